"""Runs a command on each checkpoint of a run, and stores the number that it prints as a metric of the checkpoint."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ft_ckpt.checkpoint.catalog import CheckpointInfo
from ft_ckpt.checkpoint.follow import POLL_SECONDS, Follower, key_of
from ft_ckpt.checkpoint.metrics import check_metric, write_metric
from ft_ckpt.checkpoint.open_checkpoint import open_checkpoint
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
    listing,
)
from ft_ckpt.messages import printable, warn
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.scratch import spool_file

PATH = "{path}"  # in a command: the path or URL of the checkpoint
_TAIL_BYTES = 64 << 10  # of the output: contains its last line


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one checkpoint, as a command printed them."""

    path: Path | str
    metrics: Mapping[str, float]
    seconds: float


class _CommandError(CheckpointError):
    """A command that failed, or printed no number."""


@dataclass(eq=False)
class _Evaluator(Follower):
    command: Sequence[str]
    metric: str
    on_evaluated: Callable[[Evaluation], object]
    evaluated: int = 0
    unfit_names: set[str] = field(default_factory=set, init=False)  # reported problems of names

    def visit(self, waiting: Sequence[CheckpointInfo], infos: Sequence[CheckpointInfo]) -> None:
        for info in waiting:
            if self.stop.is_set():
                return
            try:
                if self.metric not in info.metrics:
                    self.evaluate(info)
            except NotACheckpointError:  # deleted by retention
                self.settle(info)
            except ConfigError:
                raise
            except (_CommandError, TargetError, UnreadableError) as error:
                self.retry(info, error, counts=not isinstance(error, UnreadableError))  # the command has run
            except CheckpointError as error:
                self.skip(info, error)
            else:
                self.settle(info)

    def settle(self, info: CheckpointInfo) -> None:
        self.settled.add(key_of(info))
        self.errors.pop(key_of(info), None)

    def evaluate(self, info: CheckpointInfo) -> None:
        """Run the command on one checkpoint, leased meanwhile. The awaited metric is written last: it settles it."""
        begun = time.monotonic()
        with open_checkpoint(info.place, compares=False) as held:
            if problems := held.find_problems(deep=False):
                raise CorruptError(listing(list(problems)))
            command = [word.replace(PATH, str(info.path)) for word in self.command]
            metrics = self._without_unfit_names(_measure(command, self.metric))
            for name, value in metrics.items():
                write_metric(held.origin, held.manifest, name, value)
        self.evaluated += 1
        self.outages.clear()
        self.on_evaluated(Evaluation(info.path, metrics, time.monotonic() - begun))

    def _without_unfit_names(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics that can be stored; the others are reported, once for each name."""
        return {name: value for name, value in metrics.items() if self._is_storable(name)}

    def _is_storable(self, name: str) -> bool:
        try:
            check_metric(name)
        except ConfigError as error:
            self.report_once(f"{error}; it is left out", self.unfit_names)
            return False
        return True


def evaluate_run(
    run: str | Path | Place,
    command: Sequence[str],
    metric: str,
    *,
    idle_seconds: float | None = None,
    poll_seconds: float = POLL_SECONDS,
    on_evaluated: Callable[[Evaluation], object] = lambda report: None,
    on_trouble: Callable[[str], object] = warn,
) -> int:
    """Run `command` once on each checkpoint of `run` that lacks `metric`, oldest first; returns how many it measured.

    `run` is a folder or URL that may not exist yet. In `command`, `{path}` is replaced by the path or URL of the
    checkpoint. The last line that it prints on standard output is the number, or a JSON object of numbers with `metric`
    among them. They become metrics of the checkpoint, which is leased meanwhile. A checkpoint that is damaged (as by
    `verify(deep=False)`), or for which the command fails twice, is skipped: `on_trouble` gets a line for each problem.
    Ends on SIGINT or SIGTERM, after the command in progress, and after `idle_seconds` without a new checkpoint.

    Raises ConfigError for an invalid command or metric. When it ends after `idle_seconds`, it raises the last error of
    a checkpoint that was not measured.
    """
    check_metric(metric)
    if not any(PATH in word for word in command):
        raise ConfigError(f"{' '.join(command)}: expected {PATH} among its words, for the path of the checkpoint")
    evaluator = _Evaluator(open_place(run).absolute, on_trouble, command, metric, on_evaluated)
    evaluator.follow(idle_seconds, poll_seconds)
    return evaluator.evaluated


def _measure(command: Sequence[str], metric: str) -> dict[str, float]:
    """The numbers that `command` prints, `metric` last. Raises _CommandError; ConfigError if it cannot be started."""
    with spool_file() as output:
        try:
            # The command is the user's own. In a new session, so that Ctrl-C in a terminal ends only the watcher.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True)  # noqa: S603
        except (OSError, ValueError) as error:
            raise ConfigError(f"{command[0]}: cannot be started ({error})") from error
        try:
            code = process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
        line = _last_line(output)
    shown = printable(" ".join(command))
    if code:
        raise _CommandError(f"{shown}: ended with {f'exit code {code}' if code > 0 else f'signal {-code}'}")
    found = _numbers_in(line, metric)
    if metric not in found:
        expected = f"a number, or a JSON object with the number {metric!r}"
        raise _CommandError(f"{shown}: its last line is {printable(line)[:200]!r}, expected {expected}")
    return {**{name: value for name, value in found.items() if name != metric}, metric: found[metric]}


def _last_line(output: BinaryIO) -> str:
    """The last line of a file that is not empty; "" if there is none."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _numbers_in(line: str, metric: str) -> dict[str, float]:
    """The numbers in a line: `metric` alone, or those of a JSON object by name; other values are left out."""
    with suppress(ValueError, OverflowError, RecursionError):
        return {metric: float(line)}
    with suppress(ValueError, OverflowError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict):
            return {str(name): float(value) for name, value in found.items() if type(value) in (int, float)}
    return {}
