r"""Measure saving and loading with every installed peer and the machine's limits, in one run.

    python -m scripts.bench --sizes 10MB 100MB 1GB 2.5GB --rounds 5 --json figures.json
    python -m scripts.bench --only save stall --sizes 1GB
    python -m scripts.bench --docs             # everything, for the figures, pages and chart here
    python -m scripts.bench --docs --only      # pages and chart again, from the stored figures

Run it in the repository. Every measure has as many counted rounds as asked for, after an uncounted
one; all take turns in a round, and figures are medians. Quote the ratios: times are the machine's,
and a virtual disk's rate changes from minute to minute. The extra `bench` brings the peers; those
that are not installed are left out. "upload" and "download" need a bucket:
FT_CKPT_BENCH_STORE=s3://bucket/bench, and the environment variables of its client. "clients" and
"clients-load" need two mounts of a network file system, FT_CKPT_BENCH_CLIENTS=/mnt/0:/mnt/1; on
GlusterFS of this machine, if it is installed:

    PYTHONPATH=tests/helpers python -m network_disks GlusterFS 2 \
        env FT_CKPT_BENCH_CLIENTS={0}:{1} python -m scripts.bench --only clients clients-load
"""

import argparse
import json
import logging
import os
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# before the libraries read them
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import transformers

from ft_ckpt.values import parse_size
from scripts.bench.chart import draw
from scripts.bench.common import ROOT, Setting, scratch
from scripts.bench.machine import facts, missing
from scripts.bench.measures import MEASURES
from scripts.bench.pages import IMAGES, STORED, write_pages
from scripts.bench.show import ratios_of, show

Figures = dict[str, Any]  # "machine", and "rows" of all measures


def main() -> None:
    """Take each measure at each size; show its figures, and store all of them."""
    args = _arguments()
    _silence_peers()
    figures = _stored_figures(args)
    for name in args.only:
        measure = MEASURES[name]
        for size in measure.sizes(args.sizes):
            with scratch(args.folder) as folder:
                setting = Setting(args.rounds, folder, tuple(args.ways))
                rows = measure.run(setting, parse_size(size))
            _add(figures, name, size, rows)
            show(name, size, figures)
            if args.json:
                write(figures, args.json)
    if args.chart:
        draw(figures, args.chart)
    if args.docs:
        write_pages(figures, args.docs)


def _stored_figures(args: argparse.Namespace) -> Figures:
    """Return the stored figures, to which the new ones are added.

    They must be of this machine, unless everything is measured again. Raises SystemExit otherwise.
    """
    stored: Figures = {"rows": []}
    if args.json and args.json.exists():
        stored = json.loads(args.json.read_text())
    if not args.only and "machine" in stored:
        return stored
    machine = facts(args.folder) | {"rounds": args.rounds}
    is_same_machine = _place(stored) == _place({"machine": machine})
    if "machine" not in stored or args.only == list(MEASURES):
        rows = stored["rows"] if is_same_machine else []
        return {"machine": machine, "missing": missing(), "rows": rows}
    if not is_same_machine:
        raise SystemExit(
            f"{args.json}: has figures of {_place(stored)}; measure all again, or name another file"
        )
    return stored


def _place(figures: Figures) -> dict[str, Any]:
    """Return the properties that machines must share for their figures to be compared."""
    machine = figures.get("machine", {})
    return {name: machine.get(name) for name in ("processor", "cores", "gpu", "file_system")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["10MB", "100MB", "1GB", "2.5GB"],
        help="bytes of the state dict",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="counted rounds, after one that is not"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=list(MEASURES),
        choices=MEASURES,
        metavar="MEASURE",
        help=_titles(),
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        default=[],
        metavar="WAY",
        help="the rows that are wanted; the limits come too",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to write (default: the system's folder for temporary files)",
    )
    parser.add_argument(
        "--json", type=Path, help="file for all figures; others of this machine stay"
    )
    parser.add_argument(
        "--chart", type=Path, help="folder for a chart of all figures, as SVG, light and dark"
    )
    parser.add_argument(
        "--docs",
        type=Path,
        nargs="?",
        const=ROOT,
        metavar="CHECKOUT",
        help=(
            "write docs/figures.json, the tables of the pages and the chart, of this checkout "
            "or another"
        ),
    )
    args = parser.parse_args()
    if args.docs:
        args.json, args.chart = args.json or args.docs / STORED, args.chart or args.docs / IMAGES
    return args


def _titles() -> str:
    titles = "; ".join(f"{name}: {measure.title}" for name, measure in MEASURES.items())
    return titles.replace("%", "%%")  # argparse formats help texts with %


def _silence_peers() -> None:
    """Silence the warnings, progress bars and logs of peers."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.ERROR)


def write(figures: Figures, path: Path) -> None:
    """Write figures as JSON, a row in a line."""
    head = json.dumps({**figures, "rows": []}, indent=1)
    rows = ",\n  ".join(json.dumps(_rounded(row)) for row in figures["rows"])
    path.write_text(head.replace('"rows": []', f'"rows": [\n  {rows}\n ]') + "\n")


def _rounded(value: Any) -> Any:
    """Round each number to five digits, which is more than was measured."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _add(figures: Figures, measure: str, size: str, rows: list[dict[str, Any]]) -> None:
    """Replace the rows of the same measure and size by the new ones."""
    date = datetime.now(timezone.utc).isoformat(timespec="minutes")
    others = [row for row in figures["rows"] if (row["measure"], row["size"]) != (measure, size)]
    for row in rows:
        ratios = ratios_of(measure, row, rows)
        others.append({"measure": measure, "size": size, "date": date, **row, **ratios})
    figures["rows"] = others


if __name__ == "__main__":
    main()
