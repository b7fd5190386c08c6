"""The figures as tables, with their ratios to the machine's limit and to the best peer."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.bench.common import Row
from scripts.bench.measures import MEASURES

_HIDDEN = {
    "measure",
    "size",
    "date",
    "way",
    "error",
    "rounds",
    "tensor_bytes",
    "syncs",
    "steps",
    "rest_seconds",
}
_WIDTH = 150  # if the output is not a terminal


def show(name: str, size: str, figures: dict[str, Any]) -> None:
    """Print the table of one measure at one size."""
    rows = [row for row in figures["rows"] if (row["measure"], row["size"]) == (name, size)]
    columns: dict[str, None] = {}  # in the order in which they come
    for row in rows:
        columns |= dict.fromkeys(figure for figure in row if figure not in _HIDDEN)
    table = Table(title=f"{name}, {size}: {MEASURES[name].title}", title_justify="left")
    table.add_column("", no_wrap=True)
    for figure in columns:
        table.add_column(_heading(figure), justify="right")
    for row in rows:
        if "error" not in row:
            star = "" if row.get("syncs", True) else " *"
            cells = [_text(figure, row.get(figure)) for figure in columns]
            table.add_row(row["way"] + star, *cells)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table)
    if not all(row.get("syncs", True) for row in rows):
        console.print("* does not wait for the disk itself: the bench syncs, in the time given")
    for row in rows:
        if "error" in row:
            console.print(f"{row['way']}: failed ({row['error']})", markup=False)
    if figures["missing"]:
        console.print(f"not installed: {', '.join(figures['missing'])}")


def ratios_of(name: str, row: Row, rows: Sequence[Row]) -> Row:
    """Return the ratios of a row.

    "of_limit": limit / figure, 1 is as fast; "times_best_peer": best peer / figure.
    """
    measure = MEASURES[name]
    values = {}
    for other in rows:
        if other.get(measure.figure, 0) > 0:
            values[other["way"]] = other[measure.figure]
    value = values.get(row["way"])
    if not value:
        return {}
    ratios = {}
    if measure.limit in values:
        ratios["of_limit"] = values[measure.limit] / value
    best = best_peer(name, rows)
    if best is not None:
        ratios["times_best_peer"] = values[best] / value
    return ratios


def best_peer(name: str, rows: Sequence[Row]) -> str | None:
    """Return the way with the least figure, without ft_ckpt and the limits; None without one."""
    figure = MEASURES[name].figure
    peers = {}
    for row in rows:
        way, value = row["way"], row.get(figure, 0)
        if value > 0 and not is_ours(way) and not way.startswith("limit"):
            peers[way] = value
    return min(peers, key=lambda way: peers[way]) if peers else None


def is_ours(way: str) -> bool:
    """Check for a way of ft_ckpt."""
    return way.startswith("ours")


def _heading(figure: str) -> str:
    units = {"seconds": "s", "bytes": "MB"}
    name, _, unit = figure.rpartition("_")
    if unit not in units:
        return figure.replace("_", " ")
    return f"{name.replace('_', ' ')} {units[unit]}".strip()


def _text(figure: str, value: float | None) -> str:
    if value is None:
        return ""
    if figure.endswith("bytes"):
        return f"{value / 1e6:,.1f}"
    if figure.endswith("seconds"):
        return f"{value:.4f}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"
