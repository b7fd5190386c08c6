"""The page of `ft-ckpt report`: the facts about a run as one HTML file, complete in itself."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint.manifest import parse_time
from ft_ckpt.cli.charts import (
    Column,
    Mark,
    Series,
    column_chart,
    escaped,
    line_chart,
    mark_legend,
    row_chart,
    shade_chart,
)
from ft_ckpt.cli.plan import human_time
from ft_ckpt.cli.report_style import PAGE_STYLE
from ft_ckpt.cli.run_facts import Drift, KeptCheckpoint, RunFacts, StoredModel
from ft_ckpt.retention import Keep
from ft_ckpt.schedule import LoggedSave
from ft_ckpt.values import human_size

_SAVES_NOTE = (
    "waited: how long training waited. on disk: from the call until the commit; "
    "&ge;: until the files were written, as only a later save stores the time of the commit."
)
_MAX_METRIC_CHARTS = 6
_MAX_METRIC_COLUMNS = 3
_MAX_ROWS = 20  # of a table; the older ones are folded away
_MAX_LAYERS = 60
_MAX_MOMENT = 253_000_000_000  # unix seconds, near the year 9999


def page_text(facts: RunFacts) -> str:
    """The page, which is complete in itself: it needs neither scripts nor a network."""
    name = facts.run.rstrip("/").rpartition("/")[2] or facts.run
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    sections = (
        *_problems(facts),
        *_facts_list(facts),
        *_metric_charts(facts),
        *_checkpoint_table(facts),
        *_retention(facts),
        *_saves(facts),
        *_sizes(facts),
        *_drift(facts),
    )
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{escaped(name)}: {_count(len(facts.checkpoints), 'checkpoint')}</title>",
        f'<link rel="icon" href="data:,"><style>{PAGE_STYLE}</style></head><body><main>',
        f"<h1>{escaped(name)}</h1>",
        f'<p class="muted">{escaped(facts.run)}</p>' if name != facts.run else "",
        f'<p class="lead">{escaped(_lead(facts))}</p>',
        *sections,
        f"<footer>Written by ft-ckpt report {escaped(__version__)}, {_now_text()}.</footer>",
        "</main></body></html>",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _now_text() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _lead(facts: RunFacts) -> str:
    shared = sum(checkpoint.size_bytes for checkpoint in facts.checkpoints) - facts.disk_bytes
    size = human_size(facts.disk_bytes) + (f", {human_size(shared)} shared" if shared else "")
    sentences = [f"{_count(len(facts.checkpoints), 'checkpoint')}, {size}."]
    dropped = len(facts.dropped_saves)
    if facts.saves:
        saves = _count(len(facts.saves), "logged save")
        verb = "was" if dropped == 1 else "were"
        sentences.append(f"Of {saves}, {dropped or 'none'} {verb} deleted since.")
    newest = facts.checkpoints[-1]
    for checkpoint in reversed(facts.checkpoints):
        if not checkpoint.is_export:
            newest = checkpoint
            break
    sentences.append(f"Newest: {newest.name}, {_moment_text(newest.created)} UTC.")
    for metric in facts.rankings:
        best = facts.best_checkpoint(metric)
        if best is not None:
            sentences.append(f"Best {metric}: {_value_text(best.metrics[metric])}, {best.name}.")
    return " ".join(sentences)


def _moment_text(created: str) -> str:
    moment = parse_time(created)
    return created if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def _value_text(value: float) -> str:
    return f"{value:#.4g}"


def _problems(facts: RunFacts) -> Iterable[str]:
    broken = [
        f"{checkpoint.name}: {'; '.join(checkpoint.problems)}"
        for checkpoint in facts.checkpoints
        if checkpoint.problems
    ]
    for text in (*broken, *facts.notes):
        yield f'<p class="card note">{escaped(text)}</p>'


def _facts_list(facts: RunFacts) -> Iterable[str]:
    yield '<h2 id="run">Run</h2><dl class="facts">'
    for name, text in _run_facts(facts).items():
        yield f"<div><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>"
    yield "</dl>"


def _run_facts(facts: RunFacts) -> dict[str, str]:
    """The facts by name, as text; those that are unknown are left out."""
    training, texts = facts.training, {}
    for model in facts.models:
        kind = "adapter" if model.kind == "adapter" else "model"
        texts[f"{kind} {model.name}".strip()] = _model_text(model)
        if model.base is not None:
            texts[f"base of {model.name}" if model.name else "base"] = model.base
    settings = dict(training.settings)
    whole = settings.pop("parameters", "")
    has_adapters = any(model.kind == "adapter" for model in facts.models)
    if whole.isdecimal() and has_adapters:
        texts["parameters with the base"] = f"{int(whole):,}"
    if training.ranks is not None:
        texts["ranks"] = f"{training.ranks:,}"
        texts["wrapper"] = "none" if training.wrapper in ("", "plain") else training.wrapper
    progress = training.progress
    if progress:
        samples = _count(progress["samples"], "sample")
        texts["progress"] = f"step {progress['step']:,}, epoch {progress['epoch']:,}, {samples}"
    if training.run_seconds is not None:
        restarts = _count(training.failures or 0, "restart")
        duration = f"{human_time(training.run_seconds)}, {restarts} after a failure"
        texts["training time until the newest save"] = duration
    timed = [save for save in facts.saves if save.stall_seconds is not None]
    if timed:
        waited = f"{human_time(facts.waited_seconds)} for {_count(len(timed), 'save')}"
        if training.run_seconds:
            waited += f" ({facts.waited_seconds / training.run_seconds:.2%} of the training time)"
        texts["training waited"] = waited
    if settings:
        texts["settings"] = ", ".join(f"{name} {value}" for name, value in settings.items())
    if training.versions:
        versions = (f"{name} {version}" for name, version in training.versions.items())
        texts["versions"] = ", ".join(versions)
    return texts


def _model_text(model: StoredModel) -> str:
    numbers = f"{model.values:,} parameters, all trained"
    if model.trainable != model.values:  # frozen ones and buffers are stored, too
        numbers = f"{model.trainable:,} parameters trained, {model.values:,} values stored"
    numbers += f", {', '.join(model.dtypes)}"
    return f"{model.class_name}: {numbers}" if model.class_name else numbers


def _metric_charts(facts: RunFacts) -> Iterable[str]:
    names = [name for name in facts.metrics if facts.metric_points(name)]
    if not names:
        return
    yield '<h2 id="metrics">Metrics</h2>'
    left_out = len(names) - _MAX_METRIC_CHARTS
    if left_out > 0:
        more = _count(left_out, "more metric")
        yield f'<p class="muted">{more}: <code>ft-ckpt ls --metrics</code></p>'
    looks = [("mark", "checkpoint exists"), ("mark hollow", "checkpoint deleted")]
    yield mark_legend([*looks, ("ring", "best checkpoint")] if facts.rankings else looks)
    yield '<div class="charts">'
    for name in names[:_MAX_METRIC_CHARTS]:
        yield _metric_chart(facts, name)
    yield "</div>"


def _metric_chart(facts: RunFacts, name: str) -> str:
    existing, best = facts.saved_checkpoints, facts.best_checkpoint(name)
    marks = []
    for step, value in facts.metric_points(name):
        checkpoint = existing.get(step)
        is_deleted = checkpoint is None
        is_best = best is not None and checkpoint is best
        fate = "deleted" if checkpoint is None else checkpoint.name
        if is_best:
            fate += ", the best"
        title = f"{name} {_value_text(value)}, step {step}, {fate}"
        marks.append(Mark(step, value, title, is_hollow=is_deleted, is_ringed=is_best))
    notes = {"min": "lower is better", "max": "higher is better"}
    note = notes.get(facts.rankings.get(name, ""), "")
    return line_chart(name, [Series(name, tuple(marks))], note=note)


@dataclass(frozen=True)
class _Table:
    """A table whose first cells name the rows."""

    columns: tuple[tuple[str, str], ...]  # (head, CSS class)
    rows: tuple[tuple[str, ...], ...]  # cells are HTML


def _table_text(table: _Table, label: str) -> str:
    """The first rows as a table, and the others as one that is folded away."""
    newest, older = table.rows[:_MAX_ROWS], table.rows[_MAX_ROWS:]
    text = _rows_text(table, newest, label)
    if older:
        folded = _rows_text(table, older, f"{label}, older ones")
        text += f"<details><summary>{len(older):,} older</summary>{folded}</details>"
    return text


def _rows_text(table: _Table, rows: Sequence[Sequence[str]], label: str) -> str:
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


def _checkpoint_table(facts: RunFacts) -> Iterable[str]:
    metrics = facts.metrics[:_MAX_METRIC_COLUMNS]
    scale, unit = _size_unit(checkpoint.size_bytes for checkpoint in facts.checkpoints)
    sizes = [f"size, {unit}", f"not shared, {unit}"][: 1 + _is_sharing(facts)]
    rows = []
    for checkpoint in reversed(facts.checkpoints):
        size_cells = [checkpoint.size_bytes, checkpoint.own_bytes][: len(sizes)]
        cells = [
            _name_cell(facts, checkpoint),
            "" if checkpoint.step is None else str(checkpoint.step),
            escaped(_moment_text(checkpoint.created)),
        ]
        cells += [f"{size / scale:.1f}" for size in size_cells]
        cells += [_metric_cell(checkpoint, metric) for metric in metrics]
        cells.append(_fate_cell(checkpoint))
        rows.append(tuple(cells))
    columns = [("checkpoint", ""), ("step", "number"), ("saved, UTC", "date")]
    columns += [(head, "number") for head in (*sizes, *metrics)]
    columns.append(("why it is here", "long"))
    yield '<h2 id="checkpoints">Checkpoints</h2>'
    table = _Table(tuple(columns), tuple(rows))
    yield _table_text(table, "Checkpoints, newest first")


def _is_sharing(facts: RunFacts) -> bool:
    return any(checkpoint.own_bytes != checkpoint.size_bytes for checkpoint in facts.checkpoints)


def _name_cell(facts: RunFacts, checkpoint: KeptCheckpoint) -> str:
    best = [metric for metric in facts.rankings if facts.best_checkpoint(metric) is checkpoint]
    badges = "".join(f'<span class="badge good">best {escaped(metric)}</span>' for metric in best)
    if checkpoint.problems:
        badges += '<span class="badge bad">damaged</span>'
    return f"{escaped(checkpoint.name)}{badges}"


def _metric_cell(checkpoint: KeptCheckpoint, metric: str) -> str:
    return _value_text(checkpoint.metrics[metric]) if metric in checkpoint.metrics else ""


def _fate_cell(checkpoint: KeptCheckpoint) -> str:
    look = ' class="bad"' if "the next save deletes it" in checkpoint.fate else ""
    return f"<span{look}>{escaped(checkpoint.fate)}</span>"


def _size_unit(sizes: Iterable[int]) -> tuple[int, str]:
    """The unit for a column of sizes: bytes in it, and its name."""
    largest = max(sizes, default=0)
    units = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
    for scale, name in units:
        if largest >= scale:
            return scale, name
    return 1, "B"


def _retention(facts: RunFacts) -> Iterable[str]:
    rows: dict[str, list[Mark]] = {}
    for checkpoint in facts.checkpoints:
        when = checkpoint.created_at
        if when is None or not 0 <= when <= _MAX_MOMENT:
            continue
        title = f"{checkpoint.name}, {_moment_text(checkpoint.created)} UTC: {checkpoint.fate}"
        for row in _rows_of(facts, checkpoint):
            rows.setdefault(row, []).append(Mark(when, 0.0, title))
    deleted = []
    for save in facts.dropped_saves:
        if 0 <= save.saved_at <= _MAX_MOMENT:
            moment = datetime.fromtimestamp(save.saved_at, timezone.utc)
            title = f"step {save.step}, {moment:%Y-%m-%d %H:%M:%S} UTC: deleted"
            deleted.append(Mark(save.saved_at, 0.0, title, is_hollow=True))
    series = [Series(row, tuple(marks)) for row, marks in rows.items()]
    if deleted:
        series.append(Series("deleted", tuple(deleted)))
    yield '<h2 id="retention">What is kept</h2>'
    yield f"<p>{escaped(_rules_text(facts.rules))}</p>"
    marks = chain.from_iterable(row.marks for row in series)
    moments = [mark.x for mark in marks]
    if moments:
        chart = row_chart("Checkpoints by the rule that keeps them", series, moments, "time in UTC")
        yield f'<div class="charts">{chart}</div>'


def _rows_of(facts: RunFacts, checkpoint: KeptCheckpoint) -> list[str]:
    if checkpoint.is_export:
        return ["exported weights"]
    if facts.rules is None:
        return ["checkpoints"]
    reasons = [reason.partition(":")[0] for reason in checkpoint.kept]
    return list(dict.fromkeys(reasons)) or ["deleted by the next save"]


def _rules_text(rules: Keep | None) -> str:
    if rules is None:
        return "The rules are unknown without a training state."
    phrases = _rule_phrases(rules)
    if not phrases:
        return "The run has no rules: it keeps all checkpoints."
    text = f"A checkpoint stays if one of these holds: {'; '.join(phrases)}."
    if rules.state is not None:
        state_phrases = "; ".join(_rule_phrases(rules.state))
        text += f" A training state stays if one of these holds: {state_phrases}."
    return text


def _rule_phrases(rules: Keep) -> list[str]:
    phrases = [] if rules.last is None else [f"it is one of the last {rules.last}"]
    if rules.every_steps is not None:
        phrases.append(f"its step is a multiple of {rules.every_steps}")
    for metric, mode, count in rules.rankings:
        rank = "the best" if count == 1 else f"one of the best {count}"
        phrases.append(f"it is {rank} by {metric} ({mode})")
    for period, number in (("hour", rules.hourly), ("day", rules.daily), ("week", rules.weekly)):
        if number is not None:
            phrases.append(f"it is the newest of one of the last {_count(number, period)}")
    return phrases


def _saves(facts: RunFacts) -> Iterable[str]:
    if not facts.saves:
        return
    yield '<h2 id="saves">Saves</h2>'
    waits = [(save.step, save.stall_seconds) for save in facts.saves]
    waited = _time_series(waits, "training waited")
    written = _time_series([(save.step, save.seconds) for save in facts.saves], "until on the disk")
    series = [line for line in (waited, written) if line.marks]
    if series:
        chart = line_chart("Time of each save", series, unit=" s")
        yield f'<div class="charts">{chart}</div>'
    scale, unit = _size_unit(save.size_bytes or 0 for save in facts.saves)
    existing = facts.saved_checkpoints
    rows = []
    for save in reversed(facts.saves):
        checkpoint = existing.get(save.step)
        saved_bytes = save.size_bytes if checkpoint is None else checkpoint.size_bytes
        name = "deleted" if checkpoint is None else checkpoint.name
        rows.append(
            (
                f"step {save.step}",
                escaped(save.reason or "script"),
                _seconds_cell(save.stall_seconds),
                _written_cell(save, checkpoint),
                "" if saved_bytes is None else f"{saved_bytes / scale:.1f}",
                escaped(name),
            )
        )
    numbers = [(head, "number") for head in ("waited, s", "on disk, s", f"size, {unit}")]
    columns = [("save", ""), ("reason", ""), *numbers, ("checkpoint", "name")]
    table = _Table(tuple(columns), tuple(rows))
    yield f"<details{' open' if len(rows) <= _MAX_ROWS else ''}><summary>All saves</summary>"
    yield _table_text(table, "Saves, newest first")
    yield f'<p class="muted">{_SAVES_NOTE}</p></details>'


def _time_series(seconds: Iterable[tuple[int, float | None]], label: str) -> Series:
    marks = []
    for step, value in seconds:
        if value is not None:
            title = f"step {step}: {label} {human_time(value)}"
            marks.append(Mark(step, value, title))
    return Series(label, tuple(marks))


def _seconds_cell(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:,.3f}"


def _written_cell(save: LoggedSave, checkpoint: KeptCheckpoint | None) -> str:
    """The time until the commit; of the newest save, until its files were written."""
    if save.seconds is not None or checkpoint is None or checkpoint.created_at is None:
        return _seconds_cell(save.seconds)
    return f"&ge; {max(0.0, checkpoint.created_at - save.saved_at):,.3f}"


def _sizes(facts: RunFacts) -> Iterable[str]:
    scale, unit = _size_unit(checkpoint.size_bytes for checkpoint in facts.checkpoints)
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


def _drift(facts: RunFacts) -> Iterable[str]:
    if not facts.drift:
        return
    names = _changed_layers(facts.drift)
    steps = {checkpoint.name: checkpoint.step for checkpoint in facts.checkpoints}
    columns = [str(steps.get(drift.after) or drift.after) for drift in facts.drift]
    values = [_layer_changes(facts.drift, name) for name in names]
    note = "by step, since the checkpoint before"
    if not all(map(math.isfinite, chain.from_iterable(values))):
        note += "; orange: the layer was zero before, or is not a number"
    yield '<h2 id="drift">Change of each layer</h2><div class="charts">'
    title = "Norm of the change, relative to the norm of the layer"
    yield shade_chart(title, names, columns, values, note=note)
    yield "</div>"


def _layer_changes(drifts: Sequence[Drift], layer: str) -> list[float]:
    return [drift.layers.get(layer, 0.0) for drift in drifts]


def _changed_layers(drifts: Sequence[Drift]) -> list[str]:
    """The layers that changed most, in the order of their names: "layers.2" before "layers.10"."""
    largest: dict[str, float] = {}
    for drift in drifts:
        for layer, change in drift.layers.items():
            finite = change if math.isfinite(change) else math.inf
            largest[layer] = max(largest.get(layer, 0.0), finite)
    by_change = sorted(largest, key=lambda layer: -largest[layer])
    return sorted(by_change[:_MAX_LAYERS], key=_layer_key)


def _layer_key(name: str) -> list[tuple[int, int, str]]:
    key = []
    for word in name.split("."):
        key.append((0, int(word), "") if word.isdecimal() else (1, 0, word))
    return key
