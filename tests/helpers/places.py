"""Paths of this repository, and the PYTHONPATH of the tests' own modules."""

import os
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
WORKERS = TESTS / "workers"


def python_path() -> str:
    """Return the PYTHONPATH of a process that imports ft_ckpt and the tests' helpers."""
    return os.pathsep.join([str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", "")])
