"""Where things lie in this repository, and where Python finds the tests' own modules."""

import os
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
WORKERS = TESTS / "workers"


def python_path() -> str:
    """What PYTHONPATH is for a process that runs our code beside the tests' helpers."""
    return os.pathsep.join([str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", "")])
