"""This rank, its process group, and collective operations that end on all ranks when one fails.

Agreement uses the process group's key-value store, not a collective. So no rank waits in a GPU
operation while rank 0 writes (no watchdog fires), and errors name a missing rank by number. An
error on one rank reaches the others within a second (with more than 1,000 ranks, a second for each
1,000): the failed rank reports it under the next agreement, and the others poll for such reports
wherever they wait. The same calls work with one process and no process group.
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

_BEAT_SECONDS = 1.0  # between signs of life of a rank at work; well below any sensible time-out
_POLL_SECONDS = 0.1  # between polls of a working rank for failure reports
_POLLS_PER_SECOND = 1000  # at most, of all ranks together: one process answers them
_MAX_POLLED = 32  # ranks whose signs of life are polled at a time


@contextmanager
def beside_thread(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a daemon thread during the block.

    It must return soon after its event is set.
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

    A key-value `store` connects them; it is None with one process.
    """

    rank: int
    size: int
    store: Any = None
    timeout_seconds: float = 600.0
    rounds: int = 0  # agreements of this scope
    slots: int = 0  # for receiving tensors, since the last agreement
    channel: str = ""  # separates the agreements of another thread from the main one's
    scope: str = ""  # of the attempts this rank is in: their agreements are counted separately
    # keys of the agreements that follow the attempts this rank is in
    later_agreements: tuple[str, ...] = ()
    # this rank's keys that no rank needs after the next agreement
    deletable_keys: list[str] = field(default_factory=list)
    # number of parts of this rank's values that have several, by key
    parts_by_key: dict[str, int] = field(default_factory=dict)
    polled_at: float = 0.0  # for failure reports

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def node(self) -> str | None:
        """The host name of this rank for errors; None if all ranks are on one node.

        It waits up to a second for ranks that have not announced theirs yet.
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
        decide: Callable[[Values], Any] = agreement.value_of_leader,
    ) -> Agreed:
        """Exchange a `value` of each rank, and decide on rank 0 what every rank gets.

        A value is JSON. Rank 0 calls `decide` with all values. `what` names the call in errors. The
        result should not grow with the number of ranks, because every rank reads it. `decide` may
        take long: rank 0 reports meanwhile that it is alive. The fields named in `same` must be
        equal on all ranks. Raises this rank's own `error` unchanged; on the other ranks RankError
        naming the rank that failed, NoSpaceError or LeaseTakenError; on all ranks the error of
        `decide`; RanksDisagreeError if values differ, or if a rank does not call it within
        `timeout_seconds` (default: the object's) or can no longer call it.
        """
        if self.size == 1:
            if error is not None:
                raise error
            alone = [json.loads(json.dumps(dict(value or {})))]  # JSON, as with several ranks
            return Agreed(json.loads(json.dumps(decide(alone))), alone)
        facts = self._facts_of(error)
        self._report_failure(facts)
        entry = {"what": what, "value": dict(value or {}), **facts}
        self.rounds, self.slots = self.rounds + 1, 0
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
        """Keep the error of the block until `agree`, which gets it and raises it on all ranks.

        All ranks call it. Meanwhile this rank reports that it is alive. Its error is raised on the
        other ranks as well, as soon as they wait or poll (`check_peers`) inside their block, so
        that all reach the agreement.
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
        self._report_failure(self._facts_of(outcome.error))

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
        """Raise the failure of another rank: NoSpaceError, LeaseTakenError, or RankError naming it.

        Cheap enough for any loop.
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
        """Report during the block that this rank is alive, so that the others continue to wait.

        A thread reports, because the work may be one long system call. It ends with the process.
        """
        if self.size == 1:
            yield
            return

        def send_beats(done: threading.Event) -> None:
            with suppress(RankError):  # the store is gone: raised where something waits for it
                while not done.wait(_BEAT_SECONDS):
                    self.store.set(self._beat_key(self.rank), str(time.monotonic_ns()))

        with beside_thread("ft_ckpt-beat", send_beats):
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
        """Collect the entries of all ranks and store the verdict for the others.

        Each rank deletes its own keys, because one rank would need a call for each of the others.
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
            verdict = problem or agreement.verdict_on(values, decide, self._facts_of)
        self._put_value(f"{self.rounds}/verdict", verdict)
        # so all have read the previous verdict and used its receive slots
        if len(present) == self.size:
            self._delete_keys()
        used_names = [f"{self.rounds}/verdict", names[0]]
        if verdict["problem"]:  # then the other ranks leave their entries
            used_names += [*names[1:], f"{self.rounds}/failed"]
        self.deletable_keys += map(self._store_key, used_names)
        return verdict, values

    def _await_verdict(self, what: str, limit: float) -> dict[str, Any]:
        """Wait for rank 0 to arrive, then for its verdict.

        Each sign of life of rank 0 begins the wait again: `limit` seconds until it arrives, and a
        minute more for the verdict.
        """
        has_arrived = self._await_names([f"{self.rounds}/0"], [0], limit)
        if has_arrived and self._await_names([f"{self.rounds}/verdict"], [0], limit + 60.0):
            return self._read_verdict()
        # Rank 0 may still arrive: it must not count this entry as the presence of this rank.
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
        if not verdict["problem"]:  # else a late rank must see which ranks went on
            self._delete_key(self._store_key(f"{self.rounds}/{self.rank}"))
            self._delete_keys()  # all have arrived, so this rank's receive slots are used
        return verdict

    def _await_names(self, names: Sequence[str], awaited: Iterable[int], limit: float) -> bool:
        """Wait for `names`, each set by one of the ranks `awaited`.

        False after `limit` seconds without a sign of life. If many are missing, only the first ones
        are polled. Raises as `_check_failures` does.
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
        """Return the last signs of life of those of `ranks` that have sent any."""
        beats = []
        for rank in ranks:
            key = self._beat_key(rank)
            if self.store.check([key]):
                beats.append(self.store.get(key))
        return beats

    def _check_failures(self, missing: Sequence[tuple[str, int]] = ()) -> None:
        """Raise if keys in `missing` will never be set: their rank has failed or gone on."""
        for later in (*self.later_agreements, self._store_key(f"{self.rounds + 1}")):
            has_failure = self.store.check([f"{later}/failed"])
            gone = [rank for _, rank in missing if self.store.check([f"{later}/{rank}"])]
            if not (has_failure or gone):
                continue
            # a rank that has set the last of them may have entered the next agreement already
            if missing and self._are_set([name for name, _ in missing]):
                continue
            if has_failure:
                agreement.raise_problem(json.loads(self.store.get(f"{later}/failed")))
            raise RanksDisagreeError(
                f"rank(s) {rank_numbers(gone)} went on without this one; {ADVICE}"
            )

    def _facts_of(self, error: BaseException | None) -> dict[str, Any]:
        """Describe the error of this rank to the others, with its node if there are several."""
        return agreement.error_facts(error, None if error is None else self.node)

    def _report_failure(self, facts: Mapping[str, Any]) -> None:
        """Report at the next agreement that this rank has failed, if it has.

        The first report of any rank counts.
        """
        if facts["error"] is not None:
            report = json.dumps(agreement.failure_of_rank(self.rank, facts))
            with suppress(RankError):  # the store is gone: report the local failure
                self.store.compare_set(self._store_key(f"{self.rounds + 1}/failed"), "", report)

    def _have_arrived(self, missing: "deque[tuple[str, int]]", seconds: float) -> bool:
        """Wait at most `seconds`, or a second, until all names are set; return whether they are.

        The leading names that are set are removed from `missing`.
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
