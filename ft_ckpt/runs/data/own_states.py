"""Remembers the states of a stateful loader after its last batches.

A stateful loader (one with `state_dict`) continues from its state instead of reading the batches of
a pass again. If it prefetches, its current state is too far ahead: a resume then needs the state
before the batches that were last consumed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ft_ckpt.runs.data.loaders import has_own_state, is_map, looks_ahead, refills_a_buffer

# How many batches are read again on a resume, so that a prefetching loader holds the batch that it
# held at the save.
BATCHES_AHEAD = 2


class OwnStates:
    """The states of `loader` (of its `state_dict`) after each of the last three batches."""

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
        """The oldest remembered state; None if there is none."""
        return self._states[0] if self._states else None

    def remember(self) -> None:
        """Remember the state after the batch that was just read, if a save may need it later."""
        if self.are_used and looks_ahead(self.loader):
            self._states = [*self._states[-BATCHES_AHEAD:], copy_state(self.loader.state_dict())]

    def restore(self, stored: Any) -> None:
        """Replace the remembered states by `stored`, the state in a checkpoint or None."""
        self._states = [stored] if stored is not None and self.are_used else []

    def clear(self) -> None:
        self._states = []

    def to_store(self) -> Any:
        """Return the state to store: the one before the batches that a resume reads again.

        Returns None if a resume reads from the first batch of the pass.
        """
        if not self.are_used:
            return None
        if not looks_ahead(self.loader):
            return copy_state(self.loader.state_dict())
        return self._states[0] if len(self._states) > BATCHES_AHEAD else None


def copy_state(value: Any) -> Any:
    """Return a copy of a state that shares no memory with a file or the loader."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, Mapping):
        return {key: copy_state(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_state(item) for item in value)
    return value
