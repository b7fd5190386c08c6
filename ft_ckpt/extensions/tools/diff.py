"""Compares the tensors of two files or folders, A and B, by tensor and by layer, slice by slice."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ft_ckpt.extensions.tools.converting import SLICE_BYTES, untie_file
from ft_ckpt.formats import Spec
from ft_ckpt.formats.files import TensorFile, TensorView
from ft_ckpt.model.files import WeightsFolder, differing_parts

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
        """Norm of B - A divided by the norm of A.

        Infinite if only A is zero, or if they cannot be subtracted.
        """
        sums = self.sums
        if self.status not in ("equal", "changed") or sums.unbounded:
            return math.inf
        if not sums.norm:
            return math.inf if sums.squares else 0.0
        return math.sqrt(sums.squares / sums.norm)


def compare_files(first: TensorFile, second: TensorFile) -> list[Difference]:
    """Compare every tensor of A (`first`) and B (`second`), largest change first.

    Memory holds a few slices. A name stands for the tensor that it is tied to. A pair of tensors is
    compared once, under the first name that both files have. A name in one file only is left out if
    its tensor is compared under another name.
    """
    untied = untie_file(first), untie_file(second)
    differences = [_tensor_difference(*untied, name) for name in _names_to_compare(*untied)]
    return _most_changed_first(differences)


def _names_to_compare(first: TensorView, second: TensorView) -> list[str]:
    pairs: dict[tuple[str, str], str] = {}  # stored names in both -> name
    for name, stored_name in first.stored_names.items():
        if name in second.stored_names:
            pairs.setdefault((stored_name, second.stored_names[name]), name)
    names = list(pairs.values())
    for side, file in enumerate((first, second)):
        compared = {pair[side] for pair in pairs}
        for name, stored_name in file.stored_names.items():
            if stored_name not in compared:
                compared.add(stored_name)
                names.append(name)
    return names


def compare_settings(first: TensorFile, second: TensorFile) -> list[tuple[str, str, str]]:
    """Return (name, in A, in B) of the settings that differ and change the output.

    Returns [] unless both are folders. Raises CorruptError for a settings file that cannot be
    parsed.
    """
    if not isinstance(first, WeightsFolder) or not isinstance(second, WeightsFolder):
        return []
    second_parts = {(part.path, part.kind): part for part in second.parts}
    differences = []
    for part in first.parts:
        second_part = second_parts.get((part.path, part.kind))
        if second_part is None:
            continue
        for name, before, after in differing_parts(first, part, second, second_part):
            differences.append((f"{part.path}/{name}".lstrip("/"), before, after))
    return differences


def by_layer(differences: Iterable[Difference]) -> list[Difference]:
    """Group differences by layer, such as "model.layers.3".

    Names without a number are grouped by module.
    """
    layers: dict[str, list[Difference]] = {}
    for difference in differences:
        layers.setdefault(layer_of(difference.name), []).append(difference)
    summaries = []
    for layer, members in layers.items():
        changed = sum(difference.changed for difference in members)
        sums = sum((difference.sums for difference in members), Sums())
        status = "changed" if changed else "equal"
        summaries.append(
            Difference(layer, status, sums=sums, tensors=len(members), changed=changed)
        )
    return _most_changed_first(summaries)


def layer_of(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, or all but the last step."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def _most_changed_first(differences: Iterable[Difference]) -> list[Difference]:
    def order(difference: Difference) -> tuple[bool, float]:
        return difference.status == "equal", -difference.relative

    return sorted(differences, key=order)


def _tensor_difference(first: TensorView, second: TensorView, name: str) -> Difference:
    before, after = first.specs.get(name), second.specs.get(name)
    if before is None:
        return Difference(name, "only in B", before, after, changed=1)
    if after is None:
        return Difference(name, "only in A", before, after, changed=1)
    if before.shape != after.shape:
        return Difference(name, "shape", before, after, changed=1)
    is_equal, sums = True, Sums()
    for start in range(0, before.numel, _SLICE):
        stop = min(start + _SLICE, before.numel)
        slice_is_equal, slice_sums = _compare_slices(
            first.read(name, start, stop), second.read(name, start, stop)
        )
        is_equal = is_equal and slice_is_equal
        sums += slice_sums
    status = "equal" if is_equal else "changed"
    return Difference(name, status, before, after, sums, changed=int(not is_equal))


def _compare_slices(first: Tensor, second: Tensor) -> tuple[bool, Sums]:
    """Return whether two slices are equal, and the sums over them."""
    has_same_dtype = first.dtype == second.dtype
    has_same_bytes = has_same_dtype and torch.equal(_byte_view(first), _byte_view(second))
    if _is_packed(first) or _is_packed(second):
        return has_same_bytes, _packed_sums(first, second)
    is_complex = first.is_complex() or second.is_complex()
    before = _float64_values(first, is_complex)
    norm = float(before.nan_to_num(0.0, 0.0, 0.0).square().sum())
    if has_same_bytes:
        return True, Sums(before.numel(), norm=norm)
    after = _float64_values(second, is_complex)
    is_same = (before == after) | (before.isnan() & after.isnan())
    change = torch.where(is_same, 0.0, after - before).abs()
    is_bounded = change.isfinite()
    change = torch.where(is_bounded, change, 0.0)
    sums = Sums(
        before.numel(),
        float(change.sum()),
        float(change.square().sum()),
        norm,
        float(change.max()),
        int((~is_bounded).sum()),
    )
    # values of two dtypes may be equal; different bytes of one dtype are not, as 0.0 and -0.0
    return not has_same_dtype and bool(is_same.all()), sums


def _is_packed(data: Tensor) -> bool:
    return str(data.dtype).endswith(_PACKED)


def _packed_sums(first: Tensor, second: Tensor) -> Sums:
    """Count the elements that differ; by how much is unknown."""
    if first.dtype != second.dtype:
        return Sums(first.numel(), unbounded=first.numel())
    is_changed = _byte_view(first) != _byte_view(second)
    return Sums(first.numel(), unbounded=int(is_changed.sum()))


def _byte_view(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.uint8)


def _float64_values(data: Tensor, is_complex: bool) -> Tensor:
    if is_complex:
        return torch.view_as_real(data.to(torch.complex128)).flatten()
    return data.to(torch.float64)
