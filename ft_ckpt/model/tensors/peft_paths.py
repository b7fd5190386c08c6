"""The names of a model with PEFT adapters: which belong to the base, and their names in it."""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, TypeVar

from torch import nn

from ft_ckpt.checkpoint.manifest import DIFFUSERS_LORA_FILE, PartRecord
from ft_ckpt.model.tensors.libraries import PREFIX
from ft_ckpt.ranks.wrappers import unwrap, walk_modules

Value = TypeVar("Value")
TO_BASE = ("base_layer", "original_module")  # the child of a PEFT layer that is the base layer
BASE_STEPS = (*TO_BASE, "token_adapter")  # children of PEFT layers on the path to the base layer


def has_adapters(module: nn.Module) -> bool:
    """Check whether the module carries PEFT adapters, wrapped in a PeftModel or injected."""
    return bool(getattr(module, "peft_config", None))


def is_peft_model(module: nn.Module) -> bool:
    """Check whether the module is a PeftModel, not a model with adapters injected into it."""
    has_base = hasattr(module, "base_model") and hasattr(module, "get_base_model")
    return has_adapters(module) and has_base


def active_adapters(module: Any) -> list[str]:
    """Name the active adapters, of a PeftModel or injected."""
    active = getattr(module, "active_adapters", None)
    if not active or callable(active):
        # Injected: transformers' method raises if PEFT did it, or is older than transformers asks
        # for; the layers know.
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
    """Return the base model, which has the adapters' layers in it."""
    return module.get_base_model() if is_peft_model(module) else module


def entries_of_base(module: nn.Module, entries: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    """Yield the entries of a model's state dict that belong to its base, by their names there."""
    base_steps_at = layers_with_base(module)
    root = root_steps(module)
    for name, value in entries.items():
        steps = name.split(".")
        if steps[: len(root)] != root:
            continue  # a prompt encoder, a projection shared by all layers
        steps_in_base = _without_peft_layers(steps, base_steps_at)
        if steps_in_base is not None:
            yield ".".join(steps_in_base[len(root) :]), value


def _without_peft_layers(
    steps: list[str], base_steps_at: Mapping[str, tuple[str, ...]]
) -> list[str] | None:
    """Return the path without the steps of PEFT layers; None if it belongs to an adapter."""
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
    """Return the steps from a PeftModel to its base; none where adapters are injected."""
    if not is_peft_model(module):
        return []
    if hasattr(module.base_model, "peft_config"):
        return ["base_model", "model"]
    return ["base_model"]


def layers_with_base(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, by path, the names of each PEFT layer's children that contain base tensors."""
    layers = {}
    for path, _, layer in walk_modules(module):
        steps = _steps_to_base(layer)
        if steps:
            layers[path] = steps
    return layers


def _steps_to_base(module: nn.Module) -> tuple[str, ...]:
    """Name the children of a PEFT layer that contain base tensors.

    () for another module.
    """
    from peft.tuners.adaption_prompt.layer import AdaptedAttention, AdaptedAttentionGPT
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        return BASE_STEPS
    return ("model",) if isinstance(module, (AdaptedAttention, AdaptedAttentionGPT)) else ()


def without_adapters(module: nn.Module) -> nn.Module:
    """Return the base layer, unwrapped, inside a PEFT layer; any other module unwrapped."""
    module = unwrap(module)
    for step in _steps_to_base(module):
        child = module._modules.get(step)
        if child is not None:
            return without_adapters(child)
    return module


def peft_name(name: str, file: str) -> str:
    """Return PEFT's name of the tensor `name` in an adapter's weight file `file`.

    The file may be in the layout of diffusers.
    """
    if not PurePosixPath(file).name.startswith(DIFFUSERS_LORA_FILE):
        return name
    return PREFIX + name.partition(".")[2]  # without the component of a pipeline


def base_name(stored_name: str) -> str:
    """Return the base's name of an adapter's stored tensor, without the steps that PEFT adds."""
    steps = stored_name.removeprefix(PREFIX).split(".")
    return ".".join(step for step in steps if step not in BASE_STEPS)


def stored_base_names(record: PartRecord) -> set[str]:
    """Return the names in the base model of all stored tensors of an adapter.

    Those of base tensors are among them.
    """
    return {base_name(peft_name(tensor.name, tensor.file)) for tensor in record.tensors}
