"""The tables of README.md and docs/figures.md, made from the stored figures.

Each follows a comment that names it, up to the next empty line: `<!-- figures: save -->`.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench import limits
from scripts.bench.common import Row
from scripts.bench.labels import figure_text, label, seconds_text
from scripts.bench.measures import MEASURES
from scripts.bench.show import is_ours

Figures = dict[str, Any]

STORED, IMAGES = "docs/figures.json", "docs/images"
PAGES = ("README.md", "docs/figures.md")
_PLACE = re.compile(r"(<!-- figures: (\w+) -->\n)(?:.+\n)*")
_NOT_MEASURED = "Not measured.\n"


def write_pages(figures: Figures, checkout: Path) -> None:
    """Write the tables of all pages. Raises KeyError when a page names an unknown table."""

    def with_table(place: re.Match[str]) -> str:
        comment, name = place.groups()
        return f"{comment}{TABLES[name](figures)}"

    for page in PAGES:
        path = checkout / page
        text = path.read_text(encoding="utf-8")
        path.write_text(_PLACE.sub(with_table, text), encoding="utf-8")


# The README's


@dataclass(frozen=True)
class Compared:
    """A line of the README: figures of ft_ckpt, of the machine's limit, and of peers.

    Peers are those that `peers` names, or so many of the best by the first of `figures`.
    """

    words: str  # a template with figures of the row `ours`
    measure: str
    size: str
    figures: tuple[str, ...] = ("seconds",)
    ours: str = "ours"
    limit: str = ""
    peers: int | tuple[str, ...] = 2


_LIMITS = {
    limits.WRITE: "O_DIRECT and sync",
    limits.READ: "read past the page cache",
    limits.COPY: "a copy in memory",
}
_RESUME, _MEMORY = "ours, resume with digests", ("seconds", "peak_bytes")
COMPARED = (
    Compared(
        "training stalls for a background save of {tensor_bytes}",
        "stall",
        "2.5GB",
        limit=limits.COPY,
    ),
    Compared(
        "resuming a live model of {tensor_bytes}, all digests compared (torch DCP: none)",
        "cold",
        "1GB",
        ours=_RESUME,
        limit=limits.READ,
        peers=("torch DCP",),
    ),
    Compared(
        "FSDP2, two ranks, {tensor_bytes}: time, memory of rank 0", "ranks", "1GB", _MEMORY, peers=1
    ),
    Compared("LoRA of rank 8 on a model of 1.2 GB, likewise", "adapter", "1.2GB", _MEMORY),
    Compared(
        "a second full save, {trainable_bytes} of {tensor_bytes} trainable: time, bytes written",
        "frozen",
        "2.5GB",
        ("seconds", "new_bytes"),
    ),
)


def _readme(figures: Figures) -> str:
    head = ("", "the machine's own limit", "ft_ckpt", "the best peers")
    lines = [_compared(figures, line) for line in COMPARED]
    return _table(head, [cells for cells in lines if cells])


def _compared(figures: Figures, line: Compared) -> list[str]:
    """Return the cells of a line; none where it was not measured."""
    rows = {row["way"]: row for row in _rows(figures, line.measure, line.size)}
    if line.ours not in rows:
        return []
    row = rows[line.ours]
    sizes = {name: figure_text(name, row[name]) for name in row if name.endswith("bytes")}
    limit = ""
    if line.limit in rows:
        limit = f"{_figures(rows[line.limit], line)} ({_LIMITS[line.limit]})"
    if isinstance(line.peers, tuple):
        peers = [way for way in line.peers if way in rows]
    else:
        peers = _best(rows, line.figures[0])[: line.peers]
    cells = [f"{_figures(rows[way], line)} ({label(line.measure, way)})" for way in peers]
    return [line.words.format_map(sizes), limit, _figures(row, line), ", ".join(cells)]


def _figures(row: Row, line: Compared) -> str:
    return ", ".join(figure_text(figure, row[figure]) for figure in line.figures if figure in row)


def _best(rows: dict[str, Row], figure: str) -> list[str]:
    """Return the peers from best to worst."""
    peers = []
    for way, row in rows.items():
        if figure in row and not is_ours(way) and not way.startswith("limit"):
            peers.append(way)
    return sorted(peers, key=lambda way: rows[way][figure])


def _measured(figures: Figures) -> str:
    """Return the versions, the date and the machine of the figures, as a paragraph."""
    machine = figures["machine"]
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    hardware = f"{machine['cores']} cores ({machine['processor']}), {memory}"
    if machine["gpu"]:
        hardware += f", {machine['gpu']}"
    words = (
        f"Medians of {machine['rounds']} rounds in which ft_ckpt {machine['versions']['ft_ckpt']}, "
        f"the peers and the machine's own limits took turns, measured on {machine['date'][:10]}: "
        f"{hardware}, a disk with {machine['file_system']}."
    )
    return textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False) + "\n"


# Those of docs/figures.md: of each measure the sizes and figures that are columns


@dataclass(frozen=True)
class Column:
    """A column of a table: a figure of a measure at a size."""

    measure: str
    size: str
    figure: str = "seconds"
    head: str = "{size}"


_SAVE = (
    Column("save", "100MB"),
    Column("save", "1GB"),
    Column("save", "2.5GB"),
    Column("save", "2.5GB", "of_limit", "of the disk's own rate"),
    Column("memory", "2.5GB", "peak_bytes", "memory at its peak"),
)
_STALL = (
    Column("stall", "1GB", "seconds", "{size}: stall"),
    Column("stall", "1GB", "lost_seconds", "lost"),
    Column("stall", "2.5GB", "seconds", "{size}: stall"),
    Column("stall", "2.5GB", "lost_seconds", "lost"),
)
_LOAD = (
    Column("cold", "1GB", head="{size}, from the disk"),
    Column("cold", "2.5GB", head="{size}, from the disk"),
    Column("warm", "1GB", head="{size}, from the page cache"),
)
_FIRST = (Column("first", "1GB"), Column("first", "2.5GB"))
_MANY = (
    Column("many", "5.12MB", "seconds", "save until synced"),
    Column("many", "5.12MB", "first_seconds", "open, read one"),
    Column("many", "5.12MB", "load_seconds", "read all"),
)
_RANKS = (
    Column("ranks", "1GB", "seconds", "{size}: seconds"),
    Column("ranks", "1GB", "peak_bytes", "memory of rank 0 at its peak"),
    Column("adapter", "1.2GB", "seconds", "LoRA of rank 8 on 1.2 GB: seconds"),
    Column("adapter", "1.2GB", "peak_bytes", "memory of rank 0"),
)
_FROZEN = (
    Column("frozen", "100MB", "seconds", "{size}: seconds"),
    Column("frozen", "100MB", "new_bytes", "{size}: bytes written"),
    Column("frozen", "2.5GB", "seconds", "{size}: seconds"),
    Column("frozen", "2.5GB", "new_bytes", "{size}: bytes written"),
)
_CONVERT = (Column("convert", "1GB", head="seconds"),)
_WRITERS = (Column("writers", "1GB", head="{size} of weights: seconds"),)


def _table_of(figures: Figures, columns: Sequence[Column], without: Sequence[str] = ()) -> str:
    """Make a table with a line for each way: limits first, then all from best to worst."""
    measured = []  # columns with a value for some way, and their values by way
    for column in columns:
        rows = _rows(figures, column.measure, column.size)
        values = {row["way"]: row[column.figure] for row in rows if column.figure in row}
        if values:
            measured.append((column, values))
    if not measured:
        return _NOT_MEASURED
    ranking = _ranking(columns[0].measure, measured)
    ways: dict[str, None] = {}  # in the order in which they were measured
    for _, values in measured:
        ways |= dict.fromkeys(way for way in values if way not in without)

    def order(way: str) -> tuple[bool, float]:
        return not way.startswith("limit"), ranking.get(way, float("inf"))

    lines = []
    for way in sorted(ways, key=order):
        cells = [_cell(column, values.get(way)) for column, values in measured]
        lines.append([label(columns[0].measure, way), *cells])
    heads = [_head(figures, column) for column, _ in measured]
    return _table(["", *heads], lines)


def _ranking(measure: str, measured: Sequence[tuple[Column, dict[str, float]]]) -> dict[str, float]:
    """Return the values that order the lines, by way.

    They are those of the last column with the measure's own figure.
    """
    figure = MEASURES[measure].figure
    ranking: dict[str, float] = {}
    for column, values in measured:
        if (column.measure, column.figure) == (measure, figure):
            ranking = values
    return ranking or measured[0][1]


def _cell(column: Column, value: float | None) -> str:
    if value is None:
        return ""
    if column.figure.endswith("seconds"):
        return seconds_text(value)
    return figure_text(column.figure, value)


def _head(figures: Figures, column: Column) -> str:
    size = column.size
    for row in _rows(figures, column.measure, column.size):
        if "tensor_bytes" in row:
            size = figure_text("bytes", row["tensor_bytes"])
            break
    return column.head.format(size=size)


def _rows(figures: Figures, measure: str, size: str) -> list[Row]:
    """Return the rows of a measure at a size, without those of ways that failed."""
    rows = []
    for row in figures["rows"]:
        if (row["measure"], row["size"]) == (measure, size) and "error" not in row:
            rows.append(row)
    return rows


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    text = ""
    for cells in (head, rule, *lines):
        padded = [f" {cell} " if cell else " " for cell in cells]
        text += f"|{'|'.join(padded)}|\n"
    return text


TABLES = {
    "readme": _readme,
    "measured": _measured,
    "save": lambda figures: _table_of(figures, _SAVE, without=[limits.COPY]),
    "stall": lambda figures: _table_of(figures, _STALL),
    "load": lambda figures: _table_of(figures, _LOAD),
    "first": lambda figures: _table_of(figures, _FIRST),
    "many": lambda figures: _table_of(figures, _MANY),
    "ranks": lambda figures: _table_of(figures, _RANKS),
    "frozen": lambda figures: _table_of(figures, _FROZEN),
    "convert": lambda figures: _table_of(figures, _CONVERT),
    "writers": lambda figures: _table_of(figures, _WRITERS),
}
