"""A tensor that is read from its file at its first use.

Shape, dtype and device need no read. Indexing by an int or a slice may read only these rows. Any
other operation loads the values, keeps them and runs on them. Small tensors are read, and large
ones are mapped. `release` drops the values.

Every use checks that the file has not changed since it was opened. After a truncation or a write in
place it raises CorruptError instead of returning wrong values.

Large tensors are mapped because touching all of a mapped file takes a fifth of the time of reading
it into memory. A mapped tensor may outlive the file object, for example as a parameter set by
`load_state_dict(assign=True)`. It is then as safe as with `torch.load(mmap=True)` or safetensors:
the file may be deleted or replaced, but it must not be truncated in place. `load(...,
mapped=False)` copies the values instead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ft_ckpt.errors import CorruptError
from ft_ckpt.formats.index import IndexedFile
from ft_ckpt.formats.trees import PLAIN

_GETTERS = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "is_meta",
    "is_cuda",
    "is_cpu",
    "is_sparse",
    "is_sparse_csr",
    "is_quantized",
    "is_mkldnn",
    "is_nested",
    "is_mps",
    "is_xpu",
    "is_xla",
    "itemsize",
    "nbytes",
    "requires_grad",
    "is_leaf",
    "grad",
    "grad_fn",
    "output_nr",
    "names",
    "_backward_hooks",
)
_METHODS = (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_contiguous",
    "stride",
    "storage_offset",
    "__len__",
    "get_device",
    "is_pinned",
    "has_names",
    "is_conj",
    "is_neg",
)
# Functions that need no values, only the shape, the dtype and the like.
_WITHOUT_VALUES: set[Any] = (
    {getattr(torch.Tensor, name).__get__ for name in _GETTERS if hasattr(torch.Tensor, name)}
    | {getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)}
    | {
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.is_tensor,
        torch.is_conj,
        torch.is_neg,
    }
)


class _StoredTensor:
    """One stored tensor, with its values while they are loaded.

    Several lazy tensors may refer to it. They share the values.
    """

    __slots__ = ("dtype", "file", "name", "shape", "values")

    def __init__(
        self, file: IndexedFile, name: str, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.file, self.name, self.shape, self.dtype = file, name, shape, dtype
        self.values: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        """Return the values as a 1-D tensor. Raises CorruptError if the file has changed."""
        if self.values is None:
            self.values = self.file.read(self.name)
        else:
            self.file.check()
        return self.values

    def rows(self, key: int | slice) -> torch.Tensor | None:
        """Read only the rows `key`, an index or a slice in the first dimension.

        Returns None if the values are loaded already or can be mapped, and for a slice that is not
        one contiguous range of elements. The caller then indexes all values.
        """
        shape = self.shape
        if self.values is not None or not shape or self.file.maps(self.name):
            return None
        rows = range(shape[0])[key]
        row_numel = math.prod(shape[1:])
        if isinstance(rows, int):
            data = self.file.read(self.name, rows * row_numel, (rows + 1) * row_numel)
            return data.view(shape[1:])
        if rows.step != 1 or not len(rows) or not row_numel:
            return None
        data = self.file.read(self.name, rows.start * row_numel, rows.stop * row_numel)
        return data.view(len(rows), *shape[1:])


class LazyTensor(torch.Tensor):
    """A tensor of a file, on the CPU. It behaves as a plain tensor, and `release` drops its values.

    Attributes:
        _stored: The stored tensor, which other lazy tensors may share.
        _own: This tensor's view of the values, with its own `requires_grad`. None before the first
            use of the values.
    """

    _stored: _StoredTensor
    _own: torch.Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if args and type(args[0]) is LazyTensor:
                if args[0]._own is None and func in _WITHOUT_VALUES:
                    return func(*args, **(kwargs or {}))
                special = _SPECIAL.get(func)
                if special is not None:
                    return special(*args, **(kwargs or {}))
            return _on_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _on_values(func, args, kwargs)

    def values(self) -> torch.Tensor:
        """Return the plain tensor.

        Raises CorruptError if the file was truncated or rewritten in place.
        """
        stored = self._stored.get()  # checks the file at each use
        if self._own is None:
            self._own = stored.view(self._stored.shape)
        return self._own

    def release(self) -> None:
        """Drop the values, and what was written to them. The next use reads them again."""
        self._own = self._stored.values = None

    @property
    def is_loaded(self) -> bool:
        """Whether the values are in memory or mapped."""
        return self._stored.values is not None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "loaded" if self.is_loaded else "not loaded"
        name, shape, dtype = self._stored.name, tuple(self._stored.shape), self._stored.dtype
        return f"LazyTensor({name!r}, shape={shape}, dtype={dtype}, {state})"

    @property
    def _is_param(self) -> bool:
        """Return False. torch.nn.Parameter sets this attribute on tensors of other classes.

        Setting it turns this object into a parameter.
        """
        return False

    @_is_param.setter
    def _is_param(self, _: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            values = self.values()
            torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
                self, torch.nn.Parameter(values.detach(), requires_grad=values.requires_grad)
            )


PLAIN.add(LazyTensor)


def _on_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    values = [_unwrap_lazy(value) for value in args]
    if not kwargs:
        return func(*values)
    return func(*values, **{name: _unwrap_lazy(value) for name, value in kwargs.items()})


def _unwrap_lazy(value: Any) -> Any:
    """Replace lazy tensors in `value` by plain ones, also inside lists, tuples and dicts."""
    if type(value) is LazyTensor:
        return value.values()
    if isinstance(value, (list, tuple, dict)):
        return pytree.tree_map_only(LazyTensor, LazyTensor.values, value)
    return value


def _require_grad(lazy: LazyTensor, requires_grad: bool = True) -> LazyTensor:
    lazy.values().requires_grad_(requires_grad)
    return lazy


def _selects_rows(key: Any) -> bool:
    if type(key) is not slice:
        return type(key) is int
    return all(bound is None or type(bound) is int for bound in (key.start, key.stop, key.step))


def _index_lazy(lazy: LazyTensor, key: Any) -> Any:
    if lazy._own is None and _selects_rows(key):
        rows = lazy._stored.rows(key)
        if rows is not None:
            return rows
    return lazy.values()[_unwrap_lazy(key)]


def _detach_lazy(lazy: LazyTensor) -> LazyTensor:
    return _make_lazy(lazy._stored)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.detach: _detach_lazy,
    torch.Tensor.requires_grad_: _require_grad,
    torch.Tensor.__getitem__: _index_lazy,
    torch.Tensor.__repr__: LazyTensor.__repr__,
}


def _plain_buffer(
    _module: torch.nn.Module, _name: str, value: torch.Tensor | None
) -> torch.Tensor | None:
    """Replace a lazy buffer by its values.

    `load_state_dict(assign=True)` then sets plain tensors.
    """
    return value.values() if isinstance(value, LazyTensor) else None


torch.nn.modules.module.register_module_buffer_registration_hook(_plain_buffer)  # type: ignore[arg-type]


_make = torch.Tensor._make_wrapper_subclass


def _make_lazy(stored: _StoredTensor) -> LazyTensor:
    lazy: LazyTensor = _make(LazyTensor, stored.shape, dtype=stored.dtype)
    lazy._stored = stored
    return lazy


def lazy_tensor(file: IndexedFile, name: str, shape: Sequence[int], dtype: str) -> LazyTensor:
    """Return the tensor `name` of `file`; `dtype` is torch's name.

    Raises CorruptError for an impossible shape or dtype.
    """
    try:
        return _make_lazy(_StoredTensor(file, name, shape, getattr(torch, dtype)))
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CorruptError(
            f"{name}: {shape} of type {dtype!r}, which this torch cannot have ({error})"
        ) from error
