"""The libraries that save models in a layout of their own, recognised by class names.

None of them is imported here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ft_ckpt.checkpoint.manifest import DIFFUSERS_MODEL_FILE

ADAPTER_FILE = "adapter_model"  # of PEFT
PREFIX = "base_model.model."  # of PEFT, before the names of its tensors in the base model


@dataclass(frozen=True)
class Library:
    """A library with `save_pretrained` and `from_pretrained`, and the file names that it reads."""

    package: str
    base_classes: frozenset[str]  # all its models with a config derive from them
    model_file: str  # the name of its weight files, without ending and shard number


TRANSFORMERS = Library("transformers", frozenset(("PreTrainedModel",)), "model")
DIFFUSERS = Library("diffusers", frozenset(("ModelMixin", "ConfigMixin")), DIFFUSERS_MODEL_FILE)
_LIBRARIES = (TRANSFORMERS, DIFFUSERS)


def library_of(module: nn.Module) -> Library | None:
    """Return the library whose model class `module` has; None for a plain module."""
    for library in _LIBRARIES:
        prefix = f"{library.package}."
        classes = [cls for cls in type(module).__mro__ if cls.__module__.startswith(prefix)]
        if library.base_classes <= {cls.__name__ for cls in classes}:
            return library
    return None


def is_config_of_diffusers(config: Mapping[str, Any]) -> bool:
    """Check whether diffusers wrote this content of config.json."""
    return "_diffusers_version" in config
