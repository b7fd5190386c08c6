"""Reads what several checks need from a folder: JSON objects, and elements that are not finite.

A finding is one line of text about something that an engine would refuse, drop or misread.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch

from ft_ckpt.errors import CheckpointError
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.storage import Store, read_text

FLOATS = ("float64", "float32", "bfloat16", "float16")


def settings_in(store: Store, name: str) -> dict[str, Any] | None:
    """Read the JSON object in the file `name`. Returns None without such a file or object."""
    try:
        document = json.loads(read_text(store, name))
    except (CheckpointError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def nonfinite_findings(file: TensorFile) -> Iterator[str]:
    """Yield a finding for each tensor with NaN or infinite elements. Reads all tensors."""
    for name, spec in file.specs.items():
        if spec.dtype in FLOATS and not torch.isfinite(file.read(name)).all():
            yield f"{name}: NaN or infinite elements; use an older checkpoint"
