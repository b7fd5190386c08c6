"""The section of retention: the rules of the run, and which of them keeps which checkpoint."""

from collections.abc import Iterable
from datetime import datetime, timezone
from itertools import chain

from ft_ckpt.cli.report.charts import Mark, Series, escaped, row_chart
from ft_ckpt.cli.report.facts import KeptCheckpoint, RunFacts
from ft_ckpt.cli.report.texts import MAX_MOMENT, count_text, moment_text
from ft_ckpt.retention import Keep


def retention_section(facts: RunFacts) -> Iterable[str]:
    rows: dict[str, list[Mark]] = {}
    for checkpoint in facts.checkpoints:
        when = checkpoint.created_at
        if when is None or not 0 <= when <= MAX_MOMENT:
            continue
        title = f"{checkpoint.name}, {moment_text(checkpoint.created)} UTC: {checkpoint.fate}"
        for row in _rows_of(facts, checkpoint):
            rows.setdefault(row, []).append(Mark(when, 0.0, title))
    deleted = []
    for save in facts.dropped_saves:
        if 0 <= save.saved_at <= MAX_MOMENT:
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
            phrases.append(f"it is the newest of one of the last {count_text(number, period)}")
    return phrases
