"""Exact data-loader position: capture and restore.

The batches and random numbers after a resume are those of the uninterrupted run. A position
therefore stores the random state at the start of the pass, which determines the sample order, and,
for loaders that prefetch (Accelerate's), the state before the last batch was requested, with which
the prefetched batch was made. On resume the pass starts again from its first sample: consumed
samples are skipped at the sampler, unread; the last one or two batches are read again and dropped,
so that the loader and its counters are where they were; then the random state of the process is
restored. Nothing in the loader is replaced. A digest proves that the sampler yields the same
samples as before.

Not exact, because the state is inside the loader: random augmentation in workers (unless `replay`);
persistent workers, which are new after a resume; an iterable data set that draws from the process's
global generators at every batch (a shuffle buffer on `random`, say); state that the `state_dict` of
a stateful loader's data set leaves out.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from ft_ckpt.errors import LoadError
from ft_ckpt.runs.data.cuts import (
    DataCut,
    batches_per_call,
    cut_of,
    data_shares,
    ends_together,
    is_spent,
    pass_length,
    skipping_items,
)
from ft_ckpt.runs.data.fields import check_position
from ft_ckpt.runs.data.loaders import (
    base_loader,
    count_empty_pass,
    forget_premade,
    forget_start,
    is_map,
    is_warm,
    loader_counters,
    looks_ahead,
    reads_here,
    samples_in,
    set_loader_counters,
)
from ft_ckpt.runs.data.own_states import BATCHES_AHEAD, OwnStates, copy_state
from ft_ckpt.runs.data.random_state import RandomState, generator_states, set_generator_states
from ft_ckpt.runs.data.recuts import continue_after, report_difference, sharing_problems
from ft_ckpt.runs.data.skipping import SampleOrder


class DataPosition:
    """The position of the run in one data loader. Each rank has its own; no call communicates."""

    def __init__(
        self,
        loader: Any,
        rank: int = 0,
        size: int = 1,
        *,
        replay: bool | None = None,
        on_difference: str = "warn",
    ) -> None:
        """Begin at the first batch of `loader`.

        `replay`: on resume, read all batches of the pass again and drop them. True is exact for
        random augmentation in workers too. None replays only iterable data without an exact state.
        False replays only data without any state; the shuffle buffer of a `datasets` stream is
        refilled then.

        `on_difference`: "warn", "raise" or "ignore" if the sampler yields other samples than
        before.
        """
        self.loader = loader
        self.rank = rank
        self.size = size
        self.replay = replay
        self.on_difference = on_difference
        self._order = SampleOrder()
        # digest of the consumed items of a pass that is to be resumed
        self._saved_order: str | None = None
        # shares of the data; ranks with the same data count once
        self.shares = data_shares(loader, size)
        self.epoch = 0  # passes done
        self.batch = 0  # batches of this rank consumed in the current pass
        # samples consumed by all ranks since the run began, if all batches are as large as here
        self.samples = 0
        # items of the source consumed under another cut of this pass, see `DataCut`
        self._offset = 0
        self._start: RandomState | None = None
        self._last: RandomState | None = None
        self._numbers: dict[str, int] = {}
        self._is_warm = False
        # the loader's own state at the start of a pass that another library began
        self._origin: Any = None
        self._own_states = OwnStates(loader, replay)
        # a position is loaded, and the loader is not advanced to it yet
        self._is_pending = False
        self._loaded_at_end: bool | None = None
        self._is_over = False  # whether the pass to be resumed has no batch left for any rank
        # lower bound of that pass's items, if its last batch may have been short
        self._min_items: int | None = None

    @property
    def at_end(self) -> bool | None:
        """Whether the pass has yielded its last batch; None if unknown before the next request."""
        if self._is_pending:
            return self._loaded_at_end
        if not self.batch:
            return False
        at_end = getattr(self.loader, "end_of_dataloader", None)
        if isinstance(at_end, bool):
            return at_end
        if self._offset or self._origin is not None:
            return None
        length = pass_length(self.loader)
        return None if length is None else self.batch >= length

    def batches(self) -> Iterator[Any]:
        """Yield the rest of the current pass after `load_state_dict`, otherwise a new pass.

        After a `break` the pass is unfinished: a save stores the position in it, and another call
        starts a new pass. Raises LoadError if the data is now shorter than the consumed part.
        """
        iterator = self._resume_pass() if self._is_pending else self._begin_pass()
        prefetches = looks_ahead(self.loader) and reads_here(self.loader)
        while True:
            # The first batch is requested in the state that the pass began with; workers draw
            # nothing here.
            if self.batch and prefetches:
                self._last = RandomState(self.loader)
            try:
                batch = next(iterator)
            except StopIteration:
                break
            self.batch += 1
            self.samples += samples_in(batch) * self.shares
            self._order.take(batches_per_call(self.loader))
            self._own_states.remember()
            yield batch
        count_empty_pass(self.loader, self._numbers)
        self.end_pass()

    def end_pass(self) -> None:
        """Count the current pass as done.

        Does nothing if no pass has begun, or one is yet to be resumed.
        """
        if self._start is None or self._is_pending:
            return
        self.epoch += 1
        self.batch = self._offset = 0
        self._start = self._last = self._origin = None
        self._own_states.clear()
        forget_start(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values, numpy arrays and tensors.

        The position has two or three random states of about 15 KB each, and may differ between
        ranks.
        """
        if not self._start:
            self._numbers = loader_counters(self.loader)
        cut = cut_of(self.loader, self.shares)
        return {
            "size": self.size,
            "shares": self.shares,
            "epoch": self.epoch,
            "batch": self.batch,
            "samples": self.samples,
            "given": self._offset + self.batch * cut.per_step,
            "per_step": cut.per_step,
            "sharing": cut.sharing,
            "offset": self._offset,
            "warm": self._is_warm,
            "at_end": self.at_end,
            "over": self._is_pending and self._is_over,
            "least": self._min_items if self._is_pending else None,
            "numbers": self._numbers,
            "start": self._start and self._start.state,
            "last": None if self._state_of_prefetch is None else self._state_of_prefetch.state,
            "own": generator_states(self.loader),
            "loader": self._own_state(),
            "origin": self._origin,
            "order": self._consumed_order(),
        }

    @property
    def _state_of_prefetch(self) -> RandomState | None:
        """The random state that the prefetched batch was made with, if not that of the start."""
        return None if self._last is self._start else self._last

    def _consumed_order(self) -> str | None:
        """Return the digest of the items consumed in the current pass."""
        if self._is_pending:
            return self._saved_order
        return self._order.digest if self.batch else None

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the position.

        Returns a sentence for each inexactness. Draws no random number and reads no data.

        `state` is this rank's, or rank 0's on all ranks if another number of ranks saved it. If the
        number of ranks or the batch size has changed, the data continues after the samples that all
        ranks together had seen. Raises CorruptError for an invalid state, LoadError for another
        kind of loader, and for another batch size on as many ranks if `on_difference` is "raise".
        """
        check_position(state)
        self._check_loader(state)
        state = copy_state(state)
        self._take_over(state)
        set_loader_counters(self.loader, self._numbers)
        # absent in older states, like the fields of the cut
        shares = state.get("shares", state["size"])
        saved_fields = {name: state[name] for name in ("per_step", "sharing") if name in state}
        cut = cut_of(self.loader, shares)
        was = replace(cut, **saved_fields)
        is_same = (state["size"], shares) == (self.size, self.shares)
        self._restore_generators(state["own"], is_same=is_same)
        if not self._is_pending or (is_same and was.per_step == cut.per_step):
            return []
        return self._cut_again(state["size"], shares, was)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Set the fields of this object to those of `state`."""
        self.epoch = state["epoch"]
        self.batch = state["batch"]
        self.samples = state["samples"]
        self._offset = state["offset"]
        self._is_warm = state["warm"]
        self._numbers = state["numbers"]
        self._loaded_at_end = state["at_end"]
        # absent in older states
        self._origin = state.get("origin")
        self._saved_order = state.get("order")
        self._is_over = state.get("over", False)
        self._min_items = state.get("least")
        self._start = RandomState(self.loader, state["start"]) if state["start"] else None
        self._last = RandomState(self.loader, state["last"]) if state["last"] else self._start
        self._own_states.restore(state["loader"])
        self._is_pending = self._start is not None

    def _restore_generators(self, generators: Mapping[str, Any], *, is_same: bool) -> None:
        """Restore the loader's own generators; `is_same`: saved on as many ranks."""
        # Accelerate gives samplers a generator when there are several ranks, and none when there is
        # one.
        if not is_same:
            generators = {name: state for name, state in generators.items() if state is not None}
        set_generator_states(self.loader, generators)

    def _check_loader(self, state: Mapping[str, Any]) -> None:
        """Raise LoadError for a position that a loader of this kind cannot have."""
        has_state = hasattr(base_loader(self.loader), "load_state_dict")
        if state.get("origin") is not None and not has_state:
            raise LoadError(
                "the data: the position is another library's, and this loader has no state; resume "
                "with a loader of the same kind"
            )
        if state["offset"] < 0 and is_map(self.loader):
            raise LoadError(
                f"the data: offset {state['offset']}, expected none below 0; "
                "resume from another checkpoint"
            )

    def _begin_pass(self) -> Iterator[Any]:
        self.end_pass()  # the last loop was left in the middle
        forget_premade(self.loader)
        if self._origin is not None:
            self.loader.load_state_dict(copy_state(self._origin))
        self._numbers = loader_counters(self.loader)
        self._is_warm = is_warm(self.loader)
        self._start = self._last = RandomState(self.loader)
        if not is_map(self.loader):
            return iter(self.loader)
        with skipping_items(self.loader, 0, 0, order=self._order):
            iterator = iter(self.loader)
            # some loaders create their sampler's iterator then
            return chain(list(islice(iterator, 1)), iterator)

    def _own_state(self) -> Any:
        """Return the loader's own state with which a resume begins.

        Returns None if a resume reads from the first batch.
        """
        if self._is_pending:
            return self._own_states.oldest
        return self._own_states.to_store() if self.batch else None

    def _resume_pass(self) -> Iterator[Any]:
        """Return the loader's iterator after the consumed batches.

        The random state and the generators are unchanged.
        """
        now = RandomState(self.loader)
        self._is_pending = False
        forget_premade(self.loader)
        # again: the script may have set an epoch since
        set_loader_counters(self.loader, self._numbers)
        if self._start is not None:
            self._start.put_back()
        try:
            return self._wind_forward()
        finally:
            now.put_back()

    def _wind_forward(self) -> Iterator[Any]:
        is_over, self._is_over = self._is_over, False
        if is_over and pass_length(self.loader) is None:
            return iter(deque(self.loader, 0))
        again, skips = self._plan_rewind()
        with ExitStack() as stack:
            for skip in skips:
                stack.enter_context(skip)
            iterator: Iterator[Any] = iter(self.loader)
            # The sampler draws its order at the first request.
            needs_first = again or (self._offset and skips)
            first = self._read_one(iterator) if needs_first else []
        if not again:
            return chain(first, iterator)
        read = self._read_again(iterator, again) if first else 0
        if read < again:
            if self._ends_after(read):
                return iter(())
            raise LoadError(
                f"the data: {self.batch} batches of the pass were consumed when it was saved, now "
                "it has fewer; resume with the same data"
            )
        self._prove_order()
        return iterator

    def _read_again(self, iterator: Iterator[Any], again: int) -> int:
        """Read on after the first batch until `again` are read; fewer if the data ends before."""
        read = 1
        while read < again:
            if read == again - 1 and self._state_of_prefetch is not None:
                self._state_of_prefetch.put_back()  # the prefetched batch was made with it
            if not self._read_one(iterator):
                break
            read += 1
        return read

    def _ends_after(self, batches: int) -> bool:
        """Check whether the pass may be over after `batches`: the last one may have been short."""
        if self._min_items is None:
            return False
        return batches * cut_of(self.loader, self.shares).per_step >= self._min_items

    def _prove_order(self) -> None:
        """Warn or raise LoadError, by `on_difference`, if the sampler yields other samples."""
        self._order.take(self.batch * batches_per_call(self.loader))
        if (
            None in (self._saved_order, self._order.digest)
            or self._saved_order == self._order.digest
        ):
            return
        problem = (
            f"the data: the sampler yields other samples than in the {self.batch} batch(es) of "
            "this pass that the run was given before, so those to come differ as well; use the "
            "same data and batch size, and a sampler whose order comes from random numbers, or "
            "from an `epoch` or `seed` that it keeps under this name"
        )
        report_difference(problem, self.on_difference)

    def _read_one(self, iterator: Iterator[Any]) -> list[Any]:
        batches = list(islice(iterator, 1))
        self._own_states.remember()
        return batches

    def _plan_rewind(self) -> tuple[int, list[AbstractContextManager[None]]]:
        """Return the number of batches to read again, and the skips before them."""
        ahead = BATCHES_AHEAD if looks_ahead(self.loader) else 0
        if self._origin is not None:
            self.loader.load_state_dict(copy_state(self._origin))
            return self.batch, []
        if self._own_states.oldest is not None:
            self.loader.load_state_dict(self._own_states.oldest)
            return ahead, []
        if not is_map(self.loader):
            return self.batch, []
        again = self.batch if self.replay else min(self.batch, ahead or 1)
        skips: list[AbstractContextManager[None]] = []
        if self._offset:
            unseen = self._offset // cut_of(self.loader, self.shares).divisor
            skips.append(skipping_items(self.loader, 0, unseen, inside=True))
        unit = batches_per_call(self.loader)
        # The first batch is kept: some loaders fill up the last batch with samples of the first.
        keep = max(again - 1, 0) * unit
        drop = (self.batch - again) * unit
        moment = self._start if self._is_warm else None
        skips.append(skipping_items(self.loader, keep, drop, moment, order=self._order))
        return again, skips

    def _cut_again(self, saved_ranks: int, shares: int, was: DataCut) -> list[str]:
        """Continue after the items that the ranks of the saved run had consumed together.

        The pass of the saved run was cut into `shares` as `was` describes.
        """
        cut = cut_of(self.loader, self.shares)
        by_index = is_map(self.loader)
        # In positions of ft_ckpt 0.2.0 the offset also counts items that were yielded again.
        repeated = self._offset % was.divisor if by_index else 0
        consumed = self._offset - repeated + self.batch * was.per_step
        done = f"{saved_ranks} ranks had seen {consumed} {cut.unit} of this pass, {self.size} go on"
        if shares == self.shares:
            done = f"batches of {was.per_step} before, of {cut.per_step} now: {done}"
            if self.on_difference == "raise":
                raise LoadError(f"the data: {done}; resume with the same batch size")
        if self._origin is not None:
            raise LoadError(
                "the data: in a pass that another library's loader had begun on "
                f"{saved_ranks} rank(s), {self.size} here; resume on as many, with the "
                "same batch size, until the pass is done"
            )
        has_own_state = self._own_states.oldest is not None
        if has_own_state and shares == self.shares and not looks_ahead(self.loader):
            # the position itself is in the loader's own state
            self._offset = consumed - self.batch * cut.per_step
            return [f"{done} with the next one"]
        self._last = self._start
        self._own_states.clear()
        self._saved_order = None
        notes = sharing_problems(was, cut) if shares != self.shares else []
        if self._is_over or self._has_ended(consumed, by_index=by_index):
            self._move_to_end(consumed, cut)
            return [f"{done} after its end", *notes]
        continuation = continue_after(consumed, cut, by_index=by_index)
        self.batch = continuation.batch
        self._offset = continuation.offset
        self._min_items = None if by_index else consumed - was.per_step + 1
        if cut.unit == "samples":
            # batches without a first dimension count for less
            self.samples = max(0, self.samples - continuation.repeated)
        return [f"{done} {continuation.text}", *notes]

    def _move_to_end(self, consumed: int, cut: DataCut) -> None:
        """Let the pass be over for all ranks."""
        self._loaded_at_end = self._is_over = True
        length = pass_length(self.loader)
        self.batch = consumed // cut.per_step if length is None else length
        self._offset = 0

    def _has_ended(self, consumed: int, *, by_index: bool) -> bool:
        """Check whether the pass is over after `consumed` items of the source."""
        has_no_batch = is_spent(self.loader, self.shares, consumed) if by_index else None
        if has_no_batch is None or ends_together(self.loader):
            return bool(has_no_batch or self._loaded_at_end)
        return has_no_batch
