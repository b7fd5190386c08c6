"""The commands `ls`, `latest`, `best` and `show`."""

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.catalog import (
    CheckpointInfo,
    discover,
    find_best,
    find_latest,
    list_checkpoints,
    run_checkpoints,
)
from ft_ckpt.checkpoint.checks import stored_bytes, verify
from ft_ckpt.checkpoint.leases import pin_reason
from ft_ckpt.checkpoint.manifest import (
    CHECKPOINT,
    MANIFEST_NAME,
    RUN,
    UNREADABLE,
    Contents,
    describe_contents,
    load_manifest,
    why_no_checkpoint,
)
from ft_ckpt.cli import views
from ft_ckpt.cli.describe import rules_of_run
from ft_ckpt.cli.options import add_json, print_lines
from ft_ckpt.errors import CheckpointError, NotACheckpointError
from ft_ckpt.retention import name_metrics, plan_pruning
from ft_ckpt.runs.folder import survey_run
from ft_ckpt.storage.places import Place, open_place


def run_folder(location: str) -> Place:
    """Open the folder of a run.

    Raises NotACheckpointError when it does not exist, or is a file.
    """
    run = open_place(location)
    if not run.is_folder:
        raise NotACheckpointError(why_no_checkpoint(run))
    return run


def run_checkpoints_in(run: Place) -> list[CheckpointInfo]:
    """Return the checkpoints of a run, or [] for an empty folder.

    Raises NotACheckpointError if the folder has other contents.
    """
    infos = run_checkpoints(run)
    if not infos and run.folder.stat(MANIFEST_NAME) is not None:
        raise NotACheckpointError(
            f"{run}: a checkpoint, expected the folder of a run; `ft-ckpt show` shows one"
        )
    if not infos:
        contents = describe_contents(run)
        if contents.kind != "empty":
            raise NotACheckpointError(contents.sentence(run))
    return infos


def followed_run(location: str) -> Place:
    """Open the folder of a run whose checkpoints the caller waits for. It need not exist yet.

    Raises NotACheckpointError if it is a file, or if it is known to be no run.
    """
    run = open_place(location)
    contents = describe_contents(run)
    if contents.kind not in (RUN, "absent", "empty", "other"):
        raise NotACheckpointError(contents.sentence(run))
    return run


def add_ls(parser: ArgumentParser) -> None:
    parser.description = (
        "List the checkpoints of the folder RUN, oldest first. Of any other folder, say what it "
        "contains."
    )
    parser.add_argument("run_folder", metavar="RUN", help="Folder of the run.")
    parser.add_argument(
        "--metrics", action="store_true", help="Show all metrics (default: the two most important)."
    )
    add_json(parser)
    parser.set_defaults(run=_ls)


def _ls(options: Namespace) -> None:
    run = run_folder(options.run_folder)
    infos = discover(run)
    if not infos:
        contents = describe_contents(run)
        views.show_contents(
            contents, run, _rows_of_contents(run, contents), as_json=options.as_json
        )
        return

    reports = {info.path: verify(info.place, deep=False) for info in infos}
    kept = _reasons_to_keep(run, infos)
    best = _best_of_runs(info for info in infos if reports[info.path].ok)
    rows = []
    for info in infos:
        path = info.path
        rows.append(
            views.checkpoint_row(info, reports[path], kept.get(path, ()), best.get(path, ()))
        )

    metrics = views.ranked_metrics(infos)[: None if options.metrics else 2]
    views.show_run(rows, metrics, as_json=options.as_json)


def _rows_of_contents(place: Place, contents: Contents) -> list[dict[str, Any]]:
    """Return a row for each run, checkpoint or model in a folder that is not a run.

    If the folder is a checkpoint or model itself, or if it contains none, it has one row.
    """
    if contents.kind == "empty":
        return []
    if contents.kind in (CHECKPOINT, "weights") or not contents.names:
        return [_row_of(place, contents)]
    inside = [Place(place.folder.within(name)) for name in contents.names]
    return [_row_of(inner, describe_contents(inner)) for inner in inside]


def _row_of(place: Place, contents: Contents) -> dict[str, Any]:
    row: dict[str, Any] = {"path": str(place), "kind": contents.kind, "contents": contents.text}
    row["advice"] = contents.advice
    if contents.kind == RUN:
        infos = run_checkpoints(place)
        newest = infos[-1].manifest if infos else None
        row["checkpoints"] = len(infos)
        row["step"] = None if newest is None else newest.step
        row["created"] = None if newest is None else newest.created
        row["bytes"] = sum(stored_bytes(info.store, info.manifest) for info in infos)
    return row


