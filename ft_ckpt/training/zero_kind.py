"""DeepSpeed among the kinds of optimizers: what it does otherwise than torch's."""

from typing import Any

from ft_ckpt.training import zero_optimizer
from ft_ckpt.training.optimizer_protocol import OptimizerKind
from ft_ckpt.training.zero_engine import EngineCounters


class ZeroOptimizers(OptimizerKind):
    """Those that DeepSpeed partitions; `zero_optimizer` does what is asked."""

    keeps_gradients = "DeepSpeed"

    serves = staticmethod(zero_optimizer.is_zero)
    describe = staticmethod(zero_optimizer.describe_zero)
    tensors = staticmethod(zero_optimizer.zero_tensors)
    check = staticmethod(zero_optimizer.check_zero)
    restore = staticmethod(zero_optimizer.restore_zero)
    hooked_optimizer = staticmethod(zero_optimizer.hooked_optimizer)
    is_accumulating = staticmethod(zero_optimizer.is_accumulating)
    adopt_weights = staticmethod(zero_optimizer.adopt_weights)
    refresh_weights = staticmethod(zero_optimizer.refresh_weights)

    def run_counters(self, accelerator: Any) -> Any:
        """Those of the engine that Accelerate has made."""
        wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
        return None if wrapped is None else EngineCounters(wrapped.engine)
