"""`ft-ckpt plan`: prints how much time and disk space different save intervals cost, as a table."""

import math
import os
import secrets
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from typing import Any

from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.checks import stored_bytes
from ft_ckpt.checkpoint.manifest import describe_contents, why_no_checkpoint
from ft_ckpt.cli import output
from ft_ckpt.cli.options import add_json, bounded, print_lines
from ft_ckpt.errors import ConfigError, NotACheckpointError
from ft_ckpt.schedule import bounded_interval, expected_overhead, optimal_interval, parse_seconds
from ft_ckpt.storage import Store
from ft_ckpt.storage.places import Place, open_place
from ft_ckpt.values import human_size, parse_size

_SAMPLE_BYTES = 256 << 20
_CHUNK_BYTES = 8 << 20
# the table goes from the optimum divided by this number to the optimum times this number
_SPREAD = 12
# the first digits of the intervals in the table besides the optimum, as in 20, 50 and 100 steps
_ROUND_DIGITS = (1, 2, 5)


@dataclass(frozen=True)
class PlannedRun:
    """The run to plan for.

    Attributes:
        step_seconds: The duration of a training step.
        save_seconds: The time that a save delays training.
        mtbf_seconds: The mean time between failures of any node of the run.
        restart_seconds: The time from a failure to the first step after it.
        size_bytes: The size of a checkpoint; None if only the time of a save is known.
        keep_last: The number of checkpoints that are kept; None for all.
        hours: The length of the run.
        max_overhead: The highest fraction of the time that saving should take.
    """

    step_seconds: float
    save_seconds: float
    mtbf_seconds: float
    restart_seconds: float
    size_bytes: int | None
    keep_last: int | None
    hours: float
    max_overhead: float


@dataclass(frozen=True)
class IntervalRow:
    """One save interval and what it costs. Fractions are relative to the time of useful work.

    Attributes:
        steps: The number of steps between two saves.
        interval_seconds: The duration of these steps.
        saves: The number of saves in the whole run.
        disk_bytes: The most bytes that are on the disk at once; None if the size is unknown.
        saving: The fraction that saves take.
        recomputation: The fraction that repeated steps, repeated saves and restarts take.
        total: The sum of both fractions.
        optimum: Whether this is the best interval that `max_overhead` allows.
    """

    steps: int
    interval_seconds: float
    saves: int
    disk_bytes: int | None
    saving: float
    recomputation: float
    total: float
    optimum: bool


def add_plan(parser: ArgumentParser) -> None:
    parser.description = (
        "Find out how often a run should save. Prints a table of intervals with the time that "
        "saving takes and the time that failures cost. FOLDER is a checkpoint, run or model of the "
        "same size."
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", help="Checkpoint, run or model of the same size."
    )
    parser.add_argument(
        "--model-size",
        metavar="SIZE",
        help='Size of a checkpoint, as in "2GB" (default: that of FOLDER).',
    )
    parser.add_argument(
        "--step-time",
        metavar="TIME",
        help='Duration of a training step, as in "1.2" (seconds) or "2min".',
    )
    parser.add_argument(
        "--save-time",
        metavar="TIME",
        help="Time that a save delays training (default: measured by writing to FOLDER).",
    )
    parser.add_argument(
        "--mtbf", metavar="TIME", help='Mean time between failures of one node, as in "30d".'
    )
    parser.add_argument(
        "--nodes",
        type=bounded(int, 1),
        default=1,
        metavar="N",
        help="Number of nodes; a failure of any of them stops the run (default: 1).",
    )
    parser.add_argument(
        "--restart-time",
        default="5min",
        metavar="TIME",
        help="Time from a failure to the first step after it (default: 5min).",
    )
    parser.add_argument(
        "--last",
        "--keep-last",
        type=bounded(int, 1),
        dest="keep_last",
        metavar="N",
        help="Number of checkpoints that are kept (default: all).",
    )
    parser.add_argument(
        "--hours",
        type=bounded(float, 0.01),
        default=24.0,
        metavar="N",
        help="Length of the run in hours (default: 24).",
    )
    parser.add_argument(
        "--max-overhead",
        type=bounded(float, 0.001, 1),
        default=0.05,
        metavar="FRACTION",
        help="Maximum fraction of the time for saving (default: 0.05).",
    )
    add_json(parser)
    parser.set_defaults(run=_plan)


