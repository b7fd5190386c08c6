"""Writes the sidecar files of the weights: config, generation config, tokenizer, chat template,
code, model card.

They are the files that `save_pretrained` writes. The code runs on rank 0 only, and parameters may
be sharded, so no tensor is read. Training continues with the same objects, so fields are set on
copies.
"""

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save, get_relative_import_files
from transformers.models.auto.processing_auto import processor_class_from_name

from ft_ckpt.checkpoint import BaseRecord, is_hub_name
from ft_ckpt.errors import CompanionError, listing
from ft_ckpt.messages import warn
from ft_ckpt.model.adapters import embedding_of, is_peft_model
from ft_ckpt.model.settings import PATTERNS, order_counts
from ft_ckpt.ranks import layout_of, unwrap, user_class
from ft_ckpt.storage import LocalStore, Store, copy_object, open_place, read_text

_CARD = """---
{head}library_name: {library}
tags:
{tags}
---

# Model Card

Adapter trained on top of {base}.

### Framework versions

- PEFT {version}
"""


@lru_cache(maxsize=1)  # compiling its template takes longer than writing an adapter
def blank_card() -> str:
    """The empty model card that PEFT starts from."""
    return str(ModelCard.from_template(ModelCardData()))


def name_base(file: Path, base_id: str | None) -> None:
    """Set the base model in a card to `base_id`; without one, remove a path, which the Hub
    refuses.
    """
    card = ModelCard.load(file)
    named = card.data.base_model
    if base_id is None and (not named or is_hub_name(named)):
        return
    card.data.base_model = base_id
    tags = [tag for tag in card.data.tags or () if not tag.startswith("base_model:")]
    card.data.tags = sorted(tags + ([f"base_model:adapter:{base_id}"] if base_id else []))
    card.save(file)


def injected_card(config: Any, library: str = "peft") -> str:
    """The model card for injected adapters, as PEFT writes it for a PeftModel; `library`: the one
    that reads them.
    """
    # here, because it is slow to import; a process with adapters has already imported it
    import peft

    base = config.base_model_name_or_path
    base = base if base and is_hub_name(base) else None
    kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    tags = [kind, "transformers" if library == "peft" else library] + (
        [f"base_model:adapter:{base}"] if base else []
    )
    return _CARD.format(
        library=library,
        head=f"base_model: {json.dumps(base)}\n" if base else "",  # a JSON string is a YAML string
        tags="\n".join(f"- {json.dumps(tag)}" for tag in sorted(tags)),
        base=f"`{base}`" if base else "a model that is not on the Hub",
        version=peft.__version__,
    )


_SPECIAL_TOKENS = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_OLMO_EOS = ("<|im_end|>", "<|endoftext|>")
# decide whether other fields are valid
_MODES = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")
_PACKED_DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def generation_config(model: nn.Module, tokenizer: Any, chat_template_name: str | None) -> Any:
    """The GenerationConfig to save, or None when the model cannot generate; the live one is not
    changed.

    `chat_template_name` None: a copy of the live one, without its invalid fields if it was changed.
    A name with "olmo": no BOS, and the EOS ids of <|im_end|> and <|endoftext|>. Any other name: EOS
    and BOS of the tokenizer. Raises CompanionError when there is no tokenizer, a token is not in
    the vocabulary, or its id exceeds the embedding rows.
    """
    live = getattr(model, "generation_config", None)
    if live is None or not hasattr(model, "can_generate") or not model.can_generate():  # type: ignore[operator]
        return None  # a wrapper of a generating model may have a generation config as well
    if chat_template_name is None:
        generation = copy.deepcopy(live)
        # not allowed in a saved config.json
        for name, value in _misplaced_settings(model.config).items():
            if getattr(generation, name, None) is None:
                setattr(generation, name, value)
        return _repaired_settings(generation)
    text = _text_tokenizer(tokenizer)
    if text is None:
        raise CompanionError(
            f"chat_template_name {chat_template_name!r} takes its tokens from a tokenizer; pass one"
        )
    if "olmo" in chat_template_name:
        ids: dict[str, Any] = {
            "eos_token_id": [_token_id(model, text, token) for token in _OLMO_EOS]
        }
    else:
        tokens = {f"{kind}_token_id": getattr(text, f"{kind}_token") for kind in ("eos", "bos")}
        ids = {
            n: None if token is None else _token_id(model, text, str(token))
            for n, token in tokens.items()
        }
    return GenerationConfig(temperature=None, top_p=None, **ids)


