"""The figures as a chart: how cost grows with size, and ours beside the peers at the largest size."""

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ft_ckpt.config import parse_size
from scripts.bench.measures import MEASURES
from scripts.bench.show import is_ours

_OURS, _PEER, _LIMIT = "#1f6fb4", "#b0b0b0", "#d98a1f"
_LINES = ("save", "stall", "cold", "warm")  # figure over size
_BARS = {  # measure -> (the figure, what it is)
    "save": ("seconds", "seconds until durable"),
    "stall": ("lost_seconds", "seconds of training lost to a save"),
    "memory": ("peak_bytes", "MB above the state dict during a save"),
    "cold": ("seconds", "seconds to load from the disk"),
    "ranks": ("seconds", "seconds for a save under FSDP2"),
    "adapter": ("seconds", "seconds for an adapter under FSDP2"),
}


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the chart of all measures that `found` has rows of."""
    mpl.use("Agg")
    rows = [row for row in found["rows"] if "error" not in row]
    measured = {row["measure"] for row in rows}
    panels = [(_lines, name) for name in _LINES if name in measured] + [(_bars, n) for n in _BARS if n in measured]
    if not panels:
        return
    columns = min(4, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.4 * height), layout="constrained")
    axes = list(figure.subplots(height, columns, squeeze=False).flat)
    for place, (panel, name) in zip(axes, panels, strict=False):
        panel(place, name, [row for row in rows if row["measure"] == name])
    for place in axes[len(panels) :]:
        place.set_axis_off()
    figure.suptitle(_caption(found["machine"]), fontsize=10)
    figure.savefig(path, dpi=110)


def _lines(axes: Axes, name: str, rows: list[dict[str, Any]]) -> None:
    """Seconds over bytes, on logarithmic scales: ours, the limit, and the peers behind them."""
    ends = {}
    for way in dict.fromkeys(row["way"] for row in rows):
        points = sorted((row["tensor_bytes"] / 1e6, row["seconds"]) for row in rows if row["way"] == way)
        first = 1 if _color(way) == _PEER else 2
        axes.plot(
            *zip(*points, strict=True), color=_color(way), marker="o", markersize=3, linewidth=first, zorder=first
        )
        ends[way] = points[-1]
    axes.set(xscale="log", yscale="log", xlabel="MB", ylabel="seconds")
    axes.set_title(MEASURES[name].title, fontsize=9)
    low, high = axes.get_ylim()
    wanted = {way: math.log(value / low) / math.log(high / low) for way, (_, value) in ends.items()}
    for way, height in _apart(wanted).items():
        axes.text(1.02, height, way, transform=axes.transAxes, fontsize=6.5, va="center", color=_text_color(way))


def _apart(wanted: dict[str, float], gap: float = 0.045) -> dict[str, float]:
    """The heights of labels, as shares of the axis, so that none lies on another and none above it."""
    found, free = {}, 0.0
    for way, height in sorted(wanted.items(), key=lambda item: item[1]):
        found[way] = max(height, free)
        free = found[way] + gap
    free = 1.0
    for way in reversed(found):
        found[way] = min(found[way], free)
        free = found[way] - gap
    return found


def _bars(axes: Axes, name: str, rows: list[dict[str, Any]]) -> None:
    """One figure of each way, at the largest size."""
    figure, title = _BARS[name]
    largest = max((row["size"] for row in rows), key=parse_size)
    scale = 1e6 if figure.endswith("bytes") else 1
    bars = sorted(
        ((row[figure] / scale, row["way"]) for row in rows if row["size"] == largest and figure in row), reverse=True
    )
    drawn = axes.barh([way for _, way in bars], [value for value, _ in bars], color=[_color(way) for _, way in bars])
    axes.bar_label(drawn, fmt="%.3g", fontsize=7, padding=2)
    axes.tick_params(labelsize=7)
    axes.margins(x=0.15)
    axes.set_title(f"{title}, {largest}", fontsize=9)


def _color(way: str) -> str:
    if way.startswith("limit"):
        return _LIMIT
    return _OURS if is_ours(way) else _PEER


def _text_color(way: str) -> str:
    color = _color(way)
    return "#606060" if color == _PEER else color


def _caption(machine: dict[str, Any]) -> str:
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    parts = [f"{machine['cores']} cores ({machine['processor']})", memory, machine["file_system"], machine["gpu"]]
    return ", ".join(part for part in (*parts, machine["date"][:10]) if part)
