"""Run functions of a test's own file on several ranks: `@on_ranks(2)`.

Called by pytest, a decorated function runs on every rank of a launch, with the arguments it was
called with; the test fails with the tracebacks of all ranks. Called on a rank, it is an ordinary
function. Arguments are pickled: paths, parameters and functions of the file are fine. Environment
variables are those of pytest at that moment.

The functions of one file with the same ranks, environment and name of a launch share processes and
process group, and run in them one after another. A launch in which a function failed, hung or ended
its process takes no other.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

import extensions
import pytest
from launch import ForkServer
from places import HELPERS

CALLS = "FT_CKPT_TEST_CALLS"  # the variable that names the socket from which a rank takes its calls
IS_RANK = CALLS in os.environ
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
START_SECONDS = 120  # to fork the ranks, import the file and join the process group
MAX_RANKS = 8  # that a file keeps at once: each may hold hundreds of megabytes
END_SECONDS = 60  # for the ranks to end after the last test of the file
PARAMETERS = ParamSpec("PARAMETERS")


@dataclass(frozen=True)
class Answer:
    """How a call ended on one rank: what it returned, or the traceback or the reason of a skip."""

    value: Any = None
    error: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Where:
    """The ranks that run a function; functions with equal ones share a launch."""

    ranks: int
    launch: str
    alone: bool
    group_seconds: float | None
    env: tuple[tuple[str, str], ...]


def on_ranks(
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    launch: str = "",
    alone: bool = False,
    group_seconds: float | None = 60,
    timeout: float = 120,
) -> Callable[[Callable[PARAMETERS, object]], Callable[PARAMETERS, Any]]:
    """Run the decorated function on `ranks` processes.

    It returns a list with the value of each rank, or None if all values are None.

    `env` are further variables of the processes. `launch` separates them from launches of other
    names. A function that is `alone` has a launch of its own: it leaves the ranks out of step, or
    changes the libraries, for example. `group_seconds` is the timeout of their gloo group, or None
    if the function makes the group. `timeout` is in seconds, for one call.
    """
    where = Where(ranks, launch, alone, group_seconds, tuple(sorted((env or {}).items())))

    def decorate(function: Callable[PARAMETERS, object]) -> Callable[PARAMETERS, Any]:
        @wraps(function)
        def call(*args: PARAMETERS.args, **kwargs: PARAMETERS.kwargs) -> Any:
            if IS_RANK:
                return function(*args, **kwargs)
            return _file().call(where, timeout, (call, args, kwargs))

        return call

    return decorate


def call_on_ranks(
    ranks: int, function: Callable[..., object], *args: object, timeout: float = 120, **options: Any
) -> Any:
    """Call a function of the test's file on `ranks` processes; `options` are of `on_ranks`."""
    where = Where(
        ranks,
        options.pop("launch", ""),
        options.pop("alone", False),
        options.pop("group_seconds", 60),
        tuple(sorted(options.pop("env", {}).items())),
    )
    assert not options, options
    return _file().call(where, timeout, (function, args, {}))


