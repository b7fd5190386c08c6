"""Paths of this repository, and the PYTHONPATH of the tests' own modules."""

import os
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
WORKERS = TESTS / "workers"


def python_path() -> str:
    """PYTHONPATH of a process that runs our code with the tests' helpers."""
    return os.pathsep.join([str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", "")])
