"""The libraries whose models are saved in a layout of their own, recognised by class names: none is imported here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ft_ckpt.checkpoint.manifest import DIFFUSERS_MODEL_FILE

ADAPTER_FILE = "adapter_model"  # of PEFT


@dataclass(frozen=True)
class Library:
    """A library with `save_pretrained` and `from_pretrained`, and the file names that it reads."""

    package: str
    base_class: str  # all its models derive from it
    model_file: str  # the name of its weight files, without ending and shard number


TRANSFORMERS = Library("transformers", "PreTrainedModel", "model")
DIFFUSERS = Library("diffusers", "ModelMixin", DIFFUSERS_MODEL_FILE)
_LIBRARIES = (TRANSFORMERS, DIFFUSERS)


def library_of(module: nn.Module) -> Library | None:
    """The library whose model class `module` has; None for a plain module."""
    for cls in type(module).__mro__:
        for library in _LIBRARIES:
            if cls.__name__ == library.base_class and cls.__module__.startswith(f"{library.package}."):
                return library
    return None


def is_config_of_diffusers(config: Mapping[str, Any]) -> bool:
    """Whether diffusers wrote this content of config.json."""
    return "_diffusers_version" in config
