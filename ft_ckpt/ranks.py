"""Which rank this is, and how all ranks agree.

Agreement goes through the process group's key-value store, not through a collective: nobody sits in a GPU operation
while rank 0 writes (so no watchdog fires), a rank that does not come is known by number, and an error on one rank
reaches the others in milliseconds. The same calls work with one process and no process group.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ft_ckpt.errors import CheckpointError, RankError, RanksDisagreeError

_BEAT_SECONDS = 1.0  # between signs of life of a rank at work; well below any sensible time-out


@dataclass
class Ranks:
    """This process among its peers: `rank` of `size`, joined by a key-value `store` (None with one process)."""

    rank: int
    size: int
    store: Any = None
    timeout_seconds: float = 600.0
    rounds: int = 0
    turns: int = 0
    lane: str = ""  # meetings of another thread, which do not mix with those of the main one

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    @property
    def shows(self) -> bool:
        """Whether this is where a person looks on."""
        return self.leads and not self.lane

    def agree(
        self,
        what: str,
        value: Mapping[str, Any] | None = None,
        error: BaseException | None = None,
        same: tuple[str, ...] = (),
        timeout_seconds: float | None = None,
    ) -> list[dict[str, Any]]:
        """Meet at `what`, and return every rank's `value` (JSON) in rank order, on every rank.

        The fields named in `same` must be equal everywhere. Raises this rank's own `error` unchanged; on the other
        ranks RankError naming the one that failed. Raises RanksDisagreeError when values differ or when a rank does
        not come within `timeout_seconds` (default: the object's).
        """
        if self.size == 1:
            if error is not None:
                raise error
            return [dict(value or {})]
        own = {"what": what, "value": dict(value or {}), "error": _describe(error)}
        self.rounds += 1
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        self._put(f"{self.rounds}/{self.rank}", own)
        verdict = self._lead(what, same, limit) if self.leads else self._follow(what, limit)
        self.turns = 0
        if error is not None:
            raise error
        if verdict["problem"]:
            raise (RanksDisagreeError if verdict["disagree"] else RankError)(verdict["problem"])
        return [entry["value"] for entry in verdict["entries"]]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Tell the other ranks, while the block runs, that this one is alive and at work: they go on waiting.

        From a thread, since the work may sit in one long system call. When the process dies, so does the thread.
        """
        if self.size == 1:
            yield
            return
        done = threading.Event()

        def beat() -> None:
            count = 0
            while not done.wait(_BEAT_SECONDS):
                count += 1
                self.store.set(self._key(f"beat/{self.rank}"), f"{self.rounds}.{count}")

        thread = threading.Thread(target=beat, name="ft_ckpt-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def open_turn(self) -> None:
        """On rank 0: from here on it takes what the others bring. Each of them waits for this before it sends.

        A send that nobody receives would end with the group's time-out, however healthy the disk rank 0 waits for.
        """
        self.turns += 1
        self.store.set(self._key(f"{self.rounds}/turn/{self.turns}"), "")

    def await_turn(self) -> None:
        """On the other ranks: wait until rank 0 takes what they bring. Raises RankError when it falls silent."""
        self.turns += 1
        if not self._wait(f"{self.rounds}/turn/{self.turns}", self.timeout_seconds, f"{self.rounds + 1}/0"):
            raise RankError(
                f"rank 0 stopped taking tensors: it failed, or gave no sign of life for {self.timeout_seconds:g} s"
            )

    def _lead(self, what: str, same: tuple[str, ...], limit: float) -> dict[str, Any]:
        """Collect what the ranks put, judge it, and put the verdict where the others wait for it."""
        names = [f"{self.rounds}/{rank}" for rank in range(self.size)]
        self._gather(names, limit)
        here = [rank for rank, name in enumerate(names) if self.store.check([self._key(name)])]
        entries = {rank: self._get(names[rank]) for rank in here}
        verdict = _judge(what, entries, self.size, same, limit)
        self._put(f"{self.rounds}/verdict", verdict)
        self._sweep(self.rounds - 2)
        return verdict

    def _gather(self, names: list[str], limit: float) -> None:
        """Wait for what all ranks put, for `limit` seconds after the last sign of life of one that is missing."""
        deadline, heard = time.monotonic() + limit, b""
        while not self._arrive(names, min(_BEAT_SECONDS, max(deadline - time.monotonic(), 0.001))):
            beats = [self._key(f"beat/{rank}") for rank in range(1, self.size)]
            beat = b" ".join(self.store.get(key) for key in beats if self.store.check([key]))
            if beat != heard:  # seen for the first time it may be an old one
                heard, deadline = beat, time.monotonic() + limit if heard else deadline
            if time.monotonic() > deadline:
                return

    def _follow(self, what: str, limit: float) -> dict[str, Any]:
        """Wait for rank 0, however long it is at work, and then for its verdict, which it gives within `limit`."""
        arrived = self._wait(f"{self.rounds}/0", limit)
        if arrived and self._wait(f"{self.rounds}/verdict", limit + 60.0):
            return self._get(f"{self.rounds}/verdict")
        # Rank 0 may still come: it must not take this rank's entry for its presence.
        self._put(f"{self.rounds}/{self.rank}", {"what": what, "value": {}, "error": f"gave up after {limit:g} s"})
        found = "rank 0 came and then fell silent" if arrived else f"rank(s) 0 did not enter {what}"
        return {"problem": f"{what}: {found} within {limit:g} s; {_ADVICE}", "disagree": True, "entries": []}

    def _wait(self, name: str, limit: float, instead: str | None = None) -> bool:
        """Wait until rank 0 has put `name`; False when it has given no sign of life for `limit` seconds.

        False, too, when it has put `instead`, which it puts after `name` if at all: it has given up and gone on.
        """
        deadline, heard = time.monotonic() + limit, b""
        while not self._arrive([name], min(_BEAT_SECONDS, max(deadline - time.monotonic(), 0.001))):
            if instead is not None and self.store.check([self._key(instead)]):
                return bool(self.store.check([self._key(name)]))
            if self.store.check([self._key("beat/0")]):
                beat = self.store.get(self._key("beat/0"))
                if beat != heard:
                    # A beat seen for the first time may be an old one: it counts only as what the next is compared to.
                    heard, deadline = beat, time.monotonic() + limit if heard else deadline
            if time.monotonic() > deadline:
                return False
        return True

    def _arrive(self, names: list[str], seconds: float) -> bool:
        """Whether all of `names` are in the store within `seconds`; the store wakes us, nobody polls."""
        try:
            self.store.wait([self._key(name) for name in names], timedelta(seconds=seconds))
        except RuntimeError:  # DistStoreError: time is up
            return False
        return True

    def _sweep(self, finished: int) -> None:
        # Every rank has put its entry of this round, so all have read the verdict of the one before: two rounds
        # back nobody looks any more, and the store stays small however long the run.
        for name in [*map(str, range(self.size)), "verdict"]:
            self._forget(f"{finished}/{name}")
        for turn in range(1, self.turns + 1):  # not sooner: a rank that had nothing to bring may come late to its turn
            self._forget(f"{self.rounds - 1}/turn/{turn}")

    def _forget(self, name: str) -> None:
        with suppress(RuntimeError, NotImplementedError):  # stores without deletion only grow
            self.store.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"ft_ckpt/{self.lane}/{name}" if self.lane else f"ft_ckpt/{name}"

    def _put(self, name: str, value: dict[str, Any]) -> None:
        self.store.set(self._key(name), json.dumps(value))

    def _get(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.store.get(self._key(name)))
        return value


_ADVICE = "call it on every rank, not under `if accelerator.is_main_process`, and with the same arguments"
_shared: dict[
    tuple[Any, str], Ranks
] = {}  # by process group and lane; the group is kept alive so that no other can be taken for it


def current(timeout_seconds: float = 600.0, lane: str = "") -> Ranks:
    """The ranks of the default process group, or one rank when there is none.

    One object per process group and `lane`: its count of rounds must be the same on every rank, whichever saver asks.
    A lane is for one thread: its meetings are apart from those of the others. Raises
    RanksDisagreeError in a process that was launched as one of several and has no process group.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        _refuse_split_brain()
        return Ranks(0, 1, lane=lane)
    if dist.get_world_size() == 1:
        return Ranks(0, 1, lane=lane)
    from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

    group = _get_default_group()
    if (group, "") not in _shared:
        _shared.clear()  # a destroyed group's store is gone with it
        _shared[group, ""] = Ranks(dist.get_rank(), dist.get_world_size(), _get_default_store())
    if (group, lane) not in _shared:  # a thread that waits in a store keeps the others from it
        store = _shared[group, ""].store.clone()
        _shared[group, lane] = Ranks(dist.get_rank(), dist.get_world_size(), store, lane=lane)
    ranks = _shared[group, lane]
    ranks.timeout_seconds = timeout_seconds
    return ranks


def _refuse_split_brain() -> None:
    """Each of several processes that believes to be alone would write the same folder."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1 and "RANK" in os.environ:
        raise RanksDisagreeError(
            f"WORLD_SIZE={launched} in the environment, but this process has no process group: every rank would take "
            "itself for the only one. Use Accelerator(cpu=True) or ACCELERATE_USE_CPU=true on a machine without "
            "accelerators, or torch.distributed.init_process_group; unset WORLD_SIZE if the process really is alone"
        )


def attempt(action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """The result of `action` and None, or None and what it raised: for steps whose outcome is agreed on next."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - carried to `agree`, which raises it after telling the other ranks
        return None, error


def _describe(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _judge(
    what: str, entries: dict[int, dict[str, Any]], size: int, same: tuple[str, ...], limit: float
) -> dict[str, Any]:
    ordered = [entries[rank] for rank in sorted(entries)]
    missing = [rank for rank in range(size) if rank not in entries]
    if missing:
        text = f"{what}: rank(s) {_numbers(missing)} did not enter it within {limit:g} s; {_ADVICE}"
        return {"problem": text, "disagree": True, "entries": []}
    elsewhere = [rank for rank, entry in entries.items() if entry["what"] != what]
    if elsewhere:
        text = f"{what}: rank(s) {_numbers(elsewhere)} called {entries[elsewhere[0]]['what']} instead; {_ADVICE}"
        return {"problem": text, "disagree": True, "entries": []}
    failed = [rank for rank, entry in entries.items() if entry["error"] is not None]
    if failed:
        text = "; ".join(f"rank {rank}: {entries[rank]['error']}" for rank in sorted(failed)[:4])
        return {"problem": f"{what} failed, nothing was committed: {text}", "disagree": False, "entries": []}
    differing = [difference for name in same if (difference := _difference(name, ordered))]
    if differing:
        return {"problem": f"{what}: ranks disagree: {'; '.join(differing)}", "disagree": True, "entries": []}
    return {"problem": None, "disagree": False, "entries": ordered}


def _difference(name: str, entries: list[dict[str, Any]]) -> str | None:
    first = entries[0]["value"].get(name)
    odd = [rank for rank, entry in enumerate(entries) if entry["value"].get(name) != first]
    if not odd:
        return None
    return f"{name} is {first!r} on rank 0 and {entries[odd[0]]['value'].get(name)!r} on rank(s) {_numbers(odd)}"


def _numbers(ranks: list[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
