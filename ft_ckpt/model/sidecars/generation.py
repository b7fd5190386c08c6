"""Makes the generation config that is saved with a model."""

import copy
from typing import Any

from torch import nn
from transformers import GenerationConfig

from ft_ckpt.errors import CompanionError
from ft_ckpt.model.sidecars.tokenizer import token_id, tokenizer_of_text

_OLMO_EOS = ("<|im_end|>", "<|endoftext|>")
# The values of these fields decide whether other fields are valid, so they are set first.
_MODES = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")


def generation_config(model: nn.Module, tokenizer: Any, chat_template_name: str | None) -> Any:
    """Return the GenerationConfig to save, or None when the model cannot generate.

    The live config is not changed. The result depends on `chat_template_name`:

    - None: a copy of the live config. If that was changed, its invalid fields are left out.
    - A name with "olmo" in it: the ids of <|im_end|> and <|endoftext|> as EOS, and no BOS.
    - Any other name: EOS and BOS of the tokenizer.

    With a name, raises CompanionError when there is no tokenizer, when a token is not in the
    vocabulary, or when the model has no embedding row for its id.
    """
    live = getattr(model, "generation_config", None)
    if live is None or not hasattr(model, "can_generate") or not model.can_generate():  # type: ignore[operator]  # a method
        return None  # A wrapper that cannot generate can have the generation config of its model.
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
    """Copy the live config. Add the generation settings that the model's config has."""
    generation = copy.deepcopy(live)
    for name, value in misplaced_settings(model_config).items():
        if getattr(generation, name, None) is None:
            setattr(generation, name, value)
    if getattr(generation, "_original_object_hash", None) == hash(generation):
        return generation  # It was not changed since it was loaded.
    return generation if _is_valid(generation) else _with_valid_fields(generation)


def misplaced_settings(config: Any) -> dict[str, Any]:
    """Return the generation settings in a model's config, which config.json must not have."""
    parameters: dict[str, Any] = getattr(config, "_get_generation_parameters", dict)()
    return parameters


def _with_valid_fields(generation: Any) -> Any:
    """Return a new config with the fields that are valid together. Others have their defaults."""
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
