"""Draws the charts of a report as inline SVG: lines, columns, rows of marks, and shades.

All functions are pure: they turn numbers into text. A chart is as wide as the page allows. Because
x is in percent and y in pixels, the text has the same size at every width. Colours are CSS
variables of the page. Each mark has a title with its values, which browsers show at the pointer.
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
# Heights in pixels.
_PLOT_HEIGHT = 180
_MARK_ROW_HEIGHT = 40
_SHADE_ROW_HEIGHT = 20
# A series with more points is thinned out: four points are drawn of each interval.
_MAX_DRAWN = 400
# A chart or row with more marks has smaller ones.
_MAX_LARGE_MARKS = 60
# A curve has its own coordinates: x goes from 0 to this number.
_CURVE_WIDTH = 1000


@dataclass(frozen=True)
class Mark:
    """One value at (x, y), which `title` describes.

    A hollow mark means that the checkpoint of the value was deleted, a ring that it is the best.
    """

    x: float
    y: float
    title: str
    is_hollow: bool = False
    is_ringed: bool = False


@dataclass(frozen=True)
class Series:
    """Values that are drawn as one line or row, with its label."""

    label: str
    marks: tuple[Mark, ...]


def escaped(text: str) -> str:
    """Escape a text for HTML and SVG.

    The result is one line without control characters and secrets.
    """
    return html.escape(printable(text))


def thinned(marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks that are drawn, in order of x.

    Up to `_MAX_DRAWN` marks are all drawn. Of more, the first, lowest, highest and last mark of
    each interval are drawn. Marks of existing checkpoints, marks with a ring, and values that are
    not finite are always drawn.
    """
    marks = sorted(marks, key=lambda mark: mark.x)
    if len(marks) <= _MAX_DRAWN:
        return marks
    interval_count = _MAX_DRAWN // 4
    width = (marks[-1].x - marks[0].x) / interval_count
    if not width:  # all marks have the same x
        width = 1.0
    groups: dict[int, list[Mark]] = {}
    for mark in marks:
        number = min(interval_count - 1, int((mark.x - marks[0].x) / width))
        groups.setdefault(number, []).append(mark)

    drawn: list[Mark] = []
    for group in groups.values():
        finite = sorted((mark for mark in group if is_drawable(mark.y)), key=lambda mark: mark.y)
        extremes = {id(mark) for mark in (group[0], group[-1], *finite[:1], *finite[-1:])}
        drawn += [mark for mark in group if id(mark) in extremes or _is_always_drawn(mark)]

    return drawn


def _is_always_drawn(mark: Mark) -> bool:
    return mark.is_ringed or not mark.is_hollow or not is_drawable(mark.y)


