"""`ft-ckpt report RUN`: an HTML page about a run, with charts."""

import html
import itertools
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial, reduce
from io import StringIO
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_ckpt.checkpoint import catalog, guards
from ft_ckpt.checkpoint.catalog import CheckpointInfo
from ft_ckpt.checkpoint.checks import file_key
from ft_ckpt.checkpoint.contents import why_no_checkpoint
from ft_ckpt.checkpoint.delete import STATE
from ft_ckpt.checkpoint.open_checkpoint import hold_open
from ft_ckpt.checkpoint.prune import survey_run
from ft_ckpt.cli import views
from ft_ckpt.cli.options import add_json, bounded, print_lines
from ft_ckpt.cli.plan import new_figure
from ft_ckpt.cli.show import run_checkpoints_in, run_folder
from ft_ckpt.config import human_size
from ft_ckpt.errors import CheckpointError, ConfigError, NotACheckpointError, damaged_input
from ft_ckpt.messages import printable
from ft_ckpt.model.convert import open_source
from ft_ckpt.model.diff import by_layer, compare_files
from ft_ckpt.retention import keep_from_record, plan_pruning
from ft_ckpt.schedule import LoggedSave, log_from_json
from ft_ckpt.storage.frozen_view import hold_listed
from ft_ckpt.storage.local_disk import local_path
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, source_access
from ft_ckpt.storage.store import FREE, Access
from ft_ckpt.training.state import read_document

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SUFFIXES = (".html", ".png")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #1b1f24 }
h1 { font-size: 1.5em; overflow-wrap: anywhere } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th, td { text-align: left; padding: .3em .8em .3em 0; border-bottom: 1px solid #d8dee4; vertical-align: top }
.number { text-align: right; font-variant-numeric: tabular-nums } .bad { color: #b3261e }
svg { width: 100%; height: auto } .wide { overflow-x: auto }
"""


def add_report(parser: ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="Folder of the run.")
    parser.add_argument(
        "-o", "--output", default="report.html", metavar="FILE",
        help="File to write: .html, or .png for the charts alone (default: report.html).",
    )  # fmt: skip
    parser.add_argument(
        "--drift", type=bounded(int, 0), default=8, metavar="N",
        help="Newest pairs of neighbouring checkpoints to compare; 0 for none (default: 8).",
    )  # fmt: skip
    add_json(parser)
    parser.set_defaults(run=_report)


def _report(options: Namespace) -> None:
    """Write a page about the folder RUN: metrics, times of saves, sizes, what is kept and why, drift by layer."""
    run, target = run_folder(options.run_folder), local_path(options.output)
    if target.suffix not in _SUFFIXES:
        raise ConfigError(f"report: --output {options.output}: expected a name that ends in {' or '.join(_SUFFIXES)}")

    infos = run_checkpoints_in(run)
    if not infos:
        raise NotACheckpointError(why_no_checkpoint(run))
    facts = gather_facts(run, views.ranked_metrics(infos), comparisons=options.drift)
    if options.as_json:
        views.print_json({**vars(facts), "disk_bytes": facts.disk_bytes})
        return
    goal = Place(LocalStore(target.parent), target.name)
    access = reduce(and_, (source_access(info.place, info.place, goal) for info in infos))
    write_report(facts, target, access.for_file)
    print_lines(f"{run}: {len(facts.checkpoints)} checkpoints, {human_size(facts.disk_bytes)} -> {target}")


def write_report(facts: "RunFacts", target: Path, access: Access = FREE) -> None:
    """Write the page, or its charts as a .png, readable by `access` only.

    Raises ConfigError without matplotlib, and TargetError.
    """
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
    count = f"{len(facts.checkpoints)} checkpoint{'' if len(facts.checkpoints) == 1 else 's'}"
    title = _html_text(f"{Path(facts.run).name}: {count}")
    shared = sum(each.size_bytes for each in facts.checkpoints) - facts.disk_bytes
    sizes = human_size(facts.disk_bytes) + (f", {human_size(shared)} shared between checkpoints" if shared else "")
    deleted = len(facts.dropped_steps)
    older = {0: "None was deleted", 1: "1 older one was deleted"}.get(deleted, f"{deleted} older ones were deleted")
    metrics = facts.metrics[:3]
    heads = ("checkpoint", "step", "saved", "size", "not shared", *metrics, "kept because", "whole")
    lines = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>',
        f"<h1>{_html_text(facts.run)}</h1>",
        f"<p>{count}, {sizes}. {older}.</p>",
        *(f"<p>{_html_text(note)}</p>" for note in facts.notes),
        f'<div class="wide">{charts}</div>',
        "<h2>Checkpoints</h2>",
        *_html_table(heads, [_checkpoint_cells(each, metrics) for each in facts.checkpoints]),
        "<h2>Saves</h2>",
        *_save_table(facts),
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


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


@dataclass(frozen=True)
class KeptCheckpoint:
    """One checkpoint of the run that still exists."""

    name: str
    step: int | None
    created: str  # ISO 8601, UTC
    kind: str
    metrics: Mapping[str, float]
    size_bytes: int
    own_bytes: int  # of files that no older checkpoint of the run has
    state_bytes: int
    kept: tuple[str, ...]  # the rules of the run that keep it
    pinned: str | None  # the reason, possibly ""; None if it is not pinned
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Drift:
    """Relative change of each layer between two checkpoints: norm of the change over the norm before it."""

    before: str
    after: str
    layers: Mapping[str, float]


@dataclass(frozen=True)
class RunFacts:
    """The checkpoints of a run, oldest first, and the log of all saves in its newest training state."""

    run: str
    checkpoints: tuple[KeptCheckpoint, ...]
    saves: tuple[LoggedSave, ...]
    drift: tuple[Drift, ...]
    metrics: tuple[str, ...]  # most important first
    notes: tuple[str, ...]  # missing facts, with the reasons

    @property
    def disk_bytes(self) -> int:
        """The bytes of all files; files that checkpoints share count once."""
        return sum(each.own_bytes for each in self.checkpoints)

    @property
    def dropped_steps(self) -> tuple[int, ...]:
        """The steps of saves whose checkpoints have been deleted."""
        there = {each.step for each in self.checkpoints}
        return tuple(each.step for each in self.saves if each.step not in there)

    def metric_points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric at all saves that had it, including those of deleted checkpoints."""
        found = {each.step: each.metrics[name] for each in self.saves if name in each.metrics}
        found |= {
            each.step: each.metrics[name] for each in self.checkpoints if each.step is not None and name in each.metrics
        }
        return sorted(found.items())


def gather_facts(run: Path | Place, metrics: Sequence[str], *, comparisons: int) -> RunFacts:
    """The facts about the folder `run`; the newest `comparisons` pairs of neighbouring checkpoints are compared."""
    infos = catalog.run_checkpoints(run)
    notes: list[str] = []
    document = _newest_document(infos, notes)
    with damaged_input(f"{run}: what its newest training state says of the run"):
        held = survey_run(run) if infos else []
        kept = plan_pruning(held, keep_from_record(document.get("keep")), document.get("run_id")).keep
        saves = log_from_json((document.get("history") or {}).get("saves", ()))
    checkpoints = tuple(_kept_checkpoints(infos, kept))
    pairs = list(itertools.pairwise(info for info in infos if not info.manifest.made_from))
    drift = [_measured_drift(*pair, notes) for pair in pairs[len(pairs) - min(comparisons, len(pairs)) :]]
    measured = tuple(each for each in drift if each is not None)
    return RunFacts(str(run), checkpoints, saves, measured, tuple(metrics), tuple(notes))


def _newest_document(infos: Sequence[CheckpointInfo], notes: list[str]) -> Mapping[str, Any]:
    for info in reversed(infos):
        if any(part.kind == STATE for part in info.manifest.parts):
            try:
                return read_document(info.store, info.manifest)
            except CheckpointError as error:
                notes.append(str(error))
    notes.append("no checkpoint has a training state, so times of saves and deleted checkpoints are unknown")
    return {}


def _kept_checkpoints(
    infos: Iterable[CheckpointInfo], kept: Mapping[Path | str, tuple[str, ...]]
) -> Iterable[KeptCheckpoint]:
    seen: set[object] = set()
    for info in infos:
        report = catalog.verify(info.place, deep=False)
        sizes = _file_sizes(info)
        new = {key: size for key, (size, _) in sizes.items() if key not in seen}
        seen.update(new)
        yield KeptCheckpoint(
            name=info.name,
            step=info.manifest.step,
            created=info.manifest.created,
            kind=info.manifest.kind,
            metrics=dict(info.metrics),
            size_bytes=sum(size for size, _ in sizes.values()),
            own_bytes=sum(new.values()),
            state_bytes=sum(size for size, is_state in sizes.values() if is_state),
            kept=kept.get(info.path, ()),
            pinned=guards.pin_reason(info.place),
            problems=report.problems,
        )


def _file_sizes(info: CheckpointInfo) -> dict[object, tuple[int, bool]]:
    """(bytes, whether it belongs to the training state) of each file, by a key that is equal for hard links."""
    state = tuple(f"{part.path}/" for part in info.manifest.parts if part.kind == STATE)
    store = hold_listed(info.store)
    found = {file.path: store.stat(file.path) for file in info.manifest.files}
    return {
        file_key(info.store, name): (stored.size_bytes, name.startswith(state))
        for name, stored in found.items()
        if stored is not None
    }


def _measured_drift(before: CheckpointInfo, after: CheckpointInfo, notes: list[str]) -> Drift | None:
    try:
        with ExitStack() as stack:
            places = [stack.enter_context(hold_open(each.place)) for each in (before, after)]
            opened = [stack.enter_context(closing(open_source(place))) for place in places]
            changes = {each.name: each.relative for each in by_layer(compare_files(*opened))}
    except CheckpointError as error:
        notes.append(f"{before.name} and {after.name} were not compared: {error}")
        return None
    return Drift(before.name, after.name, changes)


_Draw = Callable[["Axes", RunFacts], None]
_HEIGHT = 2.2  # of a chart, in inches
_MOST_METRICS = 4
_MOST_LAYERS = 60
_LEAST_CHANGE = 1e-12  # relative change of a layer; smaller changes are drawn as this


def draw_run(facts: RunFacts) -> "Figure":
    """All charts, one below the other: metrics, times of the saves, sizes on the disk, drift by layer.

    Raises ConfigError without matplotlib.
    """
    metrics = [name for name in facts.metrics if facts.metric_points(name)][:_MOST_METRICS]
    charts: list[tuple[float, _Draw]] = [(_HEIGHT, partial(_draw_metric, name)) for name in metrics]
    charts += [(_HEIGHT, _draw_times)] if facts.saves else []
    charts += [(_HEIGHT, _draw_sizes)]
    if facts.drift:
        layers = {layer for each in facts.drift for layer in each.layers}
        charts.append((1.2 + 0.14 * min(_MOST_LAYERS, len(layers)), _draw_drift))
    heights = [height for height, _ in charts]
    figure = new_figure((10, sum(heights)))
    # Subfigures have margins of their own: long labels of one chart do not make the others narrow.
    parts = figure.subfigures(len(charts), 1, height_ratios=heights, squeeze=False)
    for (part,), (_, draw) in zip(parts, charts, strict=True):
        draw(part.subplots(), facts)
    return figure


def _draw_metric(name: str, axes: "Axes", facts: RunFacts) -> None:
    points = facts.metric_points(name)
    there = {each.step for each in facts.checkpoints}
    axes.plot(*zip(*points, strict=True), color="tab:blue", linewidth=1.5)
    for is_there, label, fill in ((True, "kept", "tab:blue"), (False, "deleted", "white")):
        some = [point for point in points if (point[0] in there) is is_there]
        if some:
            axes.plot(*zip(*some, strict=True), "o", color="tab:blue", label=label, markerfacecolor=fill)
    axes.set(title=_label_text(name), xlabel="step")
    _set_step_ticks(axes)
    if len(points) == 1:
        axes.set_yticks([points[0][1]])
    axes.legend()


def _draw_times(axes: "Axes", facts: RunFacts) -> None:
    done = [(each.step, each.seconds) for each in facts.saves if each.seconds is not None]
    waits = [(each.step, each.stall_seconds) for each in facts.saves if each.stall_seconds is not None]
    for points, style, label in ((done, "s-", "until on the disk"), (waits, "o-", "training waited")):
        axes.plot([step for step, _ in points], [seconds for _, seconds in points], style, label=label)
    axes.set(title="saves", xlabel="step", ylabel="seconds", yscale="log")
    _set_step_ticks(axes)
    axes.legend()


def _set_step_ticks(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def _draw_sizes(axes: "Axes", facts: RunFacts) -> None:
    from matplotlib.ticker import EngFormatter

    places, left = range(len(facts.checkpoints)), [0] * len(facts.checkpoints)
    for label, sizes, colour in _size_series(facts):
        axes.barh(places, sizes, left=left, label=label, color=colour)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_title("size on the disk", loc="left")
    axes.set(yticks=list(places), xlim=(0, 1.02 * max(left)))
    axes.set_yticklabels([_label_text(each.name) for each in facts.checkpoints])
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.invert_yaxis()
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)


def _size_series(facts: RunFacts) -> list[tuple[str, list[int], str]]:
    """The segments of the bars: label, bytes of each checkpoint, colour."""
    shared = [each.size_bytes - each.own_bytes for each in facts.checkpoints]
    state = [min(each.state_bytes, each.own_bytes) for each in facts.checkpoints]
    weights = [each.own_bytes - size for each, size in zip(facts.checkpoints, state, strict=True)]
    series = [("weights", weights, "tab:blue"), ("training state", state, "tab:orange")]
    return [*series, ("shared with older ones", shared, "lightgray")] if any(shared) else series


def _draw_drift(axes: "Axes", facts: RunFacts) -> None:
    from matplotlib.colors import LogNorm

    layers = _drift_layers(facts)
    values = [[_drawn_change(each.layers.get(layer, 0.0)) for each in facts.drift] for layer in layers]
    seen = sorted({value for row in values for value in row if value > _LEAST_CHANGE} or {_LEAST_CHANGE})
    norm = LogNorm(vmin=seen[0] / 2, vmax=seen[-1] * 2, clip=True)
    image = axes.imshow(values, aspect="auto", norm=norm, cmap="viridis")
    axes.set(
        title="change of each layer, relative to its norm", yticks=range(len(layers)), xticks=range(len(facts.drift))
    )
    axes.set_yticklabels(map(_label_text, layers), fontsize=7)
    axes.set_xticklabels([_label_text(each.after) for each in facts.drift], fontsize=8)
    axes.figure.colorbar(image, ax=axes)


def _label_text(name: str) -> str:
    return printable(name).replace("$", r"\$")  # not a formula


def _drift_layers(facts: RunFacts) -> list[str]:
    most: dict[str, float] = {}
    for each in facts.drift:
        for layer, change in each.layers.items():
            most[layer] = max(most.get(layer, 0.0), _drawn_change(change))
    chosen = sorted(most, key=lambda layer: -most[layer])[:_MOST_LAYERS]
    # "layers.2" before "layers.10"
    return sorted(chosen, key=lambda name: [(0, int(s), "") if s.isdigit() else (1, 0, s) for s in name.split(".")])


def _drawn_change(change: float) -> float:
    return max(change, _LEAST_CHANGE) if math.isfinite(change) else 1.0
