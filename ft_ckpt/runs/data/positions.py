"""Keeps the positions of a run in all of its data loaders.

A feed is the `DataPosition` of one loader. A checkpoint stores the states of the feeds in the order
in which the script requested the loaders. After a resume, each loader that is requested gets the
stored state of its data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ft_ckpt.messages import warn
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.data.position import DataPosition
from ft_ckpt.runs.data.recuts import report_difference

_ABOUT = "about"  # key of the description of the data, by which loaders are recognized
_COUNTS = ("epoch", "batch", "samples")


@dataclass
class _FeedSlot:
    """The position in one loader. Until the script requests the loader, it is a stored state."""

    state: dict[str, Any] | None
    feed: DataPosition | None = None

    @property
    def counts(self) -> dict[str, Any]:
        """Epoch, batch, samples, and "at_end", see `DataPosition.at_end`."""
        names = (*_COUNTS, "at_end")
        if self.feed is None:
            state = self.state or {}
            return {name: state.get(name) for name in names}
        return {name: getattr(self.feed, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the position, with the description of its data."""
        if self.feed is None:
            return self.state or {}
        return {**self.feed.state_dict(), _ABOUT: describe_data(self.feed.loader)}


class DataPositions:
    """The positions of loaders, in the order in which the run first requested them.

    The order is kept over restarts of the run.
    """

    def __init__(self, states: Sequence[dict[str, Any]] = ()) -> None:
        """Continue from `states`, the `state_dicts` of the checkpoint."""
        self._slots = [_FeedSlot(state) for state in states]
        # the position that was requested last
        self.current: DataPosition | None = None

    def position_of(
        self, loader: Any, ranks: Ranks, replay: bool | None, on_difference: str
    ) -> DataPosition:
        """Return the position of `loader`. Its first request restores it from the checkpoint.

        The other arguments are those of `DataPosition`.
        """
        for feed in self.known_positions:
            if feed.loader is loader:
                self.current = feed
                return feed
        slot = self._slot_of(loader, on_difference)
        feed = DataPosition(
            loader, ranks.rank, ranks.size, replay=replay, on_difference=on_difference
        )
        self.current = slot.feed = feed
        if slot.state is not None:
            for note in feed.load_state_dict(slot.state):
                warn(f"loader {self._slots.index(slot)}: {note}")
        return feed

    @property
    def known_positions(self) -> list[DataPosition]:
        return [slot.feed for slot in self._slots if slot.feed is not None]

    @property
    def counts(self) -> dict[str, int]:
        """Epoch, batch and samples of the first loader."""
        first = self._slots[0].counts if self._slots else {}
        return {name: first.get(name, 0) for name in _COUNTS}

    @property
    def epochs_ended(self) -> int:
        """Passes over the first loader that have yielded their last batch."""
        if not self._slots:
            return 0
        counts = self._slots[0].counts
        return (counts["epoch"] or 0) + bool(counts["at_end"])

    def passes_done(self, of: int = 1, *, with_last: bool = True) -> int:
        """Count how often `of` passes are done, over all loaders.

        For example, 5 passes over one loader are 2 times 2 passes. `with_last` also counts a pass
        that has yielded its last batch and was not ended yet.
        """
        multiples = 0
        for slot in self._slots:
            counts = slot.counts
            has_last = with_last and bool(counts["at_end"])
            multiples += (counts["epoch"] + has_last) // of
        return multiples

    def state_dicts(self) -> list[dict[str, Any]]:
        """Return the state of the position in each loader."""
        return [slot.state_dict() for slot in self._slots]

    def _slot_of(self, loader: Any, on_difference: str) -> _FeedSlot:
        """Return the slot for a loader that is requested for the first time.

        It is the slot with the same data, or else the first slot without a loader, or else a new
        one. If the checkpoint has several loaders and none with the same data, this warns. If it
        has a single loader with other data, `on_difference` decides between error and warning.
        """
        waiting = [slot for slot in self._slots if slot.feed is None]
        if not waiting:
            self._slots.append(_FeedSlot(None))
            return self._slots[-1]

        about = describe_data(loader)
        alike = []
        for slot in waiting:
            if slot.state is not None and slot.state.get(_ABOUT, about) == about:
                alike.append(slot)

        if not alike and len(self._slots) > 1:
            warn(
                f"loader of {about[0]} with {about[1]} samples: no loader of the checkpoint had "
                f"such data; it goes on where loader {self._slots.index(waiting[0])} was",
            )
        elif not alike and waiting[0].state is not None:
            before = waiting[0].state[_ABOUT]
            problem = (
                f"the data: {about[0]} with {about[1]} samples, was {before[0]} with {before[1]} "
                "when it was saved; the pass goes on after the samples that the run had seen: use "
                "the same data for an exact resume"
            )
            report_difference(problem, on_difference)

        return alike[0] if alike else waiting[0]


def describe_data(loader: Any) -> list[Any]:
    """Return the class name and the size of the loader's data; the size is None if unknown.

    Another process recognizes the loader by them.
    """
    dataset = getattr(loader, "dataset", None)
    try:
        return [type(dataset).__name__, len(dataset)]  # type: ignore[arg-type]  # its TypeError is caught
    except (TypeError, NotImplementedError, AttributeError):
        return [type(dataset).__name__, None]


def position_in_state(loader: Any, origin: Any, size: int) -> dict[str, Any]:
    """Return a state for `DataPositions` that continues `loader` from its own state `origin`.

    Another library stored `origin` on each of `size` ranks.
    """
    counts = dict.fromkeys(("epoch", "batch", "samples", "given", "offset"), 0)
    absent = dict.fromkeys(("start", "last", "loader"))
    flags = {"warm": False, "at_end": False}
    return {
        **counts,
        **absent,
        **flags,
        "size": size,
        "numbers": {},
        "own": {},
        "origin": origin,
        _ABOUT: describe_data(loader),
    }
