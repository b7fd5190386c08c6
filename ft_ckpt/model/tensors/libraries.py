"""Recognises models of transformers and diffusers by their class names, without importing these.

Both libraries store their models in a layout of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ft_ckpt.checkpoint.manifest import DIFFUSERS_MODEL_FILE

# PEFT's name of weight files, without ending.
ADAPTER_FILE = "adapter_model"
# PEFT puts this before the name of a tensor in the base model.
PREFIX = "base_model.model."


@dataclass(frozen=True)
class Library:
    """Library whose models have `save_pretrained` and `from_pretrained`.

    Attributes:
        package: its name as a Python package.
        base_classes: names of classes from which all its models with a config derive.
        model_file: name of its weight files, without ending and shard number.
    """

    package: str
    base_classes: frozenset[str]
    model_file: str


TRANSFORMERS = Library("transformers", frozenset(("PreTrainedModel",)), "model")
DIFFUSERS = Library("diffusers", frozenset(("ModelMixin", "ConfigMixin")), DIFFUSERS_MODEL_FILE)
_LIBRARIES = (TRANSFORMERS, DIFFUSERS)


def library_of(module: nn.Module) -> Library | None:
    """Return the library that `module` is a model of, or None for a plain module."""
    for library in _LIBRARIES:
        prefix = f"{library.package}."
        classes = [cls for cls in type(module).__mro__ if cls.__module__.startswith(prefix)]
        if library.base_classes <= {cls.__name__ for cls in classes}:
            return library
    return None


def is_config_of_diffusers(config: Mapping[str, Any]) -> bool:
    """Check whether diffusers wrote a config.json with these fields."""
    return "_diffusers_version" in config
