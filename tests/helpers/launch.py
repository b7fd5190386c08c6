"""Programs of tests: a worker on several ranks, its cases with their errors, or one program.

Processes are forked from one that has loaded the libraries: a fresh interpreter takes seconds to
load them.
"""

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

import extensions
import psutil
from places import HELPERS, WORKERS, python_path

FORK_SERVER = (
    "FT_CKPT_TEST_FORK_SERVER"  # the variable that names the socket of tests/helpers/fork_server.py
)
TIMED_OUT = -1
# a case that kills its process costs one launch; more such cases are not worth waiting for
MAX_LAUNCHES = 4


@dataclass(frozen=True)
class Result:
    """How a launch ended: everything its ranks printed, and their exit status or TIMED_OUT."""

    log: str
    returncode: int


def launch(
    worker: str,
    ranks: int = 2,
    args: Sequence[object] = (),
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run `tests/workers/{worker}.py` on `ranks` processes for at most `timeout` seconds.

    No process is left afterwards.
    """
    # The worker prints every rank's stack shortly before it would be killed.
    environment = {"STACKS_AFTER": str(max(timeout - 15, timeout / 2)), **(env or {})}
    with tempfile.NamedTemporaryFile("w+", errors="replace") as log:
        path = Path(log.name)
        with _begun(WORKERS / f"{worker}.py", args, ranks, environment, path, path) as process:
            returncode = _fork_server().end(process, timeout)
        extensions.drop_stale_locks()  # a rank may have been killed while it held one
        log.seek(0)
        return Result(log.read(), returncode)


def run_cases(
    worker: str,
    cases: Sequence[str],
    folder: Path,
    ranks: int = 2,
    timeout: float = 180,
    env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Run the cases of a worker; return the errors of each over all ranks, or "".

    A case that kills its process gets the log as its error, and the cases after it are launched
    again, so that one crash does not hide the others. A launch that does not end after its last
    case is an error of that case.
    """
    errors: dict[str, str] = {}
    for attempt in range(MAX_LAUNCHES):
        remaining = [case for case in cases if case not in errors]
        if not remaining:
            break
        outcomes = folder / f"outcomes-{attempt}"
        outcomes.mkdir(parents=True)
        result = launch(worker, ranks, [folder, outcomes, *remaining], timeout, env)
        errors.update(_finished(outcomes, ranks))
        crashed = next((case for case in remaining if case not in errors), None)
        if crashed is None and result.returncode == TIMED_OUT:
            crashed = remaining[-1]
        if crashed is not None:
            end = f"the process ended with status {result.returncode}"
            errors[crashed] = f"{end}\n{result.log[-6000:]}"
    return {case: errors.get(case, "not run: too many cases before it crashed") for case in cases}


def run_python(
    code: str,
    *args: object,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    begun: Callable[[int], None] = lambda process: None,
) -> "subprocess.CompletedProcess[str]":
    """Run `code` as `python -c` does, in a process that has the libraries loaded.

    `begun` is called with the process id.
    """
    with _program(code) as (script, output, errors):
        with _begun(script, args, 0, env or {}, output, errors, cwd) as process:
            begun(process)
            returncode = _fork_server().end(process, timeout)
        command, texts = [code, *map(str, args)], (output.read_text(), errors.read_text())
        return subprocess.CompletedProcess(command, returncode, *texts)


def run_and_signal(
    code: str, *args: object, until: Callable[[TextIO], object], number: int = signal.SIGKILL
) -> "subprocess.CompletedProcess[str]":
    """Run `code` as `run_python` does, with a signal after `until` has read the output it needs.

    The rest of the output is returned.
    """
    with _program(code) as (script, output, errors):
        output.unlink()
        os.mkfifo(output)
        with _begun(script, args, 0, {}, output, errors) as process:
            with output.open() as lines:
                until(lines)
                os.kill(process, number)
                rest = lines.read()
            returncode = _fork_server().end(process, 60)
        command = [code, *map(str, args)]
        return subprocess.CompletedProcess(command, returncode, rest, errors.read_text())


@contextmanager
def _program(code: str) -> Iterator[tuple[Path, Path, Path]]:
    """Write a script with that code, and empty files for its output and its errors."""
    with tempfile.TemporaryDirectory() as name:
        script, output, errors = (Path(name, file) for file in ("program.py", "output", "errors"))
        script.write_text(code, encoding="utf-8")
        output.touch()
        errors.touch()
        yield script, output, errors


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    fixed = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **fixed, **extra}


