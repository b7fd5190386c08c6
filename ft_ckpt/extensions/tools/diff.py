"""Compares the tensors of two files or folders, by tensor and by layer, slice by slice.

The first file or folder is called A, the second B.
"""

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

_SLICE_ELEMENTS = SLICE_BYTES // 8  # elements are compared in float64
_PACKED_DTYPE = "float4_e2m1fn_x2"  # has two numbers per byte, and torch cannot convert it


@dataclass(frozen=True)
class Sums:
    """Sums in float64 over the elements whose difference B - A is finite.

    Attributes:
        elements: The number of all elements, unbounded ones included. A complex number counts as
            two.
        total: The sum of |B - A|.
        squares: The sum of (B - A)².
        norm: The sum of A².
        largest: The maximum of |B - A|.
        unbounded: The number of elements whose difference is infinite, NaN or unknown (float4).
            Equal elements are not among them, nor are elements that are NaN in A and B.
    """

    elements: int = 0
    total: float = 0.0
    squares: float = 0.0
    norm: float = 0.0
    largest: float = 0.0
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

    Attributes:
        name: The name of the tensor or the layer.
        status: "equal", "changed", "shape", "only in A" or "only in B". For a layer it is "equal"
            or "changed". Tensors of one dtype are equal bit for bit, those of two dtypes by value.
        before: The shape and dtype in A. None if it is not in A, and for a layer.
        after: The shape and dtype in B. None if it is not in B, and for a layer.
        sums: The sums over the differences of the elements.
        tensors: The number of tensors: 1, or those of the layer.
        changed: The number of tensors that are not equal.
    """

    name: str
    status: str
    before: Spec | None = None
    after: Spec | None = None
    sums: Sums = Sums()
    tensors: int = 1
    changed: int = 0

    @property
    def mean(self) -> float:
        """Mean of |B - A|."""
        return self.sums.total / self.sums.elements if self.sums.elements else 0.0

    @property
    def relative(self) -> float:
        """Norm of B - A divided by the norm of A.

        It is infinite if A is zero and B is not, or if they cannot be subtracted.
        """
        sums = self.sums
        if self.status not in ("equal", "changed") or sums.unbounded:
            return math.inf
        if not sums.norm:
            return math.inf if sums.squares else 0.0
        return math.sqrt(sums.squares / sums.norm)


def compare_files(first: TensorFile, second: TensorFile) -> list[Difference]:
    """Compare every tensor of A (`first`) and B (`second`), largest change first.

    Memory holds a few slices. Tied names stand for one tensor, which is compared once; see
    `_names_to_compare`.
    """
    view_of_a = untie_file(first)
    view_of_b = untie_file(second)
    differences = []
    for name in _names_to_compare(view_of_a, view_of_b):
        differences.append(_tensor_difference(view_of_a, view_of_b, name))
    return _most_changed_first(differences)


def _names_to_compare(first: TensorView, second: TensorView) -> list[str]:
    """Return the names under which tensors are compared, so that each tensor is compared once.

    A pair of tensors is compared under the first name that both files have. A name in one file only
    is left out if its tensor is compared under another name.
    """
    pairs: dict[tuple[str, str], str] = {}  # name by (stored name in A, stored name in B)
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
    """Return (name, value in A, value in B) of the settings that differ and change the output.

    Only folders have settings: the result is [] unless both are folders. Raises CorruptError for a
    settings file that cannot be parsed.
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
    """Return the layer of a tensor.

    The layer is the name up to the first number, or else the name without its last component. For
    example, "model.layers.3.mlp.weight" is in "model.layers.3", and "lm_head.weight" in "lm_head".
    """
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def _most_changed_first(differences: Iterable[Difference]) -> list[Difference]:
    def order(difference: Difference) -> tuple[bool, float]:
        return difference.status == "equal", -difference.relative

    return sorted(differences, key=order)


def _tensor_difference(first: TensorView, second: TensorView, name: str) -> Difference:
    before = first.specs.get(name)
    after = second.specs.get(name)
    if before is None:
        return Difference(name, "only in B", before, after, changed=1)
    if after is None:
        return Difference(name, "only in A", before, after, changed=1)
    if before.shape != after.shape:
        return Difference(name, "shape", before, after, changed=1)
    is_equal = True
    sums = Sums()
    for start in range(0, before.numel, _SLICE_ELEMENTS):
        stop = min(start + _SLICE_ELEMENTS, before.numel)
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
    has_same_bytes = has_same_dtype and torch.equal(_as_bytes(first), _as_bytes(second))
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

    # Values of two dtypes may be equal. Different bytes of one dtype are not, for example 0.0 and
    # -0.0.
    return not has_same_dtype and bool(is_same.all()), sums


def _is_packed(data: Tensor) -> bool:
    return str(data.dtype).endswith(_PACKED_DTYPE)


def _packed_sums(first: Tensor, second: Tensor) -> Sums:
    """Return sums that count the differing elements as unbounded, since values are unknown."""
    if first.dtype != second.dtype:
        return Sums(first.numel(), unbounded=first.numel())
    is_changed = _as_bytes(first) != _as_bytes(second)
    return Sums(first.numel(), unbounded=int(is_changed.sum()))


def _as_bytes(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.uint8)


def _float64_values(data: Tensor, is_complex: bool) -> Tensor:
    if is_complex:
        return torch.view_as_real(data.to(torch.complex128)).flatten()
    return data.to(torch.float64)
