"""Translates the names of tensors in a model with PEFT adapters to their names in the base model.

PEFT puts a layer of its own around a layer of the base. For example, the weight of the base layer
"q_proj" is "q_proj.base_layer.weight" in a model with adapters, and the adapter's matrix is
"q_proj.lora_A.NAME.weight". A step is a name between two dots.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, TypeVar

from torch import nn

from ft_ckpt.checkpoint.manifest import DIFFUSERS_LORA_FILE, PartRecord
from ft_ckpt.model.tensors.libraries import PREFIX
from ft_ckpt.ranks.wrappers import unwrap, walk_modules

Value = TypeVar("Value")
# Names of the child of a PEFT layer that is the layer of the base.
TO_BASE = ("base_layer", "original_module")
# Names of all children of PEFT layers that lead to the layer of the base.
BASE_STEPS = (*TO_BASE, "token_adapter")


def has_adapters(module: nn.Module) -> bool:
    """Check whether the module has PEFT adapters, as a PeftModel or injected into it."""
    return bool(getattr(module, "peft_config", None))


def is_peft_model(module: nn.Module) -> bool:
    """Check whether the module is a PeftModel. A model with injected adapters is none."""
    has_base = hasattr(module, "base_model") and hasattr(module, "get_base_model")
    return has_adapters(module) and has_base


def active_adapters(module: Any) -> list[str]:
    """Return the names of the active adapters."""
    active = getattr(module, "active_adapters", None)
    if not active or callable(active):
        # The adapters are injected. transformers has a method for their names, which raises if PEFT
        # has injected them, or if PEFT is too old for it. So the layers are asked.
        active = _active_on_layers(module)
    return [active] if isinstance(active, str) else list(active)


def _active_on_layers(module: nn.Module) -> Any:
    for layer in module.modules():
        if hasattr(layer, "base_layer"):
            names = getattr(layer, "active_adapters", None)
            if names and not callable(names):
                return names
    return ()


def model_below(module: Any) -> Any:
    """Return the base model. It still has the layers of the adapters in it."""
    return module.get_base_model() if is_peft_model(module) else module


def entries_of_base(module: nn.Module, entries: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    """Yield the entries of a state dict that belong to the base, with their names in the base."""
    base_steps_at = layers_with_base(module)
    root = root_steps(module)
    for name, value in entries.items():
        steps = name.split(".")
        if steps[: len(root)] != root:
            continue  # such as a prompt encoder, or a projection shared by all layers
        steps_in_base = _without_peft_layers(steps, base_steps_at)
        if steps_in_base is not None:
            yield ".".join(steps_in_base[len(root) :]), value


def _without_peft_layers(
    steps: list[str], base_steps_at: Mapping[str, tuple[str, ...]]
) -> list[str] | None:
    """Return the path without the steps of PEFT layers, or None if it belongs to an adapter."""
    steps_in_base = []
    path = ""
    for step in steps:
        base_steps = base_steps_at.get(path)
        if base_steps is None:
            steps_in_base.append(step)
        elif step not in base_steps:
            return None
        path = f"{path}.{step}" if path else step
    return steps_in_base


def root_steps(module: Any) -> list[str]:
    """Return the steps from a PeftModel to its base, or none if adapters are injected."""
    if not is_peft_model(module):
        return []
    if hasattr(module.base_model, "peft_config"):
        return ["base_model", "model"]
    return ["base_model"]


def layers_with_base(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of the children that contain base tensors, by path of the PEFT layer."""
    layers = {}
    for path, _, layer in walk_modules(module):
        steps = _steps_to_base(layer)
        if steps:
            layers[path] = steps
    return layers


def _steps_to_base(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the children of a PEFT layer that contain base tensors.

    Returns () for another module.
    """
    from peft.tuners.adaption_prompt.layer import AdaptedAttention, AdaptedAttentionGPT
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        return BASE_STEPS
    if isinstance(module, (AdaptedAttention, AdaptedAttentionGPT)):
        return ("model",)
    return ()


def without_adapters(module: nn.Module) -> nn.Module:
    """Return the base layer inside a PEFT layer, or any other module, without wrappers."""
    module = unwrap(module)
    for step in _steps_to_base(module):
        child = module._modules.get(step)
        if child is not None:
            return without_adapters(child)
    return module


def peft_name(name: str, file: str) -> str:
    """Return the name that PEFT would give the tensor `name` of an adapter's weight file `file`.

    It is `name`, unless the file is in the layout of diffusers.
    """
    if not PurePosixPath(file).name.startswith(DIFFUSERS_LORA_FILE):
        return name
    # The first step is the component of a pipeline.
    return PREFIX + name.partition(".")[2]


def base_name(stored_name: str) -> str:
    """Return a stored name of PEFT without the prefix and the steps that PEFT adds.

    For a tensor of the base, that is its name in the base.
    """
    steps = stored_name.removeprefix(PREFIX).split(".")
    return ".".join(step for step in steps if step not in BASE_STEPS)


def stored_base_names(record: PartRecord) -> set[str]:
    """Return `base_name` of all stored tensors of an adapter.

    The names of the base tensors that it replaces are among them.
    """
    return {base_name(peft_name(tensor.name, tensor.file)) for tensor in record.tensors}
