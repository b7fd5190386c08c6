"""`ft-ckpt report RUN`: a run on one page, for people who look before they read."""

import dataclasses
import html
from collections.abc import Iterable, Sequence
from functools import reduce
from io import StringIO
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ft_ckpt.checkpoint import catalog
from ft_ckpt.cli import views
from ft_ckpt.cli.arguments import run_checkpoints_in, run_folder
from ft_ckpt.cli.options import JsonOption
from ft_ckpt.cli.streams import print_lines
from ft_ckpt.config import human_size
from ft_ckpt.errors import ConfigError, NotACheckpointError
from ft_ckpt.messages import printable
from ft_ckpt.storage.access import FREE, Access
from ft_ckpt.storage.local_disk import local_path
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, source_access

if TYPE_CHECKING:
    from ft_ckpt.cli.report_facts import KeptCheckpoint, RunFacts

_Output = Annotated[str, typer.Option("--output", "-o", help="File to write: .html, or .png for the charts alone.")]
_Drift = Annotated[
    int, typer.Option(min=0, help="Pairs of neighbouring checkpoints to compare, the newest; 0 for none.")
]
_SUFFIXES = (".html", ".png")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #1b1f24 }
h1 { font-size: 1.5em; overflow-wrap: anywhere } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th, td { text-align: left; padding: .3em .8em .3em 0; border-bottom: 1px solid #d8dee4; vertical-align: top }
.number { text-align: right; font-variant-numeric: tabular-nums } .bad { color: #b3261e }
svg { width: 100%; height: auto } .wide { overflow-x: auto }
"""


def report_command(
    context: typer.Context, output: _Output = "report.html", drift: _Drift = 8, as_json: JsonOption = False
) -> None:
    """Write a page about the folder RUN: metrics, times of saves, sizes, what is kept and why, drift by layer."""
    run, target = run_folder(context), local_path(output)
    if target.suffix not in _SUFFIXES:
        raise ConfigError(f"report: --output {output}: expected a name that ends in {' or '.join(_SUFFIXES)}")
    from ft_ckpt.cli.report_facts import gather_facts

    infos = run_checkpoints_in(run)
    if not infos:
        raise NotACheckpointError(catalog.why_no_checkpoint(run.folder))
    facts = gather_facts(run, views.ranked_metrics(infos), comparisons=drift)
    if as_json:
        views.print_json({**dataclasses.asdict(facts), "disk_bytes": facts.disk_bytes})
        return
    goal = Place(LocalStore(target.parent), target.name)
    access = reduce(and_, (source_access(info.place, info.place, goal) for info in infos))
    write_report(facts, target, access.for_file)
    print_lines(f"{run}: {len(facts.checkpoints)} checkpoints, {human_size(facts.disk_bytes)} -> {target}")


def write_report(facts: "RunFacts", target: Path, access: Access = FREE) -> None:
    """Write the page, or its charts as a picture, open to nobody beyond `access`.

    Raises ConfigError without matplotlib, TargetError.
    """
    from ft_ckpt.cli.report_charts import draw_run

    figure = draw_run(facts)
    store = LocalStore(target.absolute().parent, access=access)
    if target.suffix == ".png":
        from io import BytesIO

        picture = BytesIO()
        figure.savefig(picture, format="png", dpi=110)
        store.write(target.name, picture.getvalue())
        return
    drawing = StringIO()
    figure.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    store.write(target.name, _page_text(facts, svg[svg.index("<svg") :]).encode("utf-8", "backslashreplace"))


def _page_text(facts: "RunFacts", charts: str) -> str:
    title = _html_text(f"{Path(facts.run).name}: {len(facts.checkpoints)} checkpoints")
    shared = sum(each.size_bytes for each in facts.checkpoints) - facts.disk_bytes
    room = human_size(facts.disk_bytes) + (f", {human_size(shared)} shared between checkpoints" if shared else "")
    lines = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>',
        f"<h1>{_html_text(facts.run)}</h1>",
        f"<p>{len(facts.checkpoints)} checkpoints on {room}. {len(facts.dropped_steps)} older ones were deleted.</p>",
        *(f"<p>{_html_text(note)}</p>" for note in facts.notes),
        f'<div class="wide">{charts}</div>',
        "<h2>Checkpoints</h2>",
        *_checkpoint_table(facts),
        "<h2>Saves</h2>",
        *_save_table(facts),
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


def _checkpoint_table(facts: "RunFacts") -> Iterable[str]:
    metrics = facts.metrics[:3]
    heads = ("checkpoint", "step", "saved", "size", "of its own", *metrics, "kept because", "whole")
    return _html_table(heads, [_checkpoint_cells(each, metrics) for each in facts.checkpoints])


def _checkpoint_cells(each: "KeptCheckpoint", metrics: Sequence[str]) -> list[str]:
    pinned = [f"pinned: {each.pinned}".rstrip(": ")] if each.pinned is not None else []
    return [
        each.name,
        "" if each.step is None else str(each.step),
        views.human_moment(each.created),
        human_size(each.size_bytes),
        human_size(each.own_bytes),
        *(f"{each.metrics[name]:.5g}" if name in each.metrics else "" for name in metrics),
        ", ".join(dict.fromkeys([*each.kept, *pinned])) or "no rule asks for it",
        "; ".join(each.problems) or "yes",
    ]


def _save_table(facts: "RunFacts") -> Iterable[str]:
    there = {each.step: each.name for each in facts.checkpoints}
    rows = [
        [
            str(each.step),
            each.reason or "script",
            "" if each.stall_seconds is None else f"{each.stall_seconds * 1000:.1f} ms",
            "" if each.seconds is None else f"{each.seconds:.2f} s",
            "" if each.size_bytes is None else human_size(each.size_bytes),
            there.get(each.step, "deleted"),
        ]
        for each in facts.saves
    ]
    return _html_table(("step", "reason", "training waited", "until on the disk", "size", "checkpoint"), rows)


def _html_text(text: str) -> str:
    return html.escape(printable(text))


def _html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f"<th>{_html_text(head)}</th>" for head in heads)
    yield "</tr></thead><tbody>"
    for cells in rows:
        yield "<tr>" + "".join(f"<td>{_html_text(cell)}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"
