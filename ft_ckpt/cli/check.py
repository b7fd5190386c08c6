"""`ft-ckpt check-resume SCRIPT`: tests whether a training script resumes exactly.

The script is started three times. The first run goes through without a stop. The second stops after
some steps, and the third resumes from there. The batches, the metrics and the final tensors of the
first run are compared with those of the other two, which together are the resumed run.
"""

import os
import shlex
import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_ckpt.cli import output
from ft_ckpt.cli.options import add_json, bounded, print_lines
from ft_ckpt.errors import CheckpointError, ConfigError, LoadError, listing
from ft_ckpt.runs.loop import END, VARIABLE, Rehearsal, Step, read_steps
from ft_ckpt.storage.local import LocalStore, temporary_store
from ft_ckpt.storage.places import Place, open_place, spool_file

if TYPE_CHECKING:
    from ft_ckpt.formats.files import JoinedFile

# how many of the last lines of output are shown if the script fails
_TAIL_LINES = 30


@dataclass(frozen=True)
class MetricRow:
    """One metric of one step in both runs.

    Attributes:
        step: The number of the step.
        metric: The name of the metric; None if the step has no metrics.
        through: The value in the run without a stop, as `float.hex` text; None if it is missing.
        resumed: The value in the resumed run, in the same form.
        batches: Whether both runs read the same batches; None if no digests were recorded.
    """

    step: int
    metric: str | None
    through: str | None
    resumed: str | None
    batches: bool | None

    @property
    def is_equal(self) -> bool:
        return self.through == self.resumed and self.batches is not False