def _plan(options: Namespace) -> None:
    folder = None if options.folder is None else open_place(options.folder)
    if folder and not folder.is_folder:
        raise NotACheckpointError(why_no_checkpoint(folder))
    given = {
        "--step-time": options.step_time,
        "--mtbf": options.mtbf,
        "--model-size, --save-time or FOLDER": options.model_size or options.save_time or folder,
    }
    missing = [name for name, value in given.items() if not value]
    if missing:
        raise ConfigError(f"plan: expected {'; '.join(missing)}; see `ft-ckpt plan --help`")
    size = None
    if options.model_size:
        size = parse_size(options.model_size)
    elif folder:
        size = _folder_bytes(folder)

    is_measured = not options.save_time
    if is_measured:
        target = folder or open_place(".")
        save_seconds = _measure_save(target.folder, size or 0)
    else:
        save_seconds = parse_seconds(options.save_time)

    job = PlannedRun(
        step_seconds=parse_seconds(options.step_time),
        save_seconds=save_seconds,
        mtbf_seconds=parse_seconds(options.mtbf) / options.nodes,
        restart_seconds=parse_seconds(options.restart_time),
        size_bytes=size,
        keep_last=options.keep_last,
        hours=options.hours,
        max_overhead=options.max_overhead,
    )
    if math.isinf(total_overhead(job, best_steps(job))):
        times = (
            f"a save of {human_time(job.save_seconds)} and a failure every "
            f"{human_time(job.mtbf_seconds)}"
        )
        raise ConfigError(f"plan: {times}: the run would never get from one checkpoint to the next")

    _show_plan(job, interval_rows(job), measured=is_measured, as_json=options.as_json)


def best_steps(job: PlannedRun) -> int:
    """Return the number of steps between saves with the least total overhead.

    The number is within the limit on the cost of saving.
    """
    min_steps = math.ceil(bounded_interval(job.save_seconds, job.max_overhead) / job.step_seconds)
    optimum = int(optimal_interval(job.save_seconds, job.mtbf_seconds) / job.step_seconds)
    candidates = [max(1, min_steps, steps) for steps in (optimum, optimum + 1)]
    return min(candidates, key=lambda steps: total_overhead(job, steps))


def saving_overhead(job: PlannedRun, steps: float) -> float:
    """Return the fraction of `total_overhead` that saving causes."""
    return job.save_seconds / (steps * job.step_seconds)


def total_overhead(job: PlannedRun, steps: float) -> float:
    """Return the expected overhead of a save every `steps` steps, see `expected_overhead`."""
    return expected_overhead(
        steps * job.step_seconds, job.save_seconds, job.mtbf_seconds, job.restart_seconds
    )


def interval_rows(job: PlannedRun) -> list[IntervalRow]:
    """Return the optimum, and the round numbers of steps around it."""
    best = best_steps(job)
    intervals = {best}
    for power in range(len(str(best * _SPREAD)) + 1):
        for digit in _ROUND_DIGITS:
            steps = digit * 10**power
            if best / _SPREAD <= steps <= best * _SPREAD:
                intervals.add(steps)
    return [_interval_row(job, steps, steps == best) for steps in sorted(intervals)]


