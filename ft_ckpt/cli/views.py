"""Prints the results of `ft-ckpt`: tables for people, JSON for programs. Rich is imported when a table is printed."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import guards
from ft_ckpt.checkpoint.catalog import CheckpointInfo, VerifyReport
from ft_ckpt.checkpoint.delete import STATE
from ft_ckpt.checkpoint.manifest import PartRecord, parse_time
from ft_ckpt.checkpoint.session import parts_of
from ft_ckpt.cli.options import print_lines, print_path
from ft_ckpt.config import human_size
from ft_ckpt.messages import printable
from ft_ckpt.storage.place import Place

_NUMBERS = {"step", "size"}  # right-aligned columns
_ORDINARY = {
    "step": "-",
    "parts": "model",
    "state": "no",
    "pinned": "no",
    "valid": "yes",
}  # a column is left out if all its cells have this value
_LEAST = ("parts", "kind", "state", "age", "pinned")  # columns dropped first when a table is too wide
_GAP = 2  # between columns


def checkpoint_row(info: CheckpointInfo, report: VerifyReport) -> dict[str, Any]:
    """The row of one checkpoint, as in the JSON output; `problems` are those of the fast verification."""
    manifest = info.manifest
    return {
        "path": str(info.path),
        "step": manifest.step,
        "created": manifest.created,
        "bytes": report.bytes,
        "kind": manifest.kind,
        "parts": [part.name for part in manifest.parts if part.kind != STATE],
        "state": any(part.kind == STATE for part in manifest.parts),
        "metrics": dict(info.metrics),
        "pinned": guards.pin_reason(info.place) is not None,
        "valid": report.ok,
        "problems": list(report.problems),
    }


def show_run(run: Place, rows: Sequence[dict[str, Any]], metrics: Sequence[str], *, as_json: bool) -> None:
    """Print the checkpoints of a run with `metrics`, then the problems of the invalid ones."""
    if as_json:
        print_json(list(rows))
        return
    if not rows:
        print_lines(f"{run}: no checkpoints")
        return
    columns = _run_columns(rows, metrics)
    invalid = [number for number, each in enumerate(rows) if not each["valid"]]
    print_table(tuple(columns), zip(*columns.values(), strict=True), red=invalid)
    others = {name for each in rows for name in each["metrics"] if _metric_head(name) not in columns}
    if others:
        print_lines(f"{len(others)} more metrics: `ft-ckpt show`, or --metrics")
    for each in rows:
        _print_problems(each["path"], each["problems"])


def ranked_metrics(infos: Iterable[CheckpointInfo]) -> list[str]:
    """The metrics of a run by importance: metrics that it ranks by, then the loss, then evaluations, then others."""
    infos = list(infos)
    ranked = {name for info in infos for name in info.manifest.rankings}
    known = dict.fromkeys(name for info in infos for name in info.metrics)

    def metric_weight(name: str) -> tuple[bool, bool, bool]:
        return name not in ranked, name not in ("eval_loss", "loss"), not name.startswith("eval_")

    return sorted(known, key=metric_weight)


def show_latest(info: CheckpointInfo, *, as_json: bool) -> None:
    """Print only the path, for scripts; in JSON with step and time."""
    if as_json:
        print_json({"path": info.path, "step": info.manifest.step, "created": info.manifest.created})
    else:
        print_path(info.path)


def show_reports(reports: Sequence[VerifyReport], note: str = "", *, as_json: bool) -> None:
    """Print each verdict with `note` in one line, then its problems. In JSON a single report is not in a list."""
    if as_json:
        print_json(reports[0] if len(reports) == 1 else list(reports))
        return
    for report in reports:
        verdict = "ok" if report.ok else f"{len(report.problems)} problem(s)"
        print_lines(f"{report.path}: {verdict}, {report.files} files, {human_size(report.bytes)}{note}")
        _print_problems("", report.problems)
        for note in report.notes:
            print_lines(f"  note: {note}")


def show_checkpoint(info: CheckpointInfo, *, as_json: bool) -> None:
    """Print metrics and each part's tensors: name, shape, dtype, size, and file if there are several."""
    manifest = info.manifest
    if as_json:
        print_json({"path": info.path, **vars(manifest), "metrics": info.metrics})
        return
    print_lines(f"{info.path}: {manifest.kind}, step {_or_dash(manifest.step)}, {human_moment(manifest.created)}")
    if info.metrics:
        print_lines(", ".join(f"{name} {value:.6g}" for name, value in info.metrics.items()))
    for part in manifest.parts:
        _show_part(part)
    if writers := parts_of(manifest):
        print_lines("", "parts of writers")
        sizes = {name: human_size(sum(file.size_bytes for file in files)) for name, files in writers.items()}
        print_table(("writer", "files", "size"), ((name, str(len(writers[name])), sizes[name]) for name in writers))


