"""Writes the section of saves, which shows how long each took and how long training waited."""

from collections.abc import Iterable

from ft_ckpt.cli.plan import human_time
from ft_ckpt.cli.report.charts import Mark, Series, escaped, line_chart
from ft_ckpt.cli.report.facts import KeptCheckpoint, RunFacts
from ft_ckpt.cli.report.tables import MAX_ROWS, Table, table_text
from ft_ckpt.cli.report.texts import size_unit
from ft_ckpt.schedule import LoggedSave

_SAVES_NOTE = (
    "waited: how long training waited. on disk: from the call until the commit; "
    "&ge;: until the files were written, as only a later save stores the time of the commit."
)


def saves_section(facts: RunFacts) -> Iterable[str]:
    if not facts.saves:
        return
    yield '<h2 id="saves">Saves</h2>'
    waits = [(save.step, save.stall_seconds) for save in facts.saves]
    commits = [(save.step, save.seconds) for save in facts.saves]
    series = [
        _time_series(waits, "training waited"),
        _time_series(commits, "until on the disk"),
    ]
    drawn = [line for line in series if line.marks]
    if drawn:
        chart = line_chart("Time of each save", drawn, unit=" s")
        yield f'<div class="charts">{chart}</div>'

    table = _saves_table(facts)
    is_open = " open" if len(table.rows) <= MAX_ROWS else ""
    yield f"<details{is_open}><summary>All saves</summary>"
    yield table_text(table, "Saves, newest first")
    yield f'<p class="muted">{_SAVES_NOTE}</p></details>'


def _saves_table(facts: RunFacts) -> Table:
    scale, unit = size_unit(save.size_bytes or 0 for save in facts.saves)
    existing = facts.saved_checkpoints
    rows = []
    for save in reversed(facts.saves):
        checkpoint = existing.get(save.step)
        name, size_bytes = "deleted", save.size_bytes
        if checkpoint is not None:
            name, size_bytes = checkpoint.name, checkpoint.size_bytes
        cells = (
            f"step {save.step}",
            escaped(save.reason or "script"),
            _seconds_cell(save.stall_seconds),
            _written_cell(save, checkpoint),
            "" if size_bytes is None else f"{size_bytes / scale:.1f}",
            escaped(name),
        )
        rows.append(cells)

    columns = (
        ("save", ""),
        ("reason", ""),
        ("waited, s", "number"),
        ("on disk, s", "number"),
        (f"size, {unit}", "number"),
        ("checkpoint", "name"),
    )
    return Table(columns, tuple(rows))


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
    """Format the time until the commit of a save.

    Of the newest save only the time until its files were written is known.
    """
    if save.seconds is not None or checkpoint is None or checkpoint.created_at is None:
        return _seconds_cell(save.seconds)
    return f"&ge; {max(0.0, checkpoint.created_at - save.saved_at):,.3f}"
