"""The section of metrics: a chart of each over the steps."""

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
    left_out = len(names) - _MAX_METRIC_CHARTS
    if left_out > 0:
        more = count_text(left_out, "more metric")
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
        title = f"{name} {value_text(value)}, step {step}, {fate}"
        marks.append(Mark(step, value, title, is_hollow=is_deleted, is_ringed=is_best))
    notes = {"min": "lower is better", "max": "higher is better"}
    note = notes.get(facts.rankings.get(name, ""), "")
    return line_chart(name, [Series(name, tuple(marks))], note=note)
