"""Writes the table of all checkpoints, and the chart of their sizes."""

from collections.abc import Iterable, Sequence

from ft_ckpt.cli.report.charts import Column, column_chart, escaped
from ft_ckpt.cli.report.facts import KeptCheckpoint, RunFacts
from ft_ckpt.cli.report.tables import Table, table_text
from ft_ckpt.cli.report.texts import moment_text, size_unit, value_text
from ft_ckpt.values import human_size

_MAX_METRIC_COLUMNS = 3


def checkpoints_section(facts: RunFacts) -> Iterable[str]:
    yield '<h2 id="checkpoints">Checkpoints</h2>'
    yield table_text(_checkpoint_table(facts), "Checkpoints, newest first")


def _checkpoint_table(facts: RunFacts) -> Table:
    metrics = facts.metrics[:_MAX_METRIC_COLUMNS]
    scale, unit = size_unit(checkpoint.size_bytes for checkpoint in facts.checkpoints)
    is_sharing = _is_sharing(facts)
    rows = []
    for checkpoint in reversed(facts.checkpoints):
        cells = [
            _name_cell(facts, checkpoint),
            "" if checkpoint.step is None else str(checkpoint.step),
            escaped(moment_text(checkpoint.created)),
            f"{checkpoint.size_bytes / scale:.1f}",
        ]
        if is_sharing:
            cells.append(f"{checkpoint.own_bytes / scale:.1f}")
        cells += [_metric_cell(checkpoint, metric) for metric in metrics]
        cells.append(_fate_cell(checkpoint))
        rows.append(tuple(cells))

    columns = [("checkpoint", ""), ("step", "number"), ("saved, UTC", "date")]
    columns.append((f"size, {unit}", "number"))
    if is_sharing:
        columns.append((f"not shared, {unit}", "number"))
    columns += [(metric, "number") for metric in metrics]
    columns.append(("why it is here", "long"))
    return Table(tuple(columns), tuple(rows))


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
    labels = ["weights", "training state"]
    if _is_sharing(facts):
        labels.append("shared with older ones")
    columns = []
    for checkpoint in facts.checkpoints:
        sizes = _sizes_by_use(checkpoint)[: len(labels)]
        title = f"{checkpoint.name}: {_sizes_text(labels, sizes)}"
        has_own_step = checkpoint.step is not None and not checkpoint.is_export
        label = str(checkpoint.step) if has_own_step else checkpoint.name
        columns.append(Column(label, title, tuple(size / scale for size in sizes)))

    yield '<h2 id="sizes">Size on the disk</h2><div class="charts">'
    yield column_chart("By checkpoint", labels, columns, unit=f" {unit}")
    yield "</div>"


def _sizes_by_use(checkpoint: KeptCheckpoint) -> tuple[int, int, int]:
    """Return the bytes of weights, of training state, and of files that older checkpoints share."""
    state_bytes = min(checkpoint.state_bytes, checkpoint.own_bytes)
    shared_bytes = checkpoint.size_bytes - checkpoint.own_bytes
    return checkpoint.own_bytes - state_bytes, state_bytes, shared_bytes


def _sizes_text(labels: Sequence[str], sizes: Sequence[int]) -> str:
    texts = []
    for label, size in zip(labels, sizes, strict=True):
        if size:
            texts.append(f"{label} {human_size(size)}")
    return ", ".join(texts)
