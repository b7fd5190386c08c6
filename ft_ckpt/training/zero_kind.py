"""DeepSpeed among the kinds of optimizers: what it does otherwise than torch's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_ckpt.training import zero_optimizer
from ft_ckpt.training.optimizer_protocol import OptimizerKind


class ZeroOptimizers(OptimizerKind):
    """Those that DeepSpeed partitions; `zero_optimizer` does what is asked."""

    keeps_gradients = "DeepSpeed"

    serves = staticmethod(zero_optimizer.is_zero)
    describe = staticmethod(zero_optimizer.describe_zero)
    tensors = staticmethod(zero_optimizer.zero_tensors)
    restore = staticmethod(zero_optimizer.restore_zero)
    plan_facts = staticmethod(zero_optimizer.zero_plan_facts)
    describe_again = staticmethod(zero_optimizer.describe_zero_again)
    hooked_optimizer = staticmethod(zero_optimizer.hooked_optimizer)
    is_accumulating = staticmethod(zero_optimizer.is_accumulating)
    adopt_weights = staticmethod(zero_optimizer.adopt_weights)
    refresh_weights = staticmethod(zero_optimizer.refresh_weights)

    def run_counters(self, accelerator: Any) -> Any:
        """Those of the engine that Accelerate has made."""
        wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
        return None if wrapped is None else _Counters(wrapped.engine)


@dataclass(frozen=True, eq=False)
class _Counters:
    """DeepSpeed's own counts of steps, as an object with state."""

    engine: Any

    def state_dict(self) -> dict[str, int]:
        return zero_optimizer.engine_counters(self.engine)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        zero_optimizer.restore_engine_counters(self.engine, state)