@dataclass
class _Launch:
    """Running ranks."""

    log: Path
    server: ForkServer
    process: int
    env: dict[str, str]  # of pytest when they began
    ranks: dict[int, Connection] = field(default_factory=dict)
    status: int | None = None

    def call(self, request: tuple[Any, ...], timeout: float) -> list[Answer]:
        """Call the function of `request` on all ranks; return the answer of each.

        The test fails if a rank ends, or does not answer within `timeout` seconds.
        """
        changed: dict[str, str | None] = {}
        for name in self.env.keys() | os.environ.keys():
            if os.environ.get(name) != self.env.get(name):
                changed[name] = os.environ.get(name)
        for connection in self.ranks.values():
            # a rank that was called before may have ended, and its launcher this one: read below
            with suppress(BrokenPipeError):
                connection.send((timeout, changed, *request))
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.ranks):
            waiting = {self.ranks[rank]: rank for rank in self.ranks if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.fail(f"no answer within {timeout:g} s", answers)
            for connection, rank in waiting.items():
                if connection not in ready:
                    continue
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    self.end(END_SECONDS)
                    self.fail(f"rank {rank} ended its process", answers)
        return [answers[rank] for rank in sorted(answers)]

    def fail(self, reason: str, answers: Mapping[int, Answer]) -> NoReturn:
        """Fail the test with what the ranks answered so far, and with their output."""
        pytest.fail(f"{reason}\n{_joined(answers)}\n{self.output()}", pytrace=False)

    def output(self) -> str:
        """Return the end of the output of the ranks."""
        return self.log.read_text(errors="replace")[-6000:]

    def end(self, timeout: float) -> int:
        """Wait for the processes, or kill them after `timeout` seconds; return the exit status."""
        if self.status is None:
            self.status = self.server.end(self.process, timeout)
            self.server.socket.close()
        return self.status


@dataclass
class _File:
    """The launches of one test file, which begin when a test needs them."""

    path: Path
    folder: Path
    launches: dict[Where, _Launch] = field(default_factory=dict)
    count: int = 0

    def call(self, where: Where, timeout: float, request: tuple[Any, ...]) -> list[Any] | None:
        launch = self.launches.pop(where, None) or self.begin(where)
        with _killing(launch):
            answers = launch.call(request, timeout)
            if errors := _joined(dict(enumerate(answers))):
                pytest.fail(errors, pytrace=False)
        if where.alone:
            _end([launch])
        else:
            self.launches[where] = launch
        for answer in answers:
            if answer.skipped:
                pytest.skip(answer.skipped)
        values = [answer.value for answer in answers]
        return None if values.count(None) == len(values) else values

    def begin(self, where: Where) -> _Launch:
        self.make_room(where.ranks)
        self.count += 1
        address = self.folder / f"calls-{self.count}"
        log = self.folder / f"log-{self.count}"
        log.touch()
        server = ForkServer()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(where.ranks)
            worker = HELPERS / "rank_worker.py"
            arguments = [self.path, "" if where.group_seconds is None else where.group_seconds]
            environment = {**dict(where.env), CALLS: str(address)}
            process = server.begin(worker, arguments, where.ranks, environment, log, log)
            launch = _Launch(log, server, process, {**os.environ})
            with _killing(launch):
                while len(launch.ranks) < where.ranks:
                    if listener not in wait([listener, server.socket], START_SECONDS):
                        launch.fail("the ranks did not start", {})
                    connection = Connection(listener.accept()[0].detach())
                    launch.ranks[connection.recv()] = connection
        return launch

    def make_room(self, ranks: int) -> None:
        """End the launches that were not used for longest, until `ranks` more have room."""
        count = ranks + sum(len(launch.ranks) for launch in self.launches.values())
        while self.launches and count > MAX_RANKS:
            oldest = self.launches.pop(next(iter(self.launches)))
            count -= len(oldest.ranks)
            _end([oldest])


def _end(launches: Sequence[_Launch]) -> None:
    """End launches: none may hang after its last function, or end with an error."""
    for launch in launches:
        for connection in launch.ranks.values():
            connection.close()
    outputs = []
    for launch in launches:
        if launch.end(END_SECONDS):
            outputs.append(f"the ranks ended with status {launch.status}\n{launch.output()}")
    assert not outputs, "\n".join(outputs)


@contextmanager
def _killing(launch: _Launch) -> Iterator[None]:
    """Kill the ranks if the block raises."""
    try:
        yield
    except BaseException:
        launch.end(0)
        raise


def _joined(answers: Mapping[int, Answer]) -> str:
    """Return the errors of all ranks as text."""
    lines = [f"[rank {rank}] {answer.error}" for rank, answer in answers.items() if answer.error]
    return "\n".join(sorted(lines))


_FILES: list[_File] = []


def _file() -> _File:
    assert _FILES, "a function that runs on ranks is called within a test"
    return _FILES[-1]


@contextmanager
def launches_of(path: Path) -> Iterator[None]:
    """Share launches between the tests in the file at `path`, to the end of the block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-")))
        file = _File(path, folder)
        _FILES.append(file)
        stack.callback(_FILES.remove, file)
        yield
        if file.count:
            # a rank may have been killed while it held one
            stack.callback(extensions.drop_stale_locks)
        _end([*file.launches.values()])