def check_tokenizer(model: nn.Module, tokenizer: Any) -> tuple[str, ...]:
    """A note on the tokens that have no row in the model's input embedding; additional rows are
    valid padding.

    Published models have such tokens: Gemma 3 1B has that of its larger siblings' images. Raises
    CompanionError for one that a text always has: a special token (end, start, padding, ...), or a
    token in the chat template.
    """
    text, rows = _text_tokenizer(tokenizer), _embedding_rows(model)
    if text is None or rows is None:
        return ()
    numbers = [*range(rows, len(text))]
    tokens = dict(zip(text.convert_ids_to_tokens(numbers), numbers, strict=True)) if numbers else {}
    specials = {f"the {name}": getattr(text, f"{name}_id", None) for name in _SPECIAL_TOKENS}
    used = {
        name: number
        for name, number in specials.items()
        if isinstance(number, int) and number >= rows
    }
    templates = "".join(_chat_templates(text, tokenizer))
    used |= {
        f"{token!r} of the chat template": number
        for token, number in tokens.items()
        if str(token) in templates
    }
    if used:
        raise CompanionError(
            "tokenizer: "
            f"{listing([f'{name} has id {number}' for name, number in used.items()], ', ')}, the "
            f"model has {rows} embedding rows; call model.resize_token_embeddings({len(text)}) "
            "before training, or pass the tokenizer the model was trained with"
        )
    if not tokens:
        return ()
    note = (
        f"tokenizer: {listing([repr(token) for token in tokens], ', ')}: "
        f"{len(tokens)} token(s) without a row among the model's {rows} embedding "
        "rows; the model cannot read a text with one of them"
    )
    return (note,)


def _chat_templates(*owners: Any) -> Iterator[str]:
    """The texts of the chat templates of a tokenizer and its processor."""
    for owner in owners:
        template = getattr(owner, "chat_template", None)
        texts = template.values() if isinstance(template, dict) else [template]
        yield from (str(text) for text in texts if text)


def write_model(folder: Path, model: Any, *, dtype: str, generation: Any = None) -> None:
    """Write configs and code of a Hugging Face model into the existing `folder`.

    `dtype`: torch's name of the stored dtype, such as "bfloat16". `generation`: the result of
    `generation_config`. Raises CompanionError when the config refuses to be saved.
    """
    config = _saved_config(model, dtype)
    _write_code(folder, model, config)
    try:
        config.save_pretrained(str(folder))
    except Exception as error:
        raise CompanionError(
            f"config.json: {type(config).__name__} refuses to be saved: {error}"
        ) from error
    if generation is not None:  # save_pretrained would refuse some published configs
        generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def write_adapter(
    folder: Path,
    model: Any,
    adapter: str,
    *,
    base: BaseRecord,
    beside: bool = False,
    base_id: str | None = None,
    library: str = "peft",
) -> None:
    """Write `adapter_config.json` and a model card for one adapter into the existing `folder`.

    `model`: a PeftModel, or a model with injected adapters and a `peft_config`. `beside`: the
    checkpoint contains the base as changed by the adapter's initialisation, so a load must not
    decompose it again. `base_id`: name of the base on the Hub, if it was loaded from elsewhere.
    `library`: the one that reads the weights, for the card, which never contains a local path.
    """
    # here, because it is slow to import; a process with adapters has already imported it
    import peft

    # shallow: a deep copy of a set may iterate in another order
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True
    # in the form that PEFT writes for AdaLoRA
    if isinstance(ranks := getattr(config, "rank_pattern", None), dict):
        config.rank_pattern = {
            name.removesuffix(f".{adapter}"): kept for name, kept in ranks.items()
        }
    if beside and isinstance(getattr(config, "init_lora_weights", None), str):
        config.init_lora_weights = True
    if base_id is not None:
        config.base_model_name_or_path, config.revision = base_id, None
    elif base.id is not None:
        config.base_model_name_or_path = config.base_model_name_or_path or base.id
        config.revision = config.revision or base.revision
    cls = user_class(type(unwrap(model.get_base_model() if is_peft_model(model) else model)))
    mapping = (
        {"base_model_class": cls.__name__, "parent_library": cls.__module__}
        if config.task_type is None
        else None
    )
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
    _keep_order_of_patterns(LocalStore(folder), config)
    has_own_card = isinstance(model, peft.PeftModel) and library == "peft"
    card = blank_card() if has_own_card else injected_card(config, library)
    LocalStore(folder).write("README.md", card.encode())
    if has_own_card:
        model.create_or_update_model_card(str(folder))
        name_base(folder / "README.md", base_id)