def _interval_row(job: PlannedRun, steps: int, optimum: bool) -> IntervalRow:
    interval = steps * job.step_seconds
    overhead = total_overhead(job, steps)
    saving = saving_overhead(job, steps)
    saves = int(job.hours * 3600 / (interval * (1 + overhead)))
    max_stored = saves
    if job.keep_last is not None:
        max_stored = min(
            saves, job.keep_last + 1
        )  # the newest one is written before one is deleted

    disk_bytes = None if job.size_bytes is None else max_stored * job.size_bytes
    return IntervalRow(
        steps=steps,
        interval_seconds=interval,
        saves=saves,
        disk_bytes=disk_bytes,
        saving=saving,
        recomputation=overhead - saving,
        total=overhead,
        optimum=optimum,
    )


def _show_plan(
    job: PlannedRun, intervals: list[IntervalRow], *, measured: bool, as_json: bool
) -> None:
    if as_json:
        best = next(row.steps for row in intervals if row.optimum)
        table = [_row_json(row) for row in intervals]
        output.print_json(
            {**asdict(job), "measured": measured, "optimum_steps": best, "rows": table}
        )
        return

    size = "" if job.size_bytes is None else f" of {human_size(job.size_bytes)}"
    how = ", measured by writing" if measured else ""
    print_lines(
        f"a save{size} takes {human_time(job.save_seconds)}{how}; a failure every "
        f"{human_time(job.mtbf_seconds)}"
    )
    print_lines(
        f"{job.hours:g} hours of running; a restart takes {human_time(job.restart_seconds)} (in "
        "recomputation)"
    )
    heads = ("steps", "interval", "saves", "disk", "saving", "recomputation", "total", "")
    rows = []
    for row in intervals:
        disk = "-" if row.disk_bytes is None else human_size(row.disk_bytes)
        percents = map(_percent_text, (row.saving, row.recomputation, row.total))
        mark = "<- optimum" if row.optimum else ""
        interval = human_time(row.interval_seconds)
        rows.append((f"{row.steps}", interval, f"{row.saves}", disk, *percents, mark))

    output.print_table(heads, rows)


def _row_json(row: IntervalRow) -> dict[str, Any]:
    """Return the fields of a row; infinity becomes None, because JSON does not have it."""
    fields = asdict(row)
    for name, value in fields.items():
        if value == math.inf:
            fields[name] = None
    return fields


def _percent_text(fraction: float) -> str:
    return "never ends" if math.isinf(fraction) else f"{fraction:.2%}"


def human_time(seconds: float) -> str:
    """Format a duration in the largest unit of which it has two, as in "2.5 h" or "90.0 min"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.3g} s"


def _folder_bytes(folder: Place) -> int:
    """Return the size of a checkpoint.

    For the folder of a run this is its newest checkpoint, for another folder the files in it.
    Raises NotACheckpointError if there are none.
    """
    infos = discover(folder)
    if infos:
        return stored_bytes(infos[-1].store, infos[-1].manifest)
    size = sum(stored.size_bytes for stored in folder.folder.list_folder().objects)
    if not size:
        raise NotACheckpointError(
            f"{folder}: {describe_contents(folder).text}; give a model, or --model-size"
        )
    return size


def _measure_save(store: Store, size_bytes: int) -> float:
    """Return the seconds that it takes to write `size_bytes` durably.

    At most 256 MiB are written, and the time is extrapolated. The time in which a save gathers
    shards is not included.
    """
    from ft_ckpt.storage.io import WriterPool, region_of

    sample = max(1, min(size_bytes, _SAMPLE_BYTES))
    chunk = os.urandom(min(sample, _CHUNK_BYTES))  # random, so that no file system compresses it
    name = f".ft_ckpt-plan-{secrets.token_hex(8)}/sample"
    start = time.perf_counter()
    try:
        with WriterPool() as writer, writer.fill(store.create(name, sample)) as file:
            for offset in range(0, sample, len(chunk)):
                file.put_region(region_of(offset, chunk[: sample - offset]))
            file.finish()
            return (time.perf_counter() - start) * max(size_bytes, 1) / sample
    finally:
        store.delete([name])
