"""The golden files that other libraries wrote, see `golden/make_library_files.py`."""

import importlib.util
import sys
from types import ModuleType

import torch
from places import TESTS

FOLDER = TESTS / "golden" / "libraries"


def numbered(number: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make the tensor `number` of a file."""
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) / 2 + 100 * number
    return values.view(shape).to(dtype)


def file_maker() -> ModuleType:
    """Import the script that writes the files with the installed libraries."""
    script = TESTS / "golden/make_library_files.py"
    spec = importlib.util.spec_from_file_location("make_library_files", script)
    assert spec is not None
    assert spec.loader is not None
    # its classes are looked up there
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
