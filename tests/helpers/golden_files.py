"""The objects in the golden files, which ft_ckpt 0.2 and 0.3 wrote and later versions read."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from places import TESTS

HERE = TESTS / "golden"


def flat() -> dict[str, torch.Tensor]:
    """Make a state dict of a few dtypes; values are exact, so that no library can change them."""
    return {
        "layers.0.weight": (torch.arange(128.0 * 300) % 251).view(128, 300).to(torch.bfloat16),
        "layers.0.bias": torch.arange(5.0),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0, 2),
    }


def nested() -> dict[object, object]:
    """Make a state with every kind of description of a leaf."""
    weight = torch.arange(6.0).view(2, 3)
    return {
        "model": OrderedDict([("w", weight), ("tied", weight), ("a/b", torch.arange(3))]),
        "step": 7,
        "rate": 1e-4,
        "odd": [float("nan"), 1j, b"raw", None, True, "é"],
        ("a", 1): np.arange(3),
        "f8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "a": {"b": 1},
        "a.b": 2,
    }


FILES: dict[str, Callable[[], Any]] = {
    "flat.h5": flat,
    "nested.h5": nested,
    "native.h5": flat,
    "dual.safetensors": flat,
}
