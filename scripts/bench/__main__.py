"""Measure saving and loading beside every installed peer and the machine's limits, in one run.

    python -m scripts.bench --sizes 10MB 100MB 1GB 2.5GB --rounds 5 --json figures.json --plot figures.png
    python -m scripts.bench --only save stall --sizes 1GB
    python -m scripts.bench --only --json figures.json --plot figures.png     # what was measured before

Run it in the repository. Every measure has as many counted rounds as asked for, after one that is not, in which all
take turns; figures are their medians. Quote the ratios: times are the machine's, and a virtual disk's rate changes from
minute to minute. `pip install ft_ckpt[bench]` brings the peers; those that are not installed are left out. "upload" and
"download" need a bucket: FT_CKPT_BENCH_STORE=s3://bucket/bench, and the variables that lead there.
"""

import argparse
import json
import logging
import os
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # before anybody reads them

import transformers

from ft_ckpt.config import parse_size
from scripts.bench.common import Setting, scratch
from scripts.bench.machine import facts, missing
from scripts.bench.measures import MEASURES
from scripts.bench.show import ratios_of, show

Figures = dict[str, Any]  # "machine", and "rows" of all measures


def main() -> None:
    args = _arguments()
    _silence()
    known = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"rows": []}
    found: Figures = {"machine": facts(args.folder), "missing": missing(), "rows": known["rows"]}
    for name in args.only:
        for size in MEASURES[name].sizes(args.sizes):
            with scratch(args.folder) as folder:
                rows = MEASURES[name].run(Setting(args.rounds, folder, tuple(args.ways)), parse_size(size))
            _add(found, name, size, rows)
            show(name, size, found)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    if args.plot:
        from scripts.bench.chart import draw

        draw(found, args.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["10MB", "100MB", "1GB", "2.5GB"], help="bytes of the state dict")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    parser.add_argument(
        "--only", nargs="*", default=list(MEASURES), choices=MEASURES, metavar="MEASURE", help=_listed()
    )
    parser.add_argument(
        "--ways", nargs="+", default=[], metavar="WAY", help="the rows that are wanted; the limits come too"
    )
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's folder for temporary files)")
    parser.add_argument("--json", type=Path, help="file for all figures; those of other measures in it stay")
    parser.add_argument("--plot", type=Path, help="file for a chart of all figures")
    return parser.parse_args()


def _listed() -> str:
    # argparse takes a percent sign for a place to fill in
    return "; ".join(f"{name}: {measure.title}" for name, measure in MEASURES.items()).replace("%", "%%")


def _silence() -> None:
    """Peers say much on their way."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.ERROR)


def _add(found: Figures, measure: str, size: str, rows: list[dict[str, Any]]) -> None:
    """The new rows in place of those of the same measure and size."""
    date = datetime.now(timezone.utc).isoformat(timespec="minutes")
    old = [row for row in found["rows"] if (row["measure"], row["size"]) != (measure, size)]
    new = [{"measure": measure, "size": size, "date": date, **row, **ratios_of(measure, row, rows)} for row in rows]
    found["rows"] = old + new


if __name__ == "__main__":
    main()
