"""Reads a whole object from a file of `torch.save`: tensors, arrays of numpy and plain values; nothing is run."""

from collections import OrderedDict
from typing import Any

import numpy as np

from ft_ckpt.errors import LoadError, damaged_input
from ft_ckpt.formats.pickled_objects import PLAIN_VALUES
from ft_ckpt.formats.raw_file import RawFile
from ft_ckpt.formats.safe_pickle import Call, Passive
from ft_ckpt.formats.torch_file import strided_tensor
from ft_ckpt.formats.torch_pickle import (
    PickleRules,
    TensorPlace,
    UnreadableTensor,
    find_torch_name,
    kind_of_leaf,
    load_torch_zip,
)


class _PickledArray:
    """Stands for an array of numpy until all of the pickle is read."""

    def __init__(self, *_made_as: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def real_array(self) -> np.ndarray[Any, Any]:
        """The array, of numbers only. Raises CorruptError when its bytes do not fit its shape."""
        with damaged_input("a pickled array of numpy"):
            _version, shape, dtype, is_fortran, data = self.state
            flat = np.frombuffer(data, dtype.real_dtype())
            native = np.dtype(flat.dtype.newbyteorder("=").str)  # as numpy itself would have made it
            made: np.ndarray[Any, Any] = flat.reshape(shape, order="F" if is_fortran else "C").astype(native)
        return made


_ARRAYS = dict.fromkeys(("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"))


def load_torch_values(file: RawFile, *, places: bool = False) -> Any:
    """The object in an open file, its tensors mapped from it; with `places` they stay `TensorPlace`.

    Raises LoadError naming what it refers to that is neither a tensor nor plain data, CorruptError when it is damaged.
    """
    return _real_value(load_torch_zip(file, rules=PickleRules(_find_with_arrays)), file.name, places)


def _find_with_arrays(full: str) -> Any:
    if full in _ARRAYS:
        return Call(_PickledArray)
    found = PLAIN_VALUES.get(full)
    return find_torch_name(full) if found is None else found


def _real_value(value: Any, name: str, places: bool) -> Any:
    """What `value`, which is at `name`, describes."""
    if isinstance(value, TensorPlace):
        return value if places else strided_tensor(value)
    if isinstance(value, _PickledArray):
        return value.real_array()
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, _real_value(one, f"{name}: {key}", places)) for key, one in value.items())
    if type(value) in (list, tuple):
        return type(value)(_real_value(one, f"{name}: {place}", places) for place, one in enumerate(value))
    if isinstance(value, (Passive, Call, UnreadableTensor, type)):
        kind_name = value.kind if isinstance(value, UnreadableTensor) else kind_of_leaf(value)
        raise LoadError(f"{name}: a {kind_name}, expected tensors and plain data; nothing of it was run")
    return value
