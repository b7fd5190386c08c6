"""The command `watch`."""

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ft_ckpt.cli import views
from ft_ckpt.cli.options import add_json, bounded, print_lines
from ft_ckpt.cli.show import followed_run
from ft_ckpt.storage.place import shown_location

if TYPE_CHECKING:
    from ft_ckpt.checkpoint.evaluate import Evaluation


def add_watch(parser: ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="Folder or URL of the run.")
    parser.add_argument(
        "command",
        metavar="COMMAND",
        nargs="+",
        help="Command to run, after --; {path} is replaced by the checkpoint's path.",
    )
    parser.add_argument("--metric", default="score", metavar="NAME", help="Name of the metric (default: score).")
    parser.add_argument(
        "--idle", type=bounded(float, 0), metavar="SECONDS", help="End after this time without a new checkpoint."
    )
    add_json(parser)
    parser.set_defaults(run=_watch)


def _watch(options: Namespace) -> None:
    """Run COMMAND once on each new checkpoint of RUN. The last line of its output, a number or a JSON object of
    numbers, is stored as metrics of the checkpoint, which ls, best and prune use. Checkpoints that have the
    metric are skipped. The command runs until SIGINT or SIGTERM.
    """
    from ft_ckpt.checkpoint.evaluate import evaluate_run

    evaluate_run(
        followed_run(options.run_folder), options.command, options.metric, idle_seconds=options.idle,
        on_evaluated=lambda found: _print_evaluation(found, as_json=options.as_json),
        on_trouble=lambda text: print_lines(f"ft-ckpt: {text}", file=sys.stderr),
    )  # fmt: skip


def _print_evaluation(found: "Evaluation", *, as_json: bool) -> None:
    if as_json:
        views.print_json({**vars(found), "path": str(found.path)})
    else:
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in found.metrics.items())
        print_lines(f"{shown_location(found.path)}: {numbers}, {found.seconds:.1f} s")
    sys.stdout.flush()  # at once: a command may take hours