@dataclass(frozen=True)
class Finding:
    """The result of comparing both runs.

    Attributes:
        stop: The step after which the second run stopped.
        rows: The metrics, step by step.
        tensors: The number of tensors of weights and training state at the end.
        different: The names of the tensors that differ at the end.
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
    parser.description = (
        "Compare a run without a stop with a stopped and resumed one, bit for bit. Runs SCRIPT "
        "twice and compares batches, metrics and final state. The exit code is 1 if they differ. "
        "Options come before SCRIPT; those after it are the script's. The script makes a "
        "CheckpointSaver, calls resume() before its loop and step(metrics) in it. Checkpoints go "
        "to a scratch folder, not to the saver's directory."
    )
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
    steps, stop = options.steps, options.stop
    if stop is not None and stop >= steps:
        raise ConfigError(f"check-resume: --stop {stop}: expected less than --steps {steps}")
    command = _launch_command([options.script, *options.arguments], options.nproc, options.launch)
    with temporary_store(options.scratch, "ft_ckpt-rehearsal-") as scratch:
        finding = rehearse_script(command, scratch.folder.absolute(), steps, stop or steps // 2)
    _show_finding(finding, as_json=options.as_json)
    return 0 if finding.is_equal else 1


def rehearse_script(command: Sequence[str], folder: Path, steps: int, stop: int) -> Finding:
    """Run `command` three times and compare the runs: without a stop, up to `stop`, and resumed.

    The first and the third run end after `steps` steps. Checkpoints go to `folder`.

    Raises CheckpointError if the script fails, ends too soon, makes no saver or never calls its
    `step`, and LoadError if it does not resume.
    """
    through_run = Rehearsal(str(folder / "through"), str(folder / "through.jsonl"), steps)
    through_steps = _run_script(command, through_run, f"{steps} steps without a stop")
    before_stop = Rehearsal(str(folder / "resumed"), str(folder / "before.jsonl"), steps, stop=stop)
    steps_before = _run_script(command, before_stop, f"a stop after step {stop}")
    stopped_at = steps_before[-1].number
    after_stop = replace(before_stop, record=str(folder / "after.jsonl"), stop=None)
    steps_after = _run_script(command, after_stop, f"resumed at step {stopped_at}")
    if steps_after[0].number <= stopped_at:
        raise LoadError(
            f"{_script_name(command)}: started again it began with step {steps_after[0].number}, "
            f"though there was a checkpoint of step {stopped_at}: call saver.resume() before the "
            "loop, with no path and no step of your own"
        )

    through_end = Place(LocalStore(Path(through_run.directory)), END)
    resumed_end = Place(LocalStore(Path(after_stop.directory)), END)
    tensor_count, different = _compare_ends(through_end, resumed_end)
    rows = tuple(_compare_steps(through_steps, [*steps_before, *steps_after]))
    return Finding(stopped_at, rows, tensor_count, tuple(different))


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
    if nproc == 1:
        return [sys.executable, *words]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    return [sys.executable, *torchrun, *words]


def _run_script(command: Sequence[str], rehearsal: Rehearsal, purpose: str) -> list[Step]:
    """Run the script, and return the steps that it recorded.

    `purpose` says in messages what the run is for. Raises CheckpointError with advice if the script
    fails, makes no saver, calls no step, or ends too soon. Its last output is printed then.
    """
    print_lines(f"ft-ckpt: {purpose} ...", file=sys.stderr)
    last_step = rehearsal.steps if rehearsal.stop is None else rehearsal.stop
    code, tail = _run_process(command, rehearsal)
    steps = read_steps(Path(rehearsal.record))
    if code:
        problem = f"ended with exit code {code}"
    elif steps is None:
        problem = (
            "made no CheckpointSaver: make one, call its resume() before the loop and its "
            "step() in it"
        )
    elif not steps:
        problem = "never called saver.step(): call it after each batch, with metrics={'loss': loss}"
    elif steps[-1].number < last_step:
        problem = (
            f"ended after step {steps[-1].number}, {last_step} are needed: let it run longer, or "
            "give fewer --steps"
        )
    else:
        return steps

    shown = (f"  {line}" for line in tail.splitlines())
    print_lines(f"{purpose}; the end of the script's output:", *shown, file=sys.stderr)
    raise CheckpointError(f"{_script_name(command)}: {problem}")


def _run_process(command: Sequence[str], rehearsal: Rehearsal) -> tuple[int, str]:
    """Run `command`, and return its exit code and the last lines of its output."""
    environment = {**os.environ, VARIABLE: rehearsal.to_json()}
    with spool_file() as log:
        try:
            process = subprocess.run(  # noqa: S603 - the command is the user's own
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        except OSError as error:
            raise ConfigError(
                f"{command[0]}: {error.strerror}; --launch is a command that takes a script"
            ) from error
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines(keepends=True)
        return process.returncode, "".join(lines[-_TAIL_LINES:])


def _script_name(command: Sequence[str]) -> str:
    return next((word for word in command if word.endswith(".py")), command[-1])


def _compare_steps(through: Sequence[Step], resumed: Sequence[Step]) -> Iterator[MetricRow]:
    """Yield a row for each metric of each step; a step without metrics has one row."""
    through_steps = {step.number: step for step in through}
    resumed_steps = {step.number: step for step in resumed}
    for number in sorted(through_steps.keys() | resumed_steps.keys()):
        no_step = Step(number, {}, None)
        through_step = through_steps.get(number, no_step)
        resumed_step = resumed_steps.get(number, no_step)
        is_in_both = number in through_steps and number in resumed_steps
        same_batches: bool | None = is_in_both and through_step.batches == resumed_step.batches
        if is_in_both and through_step.batches is None and resumed_step.batches is None:
            same_batches = None  # neither run recorded digests
        names: list[str | None] = list(
            dict.fromkeys([*through_step.metrics, *resumed_step.metrics])
        )
        for name in names or [None]:
            through_value = through_step.metrics.get(name or "")
            resumed_value = resumed_step.metrics.get(name or "")
            yield MetricRow(number, name, through_value, resumed_value, same_batches)


def _compare_ends(through: Place, resumed: Place) -> tuple[int, list[str]]:
    """Return the number of tensors at the end, and the names of those that differ.

    State that belongs to one rank, such as that of its random generators, is not compared.
    """
    from ft_ckpt.extensions.tools import compare_files

    with _open_joined(through) as through_file, _open_joined(resumed) as resumed_file:
        differences = compare_files(through_file, resumed_file)
    compared = [tensor for tensor in differences if not tensor.name.startswith("state/rank-")]
    return len(compared), [tensor.name for tensor in compared if tensor.changed]


@contextmanager
def _open_joined(place: Place) -> "Iterator[JoinedFile]":
    """Open all tensors of a checkpoint as one file.

    A part is one model of a checkpoint, or its training state. The name of each tensor begins with
    the folder of its part, for example "state/".
    """
    from ft_ckpt.checkpoint import open_checkpoint
    from ft_ckpt.formats import open_tensor_file
    from ft_ckpt.formats.files import JoinedFile

    with open_checkpoint(place) as checkpoint:
        checkpoint.refuse_damaged()
        folders = {}
        for part in checkpoint.manifest.parts:
            for tensor in part.tensors:
                folders[tensor.file] = f"{part.path}/" if part.path else ""
        files = []
        for file, folder in folders.items():
            files.append((folder, open_tensor_file(checkpoint.store.open(file))))
        with closing(JoinedFile(files, place.basename)) as joined:
            yield joined


def _show_finding(finding: Finding, *, as_json: bool) -> None:
    if as_json:
        output.print_json(_finding_json(finding))
        return
    heads = ("step", "metric", "without a stop", "stopped and resumed", "batches", "")
    output.print_table(heads, (_finding_cells(row, finding) for row in finding.rows))
    print_lines(_verdict_text(finding))


def _finding_cells(row: MetricRow, finding: Finding) -> tuple[str, ...]:
    batches = {None: "-", True: "same", False: "differ"}[row.batches]
    if row is finding.first_difference:
        mark = "<- first difference"
    elif not row.is_equal:
        mark = "differs"
    else:
        mark = "stopped here" if row.step == finding.stop else ""

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


def _verdict_text(finding: Finding) -> str:
    if finding.is_equal:
        has_metrics = any(row.metric for row in finding.rows)
        addition = "" if has_metrics else "; no metrics were given to saver.step()"
        return (
            f"the same, to the bit, with {finding.tensors} tensors of weights and training state "
            f"at the end{addition}"
        )

    ends = f"{len(finding.different)} of {finding.tensors} tensors differ at the end"
    first = finding.first_difference
    if first is None:
        return f"not the same: {ends}, though no metric does: {listing(finding.different, ', ')}"
    numbers = "the batches"
    if first.metric:
        numbers = f"{first.metric} {_exact_number(first.through)}"
        numbers += f" and {_exact_number(first.resumed)}"

    return (
        f"not the same: they differ from step {first.step} on ({numbers}); {ends}. "
        f"{_advice_text(first, finding.stop)}"
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

    data = "If the data was the same (see saver.remaining)"
    if first.batches:
        data = "The data was the same"
    return (
        f"{data}: something that moves the loss is not in the checkpoint, such as a "
        "scheduler that is neither prepared by Accelerate nor registered, or random "
        "numbers of a generator of the script's own"
    )


def _finding_json(finding: Finding) -> dict[str, Any]:
    rows = [_row_json(row) for row in finding.rows]
    first = finding.first_difference
    ends = {"tensors": finding.tensors, "different": list(finding.different)}
    return {
        "equal": finding.is_equal,
        "stop": finding.stop,
        "first_difference": None if first is None else _row_json(first),
        "end": ends,
        "rows": rows,
    }


def _row_json(row: MetricRow) -> dict[str, Any]:
    return {
        **asdict(row),
        "equal": row.is_equal,
        "through": _number(row.through),
        "resumed": _number(row.resumed),
    }


def _number(exact: str | None) -> float | None:
    return None if exact is None else float.fromhex(exact)
