"""The commands `prune`, `pin` and `unpin`."""

import re
from argparse import ArgumentParser, Namespace
from collections import Counter

from ft_ckpt.checkpoint.leases import pin, pin_reason, unpin
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, why_no_checkpoint
from ft_ckpt.cli import output
from ft_ckpt.cli.options import add_dry_run, add_json, bounded, print_lines
from ft_ckpt.cli.show import run_checkpoints_in, run_folder
from ft_ckpt.errors import ConfigError, NotACheckpointError, TargetError, listing
from ft_ckpt.retention import Best, Keep
from ft_ckpt.runs.folder import PruneReport, prune_run
from ft_ckpt.storage.places import Place, location_name, open_place
from ft_ckpt.values import human_size


def add_prune(parser: ArgumentParser) -> None:
    parser.description = (
        "Delete the checkpoints in the folder RUN that no rule keeps. The newest valid checkpoint, "
        "pinned ones and those in use always stay."
    )
    parser.add_argument("run_folder", metavar="RUN", help="Folder of the run.")
    rules = {
        ("--last", "--keep-last"): "Keep the newest N checkpoints.",
        ("--every",): "Keep every checkpoint whose step is a multiple of N.",
        ("--hourly",): "Keep the newest of each of the last N hours with a checkpoint.",
        ("--daily",): "Keep the newest of each of the last N days with a checkpoint.",
        ("--weekly",): "Keep the newest of each of the last N weeks with a checkpoint.",
        ("--state-last",): "Keep the training state of the newest N; delete it elsewhere.",
        ("--state-every",): "Also keep the training state at steps that are multiples of N.",
    }
    for names, effect in rules.items():
        parser.add_argument(*names, type=bounded(int, 1), metavar="N", help=effect)
    parser.add_argument(
        "--best",
        action="append",
        default=[],
        help='Keep the best by a metric, as in "loss:min" or "loss:min:2"; may be repeated.',
    )
    parser.add_argument(
        "--run",
        dest="run_id",
        help='Apply the rules to the run of this id, or to "all" runs in the folder.',
    )
    add_dry_run(parser)
    add_json(parser)
    parser.set_defaults(run=_prune)


def _prune(options: Namespace) -> None:
    root = run_folder(options.run_folder)
    state = Keep(last=options.state_last, every_steps=options.state_every)
    keep = Keep(
        last=options.last,
        every_steps=options.every,
        best=[_best_rule_of(text) for text in options.best],
        hourly=options.hourly,
        daily=options.daily,
        weekly=options.weekly,
        state=state if state.has_rules else None,
    )
    if not keep.has_rules and keep.state is None:
        raise ConfigError(
            "prune: no rule given, so everything stays; give --last, --every, --best, --daily, ..."
        )

    run_id = _run_id(root, options.run_id)
    report = prune_run(root, keep, run_id=run_id, dry_run=options.dry_run, strict=True)
    _show_report(root, report, dry_run=options.dry_run, as_json=options.as_json)
    if report.problems:
        raise TargetError(listing(list(report.problems)))


def add_pin(parser: ArgumentParser) -> None:
    parser.description = "Protect the checkpoint PATH from deletion until it is unpinned."
    parser.add_argument("path", metavar="PATH", help="Checkpoint.")
    parser.add_argument("--reason", default="", help="Text that ls, prune and report show.")
    parser.set_defaults(run=_pin)


def _pin(options: Namespace) -> None:
    path = open_place(options.path)
    pin(path, options.reason)
    print_lines(f"{path}: {pin_reason(path)}")


def add_unpin(parser: ArgumentParser) -> None:
    parser.description = (
        "End the protection of the checkpoint PATH. The exit code is 1 if it was not pinned."
    )
    parser.add_argument("path", metavar="PATH", help="Checkpoint.")
    parser.set_defaults(run=_unpin)


def _unpin(options: Namespace) -> int:
    path = open_place(options.path)
    if path.folder.stat(MANIFEST_NAME) is None:
        raise NotACheckpointError(why_no_checkpoint(path))
    was_pinned = unpin(path)
    print_lines(f"{path}: {'no longer pinned' if was_pinned else 'was not pinned'}")
    return 0 if was_pinned else 1


def _best_rule_of(text: str) -> Best:
    rule = re.fullmatch(r"(.+?):(min|max)(?::(\d+))?", text)
    if rule is None:
        raise ConfigError(
            f"--best {text}: expected a metric, min or max, and perhaps how many, as in "
            "eval_loss:min:2"
        )
    return rule[1], rule[2], int(rule[3] or 1)


def _run_id(root: Place, run_id: str | None) -> str | None:
    """Return the id of the run to prune; None for all.

    Raises ConfigError for an unknown id, or for several runs without one. Checkpoints without a run
    id (exported weights, averages) belong to no run, unless there are no others.
    """
    infos = [info for info in run_checkpoints_in(root) if not info.manifest.export]
    counts = Counter(info.manifest.run_id for info in infos)
    counts.pop(None, None)
    if run_id == "all" or (run_id is None and not counts):
        return None
    if run_id is None and len(counts) == 1:
        return next(iter(counts))
    if run_id is None or run_id not in counts:
        runs = [f"{name} ({count} checkpoints)" for name, count in counts.items()]
        raise ConfigError(
            f"{root}: holds the runs {listing(runs, ', ')}; give --run with one of them, or all"
        )
    return run_id


def _show_report(root: Place, report: PruneReport, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        output.print_json({"path": str(root), "dry_run": dry_run, **vars(report)})
        return
    rows = [(location_name(path), "drop", "") for path in report.dropped]
    for path, reasons in report.kept.items():
        verdict = "keep without state" if path in report.stripped else "keep"
        rows.append((location_name(path), verdict, ", ".join(reasons)))
    output.print_table(("checkpoint", "verdict", "why"), rows)
    print_lines(
        f"{root}: {human_size(report.freed_bytes)} {'would be freed' if dry_run else 'freed'}"
    )
    for file in report.left:
        print_lines(f"  {file}: stays, as no checkpoint listed it")
