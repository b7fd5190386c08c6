"""Main loop of every worker: run named cases on each rank, and record how each one ended.

Arguments of a worker: the folder to save into, the folder for outcomes, the cases to run.
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def arm_dump() -> None:
    """Print all stacks if this process still runs shortly before its timeout."""
    faulthandler.dump_traceback_later(float(os.environ.get("STACKS_AFTER", "100")), exit=False)


arm_dump()

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def run(case: Callable[[str, Path], None]) -> None:
    """Call `case(name, folder of that name)` for each name on the command line."""
    root, outcomes, *names = sys.argv[1:]
    with (Path(outcomes) / f"rank{RANK}.jsonl").open("a") as file:
        for name in names:
            print(f"[rank {RANK}] {name}", flush=True)
            folder = Path(root) / name
            folder.mkdir(parents=True, exist_ok=True)
            begun = time.monotonic()
            row = {
                "case": name,
                "error": _error(case, name, folder),
                "seconds": round(time.monotonic() - begun, 2),
            }
            file.write(json.dumps(row) + "\n")
            file.flush()


def _error(case: Callable[[str, Path], None], name: str, folder: Path) -> str:
    try:
        case(name, folder)
    except Exception:
        return traceback.format_exc()
    return ""
