"""DeepSpeed among the kinds of optimizers: what it does otherwise than torch's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ft_ckpt.distributed.tensor_info import Source
from ft_ckpt.training import zero_optimizer
from ft_ckpt.training.optimizer_protocol import Description, OptimizerKind


class ZeroOptimizers(OptimizerKind):
    """Those that DeepSpeed partitions; `zero_optimizer` does what is asked."""

    keeps_gradients = "DeepSpeed"

    def serves(self, optimizer: Any) -> bool:
        """Told by names, since importing DeepSpeed takes long."""
        return zero_optimizer.is_zero(optimizer)

    def describe(self, optimizer: Any, found: Mapping[str, Source]) -> Description:
        """With the masters and the loss scaler."""
        return zero_optimizer.describe_zero(optimizer, found)

    def tensors(self, optimizer: Any, description: Description, found: Mapping[str, Source]) -> dict[str, Source]:
        """Runs in its partitions."""
        return zero_optimizer.zero_tensors(optimizer, description, found)

    def restore(
        self,
        optimizer: Any,
        description: Description,
        found: Mapping[str, Source],
        fill: Callable[[Source], Any],
        later: Callable[[Source], Any] | None = None,
    ) -> tuple[str, ...]:
        """The weights must be back already."""
        return zero_optimizer.restore_zero(optimizer, description, found, fill, later)

    def hooked_optimizer(self, optimizer: Any) -> tuple[Any, list[Tensor]]:
        """The one inside, and the masters and weights."""
        return zero_optimizer.hooked_optimizer(optimizer)

    def is_accumulating(self, optimizer: Any) -> bool:
        """Between the batches of a step."""
        return zero_optimizer.is_accumulating(optimizer)

    def adopt_weights(self, optimizer: Any) -> None:
        """Into the masters."""
        zero_optimizer.adopt_weights(optimizer)

    def refresh_weights(self, optimizer: Any) -> None:
        """Of the masters."""
        zero_optimizer.refresh_weights(optimizer)

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
