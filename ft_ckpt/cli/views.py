"""What `ft-ckpt` prints: tables for people, JSON for programs. Rich is imported where a table is drawn."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ft_ckpt import marks
from ft_ckpt.catalog import CheckpointInfo, VerifyReport
from ft_ckpt.manifest import PartRecord
from ft_ckpt.remove import STATE


def row(info: CheckpointInfo, report: VerifyReport) -> dict[str, Any]:
    """One checkpoint of a run; `bytes` of all its files, `problems` of the fast verification."""
    manifest = info.manifest
    return {
        "path": str(info.path),
        "step": manifest.step,
        "created": manifest.created,
        "bytes": report.bytes,
        "kind": manifest.kind,
        "parts": [part.name for part in manifest.parts if part.kind != STATE],
        "state": any(part.kind == STATE for part in manifest.parts),
        "metrics": dict(manifest.metrics),
        "pinned": marks.pinned(info.path) is not None,
        "valid": report.ok,
        "problems": list(report.problems),
    }


def show_run(run: Path, rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """The checkpoints of a run, and below the table what is wrong with the invalid ones."""
    if as_json:
        print_json(list(rows))
    elif not rows:
        print(f"{run}: no checkpoints")
    else:
        print_table(
            ("checkpoint", "step", "age", "size", "kind", "parts", "state", "metrics", "pinned", "valid"),
            map(_cells, rows),
        )
        for each in rows:
            _print_problems(each["path"], each["problems"])


def show_latest(info: CheckpointInfo, *, as_json: bool) -> None:
    """The path alone, so that a script can use it; its step and time in JSON."""
    if as_json:
        print_json({"path": str(info.path), "step": info.manifest.step, "created": info.manifest.created})
    else:
        print(info.path)


def show_report(report: VerifyReport, *, as_json: bool) -> None:
    """The verdict in one line, then one line for each problem."""
    if as_json:
        print_json({**dataclasses.asdict(report), "path": str(report.path)})
        return
    verdict = "ok" if report.ok else f"{len(report.problems)} problem(s)"
    print(f"{report.path}: {verdict}, {report.files} files, {human_size(report.bytes)}")
    _print_problems("", report.problems)


def show_checkpoint(info: CheckpointInfo, *, as_json: bool) -> None:
    """Every part with its tensors: name, shape, dtype, size, file."""
    if as_json:
        print_json({"path": str(info.path), **dataclasses.asdict(info.manifest)})
        return
    print(f"{info.path}: {info.manifest.kind}, step {_or_dash(info.manifest.step)}, created {info.manifest.created}")
    for part in info.manifest.parts:
        print(f"\n{part.name or 'model'}: {part.kind} {part.class_name}, {len(part.tensors)} tensors{_base(part)}")
        tensors = ((t.name, human_shape(t.shape), t.dtype, human_size(t.end - t.start), t.file) for t in part.tensors)
        print_table(("tensor", "shape", "dtype", "size", "file"), tensors)


def _base(part: PartRecord) -> str:
    return f", on {part.base.id or 'a base built in memory'}" if part.base else ""


def _cells(each: dict[str, Any]) -> tuple[str, ...]:
    parts = ", ".join(name or "model" for name in each["parts"])
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in each["metrics"].items()) or "-"
    state, pinned, valid = ("yes" if each[key] else "no" for key in ("state", "pinned", "valid"))
    name, size = Path(each["path"]).name or each["path"], human_size(each["bytes"])
    head = (name, _or_dash(each["step"]), _since(each["created"]), size, each["kind"])
    return *head, parts, state, metrics, pinned, valid


def print_table(heads: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """A table as wide as its contents."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in {"step", "size"} else "left", overflow="fold")
    for cells in rows:
        table.add_row(*map(Text, cells))  # as Text: a name may hold what rich takes for markup
    Console(width=None if sys.stdout.isatty() else 100_000).print(table)  # a file or a pipe has no edge to wrap at


def _print_problems(path: str, problems: Iterable[str]) -> None:
    for problem in problems:
        print(f"  {path + ': ' if path else ''}{problem}")


def print_json(value: Any) -> None:
    """`value` as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def human_shape(shape: tuple[int, ...]) -> str:
    """A shape as "2x3"."""
    return "x".join(map(str, shape)) or "scalar"


def human_size(size_bytes: float) -> str:
    """Bytes in decimal units."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    power = min(4, (len(str(int(size_bytes))) - 1) // 3)
    return f"{size_bytes / 1000**power:.1f} {'KMGT'[power - 1]}B"


def _since(created: str) -> str:
    """How long ago the ISO 8601 time `created` was, in its largest unit; the text itself when it is none."""
    try:
        then = datetime.fromisoformat(created.replace("Z", "+00:00"))
    except ValueError:
        return created
    then = then if then.tzinfo else then.replace(tzinfo=timezone.utc)
    seconds = max(0, (datetime.now(timezone.utc) - then).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
