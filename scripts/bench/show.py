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


def show(name: str, size: str, found: dict[str, Any]) -> None:
    """Print the table of one measure at one size."""
    measure = MEASURES[name]
    rows = [row for row in found["rows"] if (row["measure"], row["size"]) == (name, size)]
    figures = list(dict.fromkeys(figure for row in rows for figure in row if figure not in _HIDDEN))
    table = Table(title=f"{name}, {size}: {measure.title}", title_justify="left")
    table.add_column("", no_wrap=True)
    for figure in figures:
        table.add_column(_heading(figure), justify="right")
    for row in rows:
        if "error" not in row:
            star = "" if row.get("syncs", True) else " *"
            table.add_row(
                row["way"] + star, *(_text(figure, row.get(figure)) for figure in figures)
            )
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table)
    if any(not row.get("syncs", True) for row in rows):
        console.print("* does not wait for the disk by itself: synced by us, in the time given")
    for row in rows:
        if "error" in row:
            console.print(f"{row['way']}: failed ({row['error']})", markup=False)
    if found["missing"]:
        console.print(f"not installed: {', '.join(found['missing'])}")


def ratios_of(name: str, row: Row, rows: Sequence[Row]) -> Row:
    """Ratios of a row: "of_limit", limit / figure (1: as fast); "times_best_peer", best peer /
    figure.
    """
    measure = MEASURES[name]
    values = {one["way"]: one[measure.figure] for one in rows if one.get(measure.figure, 0) > 0}
    own, limit, best = values.get(row["way"]), measure.limit, best_peer(name, rows)
    found = {}
    if own and limit in values:
        found["of_limit"] = values[limit] / own
    if own and best is not None:
        found["times_best_peer"] = values[best] / own
    return found


def best_peer(name: str, rows: Sequence[Row]) -> str | None:
    """The way with the least figure that is neither ours nor a limit; None if there is none."""
    figure = MEASURES[name].figure
    peers = {
        row["way"]: row[figure]
        for row in rows
        if row.get(figure, 0) > 0 and not is_ours(row["way"])
    }
    peers = {way: value for way, value in peers.items() if not way.startswith("limit")}
    return min(peers, key=lambda way: peers[way]) if peers else None


def is_ours(way: str) -> bool:
    """True for a way of this library."""
    return way.startswith("ours")


def _heading(figure: str) -> str:
    name, _, unit = figure.rpartition("_")
    units = {"seconds": "s", "bytes": "MB"}
    return (
        f"{name.replace('_', ' ')} {units[unit]}".strip()
        if unit in units
        else figure.replace("_", " ")
    )


def _text(figure: str, value: float | None) -> str:
    if value is None:
        return ""
    if figure.endswith("bytes"):
        return f"{value / 1e6:,.1f}"
    if figure.endswith("seconds"):
        return f"{value:.4f}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"
