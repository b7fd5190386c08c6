"""Presents the averages of several files as one file, whose tensors are computed when read.

Elements are summed in float32 (float64 ones in float64) and rounded once. Source: Wortsman et al.,
"Model soups", 2022, arXiv:2203.05482; Izmailov et al., "Averaging weights leads to wider optima",
2018, arXiv:1803.05407.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.extensions.tools.converting import FLOAT_DTYPES, spec_differences
from ft_ckpt.formats import Spec, dtype_of, is_within
from ft_ckpt.formats.files import TensorFile

_WITHOUT_MEAN = (
    "float8_e8m0fnu",  # powers of two, used as scales
    "float4_e2m1fn_x2",  # two numbers per byte
    "complex32",
    "complex64",
    "complex128",
)


class AveragedFile(TensorFile):
    """The averages of several files with the same tensors, as one file.

    Attributes:
        unequal: Names of tensors read so far that are no floating-point numbers, and that differ
            between the files.
        beyond: Names of tensors read so far whose averages exceed the range of their dtype.
        notes: Sentences about the ties for the report.
    """

    def __init__(
        self,
        files: Sequence[TensorFile],
        shares: Sequence[float],
        names: Sequence[str],
        dtype: str | None = None,
        *,
        is_adapter: bool = False,
    ) -> None:
        """Compare the names, shapes, dtypes and ties of `files`.

        `shares` are the weights, whose sum is 1. `names` are those of the files, for messages.
        Averages have the dtype of the sources, or `dtype`. Raises SelectionError if the files
        differ, or if tensors have no mean.
        """
        _refuse_other_tensors(files, names)
        self.files = list(files)
        self.shares = list(shares)
        self.is_adapter = is_adapter
        self.ties, self.notes = _common_ties(files, names)
        self.specs, self.casts = _cast_specs(files[-1], dtype)
        self.metadata = dict(files[-1].metadata)
        skipped: dict[str, None] = {}
        for file in files:
            skipped |= dict.fromkeys(file.skipped)
        self.skipped = tuple(skipped)
        self.unequal: set[str] = set()
        self.beyond: set[str] = set()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Average the flat elements [start, stop) of the tensor `name`.

        Returns a 1-D tensor on the CPU, of the dtype in `specs`. A tensor that is no floating-point
        numbers is read from the last file. Raises SelectionError if such a tensor differs and the
        files are of an adapter, where it has indices.
        """
        first = self.files[0].read(name, start, stop)
        if not first.is_floating_point():
            return self._read_last(name, first, start, stop)
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        total = torch.zeros_like(first, dtype=wide)
        for file, share in zip(self.files, self.shares, strict=True):
            data = first if file is self.files[0] else file.read(name, start, stop)
            if share:  # a share of 0 must ignore NaN, but NaN times 0 is NaN
                total.add_(data.to(wide), alpha=share)

        dtype = dtype_of(self.specs[name].dtype)
        if not is_within(total, dtype):
            is_beyond = total.abs() > torch.finfo(dtype).max
            if bool(is_beyond.any()):
                self.beyond.add(name)

        return total.to(dtype)

    def _read_last(self, name: str, first: Tensor, start: int, stop: int | None) -> Tensor:
        """Read the elements of the last file, and compare those of all files.

        `first` are the elements of the first file.
        """
        previous = first
        for file in self.files[1:]:
            data = file.read(name, start, stop)
            if not torch.equal(data, previous):
                self.unequal.add(name)
            previous = data
        # A tensor of one element is a counter, which may differ.
        if self.is_adapter and name in self.unequal and self.specs[name].numel > 1:
            raise SelectionError(
                f"{name}: indices that differ between the sources; their values have no average"
            )
        return previous

    def close(self) -> None:
        """Leave the files open: the caller closes them."""


def _cast_specs(file: TensorFile, dtype: str | None) -> tuple[dict[str, Spec], dict[str, int]]:
    """Return the specs of the averages, and how many tensors each cast is for.

    A cast is a text such as "float32->bfloat16".
    """
    specs = dict(file.specs)
    casts: Counter[str] = Counter()
    for name, spec in file.specs.items():
        if dtype is not None and spec.dtype in FLOAT_DTYPES and spec.dtype != dtype:
            specs[name] = spec._replace(dtype=dtype)
            casts[f"{spec.dtype}->{dtype}"] += 1
    return specs, dict(casts)


def _refuse_other_tensors(files: Sequence[TensorFile], names: Sequence[str]) -> None:
    """Raise SelectionError for tensors that differ from the first file's, or that have no mean."""
    expected = _shapes_and_dtypes(files[0])
    problems: list[str] = []
    for source, file in zip(names[1:], files[1:], strict=True):
        for difference in spec_differences(expected, _shapes_and_dtypes(file)):
            problems.append(f"{source}: {difference}")

    if problems:
        raise SelectionError(
            f"{listing(problems)}: not as in {names[0]}; average checkpoints of one model"
        )

    without_mean = []
    for name, (_, dtype) in expected.items():
        if dtype in _WITHOUT_MEAN:
            without_mean.append(f"{name}: {dtype}")

    if without_mean:
        raise SelectionError(
            f"{listing(without_mean)}: no mean of this dtype; convert the models first"
        )


def _shapes_and_dtypes(file: TensorFile) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (spec.shape, spec.dtype) for name, spec in file.specs.items()}


def _common_ties(
    files: Sequence[TensorFile], names: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the stored name of each tied name, and notes on files that do not record the tie.

    Files that transformers wrote record no ties. Raises SelectionError if a name is tied to
    different tensors in different files.
    """
    ties: dict[str, str] = {}
    problems: list[str] = []
    for source, file in zip(names, files, strict=True):
        for name, stored_name in file.ties.items():
            first = ties.setdefault(name, stored_name)
            if first != stored_name:
                problems.append(f"{source}: {name}: tied to {stored_name}, expected {first}")

    if problems:
        raise SelectionError(
            f"{listing(problems)}: not as in other sources; average checkpoints of one model"
        )

    notes = []
    for name, stored_name in ties.items():
        for source, file in zip(names, files, strict=True):
            if name not in file.ties:
                notes.append(
                    f"{name}: not in {source}; taken to be tied to {stored_name}, as "
                    "in the other sources"
                )

    return ties, notes
