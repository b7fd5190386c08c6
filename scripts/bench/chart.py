"""The figures as a chart: a few measures at their largest size, ours beside the machine's limit and
the peers.

Two transparent SVG files, for pages with a light and with a dark background.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

from ft_ckpt.config import parse_size
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
    """One measure: its figure to draw, the limit among its rows, and peers that are drawn though
    others are better.
    """

    measure: str
    figure: str
    title: str
    words: str  # below the title, with a place for the size
    limit: str = ""
    known: Sequence[str] = ()


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
        known=("get_state_dict + save_pretrained", "torch DCP + consolidation"),
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


def draw(found: Figures, folder: Path) -> None:
    """Write the chart, for each theme, of all panels that `found` has rows of."""
    folder.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        (folder / f"figures-{theme}.svg").write_text(chart(found, theme), encoding="utf-8")


def chart(found: Figures, theme: str) -> str:
    """The chart as SVG."""
    text, muted, *_ = THEMES[theme]
    panels = [(panel, rows) for panel in PANELS if (rows := _rows(found, panel))]
    lines = [
        max((len(rows) for _, rows in panels[at : at + 2]), default=0)
        for at in range(0, len(panels), 2)
    ]
    tops = [
        sum(_HEAD + _ROW * count + _GAP for count in lines[:at]) for at in range(len(lines) + 1)
    ]
    height = tops[-1] + _FOOT
    size = {"width": str(_WIDTH), "height": str(height), "viewBox": f"0 0 {_WIDTH} {height}"}
    svg = Xml.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", **size, "font-family": FONT, "role": "img"}
    )
    Xml.SubElement(
        svg, "title"
    ).text = "What ft_ckpt costs beside other libraries and the machine's limits"
    for at, (panel, rows) in enumerate(panels):
        left, top = (at % 2) * (_WIDTH - _PANEL), tops[at // 2]
        write_text(svg, left, top + 16, panel.title, text, 15, weight="600")
        write_text(
            svg,
            left,
            top + 34,
            panel.words.format(figure_text("bytes", rows[0]["tensor_bytes"])),
            muted,
            12,
        )
        _bars(svg, left, top + _HEAD, panel, rows, theme)
    _legend(svg, tops[-1] + 8, caption(found), theme)
    Xml.indent(svg)
    return Xml.tostring(svg, encoding="unicode") + "\n"


def caption(found: Figures) -> str:
    """The machine and the date, in a line."""
    machine = found["machine"]
    processor = machine["gpu"] or f"{machine['cores']} cores"
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    place = f"{processor}, {memory}, {machine['file_system']}"
    return f"medians of {machine['rounds']} rounds, {place}, {machine['date'][:10]}"


def _rows(found: Figures, panel: Panel) -> list[Row]:
    """The rows of a panel: the limit, ours, and the peers from best to worst; at the largest size
    measured.
    """
    rows = [row for row in found["rows"] if row["measure"] == panel.measure and "error" not in row]
    largest = max((row["size"] for row in rows), key=parse_size, default="")
    rows = [
        row
        for row in rows
        if row["size"] == largest and (panel.figure in row or row["way"] == panel.limit)
    ]
    by_way = {row["way"]: row for row in rows}
    peers = [way for way in by_way if not is_ours(way) and not way.startswith("limit")]
    peers.sort(key=lambda way: _value(by_way[way], panel))
    peers = [way for at, way in enumerate(peers) if at < _BEST or way in panel.known]
    ours = ["ours", "ours, gather"] if panel.measure == "ranks" else ["ours"]
    return [by_way[way] for way in (panel.limit, *ours, *peers) if way in by_way]


def _value(row: Row, panel: Panel) -> float:
    """The panel's figure; a copy in memory has only its seconds."""
    return max(0.0, float(row.get(panel.figure, row.get("seconds", 0))))


def _bars(
    svg: Xml.Element, left: float, top: float, panel: Panel, rows: Sequence[Row], theme: str
) -> None:
    text, muted, ours, peer, outline = THEMES[theme]
    most = max(_value(row, panel) for row in rows) or 1
    for at, row in enumerate(rows):
        way, value, middle = row["way"], _value(row, panel), top + _ROW * at + _ROW / 2
        color = ours if is_ours(way) else peer
        paint = (
            {"fill": "none", "stroke": outline}
            if way.startswith("limit")
            else {"fill": color, "stroke": color}
        )
        wide, weight = max(1.0, _BAR * value / most), "600" if is_ours(way) else "400"
        named = _SHORT.get(way) or (
            "ft_ckpt" if way == "ours" else label(panel.measure, way).replace("`", "")
        )
        write_text(
            svg, left + _LABELS - 10, middle + 4.5, named, text, 13, anchor="end", weight=weight
        )
        corner = {
            "x": f"{left + _LABELS + 0.5:g}",
            "y": f"{middle - _THICK / 2:g}",
            "height": str(_THICK),
        }
        Xml.SubElement(svg, "rect", {**corner, "width": f"{wide:.1f}", "rx": "1.5", **paint})
        figure = figure_text(panel.figure, value)
        shade = text if is_ours(way) else muted
        write_text(svg, left + _LABELS + wide + 7, middle + 4.5, figure, shade, 13, weight=weight)


def _legend(svg: Xml.Element, top: float, words: str, theme: str) -> None:
    _, muted, ours, peer, outline = THEMES[theme]
    marks = (
        ("ft_ckpt", ours, ours),
        ("other libraries", peer, peer),
        ("the machine's limit", "none", outline),
    )
    for left, (name, fill, stroke) in zip((0.5, 88.5, 218.5), marks, strict=True):
        square = {
            "x": f"{left:g}",
            "y": f"{top + 0.5:g}",
            "width": "11",
            "height": "11",
            "rx": "1.5",
        }
        Xml.SubElement(svg, "rect", {**square, "fill": fill, "stroke": stroke})
        write_text(svg, left + 17, top + 10.5, name, muted, 12)
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
    """Add a line of text; `anchor` says which end of it is at `x`, and `y` is its base line, in
    pixels.
    """
    place = {"x": f"{x:.1f}", "y": f"{y:g}", "fill": color, "font-size": str(size)}
    look = {"text-anchor": anchor, "font-weight": weight}
    Xml.SubElement(svg, "text", {**place, **look}).text = words
