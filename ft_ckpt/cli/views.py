"""Prints runs, checkpoints and verify reports for `ls`, `show`, `latest`, `best` and `verify`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.catalog import CheckpointInfo
from ft_ckpt.checkpoint.checks import VerifyReport, stored_bytes
from ft_ckpt.checkpoint.commit import STATE
from ft_ckpt.checkpoint.leases import pin_reason
from ft_ckpt.checkpoint.manifest import RUNS, Contents, Manifest, PartRecord, age_of
from ft_ckpt.cli.describe import ModelFacts, adapter_name, facts_of_part
from ft_ckpt.cli.options import print_lines, print_path
from ft_ckpt.cli.output import (
    COLUMN_GAP,
    count_of,
    human_moment,
    human_shape,
    or_dash,
    print_json,
    print_table,
    terminal_width,
)
from ft_ckpt.extensions.rl.writers import files_by_writer
from ft_ckpt.messages import printable
from ft_ckpt.schema import values_of
from ft_ckpt.storage.places import Place, location_name
from ft_ckpt.values import human_size

# a column says nothing, and is left out, if all its cells have this value
_DEFAULT_CELLS = {"step": "-", "parts": "model", "kept": "", "valid": "yes"}
# the column of the reasons to keep a checkpoint is wrapped, but not below this width
_MIN_REASONS_WIDTH = 14


def checkpoint_row(
    info: CheckpointInfo, report: VerifyReport, kept: Sequence[str], best: Sequence[str]
) -> dict[str, Any]:
    """Return the row of one checkpoint, as in the JSON output.

    `report` is the result of the fast verification. `kept` has the reasons why the checkpoint
    stays, `best` the metrics by which it is the best of its run.
    """
    manifest = info.manifest
    adapters = [adapter_name(info.store, part) for part in manifest.parts if part.kind == "adapter"]
    return {
        "path": str(info.path),
        "step": manifest.step,
        "created": manifest.created,
        "bytes": report.bytes,
        "kind": manifest.kind,
        "adapter": adapters[0] if adapters else None,
        "parts": [part.name for part in manifest.parts if part.kind != STATE],
        "state": any(part.kind == STATE for part in manifest.parts),
        "metrics": dict(info.metrics),
        "best": list(best),
        "kept": list(kept),
        "pinned": pin_reason(info.place) is not None,
        "valid": report.ok,
        "problems": list(report.problems),
    }


def show_run(rows: Sequence[dict[str, Any]], metrics: Sequence[str], *, as_json: bool) -> None:
    """Print the checkpoints of a run with `metrics`, then the problems of the invalid ones."""
    if as_json:
        print_json(list(rows))
        return
    columns = _run_columns(rows, metrics)
    invalid_rows = [number for number, row in enumerate(rows) if not row["valid"]]
    print_table(tuple(columns), zip(*columns.values(), strict=True), red=invalid_rows)
    all_metrics = set(chain.from_iterable(row["metrics"] for row in rows))
    hidden_metrics = [name for name in all_metrics if _metric_head(name) not in columns]
    if hidden_metrics:
        print_lines(f"{len(hidden_metrics)} more metrics: `ft-ckpt show`, or --metrics")
    for row in rows:
        _print_problems(row["path"], row["problems"])


def show_contents(
    contents: Contents, place: Place, rows: Sequence[dict[str, Any]], *, as_json: bool
) -> None:
    """Print what is in a folder that is not a run, and which command describes it."""
    if as_json:
        print_json(list(rows))
        return
    if contents.kind == RUNS:
        print_lines(f"{place}: {count_of(len(rows), 'run')}")
        _print_runs(rows)
        command, effect = "ls", "lists the checkpoints of one"
    else:
        print_lines(contents.sentence(place))
        command, effect = "show", "describes its model"
    if rows and contents.kind != "other":
        print_lines(f"`ft-ckpt {command} {rows[-1]['path']}` {effect}")


def _print_runs(rows: Iterable[dict[str, Any]]) -> None:
    cells = []
    for row in rows:
        name = location_name(row["path"])
        age = "-" if row["created"] is None else _age_text(row["created"])
        size = human_size(row["bytes"])
        cells.append((name, str(row["checkpoints"]), or_dash(row["step"]), age, size))
    print_table(("run", "checkpoints", "step", "age", "size"), cells)


def ranked_metrics(infos: Iterable[CheckpointInfo]) -> list[str]:
    """Return the metrics of a run, the most important first.

    The metrics by which the run ranks its checkpoints come first, then the loss, then those of
    evaluations, then all others.
    """
    ranked: set[str] = set()
    metrics: dict[str, None] = {}  # in the order of the checkpoints
    for info in infos:
        ranked.update(info.manifest.rankings)
        metrics.update(dict.fromkeys(info.metrics))

    def sort_key(name: str) -> tuple[bool, bool, bool]:  # False comes before True
        return name not in ranked, name not in ("eval_loss", "loss"), not name.startswith("eval_")

    return sorted(metrics, key=sort_key)


def show_latest(info: CheckpointInfo, *, as_json: bool) -> None:
    """Print only the path, so that scripts can use it. JSON also has the step and the time."""
    if as_json:
        print_json(
            {"path": info.path, "step": info.manifest.step, "created": info.manifest.created}
        )
    else:
        print_path(info.path)


def show_reports(reports: Sequence[VerifyReport], note: str = "", *, as_json: bool) -> None:
    """Print one line for each report, which ends with `note`, then the problems and notes.

    In JSON a single report is an object, and several are a list.
    """
    if as_json:
        rows = [_report_json(report) for report in reports]
        print_json(rows[0] if len(rows) == 1 else rows)
        return
    for report in reports:
        verdict = "ok" if report.ok else count_of(len(report.problems), "problem")
        files = count_of(report.files, "file")
        print_lines(f"{report.path}: {verdict}, {files}, {human_size(report.bytes)}{note}")
        _print_problems("", report.problems)
        for text in report.notes:
            print_lines(f"  note: {text}")


def _report_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "ok": report.ok,
        "problems": report.problems,
        "files": report.files,
        "bytes": report.bytes,
        "notes": report.notes,
    }


def show_checkpoint(info: CheckpointInfo, *, as_json: bool) -> None:
    """Print a checkpoint: class and number of parameters, metrics, and the tensors of each part.

    A part is one model or adapter of the checkpoint, or its training state. The file of a tensor is
    printed if the part has several files.
    """
    manifest = info.manifest
    models = [part for part in manifest.parts if part.kind != STATE]
    facts = {part.name: facts_of_part(info.store, part) for part in models}
    if as_json:
        print_json(
            {"path": info.path, **values_of(manifest), "metrics": info.metrics, "models": facts}
        )
        return

    if len(facts) == 1:
        (model,) = facts.values()
        print_lines(f"{info.path}: {model.headline()}", *(f"  {line}" for line in model.details()))
    elif facts:
        print_lines(f"{info.path}: {count_of(len(facts), 'part')}")
    else:
        print_lines(f"{info.path}: training state only")

    step = "" if manifest.step is None else f"step {manifest.step}, "
    has_state = len(models) < len(manifest.parts)
    state = ", with training state" if facts and has_state else ""
    size = human_size(stored_bytes(info.store, manifest))
    print_lines(f"  {step}saved {human_moment(manifest.created)}, {manifest.kind}, {size}{state}")
    if info.metrics:
        metrics = ", ".join(f"{name} {value:.6g}" for name, value in info.metrics.items())
        print_lines(f"  {metrics}")

    for part in manifest.parts:
        is_described = len(facts) > 1 and part.kind != STATE
        _show_part(part, facts[part.name] if is_described else None)

    _show_writers(manifest)


def _show_writers(manifest: Manifest) -> None:
    """Print what other programs have added to the checkpoint as writers, if there is anything."""
    rows = []
    for name, files in files_by_writer(manifest).items():
        size_bytes = sum(file.size_bytes for file in files)
        rows.append((name, str(len(files)), human_size(size_bytes)))
    if rows:
        print_lines("", "parts of writers")
        print_table(("writer", "files", "size"), rows)


def _show_part(part: PartRecord, facts: ModelFacts | None) -> None:
    """Print one part. `facts` describe its model, and are None if they were printed before."""
    files = sorted({tensor.file for tensor in part.tensors})
    headline, details = "", []
    if facts is not None:
        headline = f"{facts.headline()}; "
        details = [f"  {line}" for line in facts.details()]

    name = part.name
    if not name:
        name = "training state" if part.kind == STATE else "model"
    place = f" in {files[0]}" if len(files) == 1 else ""
    print_lines("", f"{name}: {headline}{count_of(len(part.tensors), 'tensor')}{place}", *details)
    heads = ["tensor", "shape", "dtype", "size"]
    if len(files) > 1:
        heads.append("file")
    rows = []
    for tensor in part.tensors:
        size = human_size(tensor.end - tensor.start)
        cells = (tensor.name, human_shape(tensor.shape), tensor.dtype, size, tensor.file)
        rows.append(cells[: len(heads)])

    print_table(heads, rows)


def _run_columns(rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of a run's table by head.

    Columns without information are left out. If the table is wider than the terminal, columns are
    left out until it fits.
    """
    columns: dict[str, list[str]] = {}
    for head in ("checkpoint", "step", "age", "size", "kind", "parts"):
        columns[head] = [_column_cell(row, head) for row in rows]
    for name in metrics:
        columns[_metric_head(name)] = [_metric_cell(row, name) for row in rows]
    for head in ("kept", "valid"):
        columns[head] = [_column_cell(row, head) for row in rows]
    for head in list(columns):
        if set(columns[head]) == {_DEFAULT_CELLS.get(head, "")}:
            del columns[head]

    metric_heads = [_metric_head(name) for name in metrics]
    for head in ("parts", "age", "kept", "kind", *reversed(metric_heads)):
        if _table_width(columns) <= terminal_width():
            break
        columns.pop(head, None)

    return columns


