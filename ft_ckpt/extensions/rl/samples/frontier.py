"""Keeps the data position of asynchronous training: which samples were trained.

In reinforcement learning, samples are handed out, generated on and trained in different orders, and
some are dropped or fail. So a count of samples cannot tell where a resumed run must continue. A
`Frontier` gives each sample of each epoch a number: epoch * samples + position in the epoch. A
number is in one of three states:

- open: it was not handed out, or it failed, and the next `take` hands it out.
- in flight: it was handed out, and no report about it has come.
- finished: it was trained or dropped.

The finished numbers are all numbers below some bound, and a few runs above it. A checkpoint stores
only these. Numbers in flight are stored as open, so a resumed run hands them out again.
"""

import heapq
import secrets
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any, NamedTuple

from ft_ckpt.errors import CorruptError, LoadError, TicketError, listing
from ft_ckpt.extensions.rl.samples.checks import (
    ENDLESS,
    VERSION,
    check_frontier_settings,
    check_state,
    count_samples,
    digest_of,
)
from ft_ckpt.extensions.rl.samples.shuffling import shuffled
from ft_ckpt.messages import short_repr


class Ticket(NamedTuple):
    """One sample, handed out once.

    All fields are plain values, so a ticket can be pickled and sent to other processes.

    Attributes:
        id: The sample's element in the list of ids, or else the index of the sample.
        epoch: The number of the epoch, from 0.
        attempt: From 1, and one more after each `failed` in this process.
        key: The number of the sample in all epochs.
        token: A random text of the `Frontier` that handed it out, new after each
            `load_state_dict`.
    """

    id: Any
    epoch: int
    attempt: int
    key: int
    token: str


