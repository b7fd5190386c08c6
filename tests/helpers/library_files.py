"""The golden files that other libraries wrote, see `golden/make_library_files.py`, and the values
in them.
"""

import importlib.util
import sys
from types import ModuleType

import torch
from places import TESTS

FOLDER = TESTS / "golden" / "libraries"


def numbered(number: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of tensor `number` of a file."""
    return (
        (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) / 2 + 100 * number)
        .view(shape)
        .to(dtype)
    )


def file_maker() -> ModuleType:
    """The script that writes them, with the installed libraries."""
    spec = importlib.util.spec_from_file_location(
        "make_library_files", TESTS / "golden/make_library_files.py"
    )
    assert spec is not None
    assert spec.loader is not None
    # its classes are looked up there
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
