"""The way back for one tensor: each rank reads from a file the block it holds, and nothing else.

The map is the one `gather` goes by, read backwards, so a file written on any number of ranks fills any other.
"""

import math

from torch import Tensor

from ft_ckpt.engines import Source
from ft_ckpt.errors import LoadError
from ft_ckpt.formats import TensorFile
from ft_ckpt.holdings import Block
from ft_ckpt.values import dtype_name

_SLICE_BYTES = 64 << 20  # read at a time, so that a large block needs little memory beside itself


def fill(source: Source, file: TensorFile, name: str) -> int:
    """Overwrite what this rank holds of `source` with its block of the tensor `name` in `file`; bytes read.

    Raises LoadError when the file has no such tensor, or one of another shape or dtype.
    """
    check(source, file, name)
    holding = source.holding
    if holding.local is None or holding.mine is None or not holding.local.numel():
        return 0
    if not holding.view:
        holding.local.copy_(file.read(name).reshape(()))
        return source.dtype.itemsize
    return sum(
        _fill_rows(holding.local, holding.mine, holding.view, file, name, low, high) for low, high in _cuts(source)
    )


def check(source: Source, file: TensorFile, name: str) -> None:
    """Raise LoadError unless `file` holds `name` with the shape and dtype of `source`."""
    spec = file.specs.get(name)
    if spec is None:
        raise LoadError(f"{name}: not in the checkpoint, and {source.name} needs it")
    wanted = (source.shape, dtype_name(source.dtype))
    if (spec.shape, spec.dtype) != wanted:
        raise LoadError(
            f"{name}: {spec.dtype} {list(spec.shape)} in the checkpoint, {wanted[1]} {list(wanted[0])} in this run"
        )


def _cuts(source: Source) -> list[tuple[int, int]]:
    """The rows of this rank's block in runs of at most _SLICE_BYTES (or one row), counted from its first row."""
    mine = source.holding.mine
    rows = mine.sizes[0] if mine else 0
    row_bytes = max(1, math.prod(source.holding.view[1:]) * source.dtype.itemsize)
    step = max(1, _SLICE_BYTES // row_bytes)
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]


def _fill_rows(
    local: Tensor, mine: Block, view: tuple[int, ...], file: TensorFile, name: str, low: int, high: int
) -> int:
    """Rows [low, high) of the block: whole rows are read, and a block cut in other dimensions takes its columns."""
    row = math.prod(view[1:])
    first = mine.offsets[0]
    data = file.read(name, (first + low) * row, (first + high) * row)
    read = data.nbytes
    data = data.view(high - low, *view[1:])
    for dim in range(1, len(view)):
        data = data.narrow(dim, mine.offsets[dim], mine.sizes[dim])
    local[low:high].copy_(data)
    return read
