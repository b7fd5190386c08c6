"""Writes the section of metrics, with a chart of each metric over the steps."""

from collections.abc import Iterable

from ft_ckpt.cli.report.charts import Mark, Series, line_chart, mark_legend
from ft_ckpt.cli.report.facts import RunFacts
from ft_ckpt.cli.report.texts import count_text, value_text

_MAX_METRIC_CHARTS = 6


def metrics_section(facts: RunFacts) -> Iterable[str]:
    names = [name for name in facts.metrics if facts.metric_points(name)]
    if not names:
        return
    yield '<h2 id="metrics">Metrics</h2>'
    if len(names) > _MAX_METRIC_CHARTS:
        more = count_text(len(names) - _MAX_METRIC_CHARTS, "more metric")
        yield f'<p class="muted">{more}: <code>ft-ckpt ls --metrics</code></p>'

    marks = [("mark", "checkpoint exists"), ("mark hollow", "checkpoint deleted")]
    if facts.rankings:
        marks.append(("ring", "best checkpoint"))
    yield mark_legend(marks)
    yield '<div class="charts">'
    for name in names[:_MAX_METRIC_CHARTS]:
        yield _metric_chart(facts, name)
    yield "</div>"


def _metric_chart(facts: RunFacts, name: str) -> str:
    existing = facts.saved_checkpoints
    best = facts.best_checkpoint(name)
    marks = []
    for step, value in facts.metric_points(name):
        checkpoint = existing.get(step)
        title = f"{name} {value_text(value)}, step {step}"
        if checkpoint is None:
            marks.append(Mark(step, value, f"{title}, deleted", is_hollow=True))
        elif checkpoint is best:
            marks.append(Mark(step, value, f"{title}, {checkpoint.name}, the best", is_ringed=True))
        else:
            marks.append(Mark(step, value, f"{title}, {checkpoint.name}"))

    notes = {"min": "lower is better", "max": "higher is better"}
    note = notes.get(facts.rankings.get(name, ""), "")
    return line_chart(name, [Series(name, tuple(marks))], note=note)
