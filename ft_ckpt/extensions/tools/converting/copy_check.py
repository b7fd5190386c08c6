"""Compares two files of tensors: their names, shapes, dtypes and every bit."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ft_ckpt.errors import CorruptError, listing
from ft_ckpt.formats import Spec
from ft_ckpt.formats.files import TensorFile

# Slices are small, because memory that several threads free stays in the heaps of the threads.
SLICE_BYTES = 4 << 20


def read_slices(file: TensorFile, specs: Sequence[Spec]) -> Iterator[tuple[Spec, Tensor]]:
    """Yield every tensor of `specs` in order, as slices of at most SLICE_BYTES."""
    for spec in specs:
        slice_numel = SLICE_BYTES * spec.numel // max(spec.size_bytes, 1)
        slice_numel = max(slice_numel, 1)
        for start in range(0, spec.numel, slice_numel):
            yield spec, file.read(spec.name, start, min(start + slice_numel, spec.numel))


def check_copy(source: TensorFile, copied: TensorFile, name: str) -> None:
    """Raise CorruptError naming every tensor of `copied` that differs in any bit from `source`.

    Memory holds a few slices. `name` is that of the copy, for messages.
    """
    problems = spec_differences(_all_specs(source), _all_specs(copied))
    for spec in source.specs.values():
        if copied.specs.get(spec.name) == spec and not _are_equal(source, copied, spec):
            problems.append(f"{spec.name}: other values")
    if problems:
        raise CorruptError(
            f"{name}: {listing(problems)}: differs from what was written; nothing "
            "is kept, check the disk"
        )


def _are_equal(first: TensorFile, second: TensorFile, spec: Spec) -> bool:
    pairs = zip(read_slices(first, [spec]), read_slices(second, [spec]), strict=True)
    for (_, first_slice), (_, second_slice) in pairs:
        if not torch.equal(first_slice.view(torch.uint8), second_slice.view(torch.uint8)):
            return False
    return True


def spec_differences(expected: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Return a line for each name that is missing, unexpected, or has another shape or dtype.

    `expected` and `found` have shapes and dtypes by name.
    """
    differences = [f"{name}: missing" for name in expected if name not in found]
    differences += [f"{name}: unexpected" for name in found if name not in expected]
    for name, spec in expected.items():
        if name in found and found[name] != spec:
            differences.append(f"{name}: {found[name]}, expected {spec}")
    return differences


def _all_specs(file: TensorFile) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and dtype of each tensor by name, tied names included."""
    specs = {name: (spec.shape, spec.dtype) for name, spec in file.specs.items()}
    for name, stored_name in file.ties.items():
        specs[name] = specs[stored_name]
    return specs
