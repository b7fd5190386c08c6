"""The loader's own states after its last batches, for loaders that continue from one.

A stateful loader continues from its state instead of reading the batches of a pass again. One that
prefetches has already read on: the state before its last batches is needed then.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ft_ckpt.runs.data.loaders import has_own_state, is_map, looks_ahead, refills_a_buffer

# batches to read again so that a loader that prefetches one holds the right one
BATCHES_AHEAD = 2


class OwnStates:
    """The states of `loader` after each of the last three batches, as `state_dict` gives them."""

    def __init__(self, loader: Any, replay: bool | None) -> None:
        self.loader = loader
        self.replay = replay
        self._states: list[Any] = []

    @property
    def are_used(self) -> bool:
        """Whether a resume loads a state of the loader instead of reading batches again."""
        if self.replay or is_map(self.loader):
            return False
        if not has_own_state(self.loader):
            return False
        return self.replay is False or not refills_a_buffer(self.loader)

    @property
    def oldest(self) -> Any:
        """The oldest remembered state; None without one."""
        return self._states[0] if self._states else None

    def remember(self) -> None:
        """Remember the state after the batch that was just read, if a save may need it later."""
        if self.are_used and looks_ahead(self.loader):
            self._states = [*self._states[-BATCHES_AHEAD:], copy_state(self.loader.state_dict())]

    def restore(self, stored: Any) -> None:
        """Replace the remembered states by the one of a saved run, which may be None."""
        self._states = [stored] if stored is not None and self.are_used else []

    def clear(self) -> None:
        self._states = []

    def to_store(self) -> Any:
        """Return the state before the batches that a resume reads again.

        Returns None if a resume reads from the first batch.
        """
        if not self.are_used:
            return None
        if not looks_ahead(self.loader):
            return copy_state(self.loader.state_dict())
        return self._states[0] if len(self._states) > BATCHES_AHEAD else None


def copy_state(value: Any) -> Any:
    """Return a copy that shares no memory with a file or the loader."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, Mapping):
        return {key: copy_state(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_state(item) for item in value)
    return value
