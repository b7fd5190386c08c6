"""`ft-ckpt report RUN`: reads a run by `gathering`, and writes a page about it by `page`."""

from argparse import ArgumentParser, Namespace
from functools import reduce
from operator import and_

from ft_ckpt.checkpoint.manifest import why_no_checkpoint
from ft_ckpt.cli import output, views
from ft_ckpt.cli.options import add_json, bounded, print_lines
from ft_ckpt.cli.report.gathering import gather_facts
from ft_ckpt.cli.report.page import page_text
from ft_ckpt.cli.show import run_checkpoints_in, run_folder
from ft_ckpt.errors import ConfigError, NotACheckpointError
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, local_path
from ft_ckpt.values import human_size


def add_report(parser: ArgumentParser) -> None:
    parser.description = (
        "Write a page about the folder RUN: model, metrics, checkpoints and why each stays, saves."
    )
    parser.add_argument("run_folder", metavar="RUN", help="Folder of the run.")
    parser.add_argument(
        "-o",
        "--output",
        default="report.html",
        metavar="FILE",
        help="Page to write, a name that ends in .html (default: report.html).",
    )
    parser.add_argument(
        "--drift",
        type=bounded(int, 0),
        default=8,
        metavar="N",
        help="Newest pairs of neighbouring checkpoints to compare; 0 for none (default: 8).",
    )
    add_json(parser)
    parser.set_defaults(run=_report)


def _report(options: Namespace) -> None:
    run = run_folder(options.run_folder)
    target = local_path(options.output)
    if target.suffix != ".html":
        raise ConfigError(f"report: --output {options.output}: expected a name that ends in .html")

    infos = run_checkpoints_in(run)
    if not infos:
        raise NotACheckpointError(why_no_checkpoint(run))
    facts = gather_facts(run, views.ranked_metrics(infos), comparisons=options.drift)
    if options.as_json:
        output.print_json({**vars(facts), "disk_bytes": facts.disk_bytes})
        return

    # The page must not be readable by more users than any of the checkpoints.
    page = Place(LocalStore(target.parent), target.name)
    modes = [info.place.mode_at(page) for info in infos]
    store = LocalStore(target.absolute().parent, max_mode=reduce(and_, modes))
    store.write(target.name, page_text(facts).encode("utf-8", "backslashreplace"))
    size = human_size(facts.disk_bytes)
    print_lines(f"{run}: {len(facts.checkpoints)} checkpoints, {size} -> {target}")
