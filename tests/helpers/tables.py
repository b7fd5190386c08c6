"""Classes of transformers whose tensors differ between memory and file, and adapters on them."""

from collections.abc import Iterator
from typing import Any

import transformers
from model_classes import class_names
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

# The `from_pretrained` of this class fails when it is asked what it loaded.
_UNLOADABLE = {"JevForDecision"}


def classes_with_tables() -> list[str]:
    """Name the model classes that have a conversion table, or contain a model of such a class."""
    table = set(_build_checkpoint_conversion_mapping()) - {"legacy"}
    names = {name for name in table if hasattr(transformers, name)}
    names.update(class_names())
    return sorted(name for name in names - _UNLOADABLE if _has_table(name, table))


def _has_table(name: str, table: set[str]) -> bool:
    try:
        config = getattr(transformers, name).config_class()
    except Exception:  # a class of a library that is not installed, a config without defaults
        return False
    kinds = {str(nested.model_type) for nested in nested_configs(config)}
    return name in table or not kinds.isdisjoint(table)


def nested_configs(config: Any) -> Iterator[Any]:
    """Yield the config, and those in it at any depth."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from nested_configs(value)


def adapter_config(model: PreTrainedModel, kind: str) -> LoraConfig:
    """Make a LoRA config for the model.

    With the kind "layers" it is on all linear layers and fused experts, else on some layers, with
    all biases, a norm and a router.
    """
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    layers = {path for path, module in modules.items() if type(module) is nn.Linear}
    if any(path.endswith(".conv1d") for path in modules):  # PEFT refuses these of Mamba's layers
        layers -= {path for path in layers if path.endswith(".out_proj")}
    linear = sorted(path for path in layers if modules[path] is not head)
    experts = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and "expert" in name:
            experts.append(name)
    if kind == "layers":
        return LoraConfig(r=2, target_modules=linear, target_parameters=experts or None)
    ends = [path for path in modules if path.rpartition(".")[2] in ("gate", "router", "norm")]
    # PEFT refuses a layer whose neighbour is fused with it, unless it is a target too.
    parents = {path.rpartition(".")[0] for path in linear[:4]}
    targets = [path for path in linear if path.rpartition(".")[0] in parents]
    saved = sorted(set(ends) - set(targets))[:3]
    return LoraConfig(r=2, target_modules=targets, bias="all", modules_to_save=saved or None)
