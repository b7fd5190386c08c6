"""The averages of several files of the same tensors, as one file.

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

_WITHOUT_MEAN = (  # powers of two, used as scales; two numbers per byte; complex numbers
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex32",
    "complex64",
    "complex128",
)


class AveragedFile(TensorFile):
    """The averages of several files with the same tensors, as one file.

    After reading, `unequal` names the non-floating tensors that differ (an error for adapters,
    where they are indices), `beyond` the tensors whose averages exceed the range of their dtype.
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
        """Compare `files` and plan their average, in which `shares` is the weight of each.

        `names` of the files are for messages. Averages have the dtype of the sources, or `dtype`.
        Raises SelectionError unless all files store the same names, shapes and dtypes, and agree on
        ties.
        """
        _refuse_other_tensors(files, names)
        self.files, self.shares, self.is_adapter = list(files), list(shares), is_adapter
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
        """Average flat elements [start, stop) of `name`: 1-D, on the CPU, in its spec's dtype."""
        first = self.files[0].read(name, start, stop)
        if not first.is_floating_point():
            return self._read_last(name, first, start, stop)
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        total = torch.zeros_like(first, dtype=wide)
        for file, share in zip(self.files, self.shares, strict=True):
            data = first if file is self.files[0] else file.read(name, start, stop)
            if share:  # NaN times 0 is NaN
                total.add_(data.to(wide), alpha=share)
        dtype = dtype_of(self.specs[name].dtype)
        if not is_within(total, dtype):
            is_beyond = total.abs() > torch.finfo(dtype).max
            if bool(is_beyond.any()):
                self.beyond.add(name)
        return total.to(dtype)

    def _read_last(self, name: str, first: Tensor, start: int, stop: int | None) -> Tensor:
        """Read the last file's elements of a tensor without a mean; compare them with others."""
        last = first
        for file in self.files[1:]:
            data = file.read(name, start, stop)
            if not torch.equal(data, last):
                self.unequal.add(name)
            last = data
        # one element is a counter
        if self.is_adapter and name in self.unequal and self.specs[name].numel > 1:
            raise SelectionError(
                f"{name}: indices that differ between the sources; their values have no average"
            )
        return last

    def close(self) -> None:
        """Leave the files open: the caller closes them."""


def _cast_specs(file: TensorFile, dtype: str | None) -> tuple[dict[str, Spec], dict[str, int]]:
    """Return the specs of the averages, and the number of tensors by "float32->bfloat16"."""
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
    """Return the stored tensor of each tied name, with notes on files that do not record one.

    transformers does not record ties. Raises SelectionError for names that are tied to other
    tensors in other files.
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
