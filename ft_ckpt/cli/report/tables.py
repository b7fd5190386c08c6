"""Writes tables of the page as HTML."""

from collections.abc import Sequence
from dataclasses import dataclass

from ft_ckpt.cli.report.charts import escaped

# a table shows this many rows, and the rest when the reader unfolds it
MAX_ROWS = 20


@dataclass(frozen=True)
class Table:
    """A table in which the first cell of a row is its name.

    Attributes:
        columns: The head and the CSS class of each column.
        rows: The cells of each row, which are HTML.
    """

    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]


def table_text(table: Table, label: str) -> str:
    """Return the first rows as a table, and all others as a second table that is folded."""
    newest, older = table.rows[:MAX_ROWS], table.rows[MAX_ROWS:]
    text = _rows_text(table, newest, label)
    if older:
        folded = _rows_text(table, older, f"{label}, older ones")
        text += f"<details><summary>{len(older):,} older</summary>{folded}</details>"
    return text


def _rows_text(table: Table, rows: Sequence[Sequence[str]], label: str) -> str:
    region = f'role="region" tabindex="0" aria-label="{escaped(label)}"'
    lines = [f'<div class="card wide" {region}><table role="table">']
    lines.append('<thead role="rowgroup"><tr role="row">')
    for head, look in table.columns:
        column = f'scope="col" role="columnheader" class="{look}"'
        lines.append(f"<th {column}>{escaped(head)}</th>")

    lines.append('</tr></thead><tbody role="rowgroup">')
    for name, *cells in rows:
        lines.append(f'<tr role="row"><th scope="row" role="rowheader">{name}</th>')
        for (head, look), cell in zip(table.columns[1:], cells, strict=True):
            if not cell:
                look += " empty"
            lines.append(f'<td role="cell" class="{look}" data-label="{escaped(head)}">{cell}</td>')
        lines.append("</tr>")

    lines.append("</tbody></table></div>")
    return "".join(lines)
