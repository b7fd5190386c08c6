"""State of a run's models that is no parameter and no buffer: what modules list beside them, what AdaLoRA has seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.distributed.wrappers import unwrap
from ft_ckpt.training.items import EXTRA_STATE, ExtraState, Item

_SCORES = ("ipt", "exp_avg_ipt", "exp_avg_unc")


@dataclass(frozen=True, eq=False)
class RankAllocation:
    """The scores of a PEFT model's allocator of ranks, and the ranks that it has given, as an object with state."""

    tuner: Any

    def state_dict(self) -> dict[str, Any]:
        """Those of this moment; scores by the names of the parameters."""
        allocator = self.tuner.rankallocator
        scores = {kind: dict(getattr(allocator, kind)) for kind in _SCORES}
        return {**scores, "rank_pattern": allocator.peft_config.rank_pattern}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give them back, each score to the device of its parameter."""
        allocator, homes = self.tuner.rankallocator, dict(self.tuner.model.named_parameters())
        for kind in _SCORES:
            scores: Mapping[str, Tensor] = state[kind]
            setattr(allocator, kind, {name: score.to(homes[name].device) for name, score in scores.items()})
        allocator.peft_config.rank_pattern = state["rank_pattern"]


def with_extra_state(model: nn.Module, items: Sequence[Item], walked: Mapping[str, ModelTensors]) -> list[Item]:
    """`items`, one for each model whose modules list more than parameters and buffers, and AdaLoRA's allocators.

    `walked` are the tensors of the models by item, see `walk_models`.
    """
    models = [("", model), *((item.name, item.value) for item in items if item.kind == "model")]
    allocations = enumerate(rank_allocations(model))
    return [
        *items,
        *(Item(f"{EXTRA_STATE}: AdaLoRA's ranks {number}", "object", one) for number, one in allocations),
        *(
            Item(f"{EXTRA_STATE} of {name}" if name else EXTRA_STATE, "object", ExtraState(one))
            for name, one in models
            if walked[name].added()
        ),
    ]


def rank_allocations(model: nn.Module) -> list[RankAllocation]:
    """Those of a model, or of its own attributes, that AdaLoRA trains."""
    inside = unwrap(model)
    tuners = (getattr(unwrap(one), "base_model", None) for one in (inside, *inside.children()))
    return [RankAllocation(one) for one in tuners if getattr(one, "rankallocator", None) is not None]
