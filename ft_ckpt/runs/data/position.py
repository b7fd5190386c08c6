"""Captures and restores the exact position in a data loader.

After a resume, the batches and random numbers are those of the uninterrupted run. A pass is one
iteration of a loader over its data. A position stores:

- the random state at the start of the pass, which determines the order of the samples
- for loaders that prefetch (Accelerate's), the random state before the last batch was requested,
  with which the prefetched batch was made
- how many batches of the pass were consumed, and a digest of their samples

A resume begins the pass again from its first sample:

1. The sampler skips the consumed samples. They are not read.
2. The last one or two batches are read again and dropped, so that the loader and its counters are
   where they were.
3. The digest is compared, so that a changed order of samples is noticed.
4. The random state of the process is restored.

Nothing in the loader is replaced.

Some state is inside the loader and cannot be restored exactly:

- random augmentation in workers, unless `replay` reads all batches again
- persistent workers, which are new after a resume
- an iterable data set that draws from the process's global generators at every batch, such as a
  shuffle buffer on `random`
- state that the `state_dict` of a stateful loader's data set leaves out
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
    """The position of this rank in one data loader. No call communicates with other ranks."""

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

        Args:
            loader: A data loader of torch, torchdata, Accelerate or another library.
            rank: The number of this rank.
            size: The number of ranks.
            replay: Whether a resume reads all consumed batches of the pass again and drops them.
                True is exact for random augmentation in workers too. None does so only for iterable
                data without an exact state. False does so only for data without any state; the
                shuffle buffer of a `datasets` stream is refilled then.
            on_difference: What a resume does if the sampler yields other samples than before:
                "warn", "raise" or "ignore".
        """
        self.loader = loader
        self.rank = rank
        self.size = size
        self.replay = replay
        self.on_difference = on_difference

        # number of shares of the data: ranks with the same data count once
        self.shares = data_shares(loader, size)

        # number of finished passes
        self.epoch = 0

        # number of batches that this rank has consumed in the current pass
        self.batch = 0

        # number of samples that all ranks have consumed since the run began, if the batches of the
        # other ranks are as large as those of this one
        self.samples = 0

        # number of items of the source that this pass consumed under another cut, see `DataCut`
        self._offset = 0

        # random state at the start of the pass; None before a pass
        self._start: RandomState | None = None

        # random state before the last batch was requested
        self._last: RandomState | None = None

        # the loader's epochs and seeds at the start of the pass
        self._counters: dict[str, int] = {}

        # whether workers of an earlier pass served this one
        self._is_warm = False

        # the loader's own state at the start of a pass that another library began
        self._origin: Any = None
        self._own_states = OwnStates(loader, replay)
        self._order = SampleOrder()

        # The next fields belong to a position that was loaded. True until a pass resumes there:
        self._is_pending = False

        # `at_end` of the saved position
        self._loaded_at_end: bool | None = None

        # digest of the consumed items
        self._saved_order: str | None = None

        # whether the pass has no batch left for any rank
        self._is_over = False

        # lower bound of the number of items in the pass, if its last batch may have been short
        self._min_items: int | None = None

    @property
    def at_end(self) -> bool | None:
        """Whether the pass has yielded its last batch; None if only the next request can tell."""
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
        """Yield the batches of a pass: the rest of it after `load_state_dict`, else a new pass.

        After a `break` a save still stores the position in this pass. Another call of `batches`
        starts a new pass. Raises LoadError if the data is now shorter than what was consumed.
        """
        iterator = self._resume_pass() if self._is_pending else self._begin_pass()
        prefetches = looks_ahead(self.loader) and reads_here(self.loader)
        while True:
            # The first batch needs no state of its own, because it is made with the state at the
            # start. Workers draw nothing in this process.
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

        count_empty_pass(self.loader, self._counters)
        self.end_pass()

    def end_pass(self) -> None:
        """Count the current pass as finished.

        Does nothing if no pass has begun, or if a loaded position was not resumed yet.
        """
        if self._start is None or self._is_pending:
            return
        self.epoch += 1
        self.batch = 0
        self._offset = 0
        self._start = None
        self._last = None
        self._origin = None
        self._own_states.clear()
        forget_start(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values, numpy arrays and tensors.

        It may differ between ranks. It has two or three random states of about 15 KB each. The
        fields are checked in `fields`.
        """
        if not self._start:
            self._counters = loader_counters(self.loader)
        cut = cut_of(self.loader, self.shares)
        prefetch_state = self._state_of_prefetch
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
            "numbers": self._counters,
            "start": None if self._start is None else self._start.state,
            "last": None if prefetch_state is None else prefetch_state.state,
            "own": generator_states(self.loader),
            "loader": self._own_state(),
            "origin": self._origin,
            "order": self._consumed_order(),
        }

    @property
    def _state_of_prefetch(self) -> RandomState | None:
        """The random state that the prefetched batch was made with.

        None if it was made with the state at the start of the pass.
        """
        return None if self._last is self._start else self._last

    def _consumed_order(self) -> str | None:
        """Return the digest of the items consumed in the current pass."""
        if self._is_pending:
            return self._saved_order
        return self._order.digest if self.batch else None

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Load a position, at which the next call of `batches` resumes.

        Returns a sentence for each way in which the data is not exactly that of the uninterrupted
        run. Draws no random number and reads no data.

        `state` is the `state_dict` of this rank. If another number of ranks saved it, `state` is
        that of rank 0 on all ranks. If the number of ranks or the batch size has changed, the data
        continues after the samples that all ranks together had seen.

        Raises CorruptError for an invalid state and LoadError for another kind of loader. Raises
        LoadError for another batch size on as many ranks if `on_difference` is "raise".
        """
        check_position(state)
        self._check_loader(state)
        state = copy_state(state)
        self._set_fields(state)
        set_loader_counters(self.loader, self._counters)

        # Older states have neither "shares" nor the fields of the cut.
        shares = state.get("shares", state["size"])
        saved_fields = {name: state[name] for name in ("per_step", "sharing") if name in state}
        cut = cut_of(self.loader, shares)
        saved_cut = replace(cut, **saved_fields)
        is_same_size = (state["size"], shares) == (self.size, self.shares)
        self._restore_generators(state["own"], is_same_size=is_same_size)
        if not self._is_pending or (is_same_size and saved_cut.per_step == cut.per_step):
            return []
        return self._cut_again(state["size"], shares, saved_cut)

    def _set_fields(self, state: Mapping[str, Any]) -> None:
        """Set the fields of this object to the values in `state`."""
        self.epoch = state["epoch"]
        self.batch = state["batch"]
        self.samples = state["samples"]
        self._offset = state["offset"]
        self._is_warm = state["warm"]
        self._counters = state["numbers"]
        self._loaded_at_end = state["at_end"]

        # Older states do not have these four.
        self._origin = state.get("origin")
        self._saved_order = state.get("order")
        self._is_over = state.get("over", False)
        self._min_items = state.get("least")
        self._start = RandomState(self.loader, state["start"]) if state["start"] else None
        self._last = RandomState(self.loader, state["last"]) if state["last"] else self._start
        self._own_states.restore(state["loader"])
        self._is_pending = self._start is not None

    def _restore_generators(self, generators: Mapping[str, Any], *, is_same_size: bool) -> None:
        """Restore the loader's own generators.

        `is_same_size` says whether as many ranks saved them.
        """
        # Accelerate gives samplers a generator only if there are several ranks. On another number
        # of ranks, a stored None must not remove that generator.
        if not is_same_size:
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
        """Record the state at the start of a new pass, and return the iterator of the pass."""
        self.end_pass()  # if the script left the last loop by a `break`
        forget_premade(self.loader)
        if self._origin is not None:
            self.loader.load_state_dict(copy_state(self._origin))
        self._counters = loader_counters(self.loader)
        self._is_warm = is_warm(self.loader)
        self._start = RandomState(self.loader)
        self._last = self._start
        if not is_map(self.loader):
            return iter(self.loader)
        with skipping_items(self.loader, 0, 0, order=self._order):
            iterator = iter(self.loader)
            # The first batch is read inside the block, because some loaders iterate their sampler
            # only then.
            return chain(list(islice(iterator, 1)), iterator)

    def _own_state(self) -> Any:
        """Return the loader's own state from which a resume continues.

        Returns None if a resume reads from the first batch of the pass.
        """
        if self._is_pending:
            return self._own_states.oldest
        return self._own_states.to_store() if self.batch else None

    def _resume_pass(self) -> Iterator[Any]:
        """Return an iterator of the loader that stands after the consumed batches.

        The random state of the process and the loader's generators are as before the call.
        """
        now = RandomState(self.loader)
        self._is_pending = False
        forget_premade(self.loader)
        # `load_state_dict` has set them, but the script may have set another epoch since.
        set_loader_counters(self.loader, self._counters)
        if self._start is not None:
            self._start.put_back()
        try:
            return self._skip_consumed()
        finally:
            now.put_back()

    def _skip_consumed(self) -> Iterator[Any]:
        """Begin the pass again, skip or reread the consumed batches, and return the iterator."""
        is_over = self._is_over
        self._is_over = False
        if is_over and pass_length(self.loader) is None:
            return iter(deque(self.loader, maxlen=0))  # reads the whole pass and yields nothing
        reread_count, skips = self._plan_skips()
        with ExitStack() as stack:
            for skip in skips:
                stack.enter_context(skip)
            iterator: Iterator[Any] = iter(self.loader)
            # The first batch is read inside the block, because the sampler draws its order then.
            needs_first = reread_count > 0 or (self._offset and skips)
            first = self._read_one(iterator) if needs_first else []

        if not reread_count:
            return chain(first, iterator)
        read_count = self._reread(iterator, reread_count) if first else 0
        if read_count < reread_count:
            if self._ends_after(read_count):
                return iter(())
            raise LoadError(
                f"the data: {self.batch} batches of the pass were consumed when it was saved, now "
                "it has fewer; resume with the same data"
            )

        self._prove_order()
        return iterator

    def _reread(self, iterator: Iterator[Any], count: int) -> int:
        """Read batches until `count` are read, with the first, which was read before.

        Returns how many were read: fewer if the data ends.
        """
        read_count = 1
        while read_count < count:
            if read_count == count - 1 and self._state_of_prefetch is not None:
                self._state_of_prefetch.put_back()  # the prefetched batch was made with it
            if not self._read_one(iterator):
                break
            read_count += 1
        return read_count

    def _ends_after(self, batch_count: int) -> bool:
        """Check whether the pass may have ended after `batch_count` batches.

        That is so if its last batch was short under the cut of the saved run.
        """
        if self._min_items is None:
            return False
        return batch_count * cut_of(self.loader, self.shares).per_step >= self._min_items

    def _prove_order(self) -> None:
        """Compare the digest of the consumed samples with that of the saved run.

        If they differ, warns or raises LoadError, as `on_difference` says.
        """
        self._order.take(self.batch * batches_per_call(self.loader))
        digest = self._order.digest
        if self._saved_order is None or digest is None or digest == self._saved_order:
            return
        problem = (
            f"the data: the sampler yields other samples than in the {self.batch} batch(es) of "
            "this pass that the run was given before, so those to come differ as well; use the "
            "same data and batch size, and a sampler whose order comes from random numbers, or "
            "from an `epoch` or `seed` that it keeps under this name"
        )
        report_difference(problem, self.on_difference)

    def _read_one(self, iterator: Iterator[Any]) -> list[Any]:
        """Read a batch. Returns a list of it, or [] at the end of the data."""
        batches = list(islice(iterator, 1))
        self._own_states.remember()
        return batches

    def _plan_skips(self) -> tuple[int, list[AbstractContextManager[None]]]:
        """Return how many batches to read again, and the skips of the other consumed items.

        The skips are context managers, in which the pass begins. A stateful loader is set to its
        stored state and needs no skips.
        """
        ahead = BATCHES_AHEAD if looks_ahead(self.loader) else 0
        if self._origin is not None:
            self.loader.load_state_dict(copy_state(self._origin))
            return self.batch, []

        if self._own_states.oldest is not None:
            self.loader.load_state_dict(self._own_states.oldest)
            return ahead, []

        if not is_map(self.loader):
            return self.batch, []

        # At least one batch is read again, so that the loader's counters are right.
        reread_count = self.batch if self.replay else min(self.batch, max(ahead, 1))
        skips: list[AbstractContextManager[None]] = []
        if self._offset:
            skipped_items = self._offset // cut_of(self.loader, self.shares).divisor
            skips.append(skipping_items(self.loader, 0, skipped_items, inside=True))

        per_call = batches_per_call(self.loader)

        # Of several batches that are read again, the first is the first of the pass: some loaders
        # fill up the last batch of the pass with samples of the first.
        keep = max(reread_count - 1, 0) * per_call
        drop = (self.batch - reread_count) * per_call
        random_state = self._start if self._is_warm else None
        skips.append(skipping_items(self.loader, keep, drop, random_state, order=self._order))
        return reread_count, skips

    def _cut_again(self, saved_ranks: int, shares: int, saved_cut: DataCut) -> list[str]:
        """Continue after the items that the ranks of the saved run had consumed together.

        `saved_cut` is how the pass of the saved run was cut for `shares`. Returns sentences for the
        user. Raises LoadError as `load_state_dict` does.
        """
        cut = cut_of(self.loader, self.shares)
        by_index = is_map(self.loader)

        # In positions of ft_ckpt 0.2.0 the offset also counts items that were yielded again.
        repeated = self._offset % saved_cut.divisor if by_index else 0
        consumed = self._offset - repeated + self.batch * saved_cut.per_step
        done = f"{saved_ranks} ranks had seen {consumed} {cut.unit} of this pass, {self.size} go on"
        if shares == self.shares:
            done = f"batches of {saved_cut.per_step} before, of {cut.per_step} now: {done}"
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
            # The loader continues from its own state, which has the position.
            self._offset = consumed - self.batch * cut.per_step
            return [f"{done} with the next one"]

        self._last = self._start
        self._own_states.clear()
        self._saved_order = None
        notes = sharing_problems(saved_cut, cut) if shares != self.shares else []
        if self._is_over or self._has_ended(consumed, by_index=by_index):
            self._move_to_end(consumed, cut)
            return [f"{done} after its end", *notes]

        continuation = continue_after(consumed, cut, by_index=by_index)
        self.batch = continuation.batch
        self._offset = continuation.offset
        self._min_items = None if by_index else consumed - saved_cut.per_step + 1
        if cut.unit == "samples":
            # Not below 0: a batch without a first dimension was counted as one sample.
            self.samples = max(0, self.samples - continuation.repeated)

        return [f"{done} {continuation.text}", *notes]

    def _move_to_end(self, consumed: int, cut: DataCut) -> None:
        """Set the position to the end of the pass, for all ranks."""
        self._loaded_at_end = True
        self._is_over = True
        length = pass_length(self.loader)
        self.batch = consumed // cut.per_step if length is None else length
        self._offset = 0

    def _has_ended(self, consumed: int, *, by_index: bool) -> bool:
        """Check whether the pass has ended for all ranks after `consumed` items of the source."""
        has_no_batch = is_spent(self.loader, self.shares, consumed) if by_index else None
        if has_no_batch is None or ends_together(self.loader):
            return bool(has_no_batch or self._loaded_at_end)
        return has_no_batch
