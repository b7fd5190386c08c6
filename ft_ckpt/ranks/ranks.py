"""Lets ranks agree on a result, and ends an operation on all ranks when one of them fails.

Ranks agree when each of them calls `Ranks.agree`: they exchange values and errors, rank 0 decides,
and all get the same result or raise an error. The messages go through the key-value store of the
process group, not through a collective. So no rank waits in a GPU operation while rank 0 writes,
and no watchdog of such operations fires. An error can also name a missing rank by its number.

While a rank works between two agreements, in a `deferring_error` block, it may fail. It then stores
a report under the key of the next agreement. The other ranks poll for such a report wherever they
wait. So they raise the error within a second (with more than 1,000 ranks, a second for each 1,000).

A rank that works for long sends signs of life, so that the others do not take it for lost. The same
calls work with one process and no process group.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

from ft_ckpt.errors import CheckpointError, RankError, RanksDisagreeError
from ft_ckpt.ranks import agreement
from ft_ckpt.ranks.agreement import ADVICE, Agreed, Values, rank_numbers
from ft_ckpt.ranks.key_value import delete_value, get_values, put_value
from ft_ckpt.ranks.nodes import launch_prefix, node_name
from ft_ckpt.ranks.outcomes import Outcome

T = TypeVar("T")

# A working rank sends a sign of life this often, which is well below any sensible time-out.
_BEAT_SECONDS = 1.0
# A working rank polls for failure reports this often.
_POLL_SECONDS = 0.1
# All ranks together poll at most this often, because one process answers them.
_POLLS_PER_SECOND = 1000
# The signs of life of at most this many ranks are polled at a time.
_MAX_POLLED = 32


@contextmanager
def thread_during_block(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a daemon thread during the block.

    The argument of `work` is an event, which is set at the end of the block. `work` must return
    soon after that.
    """
    done = threading.Event()
    thread = threading.Thread(target=work, args=(done,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@dataclass
class Ranks:
    """This process among its peers: `rank` of `size`.

    Agreements are numbered, so that each has its own keys in the store. A `deferring_error` block
    begins a new scope: the agreements inside it are numbered separately from those around it. So a
    rank that fails inside a block, and others that do not, have the same number after it.

    Attributes:
        rank: The number of this process.
        size: The number of processes.
        store: The key-value store that connects them; None with one process.
        timeout_seconds: How long a rank waits for another without a sign of life.
        rounds: How many agreements there were in this scope.
        slots: How often a rank was ready to receive tensors since the last agreement.
        channel: A name that separates the agreements of a background thread from those of the main
            thread.
        scope: The prefix of the keys of this scope.
        later_agreements: Keys of the agreements that follow the blocks in which this rank is.
        deletable_keys: Keys that this rank has set, and that no rank needs after the next
            agreement.
        parts_by_key: The number of parts of each value of this rank that is stored in several.
        polled_at: The time of the last poll for failure reports.
    """

    rank: int
    size: int
    store: Any = None
    timeout_seconds: float = 600.0
    rounds: int = 0
    slots: int = 0
    channel: str = ""
    scope: str = ""
    later_agreements: tuple[str, ...] = ()
    deletable_keys: list[str] = field(default_factory=list)
    parts_by_key: dict[str, int] = field(default_factory=dict)
    polled_at: float = 0.0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def node(self) -> str | None:
        """The host name of this rank for errors; None if all ranks are on one node.

        This waits up to a second for ranks that have not announced their host names yet.
        """
        if self.size == 1:
            return None
        try:
            return node_name(self.store, self.size)
        except RankError:  # the store is gone
            return None

    @property
    def shows(self) -> bool:
        """Whether this rank shows progress and warnings: rank 0, outside of background threads."""
        return self.is_main and not self.channel

    def agree(
        self,
        what: str,
        value: Mapping[str, Any] | None = None,
        error: BaseException | None = None,
        same: tuple[str, ...] = (),
        timeout_seconds: float | None = None,
        decide: Callable[[Values], Any] = agreement.value_of_rank_0,
    ) -> Agreed:
        """Exchange a `value` of each rank, and decide on rank 0 what every rank gets.

        Collective: call it on every rank. `what` names the call in errors. A value is JSON, and its
        fields named in `same` must be equal on all ranks. Rank 0 calls `decide` with all values; by
        default every rank gets the value of rank 0. The result should not grow with the number of
        ranks, because every rank reads it. `decide` may take long, because rank 0 sends signs of
        life meanwhile.

        Raises:
            The `error` of this rank, unchanged.
            RankError: Another rank has failed; the text names it.
            NoSpaceError, LeaseTakenError: Another rank has failed with this error.
            RanksDisagreeError: Values differ, or a rank does not call it within `timeout_seconds`
                (by default those of this object), or can no longer call it.
            The error of `decide`, on all ranks.
        """
        if self.size == 1:
            if error is not None:
                raise error
            alone = [json.loads(json.dumps(dict(value or {})))]  # JSON, as with several ranks
            return Agreed(json.loads(json.dumps(decide(alone))), alone)

        error_fields = self._describe_error(error)
        self._report_failure(error_fields)
        entry = {"what": what, "value": dict(value or {}), **error_fields}
        self.rounds += 1
        self.slots = 0
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            self._check_failures()
            self._put_value(f"{self.rounds}/{self.rank}", entry)
            values: Values = ()
            if self.is_main:
                verdict, values = self._collect_entries(what, same, limit, decide)
            else:
                verdict = self._await_verdict(what, limit)
        except CheckpointError as problem:
            raise (problem if error is None else error) from None

        if error is not None:
            raise error
        if verdict["problem"]:
            agreement.raise_problem(verdict)
        return Agreed(verdict["result"], values)

    @contextmanager
    def deferring_error(self) -> "Iterator[Outcome]":
        """Keep the error of the block, so that `agree` raises it on all ranks.

        Collective: call it on every rank, and pass the error to `agree` after the block. During the
        block this rank sends signs of life. If it fails, the other ranks raise its error as soon as
        they wait or poll (`check_peers`) in their blocks. So all ranks reach the agreement.
        """
        outcome = Outcome()
        if self.size == 1:
            with outcome.deferring_error():
                yield outcome
            return

        outside = self.scope, self.rounds, self.later_agreements
        self.later_agreements = (*self.later_agreements, self._store_key(f"{self.rounds + 1}"))
        self.scope = f"{self.scope}{self.rounds}/"
        try:
            with self.working(), outcome.deferring_error():
                yield outcome
        finally:
            self.scope, self.rounds, self.later_agreements = outside

        self._report_failure(self._describe_error(outcome.error))

    def attempt(self, action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Return the result of `action` and None, or None and its error; see `deferring_error`."""
        result = None
        with self.deferring_error() as outcome:
            result = action()
        return result, outcome.error

    def run(self, what: str, action: Callable[[], T]) -> T:
        """Return the result of `action` on this rank, once it has succeeded on all ranks.

        `what` names it in errors. Raises as `agree` does.
        """
        with self.deferring_error() as outcome:
            result = action()
        self.agree(what, error=outcome.error)
        return result

    def check_peers(self) -> None:
        """Raise the error of another rank, if one has failed.

        That is NoSpaceError, LeaseTakenError, or RankError naming the rank. The call is cheap
        enough for any loop, because it polls only at intervals.
        """
        if self.size == 1:
            return
        now = time.monotonic()
        seconds_between = max(_POLL_SECONDS, self.size / _POLLS_PER_SECOND)
        if now >= self.polled_at + seconds_between:
            self.polled_at = now
            self._check_failures()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Send signs of life during the block, so that the other ranks continue to wait.

        A thread sends them, because the work may be one long system call. The thread does not keep
        the process alive.
        """
        if self.size == 1:
            yield
            return

        def send_beats(done: threading.Event) -> None:
            # If the store is gone, the thread ends. Whoever waits for the store raises the error.
            with suppress(RankError):
                while not done.wait(_BEAT_SECONDS):
                    self.store.set(self._beat_key(self.rank), str(time.monotonic_ns()))

        with thread_during_block("ft_ckpt-beat", send_beats):
            yield

    def open_receive_slot(self, senders: Sequence[int]) -> None:
        """Announce that this rank is ready to receive, once all `senders` are ready to send.

        A send without a receiver, or a receive from a failed rank, would block until the process
        group times out. Raises as `await_receive_slot` does.
        """
        self.slots += 1
        turn = f"{self.rounds}/turn/{self.slots}"
        self.deletable_keys.append(self._store_key(turn))
        names = [f"{turn}/{rank}" for rank in senders]
        if not self._await_names(names, senders, self.timeout_seconds):
            ranks, seconds = rank_numbers(senders), self.timeout_seconds
            raise RankError(
                f"rank(s) {ranks} did not start sending tensors within {seconds:g} s "
                "of a sign of life"
            )
        self.store.set(self._store_key(turn), "")

    def await_receive_slot(self, sends: bool, to: int = 0) -> None:
        """Wait, if this rank `sends` tensors, until the rank `to` is ready to receive them.

        All ranks other than `to` call it. Raises the failure of another rank; RankError if the rank
        `to` falls silent or has entered a later agreement.
        """
        self.slots += 1
        turn = f"{self.rounds}/turn/{self.slots}"
        if not sends:
            return
        ready = self._store_key(f"{turn}/{self.rank}")
        self.store.set(ready, "")
        if not self._await_names([turn], [to], self.timeout_seconds):
            raise RankError(
                f"rank {to} did not start receiving tensors within {self.timeout_seconds:g} s of a "
                "sign of life"
            )
        self._delete_key(ready)

    def _collect_entries(
        self, what: str, same: tuple[str, ...], limit: float, decide: Callable[[Values], Any]
    ) -> tuple[dict[str, Any], Values]:
        """Collect the entries of all ranks, on rank 0, and store the verdict for the others.

        Returns the verdict and the values of all ranks. Each rank deletes its own keys, because
        rank 0 would need a call for each of the others.
        """
        names = [f"{self.rounds}/{rank}" for rank in range(self.size)]
        present = list(range(self.size))
        if not self._await_names(names[1:], present[1:], limit):
            present = [rank for rank in present if self._are_set([names[rank]])]
        keys = [self._store_key(names[rank]) for rank in present]
        entries = dict(zip(present, get_values(self.store, keys), strict=True))
        problem = agreement.judge_entries(what, entries, self.size, same, limit)
        values: Values = [entry["value"] for entry in entries.values()]
        with self.working():
            verdict = problem or agreement.verdict_on(values, decide, self._describe_error)
        self._put_value(f"{self.rounds}/verdict", verdict)

        # All ranks are here, so all have read the previous verdict and used its receive slots.
        if len(present) == self.size:
            self._delete_keys()
        used_names = [f"{self.rounds}/verdict", names[0]]
        if verdict["problem"]:  # then the other ranks do not delete their entries
            used_names += [*names[1:], f"{self.rounds}/failed"]
        self.deletable_keys += map(self._store_key, used_names)
        return verdict, values

    def _await_verdict(self, what: str, limit: float) -> dict[str, Any]:
        """Wait for rank 0 to arrive, then for its verdict.

        The wait until rank 0 arrives ends after `limit` seconds without a sign of life of rank 0.
        The wait for the verdict has a minute more.
        """
        has_arrived = self._await_names([f"{self.rounds}/0"], [0], limit)
        if has_arrived and self._await_names([f"{self.rounds}/verdict"], [0], limit + 60.0):
            return self._read_verdict()

        # Rank 0 may still arrive, and must not take this rank for present. So the entry says that
        # it gave up.
        entry = {
            "what": what,
            "value": {},
            "error": f"gave up after {limit:g} s",
            "raises": RankError.__name__,
        }
        self._put_value(f"{self.rounds}/{self.rank}", entry)
        reason = f"rank(s) 0 did not enter {what}"
        if has_arrived:
            reason = "rank 0 came and then fell silent"
        return agreement.disagreement(f"{what}: {reason} within {limit:g} s; {ADVICE}")

    def _read_verdict(self) -> dict[str, Any]:
        verdict: agreement.Verdict
        (verdict,) = get_values(self.store, [self._store_key(f"{self.rounds}/verdict")])
        # After a problem the entries stay, so that a late rank sees which ranks have gone on.
        if not verdict["problem"]:
            self._delete_key(self._store_key(f"{self.rounds}/{self.rank}"))
            # All ranks have arrived, so none needs this rank's receive slots any more.
            self._delete_keys()
        return verdict

    def _await_names(self, names: Sequence[str], awaited: Iterable[int], limit: float) -> bool:
        """Wait until all keys `names` are set. The ranks `awaited` set one of them each.

        Returns False after `limit` seconds without a sign of life. If many keys are missing, only
        the ranks of the first ones are polled. Raises what `_check_failures` raises.
        """
        deadline = time.monotonic() + limit
        last_beats: list[bytes] = []
        missing = deque(zip(names, awaited, strict=True))
        while not self._have_arrived(missing, deadline - time.monotonic()):
            polled = list(islice(missing, _MAX_POLLED))
            self._check_failures(polled)
            beats = self._beats_of(rank for _, rank in polled)
            if beats != last_beats:
                # The first beat seen may be an old one: only a change counts as a sign of life.
                if last_beats:
                    deadline = time.monotonic() + limit
                last_beats = beats
            if time.monotonic() > deadline:
                return False

        return True

    def _beats_of(self, ranks: Iterable[int]) -> list[bytes]:
        """Return the last sign of life of each rank in `ranks` that has sent one."""
        beats = []
        for rank in ranks:
            key = self._beat_key(rank)
            if self.store.check([key]):
                beats.append(self.store.get(key))
        return beats

    def _check_failures(self, missing: Sequence[tuple[str, int]] = ()) -> None:
        """Raise an error if another rank has failed, or if a missing key will never be set.

        `missing` has pairs of a key for which this rank waits, and the rank that should set it. A
        rank that has entered a later agreement will not set it.
        """
        for later in (*self.later_agreements, self._store_key(f"{self.rounds + 1}")):
            has_failure = self.store.check([f"{later}/failed"])
            gone = [rank for _, rank in missing if self.store.check([f"{later}/{rank}"])]
            if not (has_failure or gone):
                continue
            # A rank may have set the last of these keys, and then entered the next agreement,
            # since this rank has looked.
            if missing and self._are_set([name for name, _ in missing]):
                continue
            if has_failure:
                agreement.raise_problem(json.loads(self.store.get(f"{later}/failed")))
            raise RanksDisagreeError(
                f"rank(s) {rank_numbers(gone)} went on without this one; {ADVICE}"
            )

    def _describe_error(self, error: BaseException | None) -> dict[str, Any]:
        """Describe the error of this rank to the others, with its node if there are several."""
        node = None if error is None else self.node
        return agreement.describe_error(error, node)

    def _report_failure(self, error_fields: Mapping[str, Any]) -> None:
        """Store a report under the key of the next agreement, if this rank has failed.

        `error_fields` is the result of `_describe_error`. If several ranks fail, the first report
        stays.
        """
        if error_fields["error"] is not None:
            report = json.dumps(agreement.failure_of_rank(self.rank, error_fields))
            with suppress(RankError):  # the store is gone: report the local failure
                self.store.compare_set(self._store_key(f"{self.rounds + 1}/failed"), "", report)

    def _have_arrived(self, missing: "deque[tuple[str, int]]", seconds: float) -> bool:
        """Wait until all names are set, at most `seconds` or one second; return whether they are.

        If time is up, the first names that are set are removed from `missing`.
        """
        wait = timedelta(seconds=min(_BEAT_SECONDS, max(seconds, 0.001)))
        try:
            self.store.wait([self._store_key(name) for name, _ in missing], wait)
        except RuntimeError:  # DistStoreError: time is up
            while missing and self._are_set([missing[0][0]]):
                missing.popleft()
            return not missing
        return True

    def _are_set(self, names: Iterable[str]) -> bool:
        return bool(self.store.check([self._store_key(name) for name in names]))

    def _delete_keys(self) -> None:
        for key in self.deletable_keys:
            self._delete_key(key)
        self.deletable_keys.clear()

    def _delete_key(self, key: str) -> None:
        with suppress(RuntimeError, NotImplementedError):  # stores without deletion only grow
            delete_value(self.store, key, self.parts_by_key.pop(key, 1))

    def _store_key(self, name: str) -> str:
        return f"{launch_prefix(self.size)}/{self.channel}/{self.scope}{name}"

    def _beat_key(self, rank: int) -> str:
        return f"{launch_prefix(self.size)}/{self.channel}/beat/{rank}"

    def _put_value(self, name: str, value: dict[str, Any]) -> None:
        key = self._store_key(name)
        parts = put_value(self.store, key, value)
        if parts > 1:
            self.parts_by_key[key] = parts
