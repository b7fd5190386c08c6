"""`ft-ckpt check-resume`: runs a script without a stop, then with a stop and a resume, and compares
both runs.
"""

import os
import shlex
import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ft_ckpt.cli import views
from ft_ckpt.cli.options import add_json, bounded, print_lines
from ft_ckpt.errors import CheckpointError, ConfigError, LoadError, listing
from ft_ckpt.runs import END, VARIABLE, Rehearsal, Step, read_steps
from ft_ckpt.storage import open_place, spool_file, temporary_store

_TAIL_LINES = 30  # of the output of a script that failed


@dataclass(frozen=True)
class MetricRow:
    """One metric of one step in both runs.

    Values are `float.hex` text; None if a run lacks the metric.
    """

    step: int
    metric: str | None
    through: str | None
    resumed: str | None
    batches: bool | None  # whether the digests of the batches agree; None if they were not recorded

    @property
    def is_equal(self) -> bool:
        return self.through == self.resumed and self.batches is not False


@dataclass(frozen=True)
class Finding:
    """The comparison of two runs: metrics step by step, and `tensors` of weights and training state
    at the end.
    """

    stop: int
    rows: tuple[MetricRow, ...]
    tensors: int
    different: tuple[str, ...]

    @property
    def first_difference(self) -> MetricRow | None:
        return next((row for row in self.rows if not row.is_equal), None)

    @property
    def is_equal(self) -> bool:
        return self.first_difference is None and not self.different


def add_check_resume(parser: ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="Path of the training script.")
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=REMAINDER, help="Arguments of the script."
    )
    parser.add_argument(
        "--steps",
        type=bounded(int, 2),
        default=10,
        metavar="N",
        help="Number of steps to run, 2 or more (default: 10).",
    )
    parser.add_argument(
        "--stop",
        type=bounded(int, 1),
        metavar="N",
        help="Step to stop after (default: half of the steps).",
    )
    parser.add_argument(
        "--nproc",
        type=bounded(int, 1),
        default=1,
        metavar="N",
        help="Number of processes, launched by torchrun (default: 1).",
    )
    parser.add_argument(
        "--launch",
        metavar="COMMAND",
        help='Launcher, as in "accelerate launch --config_file FILE".',
    )
    parser.add_argument(
        "--scratch",
        metavar="FOLDER",
        help=(
            "Folder with room for three or more checkpoints (default: the system's temporary "
            "folder)."
        ),
    )
    add_json(parser)
    parser.set_defaults(run=_check_resume)


