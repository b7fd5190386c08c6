"""Faults, kills and delays at each call of an action: to the disk, the system, a store, a server.

    def trial(world):
        folder = prepared(tmp_path / world.name)
        world.run(overwrite, folder)  # in this world
        assert is_old_or_new(folder)
        overwrite(folder)  # the next one works
        assert is_new(folder)

    assert try_worlds(trial, Disk("killed")).calls > 10

`try_worlds` calls the trial in an undisturbed world first, which counts the calls, and then in a
world for each call and fault. If trials fail, its error names their worlds, and what to set to try
one of them alone: FT_CKPT_WORLD.

`Disk` (calls of ft_ckpt), `Requests` (of a store) and `Server` (requests to an HTTP fake) are in
this module; `System` (all calls of the C library, by a preloaded layer) is in preloaded.py. Beside
that one, `Disk` stays: it forks the process of the test itself, takes no compiler, and can raise
Ctrl-C at a call.
"""

import errno
import mmap
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faulty_stores import Stopped, Watch
from http_server import FakeServer, Fault
from seeds import chosen_seed

from ft_ckpt.errors import TargetError
from ft_ckpt.storage import local_disk

# a request is executed
KILLS = {"killed before": {"cuts": "before"}, "killed after": {"cuts": "after"}}
_MAX_SHOWN = 10
# all that change the disk
_DISK_CALLS = ("mkdir", "move", "exchange_folders", "unlink", "chmod", "fsync", "rmtree")
_RAISED = {"Ctrl-C": KeyboardInterrupt(), "EIO": OSError(errno.EIO, "I/O error")}


class Calls:
    """Calls that can be counted, and faults that can meet each of them."""

    faults: Sequence[str] = ()

    def run(self, world: "World", action: Callable[..., Any], *arguments: Any) -> Any:
        """Do `action` in that world.

        Sets its `count`, the calls that were made, and `is_met`.
        """
        raise NotImplementedError


