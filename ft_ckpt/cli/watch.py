"""`ft-ckpt watch`: evaluates each checkpoint of a run, and stores the numbers as its metrics."""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ft_ckpt.cli import output
from ft_ckpt.cli.options import add_json, bounded, print_lines
from ft_ckpt.cli.show import followed_run
from ft_ckpt.errors import CheckpointError, ConfigError, UnreadableError
from ft_ckpt.messages import printable
from ft_ckpt.storage.places import shown_location

if TYPE_CHECKING:
    from ft_ckpt.checkpoint.catalog import CheckpointInfo

# stands for the path or URL of the checkpoint in a command
_PATH = "{path}"


class _CommandError(CheckpointError):
    """A command that failed, or printed no number."""


def add_watch(parser: ArgumentParser) -> None:
    parser.description = (
        "Run COMMAND on each checkpoint of RUN that lacks the metric, oldest first, and then on "
        "each new one when it is committed. The last line of its output, a number or a JSON object "
        "of numbers, is stored as metrics of the checkpoint, which ls, best and prune use. If "
        "COMMAND fails, the checkpoint is skipped until the next start of ft-ckpt watch. ft-ckpt "
        "watch ends on SIGINT or SIGTERM, after --idle, or if COMMAND cannot be started."
    )
    parser.add_argument("run_folder", metavar="RUN", help="Folder or URL of the run.")
    parser.add_argument(
        "command",
        metavar="COMMAND",
        nargs="+",
        help="Command to run, after --; {path} is replaced by the checkpoint's path.",
    )
    parser.add_argument(
        "--metric", default="score", metavar="NAME", help="Name of the metric (default: score)."
    )
    parser.add_argument(
        "--idle",
        type=bounded(float, 0),
        metavar="SECONDS",
        help="End after this time without a new checkpoint.",
    )
    add_json(parser)
    parser.set_defaults(run=_watch)


def _watch(options: Namespace) -> None:
    from ft_ckpt.checkpoint.catalog import check_metric
    from ft_ckpt.runs.folder import follow, stop_on_signal

    check_metric(options.metric)
    if not any(_PATH in word for word in options.command):
        raise ConfigError(
            f"{' '.join(options.command)}: expected {_PATH} among its words, for "
            "the checkpoint's path"
        )

    skipped: list[CheckpointError] = []

    def report_problem(error: CheckpointError) -> None:
        if isinstance(error, UnreadableError):
            print_lines(f"ft-ckpt: {error}; trying again", file=sys.stderr)
        else:
            skipped.append(error)
            print_lines(f"ft-ckpt: {error}; skipped", file=sys.stderr)

    with stop_on_signal() as stop:
        run = followed_run(options.run_folder)
        for checkpoint in follow(
            run, idle_seconds=options.idle, stop=stop, on_problem=report_problem
        ):
            path = shown_location(checkpoint.path)
            try:
                _evaluate(checkpoint, options)
            except ConfigError:
                raise
            except CheckpointError as error:
                skipped.append(error)
                print_lines(f"ft-ckpt: {path}: skipped: {error}", file=sys.stderr)

        if skipped and not stop.is_set():
            raise skipped[-1]


def _evaluate(checkpoint: "CheckpointInfo", options: Namespace) -> None:
    """Measure a checkpoint that lacks the metric, store what was measured, and print it."""
    if options.metric in checkpoint.metrics:
        return
    start = time.monotonic()
    command = [word.replace(_PATH, str(checkpoint.path)) for word in options.command]
    metrics = _measure(command, options.metric)
    try:
        checkpoint.write_metrics(metrics)
    except ConfigError as error:
        raise _CommandError(f"{printable(' '.join(command))}: {error}") from error

    seconds = time.monotonic() - start
    if options.as_json:
        result: dict[str, Any] = {
            "path": str(checkpoint.path),
            "metrics": metrics,
            "seconds": seconds,
        }
        output.print_json(result)
    else:
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        print_lines(f"{shown_location(checkpoint.path)}: {numbers}, {seconds:.1f} s")

    sys.stdout.flush()  # at once: a command may take hours


def _measure(command: Sequence[str], metric: str) -> Mapping[str, float]:
    """Run `command`, and return the numbers that it prints; `metric` is the last of them.

    Raises _CommandError if it fails or prints no number, and ConfigError if it cannot be started.
    """
    try:
        # The command is the user's own. It runs in a session of its own, so that Ctrl-C in a
        # terminal ends only the watcher.
        process = subprocess.run(  # noqa: S603 - see above
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            check=False,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{command[0]}: cannot be started ({error})") from error

    shown = printable(" ".join(command))
    code = process.returncode
    if code:
        reason = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise _CommandError(f"{shown}: ended with {reason}")

    lines = process.stdout.decode(errors="replace").strip().splitlines()
    line = lines[-1].strip() if lines else ""
    numbers = _numbers_in(line, metric)
    if metric not in numbers:
        expected = f"a number, or a JSON object with the number {metric!r}"
        raise _CommandError(
            f"{shown}: its last line is {printable(line)[:200]!r}, expected {expected}"
        )

    value = numbers.pop(metric)

    # The metric comes last: once a checkpoint has it, the checkpoint counts as evaluated.
    return {**numbers, metric: value}


def _numbers_in(line: str, metric: str) -> dict[str, float]:
    """Return the numbers in a line, by name.

    A line with one number is the value of `metric`. Of a JSON object, values that are not numbers
    are left out.
    """
    with suppress(ValueError):
        return {metric: float(line)}
    numbers: dict[str, float] = {}
    with suppress(ValueError, OverflowError, RecursionError):
        document = json.loads(line)
        if isinstance(document, dict):
            for name, value in document.items():
                if type(value) in (int, float):
                    numbers[name] = float(value)
    return numbers
