"""Attributes of modules that are no tensors or modules, as JSON and back.

What JSON lacks is a one-key object such as {"tuple": [...]}. Configs of transformers are among them, since a language
model inside a plain module is nothing without its own. Reading imports nothing but transformers' own models.
"""

import importlib
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ft_ckpt.errors import LoadError, SelectionError
from ft_ckpt.formats.dtypes import dtype_name, dtype_of

_MAX_DEPTH = 32  # a list that holds itself is not simple
_OF_TRANSFORMERS = re.compile(r"transformers\.models\.\w+\.(modeling|configuration)_\w+|transformers\.generation\.\w+")
_UNWRITTEN = ("_attn_implementation", "_experts_implementation")  # fields of a config that its JSON leaves out


def encode_value(value: Any, depth: int = 0) -> Any:
    """JSON for a simple value. Raises SelectionError for any other."""
    if depth > _MAX_DEPTH:
        raise SelectionError("nested too deeply")
    kind = type(value)  # exact: a subclass (an enum, a path) would come back as something else
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is torch.dtype:
        return {"dtype": dtype_name(value)}
    if kind is dict:
        return {"dict": [[encode_value(key, depth + 1), encode_value(item, depth + 1)] for key, item in value.items()]}
    if kind is list:
        return [encode_value(item, depth + 1) for item in value]
    if kind in (tuple, torch.Size, set, frozenset):
        items = [encode_value(item, depth + 1) for item in value]
        ordered = items if kind in (tuple, torch.Size) else sorted(items, key=json.dumps)
        return {"size" if kind is torch.Size else kind.__name__: ordered}
    if is_config(kind):
        return {"config": _encode_config(value)}
    raise SelectionError(f"{kind.__name__} is no simple value")


def decode_value(value: Any) -> Any:
    """The value that `encode_value` described. Raises LoadError for a dtype or config class that is not to be had."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {decode_value(key): decode_value(item) for key, item in content}
    if kind == "config":
        return _decode_config(content)
    decoders = {
        "float": float,
        "dtype": dtype_of,
        "tuple": tuple,
        "size": torch.Size,
        "set": set,
        "frozenset": frozenset,
    }
    return decoders[kind](decode_value(content))  # type: ignore[operator]  # each takes what its kind was encoded to


def is_config(kind: type) -> bool:
    """Whether `kind` is a model's or a generation config of transformers, told without importing it."""
    return any(
        base.__name__ in {"PreTrainedConfig", "PretrainedConfig", "GenerationConfig"}
        and base.__module__.startswith("transformers.")
        for base in kind.__mro__
    )


def imported_module(module_name: str) -> Any:
    """The module, if this process has imported it or it is one of transformers' own models; None otherwise."""
    if module_name not in sys.modules and _OF_TRANSFORMERS.fullmatch(module_name):
        try:
            return importlib.import_module(module_name)
        except ImportError:
            return None
    return sys.modules.get(module_name)


def _encode_config(config: Any) -> dict[str, Any]:
    kind = type(config)
    try:
        fields = json.loads(config.to_json_string(use_diff=False))
    except Exception as error:
        raise SelectionError(f"{kind.__name__} cannot be written as JSON: {error}") from error
    extra = {name: value for name in _UNWRITTEN if isinstance(value := getattr(config, name, None), str)}
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": fields, "extra": extra}


def _decode_config(content: Mapping[str, Any]) -> Any:
    module_name, _, name = content["class"].partition(":")
    kind = vars(imported_module(module_name) or object).get(name)
    if not isinstance(kind, type) or not is_config(kind):
        raise LoadError(f"{content['class']}: no config class of transformers in this process; import its module first")
    config: Any = kind.from_dict(content["fields"])  # type: ignore[attr-defined]  # every config class has it
    for key in set(_UNWRITTEN) & set(content["extra"]):
        setattr(config, key, content["extra"][key])
    return config
