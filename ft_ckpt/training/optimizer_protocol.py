"""What the library asks of one kind of optimizer; the answers here are those of one that nothing is done to.

A new kind is a subclass in a file of its own, which answers what is different about it, and a line in
`optimizer_kinds`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ft_ckpt.distributed.source import Source

Description = dict[str, Any]  # {"class": str, "groups": [{"params": [names], ...}], "state": {name: {key: entry}}}


class OptimizerKind(ABC):
    """One kind of optimizer; all methods but `serves` are handed one that it serves, without Accelerate's wrapper."""

    is_plain = False  # whether it is given the models' own parameters, and takes in their gradients
    keeps_gradients: str | None = None  # its name for people, where accumulated gradients cannot be read

    @abstractmethod
    def serves(self, optimizer: Any) -> bool:
        """Whether an object is an optimizer of this kind. Imports nothing."""

    @abstractmethod
    def describe(self, optimizer: Any, found: Mapping[str, Source]) -> Description:
        """What this rank has of its state, as JSON can say it; see `optimizers.describe_optimizer`."""

    @abstractmethod
    def tensors(self, optimizer: Any, description: Description, found: Mapping[str, Source]) -> dict[str, Source]:
        """The tensors of the described state as sources, by "parameter/key"; the same names on every rank."""

    @abstractmethod
    def check(self, optimizer: Any, description: Description, found: Mapping[str, Source]) -> None:
        """Raise LoadError where `restore` would for parameters, groups and settings. Changes nothing."""

    @abstractmethod
    def restore(
        self,
        optimizer: Any,
        description: Description,
        found: Mapping[str, Source],
        fill: Callable[[Source], Any],
        later: Callable[[Source], Any] | None = None,
    ) -> tuple[str, ...]:
        """Give it the described state; see `optimizers.restore_optimizer`. Returns notes."""

    def hooked_optimizer(self, optimizer: Any) -> tuple[Any, list[Tensor]]:
        """The torch optimizer whose step changes what is captured, at no other moment; and what that changes beside
        its own tensors. (None, []) where nobody knows.
        """
        return optimizer, []

    def is_accumulating(self, optimizer: Any) -> bool:
        """Whether gradients wait where they cannot be read."""
        return False

    def adopt_weights(self, optimizer: Any) -> None:  # noqa: B027 - most have nothing to do
        """The models' weights were restored: take them over. Not collective."""

    def refresh_weights(self, optimizer: Any) -> None:  # noqa: B027 - likewise
        """Its state was restored on all ranks: make the models' weights of it. Collective."""

    def run_counters(self, accelerator: Any) -> Any:
        """An object with state that counts the steps of a run, beside those of Accelerate; None for none."""
        return None
