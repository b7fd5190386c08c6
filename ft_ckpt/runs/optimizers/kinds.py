"""What a run asks of its optimizers, with one kind for each way in which they keep their state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from ft_ckpt.extension_points import load_extension
from ft_ckpt.ranks.sharding import Source

# {"class": str, "groups": [{"params": [names], ...}], "state": {name: {key: entry}}}
Description = dict[str, Any]

# The kinds in the order in which `recognizes` is called. Importing them imports no engine.
_KINDS = (
    "ft_ckpt.extensions.deepspeed.zero_optimizer:ZeroOptimizers",
    "ft_ckpt.runs.optimizers.torch_optimizers:TorchOptimizers",
)
_ENGINE_COUNTERS = "ft_ckpt.extensions.deepspeed.engine_numbers:EngineCounters"


class OptimizerKind(ABC):
    """The state of one kind of optimizers by parameter name, and its restoration.

    Methods take an optimizer without Accelerate's wrapper, and the `sources` of the models it
    trains, by label. No tensor moves between ranks, except in `after_restore`.
    """

    uses_model_gradients = True
    """Whether a step uses the gradients of the models' own parameters."""

    @abstractmethod
    def recognizes(self, optimizer: Any) -> bool:
        """Check whether an optimizer is of this kind, without importing an engine."""

    @abstractmethod
    def describe(self, optimizer: Any, sources: Mapping[str, Source]) -> Description:
        """Describe this rank's part of the state as JSON: plain values, tensors' shapes and dtypes.

        Raises SelectionError naming what cannot be saved.
        """

    @abstractmethod
    def state_tensors(
        self, optimizer: Any, description: Description, sources: Mapping[str, Source]
    ) -> dict[str, Source]:
        """Return the tensors of the described state as sources, by "parameter/key".

        The names are the same on every rank. Raises SelectionError naming state that this rank
        lacks for its parts of parameters, and other ranks have.
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
        """Set the described state; `fill` reads this rank's elements of a source. Returns notes.

        `later`, if given, collects sources to be filled together after the return. Raises LoadError
        for parameters or groups on one side only.
        """

    def hooked_optimizer(self, optimizer: Any) -> tuple[Any, list[Tensor]]:
        """Return the torch optimizer whose steps alone change the captured tensors.

        The second value has the tensors that its steps change besides its own. Returns (None, [])
        if captured tensors change at other moments too.
        """
        return optimizer, []

    def before_restore(self, optimizer: Any) -> None:  # noqa: B027 - most kinds do nothing here
        """Prepare the optimizer once weights are restored, before any optimizer is."""

    def after_restore(self, optimizer: Any) -> None:  # noqa: B027 - most kinds do nothing here
        """Finish the restore of the optimizer when everything is restored on all ranks.

        Collective: called on every rank.
        """

    def is_accumulating(self, optimizer: Any) -> bool:
        """Check whether the optimizer holds gradients of an unfinished step (never captured)."""
        return False

    def unsaveable_state(self, optimizer: Any) -> list[str]:
        """Return the reasons, known before the first step, why the state can never be saved."""
        return []


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper, or an unwrapped optimizer itself."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def kind_of_optimizer(optimizer: Any) -> OptimizerKind | None:
    """Return the kind of an unwrapped optimizer, or None if the object is not an optimizer."""
    return next((kind for kind in _all_kinds() if kind.recognizes(optimizer)), None)


def engine_counters(engine: Any) -> Any:
    """Return the counters of a DeepSpeed engine, as an object with a state dict.

    Returns None for other objects.
    """
    if not hasattr(engine, "global_samples"):
        return None
    return load_extension(_ENGINE_COUNTERS)(engine)


@cache
def _all_kinds() -> tuple[OptimizerKind, ...]:
    return tuple(load_extension(kind)() for kind in _KINDS)
