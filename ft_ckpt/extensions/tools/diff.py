"""Compares the tensors of two files or folders, A and B, by tensor and by layer, slice by slice."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ft_ckpt.extensions.tools.converting import SLICE_BYTES, UntiedFile
from ft_ckpt.formats import Spec, TensorFile
from ft_ckpt.model import WeightsFolder, differing_class, differing_settings
from ft_ckpt.storage import Place

_SLICE = SLICE_BYTES // 8  # in elements, which are compared in float64
_PACKED = "float4_e2m1fn_x2"  # two numbers per byte; torch cannot convert it


@dataclass(frozen=True)
class Sums:
    """Sums in float64 over the elements whose difference is finite."""

    elements: int = 0  # all elements, including unbounded ones; a complex number counts as two
    total: float = 0.0  # of |B - A|
    squares: float = 0.0  # of (B - A)²
    norm: float = 0.0  # of A²
    largest: float = 0.0  # of |B - A|
    # elements whose difference is not finite or unknown (float4), except equal ones and two NaN
    unbounded: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.elements + other.elements,
            self.total + other.total,
            self.squares + other.squares,
            self.norm + other.norm,
            max(self.largest, other.largest),
            self.unbounded + other.unbounded,
        )


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor, or of all tensors of one layer, in A and B.

    `status`: "equal" (bit for bit; by value if the dtypes differ), "changed", "shape", "only in A",
    "only in B"; for a layer "equal" or "changed".
    """

    name: str
    status: str
    before: Spec | None = None  # in A; None for a layer
    after: Spec | None = None
    sums: Sums = Sums()
    tensors: int = 1
    changed: int = 0  # tensors that are not equal

    @property
    def mean(self) -> float:
        """Mean of |B - A|."""
        return self.sums.total / self.sums.elements if self.sums.elements else 0.0

    @property
    def relative(self) -> float:
        """Norm of B - A divided by the norm of A; infinite if only A is zero, or if they cannot be
        subtracted.
        """
        if (
            self.status not in ("equal", "changed")
            or self.sums.unbounded
            or (self.sums.squares and not self.sums.norm)
        ):
            return math.inf
        return math.sqrt(self.sums.squares / self.sums.norm) if self.sums.norm else 0.0


def compare_files(one: TensorFile, other: TensorFile) -> list[Difference]:
    """Compare every tensor of A (`one`) and B (`other`), largest change first; memory holds a few
    slices.

    A name stands for the tensor that it is tied to. A pair of tensors is compared once, under the
    first name that both files have. A name in one file only is left out if its tensor is compared
    under another name.
    """
    first, second = UntiedFile(one), UntiedFile(other)
    names: dict[tuple[str, str], str] = {}
    for name in first.old:
        if name in second.old:
            names.setdefault((first.old[name], second.old[name]), name)
    alone: dict[tuple[int, str], str] = {}
    for side, file in enumerate((first, second)):
        compared = {pair[side] for pair in names}
        for name, stored in file.old.items():
            if stored not in compared:
                alone.setdefault((side, stored), name)
    return _most_changed_first(
        _tensor_difference(first, second, name) for name in (*names.values(), *alone.values())
    )


def compare_settings(one: TensorFile, other: TensorFile) -> list[tuple[str, str, str]]:
    """(name, in A, in B) of the settings that differ and change the output; empty unless both are
    folders.

    Raises CorruptError for a settings file that cannot be parsed.
    """
    if not isinstance(one, WeightsFolder) or not isinstance(other, WeightsFolder):
        return []
    parts = {(part.path, part.kind): part for part in other.parts}
    differences = []
    for part in one.parts:
        second = parts.get((part.path, part.kind))
        if second is None:
            continue
        first_store = Place(one.store, part.path).folder
        second_store = Place(other.store, part.path).folder
        settings = [
            *differing_class(part, second),
            *differing_settings(first_store, second_store, part.kind),
        ]
        for name, before, after in settings:
            differences.append((f"{part.path}/{name}".lstrip("/"), before, after))
    return differences


def by_layer(found: Iterable[Difference]) -> list[Difference]:
    """The differences by layer, such as "model.layers.3", or by module for names without a
    number.
    """
    layers: dict[str, list[Difference]] = {}
    for each in found:
        layers.setdefault(layer_of(each.name), []).append(each)
    by_name = []
    for layer, members in layers.items():
        changed, sums = (
            sum(each.changed for each in members),
            sum((each.sums for each in members), Sums()),
        )
        status = "changed" if changed else "equal"
        by_name.append(Difference(layer, status, sums=sums, tensors=len(members), changed=changed))
    return _most_changed_first(by_name)


def layer_of(name: str) -> str:
    """The layer of the tensor `name`: the name up to its first number, or all but its last step."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def _most_changed_first(found: Iterable[Difference]) -> list[Difference]:
    return sorted(found, key=lambda each: (each.status == "equal", -each.relative))


def _tensor_difference(first: UntiedFile, second: UntiedFile, name: str) -> Difference:
    before, after = first.specs.get(name), second.specs.get(name)
    if before is None or after is None or before.shape != after.shape:
        status = "only in B" if before is None else "only in A" if after is None else "shape"
        return Difference(name, status, before, after, changed=1)
    equal, sums = True, Sums()
    for low in range(0, before.numel, _SLICE):
        high = min(low + _SLICE, before.numel)
        same, more = _compare_slices(first.read(name, low, high), second.read(name, low, high))
        equal, sums = equal and same, sums + more
    return Difference(
        name, "equal" if equal else "changed", before, after, sums, changed=int(not equal)
    )


def _compare_slices(one: Tensor, other: Tensor) -> tuple[bool, Sums]:
    """Whether two slices are equal, and the sums over them."""
    same_dtype = one.dtype == other.dtype
    equal = same_dtype and torch.equal(_byte_view(one), _byte_view(other))
    if any(str(data.dtype).endswith(_PACKED) for data in (one, other)):
        same = (
            _byte_view(one) == _byte_view(other)
            if same_dtype
            else torch.zeros(one.numel(), dtype=torch.bool, device="cpu")
        )
        return equal, Sums(one.numel(), unbounded=int((~same).sum()))
    is_complex = one.is_complex() or other.is_complex()
    before = _float64_values(one, is_complex)
    norm = float(before.nan_to_num(0.0, 0.0, 0.0).square().sum())
    if equal:
        return True, Sums(before.numel(), norm=norm)
    after = _float64_values(other, is_complex)
    same = (before == after) | (before.isnan() & after.isnan())
    change = torch.where(same, 0.0, after - before).abs()
    bounded = change.isfinite()
    change = torch.where(bounded, change, 0.0)
    sums = Sums(
        before.numel(), float(change.sum()), float(change.square().sum()), norm, float(change.max())
    )
    return not same_dtype and bool(same.all()), sums + Sums(unbounded=int((~bounded).sum()))


def _byte_view(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.uint8)


def _float64_values(data: Tensor, is_complex: bool) -> Tensor:
    if is_complex:
        return torch.view_as_real(data.to(torch.complex128)).flatten()
    return data.to(torch.float64)