def line_chart(title: str, series: Sequence[Series], *, unit: str = "", note: str = "") -> str:
    """Draw lines over steps.

    A value that is not finite interrupts its line and is drawn as a cross at the top. `unit` is
    appended to the numbers of the y axis, and `note` to the title.
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

    mark_count = sum(len(line.marks) for line in series)
    notes = [note] if note else []
    if y_axis.is_log:
        notes.append("log scale")
    if len(marks) < mark_count:
        drawn_count = f"{len(marks)} of {mark_count} points"
        notes.append(f"{drawn_count}, with the lowest and highest of each interval")

    legend = _legend([line.label for line in series]) if len(series) > 1 else ""
    return _figure(title, "; ".join(notes), _PLOT_HEIGHT, body, legend)


def _curve(marks: Sequence[Mark], x_axis: Axis, y_axis: Axis) -> str:
    """Draw lines between neighbouring marks, with gaps at values that are not finite."""
    commands = []
    command = "M"  # moves to the point, without a line
    for mark in marks:
        if not is_drawable(mark.y):
            command = "M"
            continue
        x = x_axis.position_of(mark.x) * _CURVE_WIDTH
        y = _height_at(mark, y_axis)
        commands.append(f"{command}{x:.1f} {y:.1f}")
        command = "L"  # draws a line to the next point

    if not commands:
        return ""
    box = f'viewBox="0 0 {_CURVE_WIDTH} {_PLOT_HEIGHT}" preserveAspectRatio="none"'
    path = f'<path class="curve" d="{" ".join(commands)}"/>'
    return f'<svg {box} width="100%" height="{_PLOT_HEIGHT}">{path}</svg>'


def _height_at(mark: Mark, y_axis: Axis) -> float:
    """Return the distance from the top of the plot, in pixels."""
    if not is_drawable(mark.y):
        return 0.0
    return _PLOT_HEIGHT * (1 - y_axis.position_of(mark.y))


def _mark_at(mark: Mark, x_position: float, y: float, is_small: bool) -> str:
    """Draw a mark; `x_position` is a fraction of the width, `y` is in pixels."""
    centre = f'cx="{100 * x_position:.2f}%" cy="{y:.1f}"'
    title = f"<title>{escaped(mark.title)}</title>"
    if not is_drawable(mark.y):
        cross = f'<text class="odd middle" x="{100 * x_position:.2f}%" y="{y + 4:.1f}">'
        return f"{cross}&times;{title}</text>"
    ring = f'<circle class="ring" {centre} r="8"/>' if mark.is_ringed else ""
    look = "mark hollow" if mark.is_hollow else "mark"
    if is_small and not mark.is_ringed:
        return f'<circle class="{look}" {centre} r="2">{title}</circle>'
    # a transparent circle makes the mark easy to reach with a pointer or finger
    touch = f'<circle class="touch" {centre} r="11"/>'
    return f'<g>{title}{touch}{ring}<circle class="{look}" {centre} r="3.5"/></g>'


@dataclass(frozen=True)
class Column:
    """One column of a chart: its label below it, and the sizes of its segments from the bottom."""

    label: str
    title: str
    sizes: tuple[float, ...]


def column_chart(title: str, labels: Sequence[str], columns: Sequence[Column], *, unit: str) -> str:
    """Draw columns of stacked segments; the legend names the segments by `labels`."""
    y_axis = size_axis(sum(column.sizes) for column in columns)
    width = 100 / len(columns)
    body = [_grid(y_axis, unit)]
    for number, column in enumerate(columns):
        body.append(f"<g><title>{escaped(column.title)}</title>")
        base = 0.0
        for segment, size in enumerate(column.sizes, 1):
            top = y_axis.position_of(base + size)
            height = _PLOT_HEIGHT * (top - y_axis.position_of(base))
            horizontal = f'x="{(number + 0.14) * width:.3f}%" width="{0.72 * width:.3f}%"'
            vertical = f'y="{_PLOT_HEIGHT * (1 - top):.1f}" height="{height:.1f}"'
            body.append(f'<rect class="filled series-{segment}" {horizontal} {vertical}/>')
            base += size
        body.append("</g>")

    ticks = _column_ticks([column.label for column in columns], max_ticks=6)
    body.append(_x_ticks(ticks))
    return _figure(title, "", _PLOT_HEIGHT, body, _legend(labels))


def row_chart(title: str, rows: Sequence[Series], moments: Sequence[float], note: str = "") -> str:
    """Draw a row of marks for each of `rows`, above a time axis.

    The axis covers `moments`, which are unix seconds, as x is in the marks.
    """
    axis, tick_text = time_axis(moments)
    height = _MARK_ROW_HEIGHT * len(rows)
    body = []
    for number, row in enumerate(rows):
        y = _MARK_ROW_HEIGHT * (number + 0.7)
        body.append(f'<g class="series-1"><line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        body.append(f'<text x="0" y="{y - 14}">{escaped(row.label)}</text>')
        is_small = len(row.marks) > _MAX_LARGE_MARKS
        body += [_mark_at(mark, axis.position_of(mark.x), y, is_small) for mark in row.marks]
        body.append("</g>")
    ticks = [(axis.position_of(tick), tick_text(tick)) for tick in axis.ticks]
    body.append(_x_ticks(ticks, height))
    return _figure(title, note, height, body, "", margin="narrow")


def shade_chart(
    title: str,
    names: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    note: str = "",
) -> str:
    """Draw a table of shades with a row for each of `names`.

    `values` has a row for each name, with a value of at least 0 for each column. A larger value has
    a stronger shade, and one that is not finite has another colour.
    """
    axis = value_axis(value for value in chain.from_iterable(values) if value > 0)
    height = _SHADE_ROW_HEIGHT * len(names)
    width = 100 / len(columns)  # percent
    body = []
    for number, (name, row) in enumerate(zip(names, values, strict=True)):
        y = _SHADE_ROW_HEIGHT * number
        label = f"{escaped(_shortened(name))}<title>{escaped(name)}</title>"
        body.append(f'<text class="end" x="-8" y="{y + 14}">{label}</text>')
        for column, value in enumerate(row):
            text = escaped(f"{name}, step {columns[column]}: {value:.3g}")
            x = f'x="{column * width:.3f}%" width="{width:.3f}%"'
            box = f'{x} y="{y}" height="{_SHADE_ROW_HEIGHT - 2}"'
            body.append(f"<rect {_shade_look(value, axis)} {box}><title>{text}</title></rect>")

    body.append(_x_ticks(_column_ticks(columns, max_ticks=5), height))
    notes = [note] if note else []
    if axis.is_log:
        notes.append("log scale")
    return _figure(title, "; ".join(notes), height, body, "", margin="wide")


def _shade_look(value: float, axis: Axis) -> str:
    if not is_drawable(value):
        return 'class="filled series-2"'
    shade = 0.0
    if value > 0:
        shade = 0.1 + 0.9 * axis.position_of(value)
    return f'class="filled series-1" fill-opacity="{shade:.2f}"'


def _column_ticks(labels: Sequence[str], max_ticks: int) -> list[tuple[float, str]]:
    """Return the position and the label of the columns that get a tick.

    If there are many columns, every second one gets a tick, or every third one, and so on. The
    position is the middle of the column, as a fraction of the width.
    """
    labelled = range(0, len(labels), math.ceil(len(labels) / max_ticks))
    return [((number + 0.5) / len(labels), _shortened(labels[number], 9)) for number in labelled]


def _shortened(name: str, max_length: int = 18) -> str:
    """Return the end of a long name, because the numbers of layers and steps are there."""
    return name if len(name) <= max_length else f"…{name[1 - max_length :]}"


def _grid(y_axis: Axis, unit: str) -> str:
    lines = []
    for tick in y_axis.ticks:
        y = _PLOT_HEIGHT * (1 - y_axis.position_of(tick))
        lines.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="end" x="-8" y="{y + 4:.1f}">{tick:.4g}{unit}</text>')
    return "".join(lines)


def _x_ticks(ticks: Iterable[tuple[float, str]], height: int = _PLOT_HEIGHT) -> str:
    labels = []
    for position, text in ticks:
        point = f'x="{100 * position:.2f}%" y="{height + 18}"'
        labels.append(f'<text class="middle" {point}>{escaped(text)}</text>')
    return "".join(labels)


def _legend(labels: Sequence[str]) -> str:
    items = []
    for number, label in enumerate(labels, 1):
        square = '<rect class="filled" y="1" width="10" height="10" rx="2"/>'
        sample = f'<svg class="series-{number}" aria-hidden="true">{square}</svg>'
        items.append(f"<span>{sample}{escaped(label)}</span>")
    return "".join(items)


def mark_legend(labels: Sequence[tuple[str, str]]) -> str:
    """Draw a legend of marks; each of `labels` has the CSS classes of the mark and its label."""
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
