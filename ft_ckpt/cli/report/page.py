"""Writes the page of `ft-ckpt report` as one HTML file, from its sections."""

from datetime import datetime, timezone

from ft_ckpt._version import __version__
from ft_ckpt.cli.report.charts import escaped
from ft_ckpt.cli.report.checkpoints import checkpoints_section, sizes_section
from ft_ckpt.cli.report.drift import drift_section
from ft_ckpt.cli.report.facts import RunFacts
from ft_ckpt.cli.report.metrics import metrics_section
from ft_ckpt.cli.report.overview import lead_text, problem_cards, run_section
from ft_ckpt.cli.report.retention import retention_section
from ft_ckpt.cli.report.saves import saves_section
from ft_ckpt.cli.report.style import PAGE_STYLE
from ft_ckpt.cli.report.texts import count_text


def page_text(facts: RunFacts) -> str:
    """Return the page as HTML, which needs neither scripts nor a network."""
    name = facts.run.rstrip("/").rpartition("/")[2] or facts.run
    heading = [f"<h1>{escaped(name)}</h1>"]
    if name != facts.run:
        heading.append(f'<p class="muted">{escaped(facts.run)}</p>')
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    sections = (
        *problem_cards(facts),
        *run_section(facts),
        *metrics_section(facts),
        *checkpoints_section(facts),
        *retention_section(facts),
        *saves_section(facts),
        *sizes_section(facts),
        *drift_section(facts),
    )
    now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{escaped(name)}: {count_text(len(facts.checkpoints), 'checkpoint')}</title>",
        f'<link rel="icon" href="data:,"><style>{PAGE_STYLE}</style></head><body><main>',
        *heading,
        f'<p class="lead">{escaped(lead_text(facts))}</p>',
        *sections,
        f"<footer>Written by ft-ckpt report {escaped(__version__)}, {now}.</footer>",
        "</main></body></html>",
    ]
    return "\n".join(lines) + "\n"
