"""The data loaders of a run: which place of a checkpoint is whose, and how many passes are done."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.messages import warn
from ft_ckpt.training.data_position import DataPosition

_PLACE = ("epoch", "batch", "samples")
_ABOUT = "about"  # the key of what tells loaders apart


@dataclass
class _FeedSlot:
    """One loader; until it is asked for there is only what a checkpoint said of it."""

    state: dict[str, Any] | None
    feed: DataPosition | None = None

    @property
    def counts(self) -> dict[str, Any]:
        """Its epoch, batch and samples, and whether the pass is known to have ended."""
        if self.feed is None:
            return {name: (self.state or {}).get(name) for name in (*_PLACE, "at_end")}
        return {name: getattr(self.feed, name) for name in (*_PLACE, "at_end")}


class DataPositions:
    """Loaders in the order in which they were first asked for, over all restarts."""

    def __init__(self, states: Sequence[dict[str, Any]] = ()) -> None:
        """`states` are those that `state_dicts` gave when the checkpoint was made."""
        self._slots = [_FeedSlot(state) for state in states]
        self.current: DataPosition | None = None  # the one that was asked for last

    def position_of(self, loader: Any, ranks: Ranks, replay: bool | None, on_difference: str) -> DataPosition:
        """The feed of `loader`, where the checkpoint left it; the last two as for `DataPosition`."""
        self.current = next((feed for feed in self.known_positions if feed.loader is loader), None)
        if self.current is None:
            self.current = DataPosition(loader, ranks.rank, ranks.size, replay=replay, on_difference=on_difference)
            slot = self._slot_of(loader)
            slot.feed = self.current
            for note in () if slot.state is None else self.current.load_state_dict(slot.state):
                warn(f"loader {self._slots.index(slot)}: {note}", stacklevel=4)
        return self.current

    @property
    def known_positions(self) -> list[DataPosition]:
        """The feeds that were asked for."""
        return [slot.feed for slot in self._slots if slot.feed is not None]

    @property
    def counts(self) -> dict[str, int]:
        """Epoch, batch and samples of the first loader."""
        first = self._slots[0].counts if self._slots else {}
        return {name: first.get(name, 0) for name in _PLACE}

    @property
    def epochs_ended(self) -> int:
        """Passes over the first loader whose last batch was given."""
        first = self._slots[0].counts if self._slots else {}
        return (first.get("epoch") or 0) + bool(first.get("at_end"))

    def passes_done(self, of: int = 1, *, with_last: bool = True) -> int:
        """How many times a loader has come to the end of `of` passes: `with_last` when it gave the last batch."""
        places = [slot.counts for slot in self._slots]
        return sum((place["epoch"] + (with_last and bool(place["at_end"]))) // of for place in places)

    def state_dicts(self) -> list[dict[str, Any]]:
        """Where the run is in each loader."""
        return [
            (slot.state or {})
            if slot.feed is None
            else {**slot.feed.state_dict(), _ABOUT: describe_data(slot.feed.loader)}
            for slot in self._slots
        ]

    def _slot_of(self, loader: Any) -> _FeedSlot:
        """The place that is the loader's: of the same data, else the first that nobody has asked for."""
        waiting, about = [slot for slot in self._slots if slot.feed is None], describe_data(loader)
        alike = [slot for slot in waiting if slot.state is not None and slot.state.get(_ABOUT, about) == about]
        if not waiting:
            self._slots.append(_FeedSlot(None))
            return self._slots[-1]
        if not alike and len(self._slots) > 1:
            warn(
                f"loader of {about[0]} with {about[1]} samples: no loader of the checkpoint had such data; it goes on "
                f"where loader {self._slots.index(waiting[0])} was",
                stacklevel=5,
            )
        return (alike or waiting)[0]


def describe_data(loader: Any) -> list[Any]:
    """What tells a loader from others in another process: the class of its data, and how much of it there is."""
    dataset = getattr(loader, "dataset", None)
    try:
        return [type(dataset).__name__, len(dataset)]  # type: ignore[arg-type]  # asked for below
    except (TypeError, NotImplementedError):
        return [type(dataset).__name__, None]
