"""The generation config of a model."""

import copy
from typing import Any

from torch import nn
from transformers import GenerationConfig

from ft_ckpt.errors import CompanionError
from ft_ckpt.model.sidecars.tokenizer import token_id, tokenizer_of_text

_OLMO_EOS = ("<|im_end|>", "<|endoftext|>")
# decide whether other fields are valid
_MODES = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")


def generation_config(model: nn.Module, tokenizer: Any, chat_template_name: str | None) -> Any:
    """Return the GenerationConfig to save, or None when the model cannot generate.

    The live config is not changed. If `chat_template_name` is None, the result is a copy of it,
    without its invalid fields if it was changed. With "olmo" in the name, it has no BOS, and the
    EOS ids of <|im_end|> and <|endoftext|>. With any other name, it has EOS and BOS of the
    tokenizer. Raises CompanionError when there is no tokenizer, a token is not in the vocabulary,
    or its id exceeds the embedding rows.
    """
    live = getattr(model, "generation_config", None)
    if live is None or not hasattr(model, "can_generate") or not model.can_generate():  # type: ignore[operator]  # a method
        return None  # a wrapper of a generating model may have a generation config as well
    if chat_template_name is None:
        return _valid_copy(live, model.config)
    tokens = tokenizer_of_text(tokenizer)
    if tokens is None:
        raise CompanionError(
            f"chat_template_name {chat_template_name!r} takes its tokens from a tokenizer; pass one"
        )
    ids: dict[str, Any] = {}
    if "olmo" in chat_template_name:
        ids["eos_token_id"] = [token_id(model, tokens, token) for token in _OLMO_EOS]
    else:
        for kind in ("eos", "bos"):
            token = getattr(tokens, f"{kind}_token")
            number = None if token is None else token_id(model, tokens, str(token))
            ids[f"{kind}_token_id"] = number
    return GenerationConfig(temperature=None, top_p=None, **ids)


def _valid_copy(live: Any, model_config: Any) -> Any:
    """Copy the live config, with the settings that the model's config has for it."""
    generation = copy.deepcopy(live)
    for name, value in misplaced_settings(model_config).items():
        if getattr(generation, name, None) is None:
            setattr(generation, name, value)
    if getattr(generation, "_original_object_hash", None) == hash(generation):
        return generation  # unchanged since it was published
    return generation if _is_valid(generation) else _with_valid_fields(generation)


def misplaced_settings(config: Any) -> dict[str, Any]:
    """Return the generation settings in a model's config, which config.json must not have."""
    parameters: dict[str, Any] = getattr(config, "_get_generation_parameters", dict)()
    return parameters


def _with_valid_fields(generation: Any) -> Any:
    repaired = type(generation)()
    defaults = dict(vars(repaired))
    fields = dict(vars(generation))
    for name in sorted(fields, key=lambda name: name not in _MODES):
        setattr(repaired, name, fields[name])
        if _is_valid(repaired):
            continue
        delattr(repaired, name)
        if name in defaults:
            vars(repaired)[name] = defaults[name]
    return repaired


def _is_valid(generation: Any) -> bool:
    try:
        generation.validate(strict=True)
    except (ValueError, TypeError):
        return False
    return True
