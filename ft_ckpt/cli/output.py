"""Prints tables for people and JSON for programs, and formats values as text.

Rich is slow to import, so it is imported only when a table is printed.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.manifest import parse_time
from ft_ckpt.cli.options import print_lines
from ft_ckpt.messages import printable
from ft_ckpt.schema import values_of

# the heads of columns that are right-aligned
_NUMBER_HEADS = {"step", "size", "checkpoints"}
COLUMN_GAP = 2  # spaces between columns


def terminal_width() -> int:
    """Return the width of the terminal in characters.

    If the output is not a terminal, this is a large number, so that nothing is wrapped.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return 100_000
    from rich.console import Console

    return Console().width


def print_table(
    heads: Sequence[str], rows: Iterable[tuple[str, ...]], *, red: Sequence[int] = ()
) -> None:
    """Print a table that is as wide as its contents, or as the terminal if that is narrower.

    Cells are wrapped if the terminal is too narrow, but those of the first column never are. The
    rows with the numbers `red` are printed in red.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [tuple(map(printable, line)) for line in rows]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, COLUMN_GAP, 0, 0))
    for number, head in enumerate(heads):
        is_number = head in _NUMBER_HEADS
        name = Text(printable(head))  # not str: a name may look like markup
        table.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=number == 0 or is_number,
        )

    for number, line in enumerate(cells):
        table.add_row(*map(Text, line), style="red" if number in red else None)
    first_width = max((len(line[0]) for line in cells), default=0)

    # If the names need more than the terminal has, the terminal itself breaks the lines.
    min_width = first_width + (len(heads) - 1) * (COLUMN_GAP + 4)
    Console(width=max(terminal_width(), min_width)).print(table)


def print_json(value: Any) -> None:
    """Print `value` as indented JSON.

    Dataclasses become objects. Paths and numbers that are not finite become text.
    """
    print_lines(*json.dumps(_json_value(value), indent=2).split("\n"))


def _json_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = values_of(value)
    if isinstance(value, Mapping):
        return {str(key): _json_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    return value


def count_of(number: int, thing: str) -> str:
    """Format a number of things, as in "1 file" or "2 files"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def human_shape(shape: tuple[int, ...]) -> str:
    """Format a shape as "2x3"."""
    return "x".join(map(str, shape)) or "scalar"


def human_moment(created: str) -> str:
    """Format an ISO 8601 time to the second, in UTC.

    A text that is not a time is returned unchanged.
    """
    then = parse_time(created)
    return created if then is None else f"{then:%Y-%m-%d %H:%M:%S} UTC"
