"""Ranks on nodes: forked processes, each with its client of a network file system.

Each has a host name and a boot id, and all see the file system at the same path. Call it in a
process with one thread: `run_python`.
"""

import ctypes
import faulthandler
import json
import os
import signal
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import take_disk, take_host_name, take_machine_id

_POLL_SECONDS = 0.02
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_GROUP_SECONDS = 30.0  # of gloo, which waits so long for a rank that has gone
Work = Callable[[int], Any]  # of a rank; its result goes as JSON


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    status: int  # the exit status; -9: killed
    result: Any  # of its work
    error: str  # of its work, or ""
    ended_at: float  # by time.monotonic


@dataclass
class Launch:
    """Running ranks."""

    folder: Path
    processes: list[int]
    store: dist.TCPStore
    ended: dict[int, Ended] = field(default_factory=dict)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        if rank not in self.ended:
            os.kill(self.processes[rank], number)

    def await_note(self, name: str, seconds: float) -> None:
        """Return when all ranks have made this note, or one of them has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._collect():
            notes = [self.folder / f"{name}-{rank}" for rank in range(len(self.processes))]
            if all(note.exists() for note in notes):
                return
            time.sleep(_POLL_SECONDS)
        assert self.ended, f"not all ranks came to {name} within {seconds} s"

    def await_outcome(self, seconds: float, *, is_good: bool) -> None:
        """Return when a later save than those so far has worked, or has failed, on all ranks."""
        counts = [len(outcomes) for outcomes in self._outcomes()]
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._collect():
            are_met = []
            for outcomes, count in zip(self._outcomes(), counts, strict=True):
                are_met.append(any((not error) is is_good for _, error in outcomes[count:]))
            if all(are_met):
                return
            time.sleep(_POLL_SECONDS)
        assert self.ended, f"no {'good' if is_good else 'failed'} save within {seconds} s"

    def _outcomes(self) -> list[list[Any]]:
        outcomes = []
        for rank in range(len(self.processes)):
            written = self.folder / f"outcomes-{rank}"
            outcomes.append(json.loads(written.read_text()) if written.exists() else [])
        return outcomes

    def wait(self, seconds: float) -> dict[int, Ended]:
        """Return how each rank ended within these seconds; the others are killed and left out."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(self._collect()) < len(self.processes):
            time.sleep(_POLL_SECONDS)
        in_time = dict(self.ended)
        for rank in set(range(len(self.processes))) - in_time.keys():
            self.kill(rank, signal.SIGUSR1)  # it writes its stacks
            time.sleep(1)
            self.kill(rank)
        return in_time

    def _collect(self) -> dict[int, Ended]:
        for rank, process in enumerate(self.processes):
            if rank in self.ended:
                continue
            pid, status = os.waitpid(process, os.WNOHANG)
            if pid:
                self.ended[rank] = self._ended(rank, os.waitstatus_to_exitcode(status))
        return self.ended

    def _ended(self, rank: int, status: int) -> Ended:
        result, error = None, ""
        written = self.folder / f"result-{rank}"
        if written.exists():
            result, error = json.loads(written.read_text())
        return Ended(status, result, error, time.monotonic())


@dataclass
class Nodes:
    """Nodes that see a file system at one path, each through its client."""

    clients: list[Path]
    point: Path  # where they see it
    folder: Path  # on a local disk
    launches: int = 0

    def begin(self, work: Work) -> Launch:
        """Call `work` on a rank of each node."""
        self.launches += 1
        folder = self.folder / f"launch-{self.launches}"
        folder.mkdir(parents=True)
        # as under a launcher, a process that no kill meets keeps the store
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = []
        for rank in range(len(self.clients)):
            processes.append(self._fork(work, folder, rank, store.port))
        return Launch(folder, processes, store)

    def _fork(self, work: Work, folder: Path, rank: int, port: int) -> int:
        child = os.fork()
        if child:
            return child
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        result, error = None, ""
        try:
            warnings.simplefilter("ignore")
            self._become_node(folder, rank, port)
            result = work(rank)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            (folder / f"traceback-{rank}").write_text("".join(traceback.format_exception(raised)))
        (folder / f"draft-{rank}").write_text(json.dumps([result, error]))
        (folder / f"draft-{rank}").rename(folder / f"result-{rank}")
        os._exit(0)

    def _become_node(self, folder: Path, rank: int, port: int) -> None:
        take_disk(self.point, self.clients[rank])
        identity = folder / f"boot-id-{rank}"
        identity.write_text(f"{uuid.uuid5(uuid.NAMESPACE_DNS, f'node-{rank}')}\n")
        take_machine_id(identity)
        take_host_name(f"node-{rank}")
        os.chdir(folder)
        faulthandler.register(signal.SIGUSR1, Path(f"stacks-{rank}").open("w"))  # noqa: SIM115 - to its end
        torch.set_num_threads(1)
        names = {
            "RANK": rank,
            "WORLD_SIZE": len(self.clients),
            "LOCAL_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",  # the host names have no addresses
            "TMPDIR": folder,
        }
        os.environ |= {name: str(value) for name, value in names.items()}
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False),
            rank=rank,
            world_size=len(self.clients),
            timeout=timedelta(seconds=_GROUP_SECONDS),
        )


def note(name: str, rank: int) -> None:
    """Tell the process that began the ranks that this rank has come so far."""
    Path(f"{name}-{rank}").touch()