def _keep_order_of_patterns(folder: Store, config: Any) -> None:
    """Restore the order of patterns, which PEFT sorts, if the order can decide which pattern
    applies.
    """
    settings = json.loads(read_text(folder, "adapter_config.json"))
    live = {name: getattr(config, name) for name in PATTERNS & settings.keys() if settings[name]}
    moved = {
        name: dict(keys)
        for name, keys in live.items()
        if order_counts(keys) and [*keys] != [*settings[name]]
    }
    if moved:
        folder.write("adapter_config.json", json.dumps({**settings, **moved}, indent=2).encode())


# Generation config


def _misplaced_settings(config: Any) -> dict[str, Any]:
    """The generation settings in a model's config."""
    parameters: dict[str, Any] = getattr(config, "_get_generation_parameters", dict)()
    return parameters


def _repaired_settings(generation: Any) -> Any:
    """The config itself if it is valid or unchanged since it was published, else a copy with the
    valid fields only.
    """
    if getattr(generation, "_original_object_hash", None) == hash(generation) or _is_valid(
        generation
    ):
        return generation
    repaired = type(generation)()
    defaults = dict(vars(repaired))
    fields = dict(vars(generation))
    for name in sorted(fields, key=lambda name: name not in _MODES):
        setattr(repaired, name, fields[name])
        if not _is_valid(repaired):
            delattr(repaired, name)
            vars(repaired).update({name: defaults[name]} if name in defaults else {})
    return repaired


def _is_valid(generation: Any) -> bool:
    try:
        generation.validate(strict=True)
    except (ValueError, TypeError):
        return False
    return True


# Tokenizer


def _text_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer, or the tokenizer of a processor; None if a processor has none."""
    text = getattr(tokenizer, "tokenizer", tokenizer)
    return text if hasattr(text, "convert_tokens_to_ids") else None


def _token_id(model: nn.Module, tokenizer: Any, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    unknown = found == tokenizer.unk_token_id and token != str(tokenizer.unk_token)
    if found is None or unknown:
        raise CompanionError(
            f"tokenizer: {token!r} is not in the vocabulary (id {found}), expected it as a stop "
            "token; add it to the tokenizer before training, or use another chat_template_name"
        )
    rows = _embedding_rows(model)
    if rows is not None and found >= rows:
        raise CompanionError(
            f"tokenizer: {token!r} has id {found}, the model has {rows} embedding rows; call "
            "model.resize_token_embeddings(len(tokenizer)) before training"
        )
    return int(found)


def _embedding_rows(model: nn.Module) -> int | None:
    """Rows of the input embedding: its declared size, global shape, or the config's vocab_size;
    None if unknown.
    """
    embedding = embedding_of(model)
    rows = getattr(embedding, "num_embeddings", None)
    if isinstance(rows, int):
        return rows
    weight = getattr(embedding, "weight", None)
    shape = layout_of(weight).shape if isinstance(weight, torch.Tensor) else ()
    if len(shape) == 2:  # not the convolution that embeds images
        return shape[0]
    try:
        config: Any = model.config
        return getattr(config.get_text_config(decoder=True), "vocab_size", None)
    except (AttributeError, ValueError):  # no config, or several text configs in it
        return None


def write_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write a tokenizer or processor into the existing `folder`, under classes that transformers
    finds by their names.

    The live one is not changed.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = copy.deepcopy(tokenizer)  # a processor modifies its tokenizer when it is saved
    elif _substitutes(tokenizer):
        tokenizer = copy.copy(tokenizer)
    for part, known in _substitutes(tokenizer):
        part.__class__ = known
    tokenizer.save_pretrained(str(folder))


def notes_on_classes(tokenizer: Any) -> tuple[str, ...]:
    """Notes on the classes of a tokenizer or processor that `write_tokenizer` stores as others."""
    return tuple(
        f"{type(part).__name__}: a class that transformers does not have, saved as its "
        f"{known.__name__}; its own code is not in the checkpoint"
        for part, known in _substitutes(tokenizer)
    )


def _substitutes(tokenizer: Any) -> list[tuple[Any, type]]:
    """A tokenizer or processor and its parts whose classes an Auto class cannot find, with the
    ancestors it finds.

    Such a class is of the script, or a library made it at run time.
    """
    parts = [
        tokenizer,
        *(part for part in vars(tokenizer).values() if hasattr(part, "save_pretrained")),
    ]
    found = []
    for part in parts:
        known = _findable_class(type(part))
        if known is not None and known is not type(part):
            found.append((part, known))
    return found


def _findable_class(cls: type) -> type | None:
    """The class, or its nearest ancestor, that has code in its checkpoint, is registered, or is
    transformers' own.
    """
    for base in cls.__mro__:
        is_found = (
            getattr(base, "_auto_class", None) is not None
            or getattr(transformers, base.__name__, None) is base
        )
        if is_found or processor_class_from_name(base.__name__) is base:
            return base
    return None


# Model config and code


def _saved_config(model: Any, dtype: str) -> Any:
    config = copy.deepcopy(model.config)
    for name in _misplaced_settings(config):
        vars(config).pop(name, None)
    if not is_quantised(model, config):
        for name in ("quantization_config", "_pre_quantization_dtype"):
            vars(config).pop(name, None)
    cast = dtype != str(model.dtype).removeprefix("torch.")
    for part in nested_configs(config):
        part._name_or_path = ""  # nested configs would store it, and it is a local path
        part.dtype = dtype if cast and part.dtype is not None else part.dtype
    config.dtype = dtype
    config.architectures = [user_class(type(model)).__name__]
    return config


def nested_configs(config: Any) -> Iterator[Any]:
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if hasattr(part, "sub_configs"):
            yield part
            yield from nested_configs(part)


def is_quantised(model: nn.Module, config: Any) -> bool:
    """Whether the weights are packed; a merged or dequantised model may still have its quantisation
    config.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    flagged = bool(getattr(model, "hf_quantizer", None) or getattr(model, "is_quantized", False))
    if flagged and "bitsandbytes" not in str(getattr(method, "value", method)):
        # some methods hide packed weights in tensor subclasses that report the original dtype
        return True
    return any(has_packed_tensors(module) for module in model.modules())