def _show_part(part: PartRecord) -> None:
    files = sorted({tensor.file for tensor in part.tensors})
    place = f" in {files[0]}" if len(files) == 1 else ""
    base = f", on {part.base.id or 'a base built in memory'}" if part.base else ""
    about = f"{part.kind} {part.class_name}, {len(part.tensors)} tensors{place}{base}"
    print_lines("", f"{part.name or 'model'}: {about}")
    heads = ("tensor", "shape", "dtype", "size", "file")[: 5 if len(files) > 1 else 4]
    tensors = ((t.name, human_shape(t.shape), t.dtype, human_size(t.end - t.start), t.file) for t in part.tensors)
    print_table(heads, (cells[: len(heads)] for cells in tensors))


def _run_columns(rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> dict[str, list[str]]:
    """The columns of a run's table by head, as many as fit; columns without information are left out."""
    found = {
        head: [_column_cell(each, head) for each in rows] for head in ("checkpoint", "step", "age", "size", "kind")
    }
    found |= {head: [_column_cell(each, head) for each in rows] for head in ("parts", "state")}
    for name in metrics:
        values = (each["metrics"].get(name) for each in rows)
        found[_metric_head(name)] = ["-" if value is None else f"{value:.4g}" for value in values]
    found |= {head: [_column_cell(each, head) for each in rows] for head in ("pinned", "valid")}
    found = {head: cells for head, cells in found.items() if set(cells) != {_ORDINARY.get(head, "")}}
    for head in (*_LEAST, *map(_metric_head, reversed(metrics))):
        if _table_width(found) <= _terminal_width():
            break
        found.pop(head, None)
    return found


def _metric_head(metric: str) -> str:
    return f"metric {metric}" if metric in ("checkpoint", "age", "size", "kind", *_ORDINARY) else metric


def _column_cell(each: Mapping[str, Any], head: str) -> str:
    if head == "checkpoint":
        return Path(each["path"]).name or str(each["path"])
    if head == "parts":
        return ", ".join(name or "model" for name in each["parts"])
    if head in ("age", "size"):
        return _age_text(each["created"]) if head == "age" else human_size(each["bytes"])
    return ("yes" if each[head] else "no") if isinstance(each[head], bool) else _or_dash(each[head])


def _table_width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(max(len(printable(cell)) for cell in (head, *cells)) + _GAP for head, cells in columns.items()) - _GAP


def _terminal_width() -> int:
    """The width of the terminal in characters; a large number for a file or pipe, where nothing wraps."""
    if sys.stdout is None or not sys.stdout.isatty():
        return 100_000
    from rich.console import Console

    return Console().width


def print_table(heads: Sequence[str], rows: Iterable[tuple[str, ...]], *, red: Sequence[int] = ()) -> None:
    """Print a table as wide as its contents; the first column is not wrapped. `red`: numbers of the rows in red."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells, width = [tuple(map(printable, line)) for line in rows], _terminal_width()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for number, head in enumerate(heads):
        right = head in _NUMBERS
        name = Text(printable(head))  # not str: a name may look like markup
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=number == 0 or right)
    for number, line in enumerate(cells):
        table.add_row(*map(Text, line), style="red" if number in red else None)
    first = max((len(line[0]) for line in cells), default=0)
    narrowest = first + (len(heads) - 1) * (_GAP + 4)  # the terminal breaks longer names
    Console(width=max(width, narrowest)).print(table)


def _print_problems(path: str, problems: Iterable[str]) -> None:
    for problem in problems:
        print_lines(f"  {path + ': ' if path else ''}{problem}")


def print_json(value: Any) -> None:
    """Print `value` as indented JSON: dataclasses as objects, paths and non-finite numbers as text."""
    print_lines(*json.dumps(_json_value(value), indent=2).split("\n"))


def _json_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): _json_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    is_text = isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if is_text else value


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def human_shape(shape: tuple[int, ...]) -> str:
    """A shape as "2x3"."""
    return "x".join(map(str, shape)) or "scalar"


def human_moment(created: str) -> str:
    """An ISO 8601 time to the second, in UTC; the unchanged text if it is not a time."""
    then = parse_time(created)
    return created if then is None else f"{then:%Y-%m-%d %H:%M:%S} UTC"


def _age_text(created: str) -> str:
    """The age of an ISO 8601 time in its largest unit; the unchanged text if it is not a time."""
    then = parse_time(created)
    if then is None:
        return created
    seconds = max(0, (datetime.now(timezone.utc) - then).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
