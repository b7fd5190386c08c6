"""The figures as a chart: a few measures at their largest size, with peers and limits.

It is in two transparent SVG files, for pages with a light and with a dark background.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

from ft_ckpt.values import parse_size
from scripts.bench.common import Row
from scripts.bench.labels import figure_text, label
from scripts.bench.show import is_ours

Figures = dict[str, Any]

THEMES = {  # text, muted text, ours, peers, the outline of limits: told apart by lightness, too
    "light": ("#1f2328", "#59636e", "#0969da", "#c4cad1", "#59636e"),
    "dark": ("#f0f6fc", "#9198a1", "#4493f8", "#4a525c", "#9198a1"),
}
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
# pixels: the chart, a panel, its labels, its longest bar
_WIDTH, _PANEL, _LABELS, _BAR = 880, 432, 176, 190
_ROW, _THICK, _HEAD, _GAP, _FOOT = 23, 13, 46, 26, 30
_BEST = 2  # number of best peers in each panel, beside the well-known ones


@dataclass(frozen=True)
class Panel:
    """One measure in the chart."""

    measure: str
    figure: str  # to draw
    title: str
    words: str  # below the title, with a place for the size
    limit: str = ""  # the way that is the machine's limit
    always_shown: Sequence[str] = ()  # peers that are drawn though others are better


PANELS = (
    Panel(
        "save",
        "seconds",
        "Save until it is on the disk",
        "{} of weights; ft_ckpt hashes every byte, too",
        "limit: O_DIRECT write",
        ("torch.save", "torch DCP", "safetensors"),
    ),
    Panel(
        "cold",
        "seconds",
        "Load from the disk",
        "{} of weights, every page touched",
        "limit: O_DIRECT read",
        ("from_pretrained", "safetensors", "torch DCP"),
    ),
    Panel(
        "stall",
        "lost_seconds",
        "Training lost to a save in the background",
        "{} of weights and AdamW moments, until they are on the disk",
        "limit: memory copy",
        ("torch_checkpointing", "torchsnapshot async", "torch DCP async"),
    ),
    Panel(
        "ranks",
        "peak_bytes",
        "Memory that a save takes on rank 0",
        "{} of weights under FSDP2, two ranks",
        always_shown=("get_state_dict + save_pretrained", "torch DCP + consolidation"),
    ),
)
_SHORT = {  # shorter than on a page
    "limit: O_DIRECT write": "the disk itself",
    "limit: O_DIRECT read": "the disk itself",
    "limit: memory copy": "a copy in memory",
    "ours, gather": "ft_ckpt, gathering",
    "safetensors, pread": "safetensors, pread",
    "torch DCP async, staged": "torch DCP, staged",
    "get_state_dict + save_pretrained": "save_pretrained",
}


def draw(figures: Figures, folder: Path) -> None:
    """Write the chart, for each theme, of all panels that `figures` has rows of."""
    folder.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        (folder / f"figures-{theme}.svg").write_text(chart(figures, theme), encoding="utf-8")


def chart(figures: Figures, theme: str) -> str:
    """Draw the chart as SVG."""
    text, muted, *_ = THEMES[theme]
    panels = []
    for panel in PANELS:
        rows = _rows(figures, panel)
        if rows:
            panels.append((panel, rows))
    tops = _tops([len(rows) for _, rows in panels])
    height = tops[-1] + _FOOT
    size = {"width": str(_WIDTH), "height": str(height), "viewBox": f"0 0 {_WIDTH} {height}"}
    look = {"font-family": FONT, "role": "img"}
    svg = Xml.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **look})
    title = Xml.SubElement(svg, "title")
    title.text = "What ft_ckpt costs beside other libraries and the machine's limits"
    for number, (panel, rows) in enumerate(panels):
        x = (number % 2) * (_WIDTH - _PANEL)
        top = tops[number // 2]
        size_text = figure_text("bytes", rows[0]["tensor_bytes"])
        write_text(svg, x, top + 16, panel.title, text, 15, weight="600")
        write_text(svg, x, top + 34, panel.words.format(size_text), muted, 12)
        _bars(svg, x, top + _HEAD, panel, rows, theme)
    _legend(svg, tops[-1] + 8, caption(figures), theme)
    Xml.indent(svg)
    return Xml.tostring(svg, encoding="unicode") + "\n"


def _tops(row_counts: Sequence[int]) -> list[int]:
    """Return the top of each line of two panels, and the end of the last line, in pixels."""
    tops = [0]
    for first in range(0, len(row_counts), 2):
        tallest = max(row_counts[first : first + 2])
        tops.append(tops[-1] + _HEAD + _ROW * tallest + _GAP)
    return tops


def caption(figures: Figures) -> str:
    """Return the machine and the date, in a line."""
    machine = figures["machine"]
    processor = machine["gpu"] or f"{machine['cores']} cores"
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    place = f"{processor}, {memory}, {machine['file_system']}"
    return f"medians of {machine['rounds']} rounds, {place}, {machine['date'][:10]}"


def _rows(figures: Figures, panel: Panel) -> list[Row]:
    """Return the rows of a panel at the largest size measured.

    The limit comes first, then ft_ckpt, then the peers from best to worst.
    """
    measured = [row for row in figures["rows"] if row["measure"] == panel.measure]
    succeeded = [row for row in measured if "error" not in row]
    largest = max((row["size"] for row in succeeded), key=parse_size, default="")
    by_way = {}
    for row in succeeded:
        has_figure = panel.figure in row or row["way"] == panel.limit
        if row["size"] == largest and has_figure:
            by_way[row["way"]] = row
    ours = ["ours", "ours, gather"] if panel.measure == "ranks" else ["ours"]
    ways = [panel.limit, *ours, *_shown_peers(by_way, panel)]
    return [by_way[way] for way in ways if way in by_way]


def _shown_peers(by_way: Mapping[str, Row], panel: Panel) -> list[str]:
    """Return the best peers, and those that the panel always shows, from best to worst."""
    peers = [way for way in by_way if not is_ours(way) and not way.startswith("limit")]
    peers.sort(key=lambda way: _value(by_way[way], panel))
    return peers[:_BEST] + [way for way in peers[_BEST:] if way in panel.always_shown]


def _value(row: Row, panel: Panel) -> float:
    """Return the panel's figure; a copy in memory has only its seconds."""
    return max(0.0, float(row.get(panel.figure, row.get("seconds", 0))))