def _reasons_to_keep(
    run: Place, infos: Sequence[CheckpointInfo]
) -> Mapping[Path | str, tuple[str, ...]]:
    """Return the reasons to keep each checkpoint of a run.

    The reasons come from the rules of the run. If it has no rules, pins are the only reasons.
    """
    rules = rules_of_run(infos)
    if rules is not None and (rules.has_rules or rules.state is not None):
        # If a manifest cannot be read now, `discover` has warned of it. Only pins are shown then.
        with suppress(CheckpointError):
            return plan_pruning(survey_run(run), rules).keep
    reasons = {info.path: pin_reason(info.place) for info in infos}
    return {path: (reason,) for path, reason in reasons.items() if reason is not None}


def _best_of_runs(infos: Iterable[CheckpointInfo]) -> Mapping[Path | str, list[str]]:
    """Return the metrics by which each checkpoint is the best of its run, by path.

    Only the metrics count by which the run ranks its checkpoints.
    """
    best: dict[tuple[str | None, str], CheckpointInfo] = {}
    for info in infos:
        for metric, mode in info.manifest.rankings.items():
            value = info.metrics.get(metric, math.nan)
            if math.isnan(value) or info.manifest.made_from:
                continue
            key = (info.manifest.run_id, metric)
            leader = best.get(key)
            sign = 1 if mode == "min" else -1
            if leader is None or sign * value < sign * leader.metrics[metric]:
                best[key] = info

    named: dict[Path | str, list[str]] = {}
    for (_, metric), info in best.items():
        named.setdefault(info.path, []).append(metric)
    return named


def add_latest(parser: ArgumentParser) -> None:
    parser.description = (
        "Print the path of the newest valid checkpoint in the folder RUN. The exit code is 1 if "
        "there is none, or if the folder does not exist."
    )
    parser.add_argument("run_folder", metavar="RUN", help="Folder of the run.")
    add_json(parser)
    parser.set_defaults(run=_latest)


def _latest(options: Namespace) -> int:
    run = open_place(options.run_folder)
    newest = find_latest(run)
    if newest is None:
        return _say_there_is_none(run)
    views.show_latest(newest, as_json=options.as_json)
    return 0


def _say_there_is_none(run: Place) -> int:
    """Say on standard error why a folder has no valid checkpoint."""
    contents = describe_contents(run)
    text = contents.sentence(run)
    if contents.kind in (CHECKPOINT, RUN):
        text = f"{run}: no valid checkpoint in it; `ft-ckpt verify {run}` says why"
    print_lines(f"ft-ckpt: {text}", file=sys.stderr)
    return 1


def add_best(parser: ArgumentParser) -> None:
    parser.description = (
        "Print the path of the valid checkpoint in the folder RUN with the best value of a metric. "
        "Without --metric, the metric is that of the run's own rules (keep= and every=). The exit "
        "code is 1 if there is no checkpoint."
    )
    parser.add_argument("run_folder", metavar="RUN", help="Folder of the run.")
    parser.add_argument(
        "--metric", help='Metric to compare by, as in "eval_loss" or "eval_loss:min".'
    )
    add_json(parser)
    parser.set_defaults(run=_best)


def _best(options: Namespace) -> int:
    run = open_place(options.run_folder)
    name, _, mode = (options.metric or "").rpartition(":")
    ranking = (name, mode) if mode in ("min", "max") and name else options.metric
    best = find_best(run, ranking)
    if best is not None:
        views.show_latest(best, as_json=options.as_json)
        return 0

    measured: set[str] = set()
    for info in list_checkpoints(run).checkpoints:
        measured.update(info.metrics)
    metric = ranking[0] if isinstance(ranking, tuple) else ranking
    if measured and metric is not None:
        raise NotACheckpointError(
            f"{run}: no valid checkpoint with the metric {name_metrics([metric], measured)}"
        )

    return _say_there_is_none(run)


def add_show(parser: ArgumentParser) -> None:
    parser.description = (
        "Describe the checkpoint, model folder or weight file PATH. The description has class, "
        "parameters, adapter, metrics and tensors. Only headers are read, no tensor."
    )
    parser.add_argument("path", metavar="PATH", help="Checkpoint, model folder or weight file.")
    add_json(parser)
    parser.set_defaults(run=_show)


def _show(options: Namespace) -> None:
    place = open_place(options.path)
    store = place.folder
    if store.stat(MANIFEST_NAME) is None:
        contents = describe_contents(place)
        if contents.kind in UNREADABLE:
            raise NotACheckpointError(contents.sentence(place))
        from ft_ckpt.cli.show_file import show_file

        show_file(place, as_json=options.as_json)
        return
    info = CheckpointInfo(store, load_manifest(store))
    views.show_checkpoint(info, as_json=options.as_json)
