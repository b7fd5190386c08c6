"""Makes items of the extra state of modules: what they save besides parameters and buffers.

PyTorch calls it extra state (`get_extra_state`). Each item is an object with a state dict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ft_ckpt.ranks.wrappers import ModelTensors, refuse_one_way_state, unwrap
from ft_ckpt.runs.items.objects import EXTRA_STATE, Item

# attributes of PEFT's RankAllocator: scores by parameter name
_SCORES = ("ipt", "exp_avg_ipt", "exp_avg_unc")


@dataclass(frozen=True, eq=False)
class ModuleExtraState:
    """The extra state of all modules in a model, as an object with a state dict."""

    model: nn.Module

    def state_dict(self) -> dict[str, Any]:
        """Return the extra state by its name in the model's state dict."""
        added = ModelTensors(self.model).added()
        refuse_one_way_state(added)
        return {name: state.value for name, state in added.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the extra state. Raises LoadError naming what was not restored."""
        ModelTensors(self.model).restore_added(state)


@dataclass(frozen=True, eq=False)
class RankAllocation:
    """The scores and the adapter ranks of AdaLoRA's allocator, as an object with a state dict."""

    tuner: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the ranks of the adapters, and the scores by parameter name."""
        allocator = self.tuner.rankallocator
        scores = {kind: dict(getattr(allocator, kind)) for kind in _SCORES}
        return {**scores, "rank_pattern": allocator.peft_config.rank_pattern}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the ranks, and each score on the device of its parameter."""
        allocator = self.tuner.rankallocator
        parameters = dict(self.tuner.model.named_parameters())
        for kind in _SCORES:
            stored: Mapping[str, Tensor] = state[kind]
            scores = {name: score.to(parameters[name].device) for name, score in stored.items()}
            setattr(allocator, kind, scores)
        allocator.peft_config.rank_pattern = state["rank_pattern"]


def with_extra_state(
    model: nn.Module, items: Sequence[Item], models: Mapping[str, ModelTensors]
) -> list[Item]:
    """Return `items` with further ones: the extra state of each model, and AdaLoRA's allocators.

    `models` has the tensors of each model by the name of its item; "" is `model`.
    """
    all_items = list(items)
    for number, allocation in enumerate(_rank_allocations(model)):
        all_items.append(Item(f"{EXTRA_STATE}: AdaLoRA's ranks {number}", "object", allocation))
    modules = [("", model)]
    modules += [(item.name, item.value) for item in items if item.kind == "model"]
    for name, module in modules:
        if models[name].added():
            label = f"{EXTRA_STATE} of {name}" if name else EXTRA_STATE
            all_items.append(Item(label, "object", ModuleExtraState(module)))
    return all_items


def _rank_allocations(model: nn.Module) -> list[RankAllocation]:
    """Return the allocators of AdaLoRA adapters on the model itself or on direct submodules."""
    allocations = []
    inner = unwrap(model)
    for module in (inner, *inner.children()):
        tuner = getattr(unwrap(module), "base_model", None)
        if getattr(tuner, "rankallocator", None) is not None:
            allocations.append(RankAllocation(tuner))
    return allocations
