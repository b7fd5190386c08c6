"""Views of an open file: renamed and cast, without ties, some of its tensors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import ConfigError
from ft_ckpt.extensions.tools.rename_rules import Names, rename_tensors
from ft_ckpt.formats import Spec, TensorFile, is_within
from ft_ckpt.messages import expected_one_of
from ft_ckpt.storage import ByteRun

_DTYPES = ("float64", "float32", "bfloat16", "float16")
FLOAT_DTYPES = (
    *_DTYPES,
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def ties_of(file: TensorFile) -> Mapping[str, str]:
    """Further names of tensors of `file`, each with the name in its `specs`."""
    ties: Mapping[str, str] = getattr(file, "ties", {})
    return ties


def metadata_of(file: TensorFile) -> Mapping[str, str]:
    metadata: Mapping[str, str] = getattr(file, "metadata", {})
    return metadata


def skipped_of(file: TensorFile) -> Sequence[str]:
    """ "name: type" of each value of `file` that is no tensor."""
    skipped: Sequence[str] = getattr(file, "skipped", ())
    return skipped


def byte_runs(file: TensorFile, name: str) -> Sequence[ByteRun] | None:
    """The byte ranges of a tensor; None if the file does not store it byte for byte."""
    runs: Any = getattr(file, "runs", None)
    found: Sequence[ByteRun] | None = None if runs is None else runs(name)
    return found


class TranslatedFile:
    """`file` with its tensors renamed by `names` (see `read_map`) and its floats cast to `dtype`,
    if given.
    """

    def __init__(self, file: TensorFile, names: Names, dtype: str | None) -> None:
        if dtype is not None and dtype not in _DTYPES:
            raise ConfigError(f"dtype={dtype!r}: {expected_one_of(dtype, _DTYPES)}")
        ties = ties_of(file)
        new_names = rename_tensors([*file.specs, *ties], names)
        self.file = file
        self.stored_names = {new_names[name]: name for name in file.specs}
        self.specs: dict[str, Spec] = {}
        casts: Counter[str] = Counter(getattr(file, "casts", {}))
        for name, spec in file.specs.items():
            new_dtype = spec.dtype
            if dtype is not None and spec.dtype in FLOAT_DTYPES:
                new_dtype = dtype
            if new_dtype != spec.dtype:
                casts[f"{spec.dtype}->{new_dtype}"] += 1
            self.specs[new_names[name]] = Spec(new_names[name], spec.shape, new_dtype)
        self.casts = dict(casts)  # "float32->bfloat16": number of tensors, with the file's own
        self.ties = {new_names[name]: new_names[stored] for name, stored in ties.items()}
        self.metadata = dict(metadata_of(file))
        self.skipped = tuple(skipped_of(file))
        self.overflown: set[str] = set()  # names of tensors in which the cast gave infinity

    def runs(self, name: str) -> Sequence[ByteRun] | None:
        """The byte ranges of a tensor; None if it is cast or not stored byte for byte."""
        stored_name = self.stored_names[name]
        if self.file.specs[stored_name].dtype != self.specs[name].dtype:
            return None
        return byte_runs(self.file, stored_name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the tensor with the new name `name`: 1-D, on the CPU, in
        its new dtype.
        """
        data = self.file.read(self.stored_names[name], start, stop)
        dtype = getattr(torch, self.specs[name].dtype)
        if data.dtype == dtype:
            return data.contiguous()
        cast = data.to(dtype)
        if not is_within(data, dtype):
            is_new_infinity = cast.isinf() & data.to(torch.float64).isfinite()
            if bool(is_new_infinity.any()):
                self.overflown.add(name)
        return cast

    def close(self) -> None:
        self.file.close()


class UntiedFile:
    """`file` with each name of a tied tensor as a separate tensor, for formats without ties."""

    def __init__(self, file: TensorFile) -> None:
        self.file = file
        self.stored_names = {name: name for name in file.specs} | dict(ties_of(file))
        self.specs: dict[str, Spec] = {}
        for name, stored_name in self.stored_names.items():
            spec = file.specs[stored_name]
            self.specs[name] = Spec(name, spec.shape, spec.dtype)
        self.metadata = dict(metadata_of(file))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.file.read(self.stored_names[name], start, stop)

    def close(self) -> None:
        self.file.close()


class SelectedTensors:
    """The tensors `names` of a file, for one of several files to write."""

    def __init__(self, file: TranslatedFile, names: Sequence[str]) -> None:
        self.specs = {name: file.specs[name] for name in names}
        self.ties = {name: stored for name, stored in file.ties.items() if stored in self.specs}
        self.metadata = file.metadata
        self.read, self.runs, self.close = file.read, file.runs, file.close
