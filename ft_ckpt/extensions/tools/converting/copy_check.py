"""Compares two files of tensors: names, shapes and dtypes, and every bit."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ft_ckpt.errors import CorruptError, listing
from ft_ckpt.formats import Spec
from ft_ckpt.formats.files import TensorFile

SLICE_BYTES = 4 << 20  # small, because memory freed by several threads stays in their heaps


def read_slices(file: TensorFile, specs: Sequence[Spec]) -> Iterator[tuple[Spec, Tensor]]:
    """Yield every tensor of `specs` in order, as slices of at most SLICE_BYTES."""
    for spec in specs:
        step = SLICE_BYTES * spec.numel // max(spec.size_bytes, 1) or 1
        for start in range(0, spec.numel, step):
            yield spec, file.read(spec.name, start, min(start + step, spec.numel))


def check_copy(source: TensorFile, copied: TensorFile, name: str) -> None:
    """Raise CorruptError naming every tensor of `copied` that differs in any bit from `source`.

    Reads slice by slice. `name`: of the copy, for messages.
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
    for (_, tensor), (_, other) in pairs:
        if not torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)):
            return False
    return True


def spec_differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """Write a line for each name that `theirs` lacks, adds, or has in another shape or dtype."""
    differences = [f"{name}: missing" for name in ours if name not in theirs]
    differences += [f"{name}: unexpected" for name in theirs if name not in ours]
    for name, spec in ours.items():
        if name in theirs and theirs[name] != spec:
            differences.append(f"{name}: {theirs[name]}, expected {spec}")
    return differences


def _all_specs(file: TensorFile) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype by name, tied names included."""
    specs = {name: (spec.shape, spec.dtype) for name, spec in file.specs.items()}
    for name, stored_name in file.ties.items():
        specs[name] = specs[stored_name]
    return specs
