"""Compares everything but tensors that affects the output of two models.

These are configs, code, non-tensor state and token ids. All fields of a config are compared, except
those that are listed here as harmless. So fields that libraries add later are compared, too.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from ft_ckpt.errors import damaged_input
from ft_ckpt.messages import without_secrets
from ft_ckpt.model.files.settings_files import (
    EXTRA_FILE,
    SETTINGS_FILES,
    absurd_counts,
    parse_settings,
    read_settings,
    text_of,
)
from ft_ckpt.model.tensors import irreproducible, keeps_base
from ft_ckpt.storage import Store
from ft_ckpt.storage.places import files_made_by

# Fields of a model's config that do not change the output in eval mode. Fields of dropout are
# harmless as well.
HARMLESS_MODEL_FIELDS = frozenset(
    {
        # Origin of the config.
        *("_name_or_path", "_commit_hash", "transformers_version", "_diffusers_version"),
        # The dtype to load in. The dtypes of the tensors are compared instead.
        *("dtype", "torch_dtype"),
        # Additional outputs.
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        # Choice of kernels.
        *("_attn_implementation", "_attn_implementation_autoset", "_experts_implementation"),
        # Training only, or weights that are not loaded.
        *("gradient_checkpointing", "requires_grad", "initializer_range"),
    }
)
# Fields of an adapter's config that do not change the output in eval mode.
HARMLESS_ADAPTER_FIELDS = frozenset(
    {
        # The base is compared separately, by samples if possible.
        *("base_model_name_or_path", "revision"),
        # Version of the writer, and class of the base for AutoPeftModel.
        *("peft_version", "auto_mapping"),
        # Freezes the parameters at a load.
        "inference_mode",
        # Class of the wrapper. It matters for prompt methods only, because it adds the prompts.
        "task_type",
        # Source of the initial values. EVA does not change the base.
        *("tokenizer_name_or_path", "prompt_tuning_init_state_dict_path"),
        "eva_config",
    }
)
_DROPOUTS = ("dropout", "_pdrop", "layerdrop", "drop_path_rate")
# Lists whose order does not matter. PEFT only tests membership, and writes some of them as sets.
_UNORDERED = frozenset(
    {
        "target_modules",
        "exclude_modules",
        "feedforward_modules",
        "modules_to_save",
        "layers_to_transform",
    }
)
# Mappings of values by layer pattern, of which PEFT takes the first match.
PATTERNS = frozenset({"rank_pattern", "alpha_pattern"})
# Fields of AdaLoRA that determine the ranks during training. They are not compared with a live
# adapter, because ranks and scores are in the state of a run.
_ADALORA_FIELDS = (
    "rank_pattern",
    "target_r",
    "tinit",
    "tfinal",
    "deltaT",
    "beta1",
    "beta2",
    "total_step",
)
_ABSENT = object()

# A field, its value in the first config, and its value in the second one.
Difference = tuple[str, str, str]


def differing_settings(first: Store, second: Store, kind: str) -> list[Difference]:
    """List the settings that differ between the folders of two parts and change the output.

    Values are text. `kind` is the kind of both parts: "model", "adapter" or "module". The bases of
    adapters are not compared. Raises CorruptError for a settings file that cannot be parsed.
    """
    differences = []
    if kind in SETTINGS_FILES:
        differences += _differing_configs(first, second, kind)
    return [*differences, *_differing_files(first, second), *_differing_tokens(first, second)]


def _differing_configs(first: Store, second: Store, kind: str) -> list[Difference]:
    name = SETTINGS_FILES[kind]
    first_settings = read_settings(first, name)
    second_settings = read_settings(second, name)
    if first_settings == second_settings:
        return []
    if first_settings is None or second_settings is None:
        return [(name, _presence(first_settings), _presence(second_settings))]
    with damaged_input(f"{first.where(name)} and {second.where(name)}"):
        return differences_between(first_settings, second_settings, kind)


def _presence(content: object) -> str:
    return "absent" if content is None else "there"


def differences_of_live(stored: Mapping[str, Any], config: Any) -> list[Difference]:
    """List the fields in which the PEFT config of a live adapter differs from `stored` settings.

    Values are text. Only fields count that change the output although the tensors of the adapter
    and of its base are equal.
    """
    # The files that the config writes are compared, because a subclass can keep fields in a file of
    # its own.
    written = files_made_by(lambda folder: config.save_pretrained(str(folder)))
    live = json.loads(written[SETTINGS_FILES["adapter"]])
    fields_in_tensors = ["init_lora_weights"]  # their effect is in the tensors
    if stored.get("peft_type") == "ADALORA":
        fields_in_tensors += _ADALORA_FIELDS
    for name in fields_in_tensors:
        if name in stored:
            live[name] = stored[name]
    return differences_between(stored, live, "adapter")


def is_irreproducible(settings: Mapping[str, Any]) -> bool:
    """Check whether the initialisation of an adapter changes its base and cannot be repeated."""
    return bool(irreproducible({"": SimpleNamespace(**settings)}))


def differences_between(
    first: Mapping[str, Any], second: Mapping[str, Any], kind: str
) -> list[Difference]:
    """List the fields that differ between two configs of `kind` and change the output, as text."""
    if kind == "adapter":
        matters = partial(_matters_for_adapter, first)
        return _differing_leaves(_completed_adapter(first), _completed_adapter(second), matters)
    differences = _differing_leaves(first, second, _matters_for_model)
    if not differences or kind != "model":
        return differences
    # Two versions of transformers can write equal configs in different ways.
    first_config = _canonical_config(first)
    second_config = _canonical_config(second)
    if first_config is None or second_config is None:
        return differences
    return _differing_leaves(first_config, second_config, _matters_for_model)


def _differing_leaves(first: Any, second: Any, matters: Callable[[str], bool]) -> list[Difference]:
    """List the values in nested dicts and lists that differ and whose names `matters` accepts."""
    first_leaves = dict(_leaves(first))
    second_leaves = dict(_leaves(second))
    differences = []
    for name in dict.fromkeys((*first_leaves, *second_leaves)):
        before = first_leaves.get(name, _ABSENT)
        after = second_leaves.get(name, _ABSENT)
        if before != after and matters(name):
            differences.append((name, _short_text(before), _short_text(after)))
    return differences


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dicts and lists, each with its dotted name."""
    children: dict[Any, Any] = {}
    if isinstance(value, dict):
        children = value
    elif isinstance(value, list):
        children = dict(enumerate(value))
    if not children:
        yield name, value
    for key, child in children.items():
        yield from _leaves(child, f"{name}.{key}" if name else str(key))


