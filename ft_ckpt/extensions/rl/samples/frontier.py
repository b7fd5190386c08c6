"""The data position of asynchronous training: the samples that were trained, not a count.

In reinforcement learning samples are taken, generated on and trained in different orders, and some
are dropped or fail. A `Frontier` numbers the samples of all epochs in one order (number = epoch *
samples + position in the epoch) and keeps the numbers that are neither trained nor dropped, as
ranges. The settled numbers are then a low-water mark and a few runs above it, which is all that a
checkpoint stores: samples in flight are stored like samples never taken.
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
    """One sample, handed out once. Plain values: it can be pickled and sent to other processes."""

    id: Any  # the element of a list of ids, otherwise the index of the sample
    epoch: int  # from 0
    attempt: int  # from 1; one more after each `failed`, counted in this process
    key: int  # the number of the sample in all epochs
    token: str  # of the `Frontier` object that handed it out, new after each `load_state_dict`


class Frontier:
    """Hands out samples, and records those that were trained or dropped.

    A resume hands out the others again.
    """

    def __init__(
        self, samples: int | Sized, *, epochs: int | None = 1, shuffle: bool = False, seed: int = 0
    ) -> None:
        """Open `epochs` epochs of `samples`.

        `samples`: their number; or a sequence of ids (a list, a range, a column of a dataset; str,
        int, bytes or tuples of these), which the tickets carry; or anything else with a length,
        such as a dataset, whose indices the tickets carry. An id that is listed twice is two
        samples. `epochs`: None for no end. `shuffle`: each epoch has its own order, which depends
        on `seed`, the epoch and the number of samples alone.

        A group of prompts is one sample, which is taken and reported once, whatever is generated
        for it.

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
        # heap of ranges of numbers that are neither settled nor in flight
        self._open = [(0, self._end)]
        self._in_flight: dict[int, Ticket] = {}
        self._failures: dict[int, int] = {}  # of samples that are not settled
        self._trained = self._dropped = 0
        self._token = secrets.token_hex(4)
        # its lock is reentrant: a signal handler may read the state
        self._changed = threading.Condition()

    def take(self, count: int = 1, *, wait: float = 0.0) -> list[Ticket]:
        """Hand out the first `count` samples that are neither settled nor in flight.

        The samples come in the order of the epochs. Samples that failed and, after a resume, those
        that were in flight therefore precede new ones. An epoch begins while samples of the
        previous one are in flight. Returns fewer tickets, or none, if there are no more at the
        moment. `wait` is the number of seconds to wait for a ticket, because samples in flight may
        fail. Any thread may call this method.
        """
        tickets: list[Ticket] = []
        with self._changed:
            self._changed.wait_for(lambda: self._open or not self._in_flight, wait)
            while self._open and len(tickets) < count:
                start, stop = self._open[0]
                # In flight before it is no longer open: an exception of a signal handler in between
                # loses nothing.
                self._in_flight[start] = ticket = self._ticket(start)
                if start + 1 < stop:
                    # still the lowest, because ranges do not overlap
                    self._open[0] = (start + 1, stop)
                else:
                    heapq.heappop(self._open)
                tickets.append(ticket)
        return tickets

    def __iter__(self) -> Iterator[Ticket]:
        """Yield one ticket at a time, until there are no more at the moment; see `take`.

        Several threads may iterate.
        """
        tickets = self.take()
        while tickets:
            yield tickets[0]
            tickets = self.take()

    def trained(self, *tickets: Ticket) -> None:
        """Report samples as trained.

        Call this method after their backward pass, before the `saver.step()` of the batch. Raises
        TicketError naming samples that are not in flight under these tickets; then no sample is
        settled.
        """
        with self._changed:
            self._check_reports("trained", tickets)
            self._settle(tickets)
            self._trained += len(tickets)

    def dropped(self, *tickets: Ticket) -> None:
        """Settle samples that are not to be trained, such as filtered groups.

        Raises what `trained` raises.
        """
        with self._changed:
            self._check_reports("dropped", tickets)
            self._settle(tickets)
            self._dropped += len(tickets)

    def failed(self, *tickets: Ticket) -> None:
        """Return samples, which the next `take` hands out with one more `attempt`.

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
        """Return new tickets for `tickets` from before a resume; their samples are then in flight.

        This is for results in a buffer that is stored with the checkpoint, and for workers that
        outlive the trainer. Call it before `take`, which hands the same samples out again. Raises
        TicketError naming samples that are of other data, settled, or already in flight; then no
        ticket is renewed.
        """
        with self._changed:
            self._check_renewals(tickets)
            for ticket in tickets:
                self._in_flight[ticket.key] = self._ticket(ticket.key)
            spans, keys = [], deque(sorted(ticket.key for ticket in tickets))
            for begin, stop in sorted(self._open):
                start = begin
                while keys and keys[0] < stop:
                    key = keys.popleft()
                    if start < key:
                        spans.append((start, key))
                    start = key + 1
                if start < stop:
                    spans.append((start, stop))
            self._open = spans
            return [self._in_flight[ticket.key] for ticket in tickets]

    def __contains__(self, ticket: object) -> bool:
        """Check whether the ticket is in flight, so that a report of it is accepted."""
        if not isinstance(ticket, Ticket):
            return False
        current = self._in_flight.get(ticket.key)
        return current is not None and current[2:] == ticket[2:]

    @property
    def in_flight(self) -> list[Ticket]:
        """The tickets without a report, in the order of the epochs."""
        with self._changed:
            return sorted(self._in_flight.values(), key=lambda ticket: ticket.key)

    @property
    def counts(self) -> dict[str, int]:
        """Samples "trained" and "dropped" since the run began, and those "in flight".

        The numbers are sums over all epochs.
        """
        return {
            "trained": self._trained,
            "dropped": self._dropped,
            "in flight": len(self._in_flight),
        }

    @property
    def epoch(self) -> int:
        """The number of epochs whose samples are all settled."""
        with self._changed:
            return self._spans()[0][0] // self.samples

    @property
    def done(self) -> bool:
        """Whether all samples of all epochs are settled."""
        return not self._open and not self._in_flight

    def __repr__(self) -> str:
        epochs = "endless" if self.epochs is None else f"{self.epochs} epoch(s)"
        return f"Frontier({self.samples} samples, {epochs}, {self.counts})"

    def state_dict(self) -> dict[str, Any]:
        """Return the settled samples as JSON values: "low" and "runs".

        All numbers below "low" are settled. "runs" is text: the lengths of an open range above
        "low", a settled one, an open one, a settled one, ...; after the last, all numbers are open.
        """
        with self._changed:
            spans, dropped = self._spans(), self._dropped
        lengths: list[int] = []
        for (start, stop), (next_start, _) in pairwise(spans):
            lengths += (stop - start, next_start - stop)
        return {
            "version": VERSION,
            "samples": self.samples,
            "ids": self._digest,
            "seed": self._seed,
            "epochs": self.epochs,
            "low": spans[0][0],
            "runs": " ".join(map(str, lengths)),
            "dropped": dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Samples in flight are handed out again, and their tickets become invalid.

        More epochs than at the save are allowed. Raises LoadError for another number of samples,
        other ids, another order or fewer epochs, CorruptError for a state that `state_dict` does
        not return; then nothing is changed.
        """
        check_state(state)
        self._compare_settings(state)
        low, dropped = state["low"], state["dropped"]
        runs = [int(length) for length in state["runs"].split()]
        spans, number = [], low
        for opened, settled in zip(runs[::2], runs[1::2], strict=True):
            spans.append((number, number + opened))
            number += opened + settled
        total_settled = low + sum(runs[1::2])
        trained = total_settled - dropped
        if number > self._end or trained < 0:
            raise CorruptError(
                f"frontier: {total_settled} samples settled, {dropped} of them dropped, "
                f"the last before number {number} of {self._end}; the state is damaged, take "
                "another checkpoint"
            )
        if number < self._end:
            spans.append((number, self._end))
        with self._changed:
            self._open = spans
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

    def _settle(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._failures.pop(ticket.key, None)
            del self._in_flight[ticket.key]
        if not self._in_flight:
            self._changed.notify_all()

    def _spans(self) -> list[tuple[int, int]]:
        """Return the ranges of numbers that are not settled, sorted and merged.

        The last range may be empty, at the end.
        """
        spans: list[tuple[int, int]] = []
        in_flight = [(key, key + 1) for key in self._in_flight]
        for start, stop in sorted([*self._open, *in_flight]):
            if spans and start <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
            else:
                spans.append((start, stop))
        if not spans or spans[-1][1] < self._end:
            spans.append((self._end, self._end))
        return spans

    def _check_reports(self, report: str, tickets: Sequence[Ticket]) -> None:
        """Raise TicketError unless all tickets are in flight."""
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
        """Raise TicketError unless all samples are open, once each and of this data."""
        keys: set[int] = set()
        problems = []
        spans = sorted(self._open)
        for ticket in tickets:
            if not isinstance(ticket, Ticket):
                problems.append(self._problem_of(ticket))
                continue
            name, key = _name_of(ticket), ticket.key
            at = bisect_right(spans, (key, ENDLESS)) - 1
            if not 0 <= key < self._end or self._ticket(key)[:2] != ticket[:2]:
                problems.append(
                    f"{name}: not a sample of this Frontier, which has other data or another order"
                )
            elif key in self._in_flight or key in keys:
                problems.append(
                    f"{name}: in flight here already; renew tickets once, before take()"
                )
            elif at < 0 or spans[at][1] <= key:
                problems.append(f"{name}: trained or dropped already; discard its result")
            keys.add(key)
        if problems:
            raise TicketError(f"{listing(problems)}; no ticket was renewed")

    def _compare_settings(self, state: Mapping[str, Any]) -> None:
        """Raise LoadError naming each setting that differs from the saved run's."""
        live = {"samples": self.samples, "ids": self._digest, "seed": self._seed}
        words = {"ids": "the digest of the ids", "seed": "the seed (None: not shuffled)"}
        problems = []
        for name, value in live.items():
            if value != state[name]:
                what = words.get(name, f"the number of {name}")
                problems.append(f"{what} is {value}, {state[name]} in the checkpoint")
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
