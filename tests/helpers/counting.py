"""Cost of a save: bytes moved between ranks."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CollectiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not annotated it
    """Counts the bytes of every collective and point-to-point operation this thread starts.

    Each of them passes the dispatcher as an operator of `c10d` or `_c10d_functional`; the largest
    of its arguments (the output of a gather, the tensor of a send) is what it moved, to within a
    factor of the world size.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.by_operator: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        return sum(self.by_operator.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            sizes = [_size(argument) for argument in (*args, out)]
            self.by_operator[str(func)] += max(sizes)
        return out


def _size(argument: Any) -> int:
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_leaves(argument)
        if isinstance(leaf, torch.Tensor)
    )