def _short_text(value: Any) -> str:
    # Secrets are removed first, because a truncated one would not be recognised.
    text = "absent" if value is _ABSENT else without_secrets(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _matters_for_model(name: str) -> bool:
    field = name.rpartition(".")[2]
    return field not in HARMLESS_MODEL_FIELDS and not any(word in field for word in _DROPOUTS)


def _matters_for_adapter(settings: Mapping[str, Any], name: str) -> bool:
    field = name.partition(".")[0]
    if field == "task_type":
        return "num_virtual_tokens" in settings
    return field not in HARMLESS_ADAPTER_FIELDS and "dropout" not in field


def order_counts(pattern: Iterable[str]) -> bool:
    """Check whether the order of a rank_pattern or alpha_pattern matters.

    PEFT takes the first pattern that matches the end of a layer's path. So the order matters if two
    patterns can match one layer.
    """
    keys = list(pattern)
    if len(keys) > 1 and not all(re.fullmatch(r"[\w.]+", key) for key in keys):
        return True  # Two regular expressions can match one layer.
    return any(_has_suffix_among(key, set(keys)) for key in keys)


def _has_suffix_among(key: str, keys: set[str]) -> bool:
    """Check whether the end of a dotted key is a key itself, as "q_proj" of "attn.q_proj"."""
    steps = key.split(".")
    return any(".".join(steps[index:]) in keys for index in range(1, len(steps)))


def _completed_adapter(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a form in which equal adapters have equal settings.

    Absent fields get PEFT's defaults. Lists without an order are sorted. All initialisations that
    leave the base unchanged get the same value.
    """
    completed = {**_peft_defaults(settings.get("peft_type")), **settings}
    for name in _UNORDERED & completed.keys():
        if isinstance(completed[name], list):
            completed[name] = sorted(completed[name], key=str)
    for name in PATTERNS & completed.keys():
        if isinstance(completed[name], dict) and order_counts(completed[name]):
            completed[f"order of {name}"] = list(completed[name])
    if keeps_base(SimpleNamespace(**completed)):
        completed["init_lora_weights"] = "keeps the base"
    return completed


def _peft_defaults(method: Any) -> dict[str, Any]:
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    config_class = PEFT_TYPE_TO_CONFIG_MAPPING.get(method)
    if config_class is None:
        return {}
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    defaults.pop("runtime_config", None)  # PEFT does not write it
    return defaults


def _canonical_config(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config with the defaults and names of the installed transformers.

    Returns None for a config that transformers cannot parse.
    """
    import transformers

    kind = settings.get("model_type")
    if "auto_map" in settings or kind not in transformers.CONFIG_MAPPING or absurd_counts(settings):
        return None
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(settings)))
        return dict(config.to_dict())
    except Exception:  # noqa: BLE001 - anything that transformers raises for an invalid config
        return None


def _differing_files(first: Store, second: Store) -> list[Difference]:
    """List the files of code and non-tensor state that have different contents."""
    names: set[str] = set()
    for store in (first, second):
        for file in store.list_folder().objects:
            if file.name.endswith(".py") or file.name == EXTRA_FILE:
                names.add(file.name)
    differences = []
    for name in sorted(names):
        before = text_of(first, name)
        after = text_of(second, name)
        if before != after:
            presence = "another" if before and after else _presence(after)
            differences.append((f"the text of {name}", _presence(before), presence))
    return differences


def _differing_tokens(first: Store, second: Store) -> list[Difference]:
    """List the token ids that stand for different tokens.

    Embedding rows of such ids must not be mixed. Ids that are in one tokenizer only are ignored.
    """
    name = "tokenizer.json"
    first_text = text_of(first, name)
    second_text = text_of(second, name)
    if first_text == second_text:
        return []
    first_tokens = _tokens_in(first, name, first_text)
    second_tokens = _tokens_in(second, name, second_text)
    differences = []
    for number in sorted(first_tokens.keys() & second_tokens.keys()):
        before, after = first_tokens[number], second_tokens[number]
        if before != after:
            differences.append((f"token {number}", repr(before), repr(after)))
    return differences


def _tokens_in(store: Store, name: str, text: str | None) -> dict[int, str]:
    """Return the tokens of a tokenizer.json, by id. `text` is None if there is no such file."""
    settings = None if text is None else parse_settings(store, name, text)
    if settings is None:
        return {}
    tokens: dict[int, str] = {}
    with damaged_input(store.where(name)):
        vocabulary = (settings.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, dict):
            for token, number in vocabulary.items():
                tokens[int(number)] = str(token)
        else:
            # The vocabulary is a list of (token, score), in the order of the ids.
            for number, entry in enumerate(vocabulary):
                tokens[number] = str(entry[0])
        for added in settings.get("added_tokens") or ():
            tokens[int(added["id"])] = str(added["content"])

    return tokens
