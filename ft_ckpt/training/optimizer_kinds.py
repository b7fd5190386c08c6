"""The list of known kinds of optimizers."""

from typing import Any

from ft_ckpt.training.optimizers import OptimizerKind, PlainOptimizers, unwrap_optimizer
from ft_ckpt.training.zero_optimizer import ZeroOptimizers

OPTIMIZER_KINDS: list[OptimizerKind] = [ZeroOptimizers(), PlainOptimizers()]


def kind_of_optimizer(value: Any) -> OptimizerKind | None:
    """The kind of an optimizer, in Accelerate's wrapper or not; None for what is none."""
    optimizer = unwrap_optimizer(value)
    return next((kind for kind in OPTIMIZER_KINDS if kind.serves(optimizer)), None)


def run_counters(accelerator: Any) -> Any:
    """What an engine counts of a run by itself, as an object with state; None for nothing."""
    return next((one for kind in OPTIMIZER_KINDS if (one := kind.run_counters(accelerator)) is not None), None)