def _metric_cell(row: Mapping[str, Any], name: str) -> str:
    value = row["metrics"].get(name)
    if value is None:
        return "-"
    return f"{value:.4g} best" if name in row["best"] else f"{value:.4g}"


def _metric_head(metric: str) -> str:
    """Return the head of a metric's column, which differs from those of the other columns."""
    is_taken = metric in ("checkpoint", "age", "size", "kind", *_DEFAULT_CELLS)
    return f"metric {metric}" if is_taken else metric


def _column_cell(row: Mapping[str, Any], head: str) -> str:
    if head == "checkpoint":
        return Path(row["path"]).name or str(row["path"])
    if head == "parts":
        return ", ".join(name or "model" for name in row["parts"])
    if head == "kept":
        return ", ".join(row["kept"])
    if head == "kind":
        kind = row["adapter"] or row["kind"]
        return f"{kind}+state" if row["state"] and kind != STATE else kind

    if head == "age":
        return _age_text(row["created"])
    if head == "size":
        return human_size(row["bytes"])
    if isinstance(row[head], bool):
        return "yes" if row[head] else "no"
    return or_dash(row[head])


def _table_width(columns: Mapping[str, Sequence[str]]) -> int:
    total = -COLUMN_GAP
    for head, cells in columns.items():
        width = max(len(printable(cell)) for cell in (head, *cells))
        if head == "kept":
            width = min(width, _MIN_REASONS_WIDTH)
        total += COLUMN_GAP + width
    return total


def _print_problems(path: str, problems: Iterable[str]) -> None:
    prefix = f"{path}: " if path else ""
    for problem in problems:
        print_lines(f"  {prefix}{problem}")


def _age_text(created: str) -> str:
    """Format the age of an ISO 8601 time; return a text that is not a time unchanged."""
    return age_of(created) or created
