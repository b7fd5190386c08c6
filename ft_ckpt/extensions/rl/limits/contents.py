"""What is read of a folder for the findings: its settings, and elements that are not finite."""

import json
from collections.abc import Iterator
from typing import Any

import torch

from ft_ckpt.errors import CheckpointError
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.storage import Store, read_text

FLOATS = ("float64", "float32", "bfloat16", "float16")


def settings_in(store: Store, name: str) -> dict[str, Any] | None:
    """Read the JSON object in the file `name`; return None if there is no such file."""
    try:
        document = json.loads(read_text(store, name))
    except (CheckpointError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def nonfinite_findings(file: TensorFile) -> Iterator[str]:
    for name, spec in file.specs.items():
        if spec.dtype in FLOATS and not torch.isfinite(file.read(name)).all():
            yield f"{name}: NaN or infinite elements; use an older checkpoint"