def _bars(
    svg: Xml.Element, x: float, top: float, panel: Panel, rows: Sequence[Row], theme: str
) -> None:
    text, muted, *_ = THEMES[theme]
    longest = max(_value(row, panel) for row in rows) or 1
    for number, row in enumerate(rows):
        way = row["way"]
        value = _value(row, panel)
        row_top = top + _ROW * number
        base_line = row_top + _ROW / 2 + 4.5
        width = max(1.0, _BAR * value / longest)
        weight = "600" if is_ours(way) else "400"
        value_color = text if is_ours(way) else muted
        name = _bar_label(panel, way)
        write_text(svg, x + _LABELS - 10, base_line, name, text, 13, anchor="end", weight=weight)
        bar = {
            "x": f"{x + _LABELS + 0.5:g}",
            "y": f"{row_top + (_ROW - _THICK) / 2:g}",
            "height": str(_THICK),
            "width": f"{width:.1f}",
            "rx": "1.5",
        }
        Xml.SubElement(svg, "rect", bar | _paint(way, theme))
        figure = figure_text(panel.figure, value)
        figure_x = x + _LABELS + width + 7
        write_text(svg, figure_x, base_line, figure, value_color, 13, weight=weight)


def _bar_label(panel: Panel, way: str) -> str:
    if way in _SHORT:
        return _SHORT[way]
    if way == "ours":
        return "ft_ckpt"
    return label(panel.measure, way).replace("`", "")


def _paint(way: str, theme: str) -> dict[str, str]:
    """Return fill and outline of a bar: a limit is an outline only."""
    _, _, ours, peer, outline = THEMES[theme]
    if way.startswith("limit"):
        return {"fill": "none", "stroke": outline}
    color = ours if is_ours(way) else peer
    return {"fill": color, "stroke": color}


def _legend(svg: Xml.Element, top: float, words: str, theme: str) -> None:
    _, muted, ours, peer, outline = THEMES[theme]
    marks = (
        ("ft_ckpt", ours, ours),
        ("other libraries", peer, peer),
        ("the machine's limit", "none", outline),
    )
    for x, (name, fill, stroke) in zip((0.5, 88.5, 218.5), marks, strict=True):
        place = {"x": f"{x:g}", "y": f"{top + 0.5:g}", "width": "11", "height": "11", "rx": "1.5"}
        Xml.SubElement(svg, "rect", {**place, "fill": fill, "stroke": stroke})
        write_text(svg, x + 17, top + 10.5, name, muted, 12)
    write_text(svg, 375, top + 10.5, "shorter is better", muted, 12)
    write_text(svg, _WIDTH, top + 10.5, words, muted, 12, anchor="end")


def write_text(
    svg: Xml.Element,
    x: float,
    y: float,
    words: str,
    color: str,
    size: int,
    anchor: str = "start",
    weight: str = "400",
) -> None:
    """Add a line of text with its base line at `y`, and with the end `anchor` at `x`, in pixels."""
    place = {"x": f"{x:.1f}", "y": f"{y:g}", "fill": color, "font-size": str(size)}
    look = {"text-anchor": anchor, "font-weight": weight}
    Xml.SubElement(svg, "text", {**place, **look}).text = words