def _check_resume(options: Namespace) -> int:
    """Run SCRIPT once without a stop and once with a stop and a resume, and compare batches,
    metrics and final state bit for bit. The exit code is 1 if they differ. Options come before
    SCRIPT; those after it are the script's. The script makes a CheckpointSaver, calls resume()
    before its loop and step(metrics) in it. Checkpoints go to a scratch folder, not to the saver's
    directory.
    """
    steps, stop = options.steps, options.stop
    if stop is not None and stop >= steps:
        raise ConfigError(f"check-resume: --stop {stop}: expected less than --steps {steps}")
    command = _launch_command([options.script, *options.arguments], options.nproc, options.launch)
    with temporary_store(options.scratch, "ft_ckpt-rehearsal-") as room:
        found = rehearse_script(command, room.folder.absolute(), steps, stop or steps // 2)
    _show_finding(found, as_json=options.as_json)
    return 0 if found.is_equal else 1


def rehearse_script(command: Sequence[str], room: Path, steps: int, stop: int) -> Finding:
    """Run `command` three times with checkpoints in `room`: for `steps`, up to `stop`, and resumed
    from there.

    Raises CheckpointError if the script fails, ends too soon, makes no saver or never calls its
    `step`, and LoadError if it does not resume.
    """
    one, other = (Rehearsal(str(room / name), "", steps) for name in ("through", "resumed"))
    through = _run_script(
        command, replace(one, record=str(room / "through.jsonl")), f"{steps} steps without a stop"
    )
    before = _run_script(
        command,
        replace(other, record=str(room / "before.jsonl"), stop=stop),
        f"a stop after step {stop}",
    )
    stopped = before[-1].number
    after = _run_script(
        command, replace(other, record=str(room / "after.jsonl")), f"resumed at step {stopped}"
    )
    if after[0].number <= stopped:
        raise LoadError(
            f"{_script_name(command)}: started again it began with step {after[0].number}, though "
            f"there was a checkpoint of step {stopped}: call saver.resume() before the loop, with "
            "no path and no step of your own"
        )
    tensors, different = _compare_ends(Path(one.directory) / END, Path(other.directory) / END)
    return Finding(
        stopped, tuple(_compare_steps(through, [*before, *after])), tensors, tuple(different)
    )


def _launch_command(words: Sequence[str], nproc: int, launch: str | None) -> list[str]:
    if not open_place(words[0]).is_object:
        raise ConfigError(
            f"check-resume: {words[0]}: no file, expected a training script; see `ft-ckpt "
            "check-resume --help`"
        )
    if launch and nproc > 1:
        raise ConfigError(
            "check-resume: --launch and --nproc: expected one of them; the "
            "launcher has its own option"
        )
    if launch:
        return [*shlex.split(launch), *words]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    return [sys.executable, *(torchrun if nproc > 1 else ()), *words]


def _run_script(command: Sequence[str], rehearsal: Rehearsal, what: str) -> list[Step]:
    print_lines(f"ft-ckpt: {what} ...", file=sys.stderr)
    last = rehearsal.steps if rehearsal.stop is None else rehearsal.stop
    code, tail = _run_process(command, rehearsal)
    found = read_steps(Path(rehearsal.record))
    if code:
        problem = f"ended with exit code {code}"
    elif found is None:
        problem = (
            "made no CheckpointSaver: make one, call its resume() before the loop and its "
            "step() in it"
        )
    elif not found:
        problem = "never called saver.step(): call it after each batch, with metrics={'loss': loss}"
    elif found[-1].number < last:
        problem = (
            f"ended after step {found[-1].number}, {last} are needed: let it run longer, or "
            "give fewer --steps"
        )
    else:
        return found
    shown = (f"  {line}" for line in tail.splitlines())
    print_lines(f"{what}; the end of the script's output:", *shown, file=sys.stderr)
    raise CheckpointError(f"{_script_name(command)}: {problem}")


def _run_process(command: Sequence[str], rehearsal: Rehearsal) -> tuple[int, str]:
    """The exit code of `command`, and the last lines of its output."""
    environment = {**os.environ, VARIABLE: rehearsal.to_json()}
    with spool_file() as log:
        try:
            done = subprocess.run(  # noqa: S603 - the command is the user's own
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        except OSError as error:
            raise ConfigError(
                f"{command[0]}: {error.strerror}; --launch is a command that takes a script"
            ) from error
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines(keepends=True)
        return done.returncode, "".join(lines[-_TAIL_LINES:])


def _script_name(command: Sequence[str]) -> str:
    return next((word for word in command if word.endswith(".py")), command[-1])


def _compare_steps(through: Sequence[Step], resumed: Sequence[Step]) -> Iterator[MetricRow]:
    ones, others = ({step.number: step for step in steps} for steps in (through, resumed))
    for number in sorted(ones.keys() | others.keys()):
        one, other = (
            ones.get(number, Step(number, {}, None)),
            others.get(number, Step(number, {}, None)),
        )
        seen = (
            one.batches is not None
            or other.batches is not None
            or (number in ones) != (number in others)
        )
        alike = (
            one.batches == other.batches and number in ones and number in others if seen else None
        )
        for name in dict.fromkeys([*one.metrics, *other.metrics]) or [None]:
            yield MetricRow(
                number, name, one.metrics.get(name or ""), other.metrics.get(name or ""), alike
            )


def _compare_ends(one: Path, other: Path) -> tuple[int, list[str]]:
    """The number of tensors at the end, and the names of those that differ; per-rank state is not
    compared.
    """
    from ft_ckpt.checkpoint import open_checkpoint
    from ft_ckpt.extensions.tools import compare_files
    from ft_ckpt.formats import detect
    from ft_ckpt.model import JoinedFile

    with ExitStack() as stack:
        joined = []
        for path in (one, other):
            held = stack.enter_context(open_checkpoint(path))
            held.refuse_damaged()
            parts = {
                tensor.file: part.path for part in held.manifest.parts for tensor in part.tensors
            }
            files = [
                (f"{part}/" if part else "", detect.open_tensor_file(held.store.open(file)))
                for file, part in parts.items()
            ]
            joined.append(JoinedFile(files, path.name))
            stack.callback(joined[-1].close)
        found = [each for each in compare_files(*joined) if not each.name.startswith("state/rank-")]
    return len(found), [each.name for each in found if each.changed]


def _show_finding(found: Finding, *, as_json: bool) -> None:
    if as_json:
        views.print_json(_finding_json(found))
        return
    heads = ("step", "metric", "without a stop", "stopped and resumed", "batches", "")
    views.print_table(heads, (_finding_cells(row, found) for row in found.rows))
    print_lines(_verdict_text(found))


def _finding_cells(row: MetricRow, found: Finding) -> tuple[str, ...]:
    batches = {None: "-", True: "same", False: "differ"}[row.batches]
    stopped = "stopped here" if row.step == found.stop else ""
    mark = (
        "<- first difference"
        if row is found.first_difference
        else "differs"
        if not row.is_equal
        else stopped
    )
    return (
        str(row.step),
        row.metric or "-",
        _exact_number(row.through),
        _exact_number(row.resumed),
        batches,
        mark,
    )


def _exact_number(exact: str | None) -> str:
    return "-" if exact is None else repr(float.fromhex(exact))


def _verdict_text(found: Finding) -> str:
    first, ends = (
        found.first_difference,
        f"{len(found.different)} of {found.tensors} tensors differ at the end",
    )
    if found.is_equal:
        lacking = (
            ""
            if any(row.metric for row in found.rows)
            else "; no metrics were given to saver.step()"
        )
        return (
            f"the same, to the bit, with {found.tensors} tensors of weights and training state "
            f"at the end{lacking}"
        )
    if first is None:
        return (
            f"not the same: {ends}, though no metric does: {listing(list(found.different), ', ')}"
        )
    numbers = (
        f"{first.metric} {_exact_number(first.through)} and {_exact_number(first.resumed)}"
        if first.metric
        else "the batches"
    )
    return (
        f"not the same: they differ from step {first.step} on ({numbers}); {ends}. "
        f"{_advice_text(first, found.stop)}"
    )


def _advice_text(first: MetricRow, stop: int) -> str:
    if first.step <= stop:
        return (
            "That is before the stop: the script is not deterministic, so nothing can be said "
            "about resuming. Seed it before it makes model and data (accelerate.utils.set_seed)"
        )
    if first.batches is False:
        return (
            "The resumed run got other data: take batches from saver.remaining(loader), and "
            "seed all that it draws"
        )
    data = (
        "The data was the same"
        if first.batches
        else "If the data was the same (see saver.remaining)"
    )
    return (
        f"{data}: something that moves the loss is not in the checkpoint, such as a "
        "scheduler that is neither prepared by Accelerate nor registered, or random "
        "numbers of a generator of the script's own"
    )


def _finding_json(found: Finding) -> dict[str, Any]:
    rows = [
        {
            **asdict(row),
            "equal": row.is_equal,
            "through": _number(row.through),
            "resumed": _number(row.resumed),
        }
        for row in found.rows
    ]
    first = rows[found.rows.index(found.first_difference)] if found.first_difference else None
    ends = {"tensors": found.tensors, "different": list(found.different)}
    return {
        "equal": found.is_equal,
        "stop": found.stop,
        "first_difference": first,
        "end": ends,
        "rows": rows,
    }


def _number(exact: str | None) -> float | None:
    return None if exact is None else float.fromhex(exact)
