"""The commands `prune`, `pin`, `unpin` and `verify`."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ft_ckpt.checkpoint import catalog, guards, verify
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.checkpoint.prune import PruneReport, prune_run
from ft_ckpt.checkpoint.verify import verify_listed
from ft_ckpt.cli import views
from ft_ckpt.cli.options import DryRunOption, JsonOption, only_place, print_lines, run_checkpoints_in, run_folder
from ft_ckpt.config import human_size
from ft_ckpt.errors import ConfigError, ManifestError, NotACheckpointError, TargetError, UnreadableError, listing
from ft_ckpt.retention import Best, Keep
from ft_ckpt.storage.place import Place, location_name
from ft_ckpt.storage.store import Store

_Last = Annotated[int | None, typer.Option("--last", "--keep-last", help="Keep the newest so many.")]
_Every = Annotated[int | None, typer.Option(help="Keep each whose step is a multiple of this.")]
_Best = Annotated[list[str] | None, typer.Option(help='Keep the best by a metric, as in "eval_loss:min:2".')]
_Hourly = Annotated[int | None, typer.Option(help="Keep the newest of each of the last so many hours with one.")]
_Daily = Annotated[int | None, typer.Option(help="The same for days.")]
_Weekly = Annotated[int | None, typer.Option(help="The same for weeks.")]
_StateLast = Annotated[int | None, typer.Option(help="Keep the training state of the newest so many only.")]
_StateEvery = Annotated[int | None, typer.Option(help="And of each whose step is a multiple of this.")]
_Run = Annotated[str | None, typer.Option(help='Only of the run with this id; "all" for every run in the folder.')]
_Reason = Annotated[str, typer.Option(help="Shown to whoever asks why it stays.")]


def prune_command(
    context: typer.Context,
    last: _Last = None,
    every: _Every = None,
    best: _Best = None,
    hourly: _Hourly = None,
    daily: _Daily = None,
    weekly: _Weekly = None,
    state_last: _StateLast = None,
    state_every: _StateEvery = None,
    run: _Run = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the checkpoints of the folder RUN that no rule keeps; never the newest, pinned ones, or those in use."""
    root = run_folder(context)
    state = Keep(last=state_last, every_steps=state_every)
    keep = Keep(
        last=last,
        every_steps=every,
        best=[_best_rule_of(text) for text in best or ()],
        hourly=hourly,
        daily=daily,
        weekly=weekly,
        state=state if state.has_rules else None,
    )
    if not keep.has_rules and keep.state is None:
        raise ConfigError("prune: no rule given, so everything stays; give --last, --every, --best, --daily, ...")
    report = prune_run(root, keep, run_id=_run_id(root, run), dry_run=dry_run)
    _show_report(root, report, dry_run=dry_run, as_json=as_json)
    if report.problems:
        raise TargetError(listing(list(report.problems)))


def pin_command(context: typer.Context, reason: _Reason = "") -> None:
    """Keep the checkpoint PATH whatever any rule says, until it is unpinned."""
    path = only_place(context)
    guards.pin(path, reason)
    print_lines(f"{path}: {guards.pin_reason(path)}")


def unpin_command(context: typer.Context) -> None:
    """Let rules decide about the checkpoint PATH again; exit code 1 if it was not pinned."""
    path = only_place(context)
    catalog.read_manifest(path)
    was_pinned = guards.unpin(path)
    print_lines(f"{path}: {'no longer pinned' if was_pinned else 'was not pinned'}")
    sys.exit(0 if was_pinned else 1)


def _best_rule_of(text: str) -> Best:
    found = re.fullmatch(r"(.+?):(min|max)(?::(\d+))?", text)
    if found is None:
        raise ConfigError(f"--best {text}: expected a metric, min or max, and perhaps how many, as in eval_loss:min:2")
    return found[1], found[2], int(found[3] or 1)


def _run_id(root: Place, asked: str | None) -> str | None:
    """The run whose checkpoints are judged, None for each. Raises ConfigError when it has to be said which.

    Checkpoints without a run (weights that were saved by themselves) are no run's, unless there are only such.
    """
    found = Counter(info.manifest.run_id for info in run_checkpoints_in(root) if not info.manifest.export)
    runs = {name: count for name, count in found.items() if name is not None}
    if asked == "all" or (asked is None and not runs):
        return None
    if asked is None and len(runs) == 1:
        return next(iter(runs))
    if asked is None or asked not in runs:
        there = [f"{name} ({count} checkpoints)" for name, count in runs.items()]
        raise ConfigError(f"{root}: holds the runs {listing(there, ', ')}; give --run with one of them, or all")
    return asked


def _show_report(root: Place, report: PruneReport, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        views.print_json(
            {
                "path": str(root),
                "dry_run": dry_run,
                "kept": {str(path): list(why) for path, why in report.kept.items()},
                "dropped": _path_texts(report.dropped),
                "stripped": _path_texts(report.stripped),
                "freed_bytes": report.freed_bytes,
                "left": _path_texts(report.left),
                "problems": list(report.problems),
            }
        )
        return
    rows = [(location_name(path), "drop", "") for path in report.dropped]
    for path, why in report.kept.items():
        rows.append((location_name(path), "keep without state" if path in report.stripped else "keep", ", ".join(why)))
    views.print_table(("checkpoint", "verdict", "why"), rows)
    print_lines(f"{root}: {human_size(report.freed_bytes)} {'would be freed' if dry_run else 'freed'}")
    for file in report.left:
        print_lines(f"  {file}: stays, as no checkpoint listed it")


def _path_texts(paths: Sequence[Path | str]) -> list[str]:
    return list(map(str, paths))


_Fast = Annotated[bool, typer.Option("--fast", help="Names, sizes and headers only; do not read every byte.")]
_UNCHECKED = "; headers and indexes hold together, values were not compared"


def verify_command(context: typer.Context, fast: _Fast = False, as_json: JsonOption = False) -> None:
    """Compare the checkpoint PATH, or all of the run PATH, with their manifests; exit code 1 if they differ.

    A file of a checkpoint is compared with its manifest, too. Of safetensors files and folders without a manifest,
    headers, indexes and configs are checked.
    """
    place = only_place(context)
    if not place.exists:
        raise NotACheckpointError(f"{place}: no such file or folder")
    found = _checkpoints_at(place.folder)
    listed = None if found or fast else verify_listed(place)
    reports = [_report_on(each, deep=not fast) for each in found] or [listed or verify.verify_foreign(place)]
    note = "" if found or listed or not reports[0].ok else _UNCHECKED
    views.show_reports(reports, note, as_json=as_json)
    raise typer.Exit(0 if all(report.ok for report in reports) else 1)


def _checkpoints_at(store: Store) -> list[Store]:
    """The folder itself, if something was committed there, and those directly below it where something was."""
    folders = store.list_folder().folders
    below = sorted(each.name for each in folders if not each.name.startswith(".") and not each.is_link)
    here = [info.store for info in catalog.discover(Place(store))]  # in their order; then those that cannot be read
    stores = [store, *(store.within(name) for name in below)]
    return [*here, *(one for one in stores if one not in here and _may_be_one(one))]


def _may_be_one(store: Store) -> bool:
    try:
        return store.stat(MANIFEST_NAME) is not None
    except UnreadableError:
        return True


def _report_on(store: Store, *, deep: bool) -> catalog.VerifyReport:
    place = Place(store)
    try:
        return catalog.verify(place, deep=deep)
    except (ManifestError, OSError) as error:
        return catalog.VerifyReport(place.location, False, (str(error),), 0, 0)
