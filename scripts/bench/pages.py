"""The tables of README.md and docs/figures.md that are generated from the stored figures.

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


def write_pages(found: Figures, checkout: Path) -> None:
    """Write the tables of all pages. Raises KeyError when a page names an unknown table."""
    for page in PAGES:
        path = checkout / page
        text = _PLACE.sub(
            lambda place: place[1] + TABLES[place[2]](found), path.read_text(encoding="utf-8")
        )
        path.write_text(text, encoding="utf-8")


# The README's


@dataclass(frozen=True)
class Compared:
    """A line of the README: figures of ours, the limit, and the best peers by the first of the
    figures.
    """

    words: str  # a template with figures of our row
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


def _readme(found: Figures) -> str:
    head = ("", "the machine's own limit", "ft_ckpt", "the best peers")
    return _table(head, [cells for line in COMPARED if (cells := _compared(found, line))])


def _compared(found: Figures, line: Compared) -> list[str]:
    """The cells of a line; none where it was not measured."""
    ways = {row["way"]: row for row in _rows(found, line.measure, line.size)}
    own = ways.get(line.ours)
    if own is None:
        return []
    words = line.words.format_map(
        {name: figure_text(name, v) for name, v in own.items() if name.endswith("bytes")}
    )
    best: Iterable[str] = (
        line.peers if isinstance(line.peers, tuple) else _best(ways, line.figures[0])[: line.peers]
    )
    peers = [
        f"{_figures(ways[way], line)} ({label(line.measure, way)})" for way in best if way in ways
    ]
    limit = (
        f"{_figures(ways[line.limit], line)} ({_LIMITS[line.limit]})" if line.limit in ways else ""
    )
    return [words, limit, _figures(own, line), ", ".join(peers)]


def _figures(row: Row, line: Compared) -> str:
    return ", ".join(figure_text(figure, row[figure]) for figure in line.figures if figure in row)


def _best(ways: dict[str, Row], figure: str) -> list[str]:
    """The peers from best to worst."""
    peers = [
        way
        for way in ways
        if not is_ours(way) and not way.startswith("limit") and figure in ways[way]
    ]
    return sorted(peers, key=lambda way: ways[way][figure])


def _measured(found: Figures) -> str:
    """The versions, the date and the machine of the figures, as a paragraph."""
    machine = found["machine"]
    where = (
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_bytes'] / 1e9:.0f} GB"
    )
    where += f", {machine['gpu']}" if machine["gpu"] else ""
    words = (
        f"Medians of {machine['rounds']} rounds in which ft_ckpt {machine['versions']['ft_ckpt']}, "
        f"the peers and the machine's own limits took turns, measured on {machine['date'][:10]}: "
        f"{where}, a disk with {machine['file_system']}."
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


def _table_of(found: Figures, columns: Sequence[Column], without: Sequence[str] = ()) -> str:
    """A line for each way that has one of these figures: limits, then ours and the peers from best
    to worst.
    """
    values = [
        {row["way"]: row[column.figure] for row in rows if column.figure in row}
        for column in columns
        for rows in [_rows(found, column.measure, column.size)]
    ]
    by = MEASURES[columns[0].measure].figure
    own = [
        at
        for at, column in enumerate(columns)
        if (column.measure, column.figure) == (columns[0].measure, by)
    ]
    order = max((at for at in own if values[at]), default=0)
    ways = [
        way for way in dict.fromkeys(way for each in values for way in each) if way not in without
    ]
    ways.sort(key=lambda way: (not way.startswith("limit"), values[order].get(way, float("inf"))))
    lines = []
    for way in ways:
        cells = [_cell(column, each.get(way)) for column, each in zip(columns, values, strict=True)]
        lines.append([label(columns[0].measure, way), *cells])
    kept = [at for at in range(len(columns)) if values[at]]
    heads = [_head(found, columns[at]) for at in kept]
    return (
        _table(["", *heads], [[line[0], *(line[at + 1] for at in kept)] for line in lines])
        if lines
        else _NOT_MEASURED
    )


def _cell(column: Column, value: float | None) -> str:
    if value is None:
        return ""
    return (
        seconds_text(value)
        if column.figure.endswith("seconds")
        else figure_text(column.figure, value)
    )


def _head(found: Figures, column: Column) -> str:
    sizes = [
        row["tensor_bytes"]
        for row in _rows(found, column.measure, column.size)
        if "tensor_bytes" in row
    ]
    return column.head.format(size=figure_text("bytes", sizes[0]) if sizes else column.size)


def _rows(found: Figures, measure: str, size: str) -> list[Row]:
    return [
        row
        for row in found["rows"]
        if (row["measure"], row["size"]) == (measure, size) and "error" not in row
    ]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "".join(
        f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n"
        for cells in (head, rule, *lines)
    )


TABLES = {
    "readme": _readme,
    "measured": _measured,
    "save": lambda found: _table_of(found, _SAVE, without=[limits.COPY]),
    "stall": lambda found: _table_of(found, _STALL),
    "load": lambda found: _table_of(found, _LOAD),
    "first": lambda found: _table_of(found, _FIRST),
    "many": lambda found: _table_of(found, _MANY),
    "ranks": lambda found: _table_of(found, _RANKS),
    "frozen": lambda found: _table_of(found, _FROZEN),
    "convert": lambda found: _table_of(found, _CONVERT),
    "writers": lambda found: _table_of(found, _WRITERS),
}
