"""The sections of checkpoints: a table of all, and a chart of their sizes."""

from collections.abc import Iterable

from ft_ckpt.cli.report.charts import Column, column_chart, escaped
from ft_ckpt.cli.report.facts import KeptCheckpoint, RunFacts
from ft_ckpt.cli.report.tables import Table, table_text
from ft_ckpt.cli.report.texts import moment_text, size_unit, value_text
from ft_ckpt.values import human_size

_MAX_METRIC_COLUMNS = 3


def checkpoints_section(facts: RunFacts) -> Iterable[str]:
    metrics = facts.metrics[:_MAX_METRIC_COLUMNS]
    scale, unit = size_unit(checkpoint.size_bytes for checkpoint in facts.checkpoints)
    sizes = [f"size, {unit}", f"not shared, {unit}"][: 1 + _is_sharing(facts)]
    rows = []
    for checkpoint in reversed(facts.checkpoints):
        size_cells = [checkpoint.size_bytes, checkpoint.own_bytes][: len(sizes)]
        cells = [
            _name_cell(facts, checkpoint),
            "" if checkpoint.step is None else str(checkpoint.step),
            escaped(moment_text(checkpoint.created)),
        ]
        cells += [f"{size / scale:.1f}" for size in size_cells]
        cells += [_metric_cell(checkpoint, metric) for metric in metrics]
        cells.append(_fate_cell(checkpoint))
        rows.append(tuple(cells))
    columns = [("checkpoint", ""), ("step", "number"), ("saved, UTC", "date")]
    columns += [(head, "number") for head in (*sizes, *metrics)]
    columns.append(("why it is here", "long"))
    yield '<h2 id="checkpoints">Checkpoints</h2>'
    table = Table(tuple(columns), tuple(rows))
    yield table_text(table, "Checkpoints, newest first")


def _is_sharing(facts: RunFacts) -> bool:
    return any(checkpoint.own_bytes != checkpoint.size_bytes for checkpoint in facts.checkpoints)


def _name_cell(facts: RunFacts, checkpoint: KeptCheckpoint) -> str:
    best = [metric for metric in facts.rankings if facts.best_checkpoint(metric) is checkpoint]
    badges = "".join(f'<span class="badge good">best {escaped(metric)}</span>' for metric in best)
    if checkpoint.problems:
        badges += '<span class="badge bad">damaged</span>'
    return f"{escaped(checkpoint.name)}{badges}"


def _metric_cell(checkpoint: KeptCheckpoint, metric: str) -> str:
    return value_text(checkpoint.metrics[metric]) if metric in checkpoint.metrics else ""


def _fate_cell(checkpoint: KeptCheckpoint) -> str:
    look = ' class="bad"' if "the next save deletes it" in checkpoint.fate else ""
    return f"<span{look}>{escaped(checkpoint.fate)}</span>"


def sizes_section(facts: RunFacts) -> Iterable[str]:
    scale, unit = size_unit(checkpoint.size_bytes for checkpoint in facts.checkpoints)
    labels = ["weights", "training state", "shared with older ones"][: 2 + _is_sharing(facts)]
    columns = []
    for checkpoint in facts.checkpoints:
        state = min(checkpoint.state_bytes, checkpoint.own_bytes)
        shared = checkpoint.size_bytes - checkpoint.own_bytes
        sizes = (checkpoint.own_bytes - state, state, shared)[: len(labels)]
        named_sizes = zip(labels, sizes, strict=True)
        parts = [f"{label} {human_size(size)}" for label, size in named_sizes if size]
        title = f"{checkpoint.name}: {', '.join(parts)}"
        has_own_step = checkpoint.step is not None and not checkpoint.is_export
        label = str(checkpoint.step) if has_own_step else checkpoint.name
        columns.append(Column(label, title, tuple(size / scale for size in sizes)))
    yield '<h2 id="sizes">Size on the disk</h2><div class="charts">'
    yield column_chart("By checkpoint", labels, columns, unit=f" {unit}")
    yield "</div>"