def start_fork_server() -> None:
    """Start the server that forks launches, for this process and its children."""
    folder = tempfile.mkdtemp(prefix="fork-server-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # pyarrow, which older libraries load, starts an allocator thread, but the server may fork with
    # one thread only
    one_thread = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    path = str(Path(folder, "socket"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()  # clients wait in the queue until the libraries are loaded
        server = subprocess.Popen(
            [sys.executable, str(HELPERS / "fork_server.py"), str(listener.fileno())],
            stdin=subprocess.PIPE,  # it ends with this process, however that ends
            env={**os.environ, **one_thread, "HF_HUB_OFFLINE": "1"},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    atexit.register(server.kill)
    os.environ[FORK_SERVER] = path


class ForkServer:
    """A connection with the server, which runs one program or launch at a time for it."""

    def __init__(self) -> None:
        if FORK_SERVER not in os.environ:
            start_fork_server()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.environ[FORK_SERVER])
        self.socket.sendall(b" ")  # without file descriptors, see worker.py
        assert self.answer() == "ready", "tests/helpers/fork_server.py did not start"

    def answer(self) -> str:
        """Read one line of the server.

        A buffered read may take two at once, and `select` never sees the second.
        """
        line = b""
        while not line.endswith(b"\n"):
            byte = self.socket.recv(1)
            if not byte:
                raise EOFError(f"tests/helpers/fork_server.py ended after {line!r}")
            line += byte
        return line.decode().strip()

    def begin(
        self,
        script: Path,
        args: Sequence[object],
        ranks: int,
        env: Mapping[str, str],
        output: Path,
        errors: Path,
        cwd: Path | None = None,
    ) -> int:
        """Let the server fork a process; return its id.

        `env` is added to the variables of this process.
        """
        arguments, folder = [str(argument) for argument in args], str(cwd or Path.cwd())
        program = [str(script), arguments, ranks]
        request = [*program, _environment(env), folder, str(output), str(errors)]
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        return int(self.answer())

    def end(self, process: int, timeout: float) -> int:
        """Wait for the process; return its exit status, or TIMED_OUT if it had to be killed."""
        ended = select.select([self.socket], [], [], timeout)[0]
        if not ended:
            _kill_tree(process)
        returncode = int(self.answer())
        return returncode if ended else TIMED_OUT


@cache
def _fork_server() -> ForkServer:
    """Return the connection of this process with the server."""
    return ForkServer()


@contextmanager
def _begun(
    script: Path,
    args: Sequence[object],
    ranks: int,
    env: Mapping[str, str],
    output: Path,
    errors: Path,
    cwd: Path | None = None,
) -> Iterator[int]:
    """Let the server fork a process, whose id the block gets, and which the block ends.

    If the block raises, as at a test's timeout, the process is killed and the connection closed:
    the next launch would read the answer that was left in it.
    """
    server = _fork_server()
    process = server.begin(script, args, ranks, env, output, errors, cwd)
    try:
        yield process
    except BaseException:
        _kill_tree(process)
        _fork_server.cache_clear()
        server.socket.close()
        raise


def _kill_tree(number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(number)
        for process in [*launcher.children(recursive=True), launcher]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _finished(outcomes: Path, ranks: int) -> dict[str, str]:
    """Return the cases that every rank finished, with the ranks' errors joined."""
    rows: dict[str, dict[int, str]] = {}
    for rank in range(ranks):
        path = outcomes / f"rank{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            rows.setdefault(row["case"], {})[rank] = row["error"]
    finished = {}
    for case, by_rank in rows.items():
        if len(by_rank) == ranks:
            errors = [f"[rank {rank}] {by_rank[rank]}" for rank in sorted(by_rank) if by_rank[rank]]
            finished[case] = "\n".join(errors)
    return finished
