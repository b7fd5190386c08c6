"""Charts as inline SVG: lines, columns, rows of marks, shades. Pure functions from numbers to text.

A chart is as wide as its place on the page: x is in percent and y in pixels, so that text has one
size at every width. Colours are CSS variables of the page. Each mark has a title with its values.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from ft_ckpt.cli.report.chart_axes import (
    Axis,
    is_drawable,
    size_axis,
    step_axis,
    time_axis,
    value_axis,
)
from ft_ckpt.messages import printable

CHART_STYLE = """
figure { margin: 0; min-width: 0 }
figcaption { font-weight: 600; overflow-wrap: anywhere }
figcaption small { font-weight: 400; color: var(--muted) }
.plot { padding: .8rem 1.4rem 1.7rem 3.6rem }
.plot.narrow { padding-left: 1.4rem } .plot.wide { padding-left: 9.6rem }
.plot svg { display: block; width: 100%; overflow: visible }
.plot text { font-size: 12px; fill: var(--muted); font-variant-numeric: tabular-nums }
.plot .end { text-anchor: end } .plot .middle { text-anchor: middle }
.grid { stroke: var(--line); stroke-width: 1 }
.curve { fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke; stroke-linejoin: round }
.series-1 { --series: var(--first) } .series-2 { --series: var(--second) }
.series-3 { --series: var(--third) }
.curve { stroke: var(--series) } .filled { fill: var(--series) }
.mark { fill: var(--series); stroke: var(--series); stroke-width: 1.5 }
.mark.hollow { fill: var(--card) }
.ring { fill: none; stroke: var(--good); stroke-width: 2 } .touch { fill: transparent }
.odd { fill: var(--bad); font-weight: 700 }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 0 }
.legend { color: var(--muted); font-size: .85rem }
.legend svg { width: 12px; height: 12px; margin-right: .4rem; overflow: visible }
"""
_HEIGHT = 180  # of the plot of a chart, in pixels
_ROW = 40  # height of a row of marks
_SHADE = 20  # height of a row of shades
_MAX_DRAWN = 400  # points of one series; beyond it four are drawn of each interval
_MAX_LARGE_MARKS = 60
_CURVE_UNITS = 1000  # width of a curve's own coordinates


@dataclass(frozen=True)
class Mark:
    """One value, which `title` describes.

    With `is_hollow`, the checkpoint of the value was deleted. With `is_ringed`, it is the best.
    """

    x: float
    y: float
    title: str
    is_hollow: bool = False
    is_ringed: bool = False


@dataclass(frozen=True)
class Series:
    """The values of one name, by x."""

    label: str
    marks: tuple[Mark, ...]


def escaped(text: str) -> str:
    """Escape a text for HTML and SVG, in one line, without control characters and secrets."""
    return html.escape(printable(text))


def thinned(marks: Sequence[Mark]) -> list[Mark]:
    """Thin out `marks` in order of x to the first, lowest, highest and last of each interval.

    Few marks stay as they are. Marks with a ring, of checkpoints that exist, and values that are
    not finite stay.
    """
    marks = sorted(marks, key=lambda mark: mark.x)
    if len(marks) <= _MAX_DRAWN:
        return marks
    intervals = _MAX_DRAWN // 4
    width = (marks[-1].x - marks[0].x) / intervals or 1.0
    groups: dict[int, list[Mark]] = {}
    for mark in marks:
        number = min(intervals - 1, int((mark.x - marks[0].x) / width))
        groups.setdefault(number, []).append(mark)
    drawn: list[Mark] = []
    for group in groups.values():
        finite = sorted((mark for mark in group if is_drawable(mark.y)), key=lambda mark: mark.y)
        extremes = {id(mark) for mark in (group[0], group[-1], *finite[:1], *finite[-1:])}
        drawn += [mark for mark in group if id(mark) in extremes or _always_drawn(mark)]
    return drawn


def _always_drawn(mark: Mark) -> bool:
    return mark.is_ringed or not mark.is_hollow or not is_drawable(mark.y)


def line_chart(title: str, series: Sequence[Series], *, unit: str = "", note: str = "") -> str:
    """Draw lines over steps.

    A value that is not finite interrupts its line and is a cross at the top. `unit` follows each
    tick of y; `note` stands below the title.
    """
    drawn = [Series(line.label, tuple(thinned(line.marks))) for line in series]
    marks = list(chain.from_iterable(line.marks for line in drawn))
    x_axis = step_axis(mark.x for mark in marks)
    y_axis = value_axis(mark.y for mark in marks)
    ticks = [(x_axis.position_of(tick), f"{tick:.0f}") for tick in x_axis.ticks]
    body = [_grid(y_axis, unit), _x_ticks(ticks)]
    is_small = len(marks) > _MAX_LARGE_MARKS
    for number, line in enumerate(drawn, 1):
        body.append(f'<g class="series-{number}">')
        body.append(_curve(line.marks, x_axis, y_axis))
        for mark in line.marks:
            y = _height_at(mark, y_axis)
            body.append(_mark_at(mark, x_axis.position_of(mark.x), y, is_small))
        body.append("</g>")
    count = sum(len(line.marks) for line in series)
    notes = [note] if note else []
    if y_axis.is_log:
        notes.append("log scale")
    if len(marks) < count:
        drawn_count = f"{len(marks)} of {count} points"
        notes.append(f"{drawn_count}, with the lowest and highest of each interval")
    legend = _legend([line.label for line in series]) if len(series) > 1 else ""
    return _figure(title, "; ".join(notes), _HEIGHT, body, legend)


def _curve(marks: Sequence[Mark], x_axis: Axis, y_axis: Axis) -> str:
    commands = []
    is_down = False
    for mark in marks:
        if not is_drawable(mark.y):
            is_down = False
            continue
        x, y = x_axis.position_of(mark.x) * _CURVE_UNITS, _height_at(mark, y_axis)
        commands.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}")
        is_down = True
    if not commands:
        return ""
    box = f'viewBox="0 0 {_CURVE_UNITS} {_HEIGHT}" preserveAspectRatio="none"'
    path = f'<path class="curve" d="{" ".join(commands)}"/>'
    return f'<svg {box} width="100%" height="{_HEIGHT}">{path}</svg>'


def _height_at(mark: Mark, y_axis: Axis) -> float:
    return _HEIGHT * (1 - y_axis.position_of(mark.y)) if is_drawable(mark.y) else 0.0


def _mark_at(mark: Mark, share: float, y: float, is_small: bool) -> str:
    place = f'cx="{100 * share:.2f}%" cy="{y:.1f}"'
    title = f"<title>{escaped(mark.title)}</title>"
    if not is_drawable(mark.y):
        cross = f'<text class="odd middle" x="{100 * share:.2f}%" y="{y + 4:.1f}">'
        return f"{cross}&times;{title}</text>"
    ring = f'<circle class="ring" {place} r="8"/>' if mark.is_ringed else ""
    look = "mark hollow" if mark.is_hollow else "mark"
    if is_small and not mark.is_ringed:
        return f'<circle class="{look}" {place} r="2">{title}</circle>'
    touch = f'<circle class="touch" {place} r="11"/>'
    return f'<g>{title}{touch}{ring}<circle class="{look}" {place} r="3.5"/></g>'


@dataclass(frozen=True)
class Column:
    """One column: its name below it, and the sizes of its segments from the bottom."""

    label: str
    title: str
    sizes: tuple[float, ...]


def column_chart(title: str, labels: Sequence[str], columns: Sequence[Column], *, unit: str) -> str:
    """Draw columns of stacked segments, which are named by `labels`."""
    y_axis = size_axis(sum(column.sizes) for column in columns)
    width = 100 / len(columns)
    body = [_grid(y_axis, unit)]
    for number, column in enumerate(columns):
        body.append(f"<g><title>{escaped(column.title)}</title>")
        base = 0.0
        for segment, size in enumerate(column.sizes, 1):
            top = y_axis.position_of(base + size)
            height = _HEIGHT * (top - y_axis.position_of(base))
            place = f'x="{(number + 0.14) * width:.3f}%" width="{0.72 * width:.3f}%"'
            span = f'y="{_HEIGHT * (1 - top):.1f}" height="{height:.1f}"'
            body.append(f'<rect class="filled series-{segment}" {place} {span}/>')
            base += size
        body.append("</g>")
    ticks = _column_ticks([column.label for column in columns], max_ticks=6)
    body.append(_x_ticks(ticks))
    return _figure(title, "", _HEIGHT, body, _legend(labels))


def row_chart(title: str, rows: Sequence[Series], moments: Sequence[float], note: str = "") -> str:
    """Draw a line of marks for each of `rows`, above an axis of `moments`, in unix seconds."""
    axis, tick_text = time_axis(moments)
    height = _ROW * len(rows)
    body = []
    for number, row in enumerate(rows):
        y = _ROW * (number + 0.7)
        body.append(f'<g class="series-1"><line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        body.append(f'<text x="0" y="{y - 14}">{escaped(row.label)}</text>')
        is_small = len(row.marks) > _MAX_LARGE_MARKS
        body += [_mark_at(mark, axis.position_of(mark.x), y, is_small) for mark in row.marks]
        body.append("</g>")
    body.append(
        _x_ticks([(axis.position_of(tick), tick_text(tick)) for tick in axis.ticks], height)
    )
    return _figure(title, note, height, body, "", margin="narrow")


def shade_chart(
    title: str,
    names: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    note: str = "",
) -> str:
    """Draw a table of shades, a row for each of `names`, stronger for larger `values` from 0.

    Values that are not finite have another colour.
    """
    axis = value_axis(value for value in chain.from_iterable(values) if value > 0)
    height, width = _SHADE * len(names), 100 / len(columns)
    body = []
    for number, (name, row) in enumerate(zip(names, values, strict=True)):
        y = _SHADE * number
        label = f"{escaped(_shortened(name))}<title>{escaped(name)}</title>"
        body.append(f'<text class="end" x="-8" y="{y + 14}">{label}</text>')
        for column, value in enumerate(row):
            text = escaped(f"{name}, step {columns[column]}: {value:.3g}")
            x = f'x="{column * width:.3f}%" width="{width:.3f}%"'
            place = f'{x} y="{y}" height="{_SHADE - 2}"'
            body.append(f"<rect {_shade_look(value, axis)} {place}><title>{text}</title></rect>")
    body.append(_x_ticks(_column_ticks(columns, max_ticks=5), height))
    notes = [note] if note else []
    if axis.is_log:
        notes.append("log scale")
    return _figure(title, "; ".join(notes), height, body, "", margin="wide")


def _shade_look(value: float, axis: Axis) -> str:
    if not is_drawable(value):
        return 'class="filled series-2"'
    shade = 0.1 + 0.9 * axis.position_of(value) if value > 0 else 0.0
    return f'class="filled series-1" fill-opacity="{shade:.2f}"'


def _column_ticks(labels: Sequence[str], max_ticks: int) -> list[tuple[float, str]]:
    """Return the middle of each column and its label; of many columns, of some."""
    named = range(0, len(labels), math.ceil(len(labels) / max_ticks))
    return [((number + 0.5) / len(labels), _shortened(labels[number], 9)) for number in named]


def _shortened(name: str, max_length: int = 18) -> str:
    """Return the end of a long name, which has the numbers of layers and steps."""
    return name if len(name) <= max_length else f"…{name[1 - max_length :]}"


def _grid(y_axis: Axis, unit: str) -> str:
    lines = []
    for tick in y_axis.ticks:
        y = _HEIGHT * (1 - y_axis.position_of(tick))
        lines.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="end" x="-8" y="{y + 4:.1f}">{tick:.4g}{unit}</text>')
    return "".join(lines)


def _x_ticks(ticks: Iterable[tuple[float, str]], height: int = _HEIGHT) -> str:
    labels = []
    for share, text in ticks:
        place = f'x="{100 * share:.2f}%" y="{height + 18}"'
        labels.append(f'<text class="middle" {place}>{escaped(text)}</text>')
    return "".join(labels)


def _legend(labels: Sequence[str]) -> str:
    items = []
    for number, label in enumerate(labels, 1):
        square = '<rect class="filled" y="1" width="10" height="10" rx="2"/>'
        sample = f'<svg class="series-{number}" aria-hidden="true">{square}</svg>'
        items.append(f"<span>{sample}{escaped(label)}</span>")
    return "".join(items)


def mark_legend(labels: Sequence[tuple[str, str]]) -> str:
    """Draw a legend of marks: (classes, label)."""
    items = []
    for look, label in labels:
        mark = f'<circle class="{look}" cx="6" cy="7" r="4"/>'
        sample = f'<svg class="series-1" aria-hidden="true">{mark}</svg>'
        items.append(f"<span>{sample}{escaped(label)}</span>")
    return f'<p class="legend">{"".join(items)}</p>'


def _figure(
    title: str,
    note: str,
    height: int,
    body: Sequence[str],
    legend: str,
    *,
    margin: str = "",
) -> str:
    small = f" <small>{escaped(note)}</small>" if note else ""
    lines = [
        f"<figure><figcaption>{escaped(title)}{small}</figcaption>",
        f'<div class="plot {margin}"><svg role="img" height="{height}">',
        f"<title>{escaped(title)}</title>",
        *body,
        "</svg></div>",
    ]
    if legend:
        lines.append(f'<p class="legend">{legend}</p>')
    lines.append("</figure>")
    return "\n".join(lines)