def has_packed_tensors(module: nn.Module) -> bool:
    """Whether a layer is of bitsandbytes, by class name (FSDP may change its dtype), or has a
    packed dtype.
    """
    if {base.__name__ for base in type(module).__mro__} & {"Linear4bit", "Linear8bitLt"}:
        return True
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(
        tensor is not None and tensor.ndim > 1 and tensor.dtype in _PACKED_DTYPES
        for tensor in tensors
    )


def _write_code(folder: Path, model: nn.Module, config: Any) -> None:
    """Copy the files that define a custom model, and point `config.auto_map` at them.

    Nothing is executed.
    """
    cls = user_class(type(model))
    if getattr(cls, "_auto_class", None) is None:
        return
    source = getattr(sys.modules[cls.__module__], "__file__", None)
    if cls.__module__ == "__main__" or source is None:
        warn(
            f"{cls.__name__}: its code is in {cls.__module__} and cannot be saved with the model; "
            "move the class to a file of its own",
            stacklevel=2,
        )
        return
    # An empty instance of the user's class, because the source file of FSDP2's class belongs to
    # torch.
    custom_object_save(object.__new__(cls), str(folder), config=config)
    auto_map = getattr(config, "auto_map", None)
    if auto_map:
        config.auto_map = {
            name: _localised_entry(entry, folder, Path(source).parent)
            for name, entry in auto_map.items()
        }


def _localised_entry(entry: Any, folder: Path, source: Path) -> Any:
    """Copy the file of an `auto_map` entry and return it without "repo--"; unchanged if the file is
    not local.
    """
    if isinstance(entry, (list, tuple)):
        return [_localised_entry(item, folder, source) for item in entry]
    if not isinstance(entry, str):
        return entry
    local = entry.rpartition("--")[2]
    file = source / (local.split(".")[0] + ".py")
    if not open_place(file).is_object:
        return entry
    for needed in (file, *map(Path, get_relative_import_files(file))):
        with closing(open_place(needed).open()) as code:
            copy_object(code, LocalStore(folder), needed.name)
    return local
