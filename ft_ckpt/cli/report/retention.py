"""Writes the section about the rules of the run, and which rule keeps which checkpoint."""

from collections.abc import Iterable
from datetime import datetime, timezone

from ft_ckpt.cli.report.charts import Mark, Series, escaped, row_chart
from ft_ckpt.cli.report.facts import KeptCheckpoint, RunFacts
from ft_ckpt.cli.report.texts import count_text, moment_text
from ft_ckpt.retention import Keep

_MAX_MOMENT = 253_000_000_000  # unix seconds, near the year 9999


def retention_section(facts: RunFacts) -> Iterable[str]:
    yield '<h2 id="retention">What is kept</h2>'
    yield f"<p>{escaped(_rules_text(facts.rules))}</p>"
    series = _marks_by_rule(facts)
    deleted = _deleted_marks(facts)
    if deleted:
        series.append(Series("deleted", deleted))
    moments: list[float] = []
    for row in series:
        moments += [mark.x for mark in row.marks]
    if moments:
        chart = row_chart("Checkpoints by the rule that keeps them", series, moments, "time in UTC")
        yield f'<div class="charts">{chart}</div>'


def _marks_by_rule(facts: RunFacts) -> list[Series]:
    rows: dict[str, list[Mark]] = {}
    for checkpoint in facts.checkpoints:
        created_at = checkpoint.created_at
        if created_at is None or not _is_drawable(created_at):
            continue
        title = f"{checkpoint.name}, {moment_text(checkpoint.created)} UTC: {checkpoint.fate}"
        for row in _rows_of(facts, checkpoint):
            rows.setdefault(row, []).append(Mark(created_at, 0.0, title))
    return [Series(row, tuple(marks)) for row, marks in rows.items()]


def _deleted_marks(facts: RunFacts) -> tuple[Mark, ...]:
    marks = []
    for save in facts.dropped_saves:
        if _is_drawable(save.saved_at):
            moment = datetime.fromtimestamp(save.saved_at, timezone.utc)
            title = f"step {save.step}, {moment:%Y-%m-%d %H:%M:%S} UTC: deleted"
            marks.append(Mark(save.saved_at, 0.0, title, is_hollow=True))
    return tuple(marks)


def _is_drawable(moment: float) -> bool:
    return 0 <= moment <= _MAX_MOMENT


def _rows_of(facts: RunFacts, checkpoint: KeptCheckpoint) -> list[str]:
    """Return the labels of the rows that show the checkpoint: a row for each rule that keeps it."""
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
            phrases.append(f"it is the newest of one of the last {count_text(number, period)}")
    return phrases