class Frontier:
    """Hands out samples, and records which were trained or dropped.

    A resumed run hands out all others again.
    """

    def __init__(
        self, samples: int | Sized, *, epochs: int | None = 1, shuffle: bool = False, seed: int = 0
    ) -> None:
        """Open `epochs` epochs of `samples`.

        `samples`: their number, or a sequence of ids, or another object with a length, such as a
        dataset. Ids are a list, a range or a column of a dataset, of str, int, bytes or tuples of
        these. Tickets have the ids, or else the indices of the samples. An id that is listed twice
        is two samples. `epochs`: their number, or None for no end. `shuffle`: each epoch has its
        own order, which depends only on `seed`, the epoch and the number of samples.

        A group of prompts is one sample, which is handed out and reported once, whatever is
        generated for it.

        Raises ConfigError for invalid values.
        """
        count = count_samples(samples)
        check_frontier_settings(samples, count, epochs, shuffle, seed)
        self.samples, self.epochs = count, epochs
        self._ids: Sequence[Any] | None = None
        if isinstance(samples, Sequence):
            self._ids = samples if isinstance(samples, range) else tuple(samples)
        self._digest = None if self._ids is None else digest_of(self._ids)
        self._seed = seed if shuffle else None
        self._end = ENDLESS if epochs is None else count * epochs

        # A heap of ranges [start, stop) of the open numbers. The ranges do not overlap.
        self._open = [(0, self._end)]
        self._in_flight: dict[int, Ticket] = {}

        # How often each sample failed, until it is finished.
        self._failures: dict[int, int] = {}
        self._trained = self._dropped = 0
        self._token = secrets.token_hex(4)

        # The lock of a condition is reentrant, because a signal handler may read the state.
        self._changed = threading.Condition()

    def take(self, count: int = 1, *, wait: float = 0.0) -> list[Ticket]:
        """Hand out the first `count` open samples.

        Samples come in the order of the epochs. So samples that failed come before new ones, and
        after a resume also those that were in flight. An epoch begins while samples of the previous
        one are still in flight. Returns fewer tickets, or none, if there are no more open samples.
        `wait` is the number of seconds to wait for an open sample, because a sample in flight may
        fail. Any thread may call this method.
        """
        tickets: list[Ticket] = []
        with self._changed:
            self._changed.wait_for(lambda: self._open or not self._in_flight, wait)
            while self._open and len(tickets) < count:
                start, stop = self._open[0]
                # The number is in flight before it is removed from the open ones, so that no sample
                # is lost if a signal handler raises in between.
                self._in_flight[start] = ticket = self._ticket(start)
                if start + 1 < stop:
                    # Still the lowest range, because ranges do not overlap.
                    self._open[0] = (start + 1, stop)
                else:
                    heapq.heappop(self._open)
                tickets.append(ticket)

        return tickets

    def __iter__(self) -> Iterator[Ticket]:
        """Yield one ticket at a time, until no sample is open; see `take`.

        Several threads may iterate at the same time.
        """
        tickets = self.take()
        while tickets:
            yield tickets[0]
            tickets = self.take()

    def trained(self, *tickets: Ticket) -> None:
        """Report samples as trained.

        Call this method after their backward pass, before the `saver.step()` of the batch. Raises
        TicketError naming the samples that are not in flight under these tickets. No sample is then
        recorded as trained.
        """
        with self._changed:
            self._check_reports("trained", tickets)
            self._finish(tickets)
            self._trained += len(tickets)

    def dropped(self, *tickets: Ticket) -> None:
        """Report samples that are never to be trained, such as filtered groups.

        Raises what `trained` raises.
        """
        with self._changed:
            self._check_reports("dropped", tickets)
            self._finish(tickets)
            self._dropped += len(tickets)

    def failed(self, *tickets: Ticket) -> None:
        """Report samples as failed. The next `take` hands them out with one more `attempt`.

        Raises what `trained` raises.
        """
        with self._changed:
            self._check_reports("failed", tickets)
            for ticket in tickets:
                self._failures[ticket.key] = ticket.attempt
                heapq.heappush(self._open, (ticket.key, ticket.key + 1))
                del self._in_flight[ticket.key]
            self._changed.notify_all()

    def renew(self, *tickets: Ticket) -> list[Ticket]:
        """Return new tickets for `tickets` from before a resume. Their samples are then in flight.

        This is for results in a buffer that is stored with the checkpoint, and for workers that
        outlive the trainer. Call it before `take`, which would hand the same samples out again.
        Raises TicketError naming the samples that are of other data, finished, or in flight
        already. No ticket is then renewed.
        """
        with self._changed:
            self._check_renewals(tickets)
            for ticket in tickets:
                self._in_flight[ticket.key] = self._ticket(ticket.key)

            # The renewed numbers are cut out of the open ranges. For example, 5 cut out of [3, 9)
            # leaves [3, 5) and [6, 9).
            ranges = []
            keys = deque(sorted(ticket.key for ticket in tickets))
            for range_start, stop in sorted(self._open):
                start = range_start
                while keys and keys[0] < stop:
                    key = keys.popleft()
                    if start < key:
                        ranges.append((start, key))
                    start = key + 1
                if start < stop:
                    ranges.append((start, stop))

            self._open = ranges
            return [self._in_flight[ticket.key] for ticket in tickets]

    def __contains__(self, ticket: object) -> bool:
        """Check whether the ticket is in flight, so that a report of it is accepted."""
        if not isinstance(ticket, Ticket):
            return False
        current = self._in_flight.get(ticket.key)
        return current is not None and current[2:] == ticket[2:]

    @property
    def in_flight(self) -> list[Ticket]:
        """The tickets that were handed out and not reported, in the order of the epochs."""
        with self._changed:
            return sorted(self._in_flight.values(), key=lambda ticket: ticket.key)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of samples "trained", "dropped" and "in flight", summed over all epochs.

        Those trained and dropped are counted since the run began.
        """
        return {
            "trained": self._trained,
            "dropped": self._dropped,
            "in flight": len(self._in_flight),
        }

    @property
    def epoch(self) -> int:
        """The number of epochs whose samples are all finished."""
        with self._changed:
            first_start, _ = self._unfinished_ranges()[0]
            return first_start // self.samples

    @property
    def done(self) -> bool:
        """Whether all samples of all epochs are finished."""
        return not self._open and not self._in_flight

    def __repr__(self) -> str:
        epochs = "endless" if self.epochs is None else f"{self.epochs} epoch(s)"
        return f"Frontier({self.samples} samples, {epochs}, {self.counts})"

    def state_dict(self) -> dict[str, Any]:
        """Return which samples are finished, as JSON values.

        All numbers below "low" are finished. "runs" is text: the lengths of ranges above "low",
        which are unfinished and finished in turn. All numbers after the last range are unfinished.
        For example, if the numbers 0, 1, 4, 5 and 7 are finished, "low" is 2 and "runs" is
        "2 2 1 1".
        """
        with self._changed:
            ranges = self._unfinished_ranges()
            dropped = self._dropped

        lengths: list[int] = []
        for (start, stop), (next_start, _) in pairwise(ranges):
            lengths += (stop - start, next_start - stop)
        return {
            "version": VERSION,
            "samples": self.samples,
            "ids": self._digest,
            "seed": self._seed,
            "epochs": self.epochs,
            "low": ranges[0][0],
            "runs": " ".join(map(str, lengths)),
            "dropped": dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Samples in flight are handed out again, and their tickets become invalid.

        The frontier may have more epochs than at the save. Raises LoadError for another number of
        samples, other ids, another order or fewer epochs, and CorruptError for a state that
        `state_dict` does not return. Nothing is then changed.
        """
        check_state(state)
        self._compare_settings(state)
        low, dropped = state["low"], state["dropped"]
        lengths = [int(length) for length in state["runs"].split()]
        unfinished_lengths = lengths[::2]
        finished_lengths = lengths[1::2]
        ranges = []
        number = low
        for unfinished, finished in zip(unfinished_lengths, finished_lengths, strict=True):
            ranges.append((number, number + unfinished))
            number += unfinished + finished

        total_finished = low + sum(finished_lengths)
        trained = total_finished - dropped
        if number > self._end or trained < 0:
            raise CorruptError(
                f"frontier: {total_finished} samples finished, {dropped} of them dropped, "
                f"the last before number {number} of {self._end}; the state is damaged, take "
                "another checkpoint"
            )

        if number < self._end:
            ranges.append((number, self._end))
        with self._changed:
            self._open = ranges
            self._in_flight = {}
            self._failures = {}
            self._trained, self._dropped = trained, dropped
            self._token = secrets.token_hex(4)
            self._changed.notify_all()

    def _ticket(self, key: int) -> Ticket:
        epoch, index = divmod(key, self.samples)
        if self._seed is not None:
            index = shuffled(index, self.samples, self._seed, epoch)
        name = index if self._ids is None else self._ids[index]
        return Ticket(name, epoch, self._failures.get(key, 0) + 1, key, self._token)

    def _finish(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._failures.pop(ticket.key, None)
            del self._in_flight[ticket.key]
        if not self._in_flight:
            self._changed.notify_all()

    def _unfinished_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of numbers that are open or in flight, sorted and joined.

        For example, [0, 4) and [4, 8) become [0, 8). If the numbers before the end are finished,
        the last range is empty and lies at the end, so that there is always a range.
        """
        ranges: list[tuple[int, int]] = []
        in_flight = [(key, key + 1) for key in self._in_flight]
        for start, stop in sorted([*self._open, *in_flight]):
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
            else:
                ranges.append((start, stop))
        if not ranges or ranges[-1][1] < self._end:
            ranges.append((self._end, self._end))
        return ranges

    def _check_reports(self, report: str, tickets: Sequence[Ticket]) -> None:
        """Raise TicketError unless all tickets are in flight, and each is given once."""
        keys = set()
        problems = []
        for ticket in tickets:
            if ticket not in self or ticket.key in keys:
                problems.append(self._problem_of(ticket))
            else:
                keys.add(ticket.key)
        if problems:
            raise TicketError(f"{listing(problems)}; nothing was recorded of this {report}() call")

    def _problem_of(self, ticket: Any) -> str:
        """Return in words why a report about the ticket is not accepted."""
        if not isinstance(ticket, Ticket):
            return (
                f"a {type(ticket).__name__} is no ticket; give tickets one by one, as in "
                "trained(*tickets)"
            )

        name = _name_of(ticket)
        if ticket.token != self._token:
            return (
                f"{name}: its ticket is from before a resume, or of another Frontier; renew() "
                "it or discard its result"
            )

        if ticket in self:
            return f"{name}: the ticket is given twice"
        failures = self._failures.get(ticket.key, 0)
        if failures >= ticket.attempt:
            return (
                f"{name}: reported as failed already, it comes again as attempt "
                f"{failures + 1}; discard this result"
            )

        return f"{name}: reported as trained or dropped already; report each ticket once"

    def _check_renewals(self, tickets: Sequence[Ticket]) -> None:
        """Raise TicketError unless all samples are of this data, open, and given once."""
        keys: set[int] = set()
        problems = []
        ranges = sorted(self._open)
        for ticket in tickets:
            if not isinstance(ticket, Ticket):
                problems.append(self._problem_of(ticket))
                continue

            name = _name_of(ticket)
            key = ticket.key

            # The last open range that begins at `key` or before, or -1.
            index = bisect_right(ranges, (key, ENDLESS)) - 1
            if not 0 <= key < self._end or self._ticket(key)[:2] != ticket[:2]:
                problems.append(
                    f"{name}: not a sample of this Frontier, which has other data or another order"
                )
            elif key in self._in_flight or key in keys:
                problems.append(
                    f"{name}: in flight here already; renew tickets once, before take()"
                )
            elif index < 0 or ranges[index][1] <= key:
                problems.append(f"{name}: trained or dropped already; discard its result")

            keys.add(key)

        if problems:
            raise TicketError(f"{listing(problems)}; no ticket was renewed")

    def _compare_settings(self, state: Mapping[str, Any]) -> None:
        """Raise LoadError naming each setting that differs from the saved run's."""
        settings = (
            ("samples", "the number of samples", self.samples),
            ("ids", "the digest of the ids", self._digest),
            ("seed", "the seed (None: not shuffled)", self._seed),
        )
        problems = []
        for field, description, value in settings:
            if value != state[field]:
                problems.append(f"{description} is {value}, {state[field]} in the checkpoint")

        if self.epochs is not None and (state["epochs"] is None or self.epochs < state["epochs"]):
            problems.append(
                f"the number of epochs is {self.epochs}, {state['epochs']} in the checkpoint"
            )

        if problems:
            raise LoadError(
                f"frontier: {listing(problems)}; make the Frontier with the samples, seed and "
                "epochs of the saved run (more epochs are allowed)"
            )


def _name_of(ticket: Ticket) -> str:
    return f"sample {short_repr(ticket.id, 80)} of epoch {ticket.epoch} (attempt {ticket.attempt})"
