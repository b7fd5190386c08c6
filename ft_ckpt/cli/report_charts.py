"""The charts of `ft-ckpt report`; matplotlib is imported here, when there is something to draw."""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ft_ckpt.cli.plots import new_figure
from ft_ckpt.cli.report_facts import RunFacts
from ft_ckpt.messages import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Draw = Callable[["Axes", RunFacts], None]
_HEIGHT = 2.2  # of a chart, in inches
_MOST_METRICS = 4
_MOST_LAYERS = 60
_LEAST_CHANGE = 1e-12  # of a layer; what has changed by less, or not at all, is drawn as if it were this


def draw_run(facts: RunFacts) -> "Figure":
    """All charts below each other: metrics, times of the saves, room on the disk, drift by layer.

    Raises ConfigError without matplotlib.
    """
    metrics = [name for name in facts.metrics if facts.metric_points(name)][:_MOST_METRICS]
    charts: list[tuple[float, _Draw]] = [(_HEIGHT, partial(_draw_metric, name)) for name in metrics]
    charts += [(_HEIGHT, _draw_times)] if facts.saves else []
    charts += [(_HEIGHT, _draw_sizes)]
    charts += [(_drift_height(facts), _draw_drift)] if facts.drift else []
    heights = [height for height, _ in charts]
    figure = new_figure((10, sum(heights)))
    grid = figure.add_gridspec(len(charts), 1, height_ratios=heights)
    for number, (_, draw) in enumerate(charts):
        draw(figure.add_subplot(grid[number]), facts)
    return figure


def _draw_metric(name: str, axes: "Axes", facts: RunFacts) -> None:
    points = facts.metric_points(name)
    there = {each.step for each in facts.checkpoints}
    axes.plot(*zip(*points, strict=True), color="tab:blue", linewidth=1.5)
    for is_there, label, fill in ((True, "kept", "tab:blue"), (False, "deleted", "white")):
        some = [point for point in points if (point[0] in there) is is_there]
        if some:
            axes.plot(*zip(*some, strict=True), "o", color="tab:blue", label=label, markerfacecolor=fill)
    axes.set(title=_label_text(name), xlabel="step")
    axes.legend()


def _draw_times(axes: "Axes", facts: RunFacts) -> None:
    done = [(each.step, each.seconds) for each in facts.saves if each.seconds is not None]
    waits = [(each.step, each.stall_seconds) for each in facts.saves if each.stall_seconds is not None]
    for points, style, label in ((done, "s-", "until on the disk"), (waits, "o-", "training waited")):
        axes.plot([step for step, _ in points], [seconds for _, seconds in points], style, label=label)
    axes.set(title="saves", xlabel="step", ylabel="seconds", yscale="log")
    axes.legend()


def _draw_sizes(axes: "Axes", facts: RunFacts) -> None:
    from matplotlib.ticker import EngFormatter

    places, left = range(len(facts.checkpoints)), [0] * len(facts.checkpoints)
    for label, sizes, colour in _size_series(facts):
        axes.barh(places, sizes, left=left, label=label, color=colour)
        left = [one + other for one, other in zip(left, sizes, strict=True)]
    axes.set(title="room on the disk", yticks=list(places), xlim=(0, 1.02 * max(left)))
    axes.set_yticklabels([_label_text(each.name) for each in facts.checkpoints])
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _size_series(facts: RunFacts) -> list[tuple[str, list[int], str]]:
    """What the bars are made of: label, bytes of each checkpoint, colour."""
    shared = [each.size_bytes - each.own_bytes for each in facts.checkpoints]
    state = [min(each.state_bytes, each.own_bytes) for each in facts.checkpoints]
    weights = [each.own_bytes - some for each, some in zip(facts.checkpoints, state, strict=True)]
    series = [("weights", weights, "tab:blue"), ("training state", state, "tab:orange")]
    return [*series, ("shared with\nolder ones", shared, "lightgray")] if any(shared) else series


def _draw_drift(axes: "Axes", facts: RunFacts) -> None:
    from matplotlib.colors import LogNorm

    layers = _drift_layers(facts)
    values = [[_drawn_change(each.layers.get(layer, 0.0)) for each in facts.drift] for layer in layers]
    seen = sorted({value for row in values for value in row if value > _LEAST_CHANGE} or {_LEAST_CHANGE})
    norm = LogNorm(vmin=seen[0] / 2, vmax=seen[-1] * 2, clip=True)
    image = axes.imshow(values, aspect="auto", norm=norm, cmap="viridis")
    axes.set(
        title="change of each layer, relative to its norm", yticks=range(len(layers)), xticks=range(len(facts.drift))
    )
    axes.set_yticklabels(map(_label_text, layers), fontsize=7)
    axes.set_xticklabels([_label_text(each.after) for each in facts.drift], fontsize=8)
    axes.figure.colorbar(image, ax=axes)


def _label_text(name: str) -> str:
    return printable(name).replace("$", r"\$")  # no formula


def _drift_layers(facts: RunFacts) -> list[str]:
    """The layers that changed most, in the order of their names' numbers."""
    most: dict[str, float] = {}
    for each in facts.drift:
        for layer, change in each.layers.items():
            most[layer] = max(most.get(layer, 0.0), _drawn_change(change))
    chosen = sorted(most, key=lambda layer: -most[layer])[:_MOST_LAYERS]
    return sorted(chosen, key=_natural_key)


def _natural_key(name: str) -> list[Any]:
    return [(0, int(step), "") if step.isdigit() else (1, 0, step) for step in name.split(".")]


def _drawn_change(change: float) -> float:
    return max(change, _LEAST_CHANGE) if math.isfinite(change) else 1.0


def _drift_height(facts: RunFacts) -> float:
    return 1.2 + 0.14 * min(_MOST_LAYERS, len({layer for each in facts.drift for layer in each.layers}))
