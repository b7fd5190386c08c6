"""Functions of a test's module, each done in a fork of a process that has faulty.c preloaded.

The process loads the module once. Each line of its input is a run as JSON. The responses are lines,
too: "ready" at first; then, for a run, the process id, "stopped" each time the process stops, which
it does before it begins, and how it ended as JSON.
"""

import ctypes
import errno
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from faults import Calls, World
from places import HELPERS, python_path

from ft_ckpt.errors import CheckpointError

RUN_SECONDS = 150  # then its stacks are printed and it ends
REFUSED, BROKE = 3, 4  # exit statuses of an error of ft_ckpt, and of any other
_STOPS, _SHORT = 9997, 9999  # as in faulty.c: the process stops; a write takes half of its bytes
_NUMBERS = {"killed": _STOPS, "short": _SHORT}
_LASTING = " and on"


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    status: int  # the exit status; -9: killed
    text: str  # what its function returned, or its error
    calls: int  # that count for the fault
    met: str  # the call that failed

    @property
    def is_right(self) -> bool:
        """Whether it returned, or raised an error of ft_ckpt."""
        return self.status in (0, REFUSED)


class Preloaded:
    """A process that has the module in `file` and further `modules`, and is forked for each run."""

    def __init__(self, shim: Path, file: str, *modules: str) -> None:
        path = os.pathsep.join([str(Path(file).parent), python_path()])
        self._process = subprocess.Popen(
            [sys.executable, HELPERS / "preloaded.py", Path(file).stem, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": path},
        )
        self.pid = 0
        self._expect("ready")

    def run(
        self,
        function: Callable[..., str | None],
        folder: Path,
        *arguments: object,
        fault: str = "",
        number: int = 0,
        reads: bool = False,
        begun: Callable[[int], object] = lambda process: None,
        stopped: Callable[[], object] = lambda: None,
    ) -> Ended:
        """Do `function(folder, ...)`; the fault meets the `number`-th call below the folder.

        Arguments go as JSON. `begun` is called with the process id, and `stopped` while the process
        that is to be killed stands still.
        """
        lasts = fault.endswith(_LASTING)
        name = fault.removesuffix(_LASTING)
        code = _NUMBERS.get(name) or getattr(errno, name, 0)
        request = {
            "function": function.__name__,
            "arguments": [str(folder), *arguments],
            "shim": [number, code, int(lasts), int(reads)],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self.pid = int(self._line())
        self._expect("stopped")
        begun(self.pid)
        ended = self._go_on(signal.SIGCONT)
        if ended is None:
            stopped()
            ended = self._go_on(signal.SIGKILL)
        assert ended is not None
        return ended

    def close(self) -> None:
        """End the process, and a run that a failed test left."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._process.kill()  # it would free all that it has loaded
        self._process.communicate()

    def _go_on(self, number: int) -> Ended | None:
        """Send the run a signal, and wait until it stops (None) or ends."""
        os.kill(self.pid, number)
        line = self._line()
        if line == "stopped":
            return None
        self.pid = 0
        return Ended(**json.loads(line))

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _expect(self, line: str) -> None:
        assert (answer := self._line()) == line, answer


class System(Calls):
    """All calls of the C library that change files below a folder.

    With `reads` those that read them count, too. Faults are names of errno, with " and on" for all
    calls from this one on; and "short": half of a write is done.

    Or the fault is "killed": the process stops at the call, `world.meanwhile` is called, and the
    process is killed. Other calls count for it: those that change nothing do not, and a write is
    two, so that it can end half way.
    """

    def __init__(self, preloaded: Preloaded, *faults: str, reads: bool = False) -> None:
        self.preloaded, self.faults, self.reads = preloaded, faults, reads

    def run(self, world: World, action: Callable[..., Any], *arguments: Any) -> Ended:
        ended = self.preloaded.run(
            action,
            *arguments,
            fault=world.fault or self.faults[0],  # which the calls depend on that count
            number=world.number,
            reads=self.reads,
            stopped=world.meanwhile,
        )
        world.count = ended.calls
        world.is_met = 0 < world.number <= ended.calls
        return ended


# The process


def _serve(functions: Any, shim: Any, answers: TextIO) -> None:
    """Do the runs until the input ends."""
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        end, start = os.pipe()
        pid = os.fork()
        if not pid:
            function = getattr(functions, request["function"])
            os._exit(_act(shim, start, function, request["arguments"], request["shim"]))
        os.close(start)
        print(pid, file=answers, flush=True)
        while os.WIFSTOPPED(status := os.waitpid(pid, os.WUNTRACED)[1]):
            print("stopped", file=answers, flush=True)
        with os.fdopen(end, errors="replace") as pipe:
            text = pipe.read()
        exit_status, met = os.waitstatus_to_exitcode(status), shim.faulty_failed().decode()
        ended = Ended(exit_status, text, shim.faulty_count(), met)
        print(json.dumps(vars(ended)), file=answers, flush=True)


def _act(
    shim: Any, pipe: int, function: Callable[..., Any], arguments: list[Any], fault: Sequence[int]
) -> int:
    """Do one run and write its result to `pipe`; return the exit status."""
    number, code, lasts, reads = fault
    shim.faulty_arm(b"", ctypes.c_long(0), 0, 0)  # disarms the shim of the last process
    os.kill(os.getpid(), signal.SIGSTOP)  # until its id is known
    faulthandler.dump_traceback_later(RUN_SECONDS, exit=True)
    shim.faulty_reads(reads)
    shim.faulty_arm(os.fsencode(arguments[0]), ctypes.c_long(number), code, lasts)
    status = 0
    try:
        text = function(Path(arguments[0]), *arguments[1:]) or ""
    except CheckpointError as error:
        status, text = REFUSED, f"{type(error).__name__}: {error}"
    except BaseException as error:
        shim.faulty_disarm()  # for the lines of the traceback
        status, text = BROKE, "".join(traceback.format_exception(error))[-3500:]
    shim.faulty_disarm()
    with os.fdopen(pipe, "w", errors="replace") as output:
        output.write(text[:60_000])  # the pipe is read when the process has ended
    return status


def disarm() -> None:
    """Let no further call of this process fail; it is a fork of a run."""
    ctypes.CDLL(None).faulty_disarm()


def set_clock(seconds: int) -> None:
    """Change the clock of this process, and of those that it forks, by so many seconds."""
    ctypes.CDLL(None).faulty_clock(ctypes.c_long(seconds))


if __name__ == "__main__":
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is not a response
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    library = ctypes.CDLL(None)
    library.faulty_count.restype = ctypes.c_long
    library.faulty_failed.restype = ctypes.c_char_p
    _serve(importlib.import_module(sys.argv[1]), library, stream)
