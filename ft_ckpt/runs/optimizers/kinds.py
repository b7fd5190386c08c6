"""Defines the interface through which a run reads and restores its optimizers.

A kind is one way in which optimizers keep their state: as PyTorch does, or as DeepSpeed's ZeRO.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from ft_ckpt.extension_points import load_extension
from ft_ckpt.ranks.sharding import Source

# The state of an optimizer as JSON, with the shapes and dtypes of its tensors in their place:
# {
#   "class": "AdamW",
#   "groups": [{"params": ["head.weight"], "values": {"lr": ...}}],
#   "state": {"head.weight": {"exp_avg": entry, "step": entry}},
# }
# `values` says what an entry is.
Description = dict[str, Any]

# The kinds. The first that recognizes an optimizer is taken. Importing them imports no engine.
_KINDS = (
    "ft_ckpt.extensions.deepspeed.zero_optimizer:ZeroOptimizers",
    "ft_ckpt.runs.optimizers.torch_optimizers:TorchOptimizers",
)
_ENGINE_COUNTERS = "ft_ckpt.extensions.deepspeed.engine_numbers:EngineCounters"


class OptimizerKind(ABC):
    """Describes and restores the state of one kind of optimizers.

    Methods take an optimizer without Accelerate's wrapper. `sources` are the tensors of the models
    that it trains, by label. No tensor moves between ranks, except in `after_restore`.
    """

    uses_model_gradients = True
    """Whether a step uses the gradients of the models' own parameters."""

    @abstractmethod
    def recognizes(self, optimizer: Any) -> bool:
        """Check whether an optimizer is of this kind, without importing an engine."""

    @abstractmethod
    def describe(self, optimizer: Any, sources: Mapping[str, Source]) -> Description:
        """Describe the state that this rank has.

        Raises SelectionError naming what cannot be saved.
        """

    @abstractmethod
    def state_tensors(
        self, optimizer: Any, description: Description, sources: Mapping[str, Source]
    ) -> dict[str, Source]:
        """Return the tensors of the described state as sources, by "parameter/key".

        The names are the same on every rank. Raises SelectionError naming state that other ranks
        have and this rank lacks, although it holds elements of the parameter.
        """

    @abstractmethod
    def check(
        self, optimizer: Any, description: Description, sources: Mapping[str, Source]
    ) -> None:
        """Raise LoadError if parameters, groups or settings differ from the description.

        Changes nothing.
        """

    @abstractmethod
    def restore(
        self,
        optimizer: Any,
        description: Description,
        sources: Mapping[str, Source],
        fill: Callable[[Source], Any],
        later: Callable[[Source], Any] | None = None,
    ) -> tuple[str, ...]:
        """Restore the described state, and return notes for the report.

        `fill` reads this rank's elements of a source at once. If `later` is given, it is called
        instead for sources that may be filled after the return, so that the caller reads them
        together. Raises LoadError if only one side has a parameter or a group.
        """

    def hooked_optimizer(self, optimizer: Any) -> tuple[Any, list[Tensor]]:
        """Return the torch optimizer whose steps change the captured tensors.

        The second value has the tensors that its steps change besides its parameters and state.
        Returns (None, []) if captured tensors change at other moments too.
        """
        return optimizer, []

    def before_restore(self, optimizer: Any) -> None:  # noqa: B027 - most kinds do nothing here
        """Prepare the optimizer after the weights and before any optimizer is restored."""

    def after_restore(self, optimizer: Any) -> None:  # noqa: B027 - most kinds do nothing here
        """Finish the restore of the optimizer, after everything was restored on all ranks.

        Collective: call it on every rank.
        """

    def is_accumulating(self, optimizer: Any) -> bool:
        """Check whether the optimizer holds gradients of an unfinished step, which no save has."""
        return False

    def unsaveable_state(self, optimizer: Any) -> list[str]:
        """Return why the state can never be saved, as far as it is known before a step."""
        return []


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper, or `optimizer` if it has no wrapper."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def kind_of_optimizer(optimizer: Any) -> OptimizerKind | None:
    """Return the kind of an unwrapped optimizer, or None if the object is not an optimizer."""
    return next((kind for kind in _all_kinds() if kind.recognizes(optimizer)), None)


def engine_counters(engine: Any) -> Any:
    """Return the counters of a DeepSpeed engine as an object with a state dict.

    Returns None if `engine` is another object.
    """
    if not hasattr(engine, "global_samples"):
        return None
    return load_extension(_ENGINE_COUNTERS)(engine)


@cache
def _all_kinds() -> tuple[OptimizerKind, ...]:
    return tuple(load_extension(kind)() for kind in _KINDS)
