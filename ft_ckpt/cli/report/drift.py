"""Writes the section that shows how much each layer changed between checkpoints."""

import math
from collections.abc import Iterable, Sequence

from ft_ckpt.cli.report.charts import shade_chart
from ft_ckpt.cli.report.facts import Drift, RunFacts

_MAX_LAYERS = 60


def drift_section(facts: RunFacts) -> Iterable[str]:
    if not facts.drift:
        return
    names = _changed_layers(facts.drift)
    steps = {checkpoint.name: checkpoint.step for checkpoint in facts.checkpoints}
    columns = [str(steps.get(drift.after) or drift.after) for drift in facts.drift]
    rows = [_layer_changes(facts.drift, name) for name in names]
    note = "by step, since the checkpoint before"
    if not all(_are_finite(row) for row in rows):
        note += "; orange: the layer was zero before, or is not a number"
    yield '<h2 id="drift">Change of each layer</h2><div class="charts">'
    title = "Norm of the change, relative to the norm of the layer"
    yield shade_chart(title, names, columns, rows, note=note)
    yield "</div>"


def _are_finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _layer_changes(drifts: Sequence[Drift], layer: str) -> list[float]:
    return [drift.layers.get(layer, 0.0) for drift in drifts]


def _changed_layers(drifts: Sequence[Drift]) -> list[str]:
    """Return the layers that changed most, sorted by name, with "layers.2" before "layers.10"."""
    largest: dict[str, float] = {}
    for drift in drifts:
        for layer, change in drift.layers.items():
            finite = change if math.isfinite(change) else math.inf
            largest[layer] = max(largest.get(layer, 0.0), finite)
    by_change = sorted(largest, key=lambda layer: -largest[layer])
    return sorted(by_change[:_MAX_LAYERS], key=_layer_key)


def _layer_key(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts the numbers in names by value, and before words."""
    key = []
    for word in name.split("."):
        if word.isdecimal():
            key.append((0, int(word), ""))
        else:
            key.append((1, 0, word))
    return key
