"""The positions of a run in all of its data loaders."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ft_ckpt.messages import warn
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.data.position import DataPosition
from ft_ckpt.runs.data.recuts import report_difference

_ABOUT = "about"  # key of the description by which loaders are recognized
_PLACE = ("epoch", "batch", "samples")


@dataclass
class _FeedSlot:
    """One loader; until it is requested, only its saved state."""

    state: dict[str, Any] | None
    feed: DataPosition | None = None

    @property
    def counts(self) -> dict[str, Any]:
        """Epoch, batch, samples, and whether the pass is known to have ended."""
        names = (*_PLACE, "at_end")
        if self.feed is None:
            state = self.state or {}
            return {name: state.get(name) for name in names}
        return {name: getattr(self.feed, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with the description of its data."""
        if self.feed is None:
            return self.state or {}
        return {**self.feed.state_dict(), _ABOUT: describe_data(self.feed.loader)}


class DataPositions:
    """The positions of loaders in the order of the first request, over all restarts."""

    def __init__(self, states: Sequence[dict[str, Any]] = ()) -> None:
        """Continue from `states`, the `state_dicts` of the checkpoint."""
        self._slots = [_FeedSlot(state) for state in states]
        self.current: DataPosition | None = None  # the one requested last

    def position_of(
        self, loader: Any, ranks: Ranks, replay: bool | None, on_difference: str
    ) -> DataPosition:
        """Return the position of `loader`, restored from the checkpoint.

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
        return {name: first.get(name, 0) for name in _PLACE}

    @property
    def epochs_ended(self) -> int:
        """Passes over the first loader that have yielded their last batch."""
        first = self._slots[0].counts if self._slots else {}
        return (first.get("epoch") or 0) + bool(first.get("at_end"))

    def passes_done(self, of: int = 1, *, with_last: bool = True) -> int:
        """Count the completed multiples of `of` passes.

        `with_last` counts a pass that has yielded its last batch.
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
        """Return the slot with the loader's data, else the first that no loader has requested.

        If the checkpoint has one loader, of other data, `on_difference` decides between an error
        and a warning.
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
        return (alike or waiting)[0]


def describe_data(loader: Any) -> list[Any]:
    """Describe a loader by class and size of its data, to recognize it in another process."""
    dataset = getattr(loader, "dataset", None)
    try:
        return [type(dataset).__name__, len(dataset)]  # type: ignore[arg-type]  # its TypeError is caught
    except (TypeError, NotImplementedError, AttributeError):
        return [type(dataset).__name__, None]


def position_in_state(loader: Any, origin: Any, size: int) -> dict[str, Any]:
    """Return the state with which `DataPositions` continues `loader` from `origin`.

    `origin` is the state of the loader itself on each of `size` ranks.
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
