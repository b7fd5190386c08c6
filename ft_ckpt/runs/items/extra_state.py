"""What modules save besides parameters and buffers, as items of a run."""

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
    """What modules save besides parameters and buffers, as an object with a state dict."""

    model: nn.Module

    def state_dict(self) -> dict[str, Any]:
        """Return the current values by name."""
        added = ModelTensors(self.model).added()
        refuse_one_way_state(added)
        return {name: state.value for name, state in added.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values. Raises LoadError naming those that were not restored."""
        ModelTensors(self.model).restore_added(state)


@dataclass(frozen=True, eq=False)
class RankAllocation:
    """The scores and the ranks of AdaLoRA's rank allocator, as an object with a state dict."""

    tuner: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the current ranks, and scores by parameter name."""
        allocator = self.tuner.rankallocator
        scores = {kind: dict(getattr(allocator, kind)) for kind in _SCORES}
        return {**scores, "rank_pattern": allocator.peft_config.rank_pattern}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ranks and scores, each score on the device of its parameter."""
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
    """Return `items`, the extra state of each model, and AdaLoRA's allocators.

    `models` are the tensors of the models by item, "" for `model`.
    """
    extended = list(items)
    for number, allocation in enumerate(_rank_allocations(model)):
        extended.append(Item(f"{EXTRA_STATE}: AdaLoRA's ranks {number}", "object", allocation))
    modules = [("", model)]
    modules += [(item.name, item.value) for item in items if item.kind == "model"]
    for name, module in modules:
        if models[name].added():
            label = f"{EXTRA_STATE} of {name}" if name else EXTRA_STATE
            extended.append(Item(label, "object", ModuleExtraState(module)))
    return extended


def _rank_allocations(model: nn.Module) -> list[RankAllocation]:
    """Return AdaLoRA's allocators, which train the model itself or direct submodules."""
    allocations = []
    inner = unwrap(model)
    for module in (inner, *inner.children()):
        tuner = getattr(unwrap(module), "base_model", None)
        if getattr(tuner, "rankallocator", None) is not None:
            allocations.append(RankAllocation(tuner))
    return allocations