@dataclass
class World:
    """One run: undisturbed, or with a fault at one call."""

    calls: Calls
    fault: str = ""  # "": undisturbed
    number: int = 0  # of the call that the fault meets; the first is 1
    count: int = 0  # calls that the run made
    is_met: bool = False  # False if the run made fewer calls
    watch: Watch = field(default_factory=Watch)  # of the stores in this world
    process: int = 0  # the one that a fault of a server kills, once `begin` was called
    meanwhile: Callable[[], object] = lambda: None  # called just before a kill of another process
    has_begun: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        """A name for the files of this world."""
        kind = type(self.calls).__name__.lower()
        fault = self.fault.replace(" ", "-") or "undisturbed"
        return f"{kind}-{fault}-{self.number}"

    def run(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """Do `action` in this world.

        A kill and an error of ft_ckpt are part of it; any other error is raised.
        """
        return self.calls.run(self, action, *arguments)

    def begin(self, process: int) -> None:
        """Name the process that does its action."""
        self.process = process
        self.has_begun.set()

    def kill(self) -> None:
        """Kill its process."""
        self.has_begun.wait()
        self.meanwhile()
        os.kill(self.process, signal.SIGKILL)


@dataclass
class Report:
    """The number of calls that a fault can meet, and of worlds whose fault has met one or not."""

    calls: int
    met: int = 0
    missed: int = 0  # the action ended before its call


def try_worlds(
    trial: Callable[[World], object],
    *calls: Calls,
    every: int = 1,
    max_worlds: int = 0,
    may_be_idle: bool = False,
) -> Report:
    """Call `trial` in an undisturbed world of each of `calls`, then in one for each call and fault.

    With the seed 0, faults come at each `every`th call. With `max_worlds`, so many worlds are
    drawn. With `may_be_idle` the trial may make no call that a fault could meet.
    """
    worlds, count = [], 0
    for kind in calls:
        undisturbed = World(kind)
        trial(undisturbed)
        count += undisturbed.count
        step = every if os.environ["FT_CKPT_SEED"] == "0" else 1
        for number in range(1, undisturbed.count + 1, step):
            worlds += [World(kind, fault, number) for fault in kind.faults]
    assert count or may_be_idle, "it makes no call that a fault could meet"
    if max_worlds:
        worlds = random.Random(chosen_seed()).sample(worlds, min(max_worlds, len(worlds)))
    if single := os.environ.get("FT_CKPT_WORLD"):
        worlds = [world for world in worlds if world.name == single]
    return _tried(trial, worlds, Report(count))


def _tried(trial: Callable[[World], object], worlds: Sequence[World], report: Report) -> Report:
    failed: list[tuple[World, Exception]] = []
    for world in worlds:
        try:
            trial(world)
        except Exception as error:
            failed.append((world, error))
        report.met += world.is_met
        report.missed += not world.is_met
    print(report)
    if failed:
        lines = [f"{len(failed)} of {len(worlds)} worlds failed"]
        for world, raised in failed[:_MAX_SHOWN]:
            lines.append(f"{world.name}: {type(raised).__name__}: {raised}")
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        name = failed[0][0].name
        lines.append(f"to repeat the first: FT_CKPT_WORLD={name} python -m pytest '{test}'")
        raise AssertionError("\n".join(lines)) from failed[0][1]
    return report


class Disk(Calls):
    """The calls of ft_ckpt that change the disk, or some of them, in this process.

    Nothing is really synced: no power is cut.

    "killed": the action is done in a fork, which is killed just before the call, or half way in the
    removal of a folder. "Ctrl-C" and "EIO" are raised at the call.
    """

    def __init__(self, fault: str, calls: Sequence[str] = _DISK_CALLS) -> None:
        self.faults, self.calls = (fault,), calls

    def run(self, world: World, action: Callable[..., Any], *arguments: Any) -> Any:
        with closing(mmap.mmap(-1, mmap.PAGESIZE)) as memory:  # shared with a fork
            counted = partial(_counting, memory, world, self.calls, action, *arguments)
            result = None
            if self.faults[0] in _RAISED:
                result = _in_this_process(world, counted)
            else:
                _in_a_fork(world, counted)
            world.count = int.from_bytes(memory[:8], "little")
        world.is_met = 0 < world.number <= world.count
        return result


def _counting(
    memory: mmap.mmap,
    world: World,
    calls: Sequence[str],
    action: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """Do `action` and count its `calls` to the disk in `memory`, in the first eight bytes."""

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            count = int.from_bytes(memory[:8], "little") + 1
            memory[:8] = count.to_bytes(8, "little")
            if count == world.number:
                if name == "rmtree":
                    _remove_half(Path(args[0]))
                _interfere(world.fault)
            return None if name == "fsync" else real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(local_disk, name, wrapped(name, getattr(local_disk, name)))
        return action(*arguments)


def _interfere(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise _RAISED[fault]


def _remove_half(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files[len(files) // 2 :]:
        path.unlink()


def _in_this_process(world: World, action: Callable[[], Any]) -> Any:
    """Return the result of `action`; None if it raised the fault, or an error of ft_ckpt for it."""
    try:
        return action()
    except (KeyboardInterrupt, TargetError):
        if not world.fault:
            raise
        return None


def _in_a_fork(world: World, action: Callable[[], Any]) -> None:
    status, error = _forked(action)
    is_killed = world.fault == "killed" and os.WIFSIGNALED(status)
    assert is_killed or os.waitstatus_to_exitcode(status) == 0, error


def in_child(action: Callable[[], object]) -> str:
    """Run `action` in a forked process; return the type and text of its exception, or ""."""
    return _forked(action)[1]


def _forked(action: Callable[[], object]) -> tuple[int, str]:
    """Run `action` in a forked process; return its wait status and its exception as text."""
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            os.write(start, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os._exit(0)
    os.close(start)
    with os.fdopen(end, encoding="utf-8") as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], text


class Requests(Calls):
    """The requests to the stores of `world.watch`.

    "refused" is an error. "stopped" ends the action as a kill would: requests in its `finally` are
    stopped as well.
    """

    def __init__(self, fault: str) -> None:
        self.faults = (fault,)

    def run(self, world: World, action: Callable[..., Any], *arguments: Any) -> Any:
        def hook(_call: str, where: str) -> None:
            world.count += 1
            if world.fault == "stopped" and world.count >= world.number:
                raise Stopped
            if world.fault and world.count == world.number:
                raise TargetError(f"{where}: refused")

        world.watch.hook = hook
        try:
            return action(*arguments)
        except Stopped:
            return None
        finally:
            world.watch.hook = lambda call, where: None
            world.is_met = 0 < world.number <= world.count


class Server(Calls):
    """The requests to an HTTP fake.

    Each fault has a name and the fields of a `Fault` (http_server.py). One whose name begins with
    "killed" kills the process `world.process` before the request is answered.
    """

    def __init__(self, server: FakeServer, faults: Mapping[str, Mapping[str, Any]]) -> None:
        self.server, self.fields = server, faults
        self.faults = tuple(faults)

    def run(self, world: World, action: Callable[..., Any], *arguments: Any) -> Any:
        count_before = self.server.request_count
        if world.fault:
            fault = Fault(at=count_before + world.number, **self.fields[world.fault])
            if world.fault.startswith("killed") and fault.then is None:
                fault.then = world.kill
            self.server.faults = [fault]
        try:
            return action(*arguments)
        finally:
            self.server.faults = []
            world.count = self.server.request_count - count_before
            world.is_met = 0 < world.number <= world.count


@contextmanager
def writes(before: Callable[[], Any] = lambda: None) -> Iterator[list[int]]:
    """List the sizes of the writes to files during the block, in bytes.

    `before` is called before each write, and may raise.
    """
    real, sizes = os.pwrite, []

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        before()
        sizes.append(real(descriptor, data, offset))
        return sizes[-1]

    os.pwrite = pwrite
    try:
        yield sizes
    finally:
        os.pwrite = real
