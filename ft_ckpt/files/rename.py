"""Gives the tensors of one file other names and another type, a slice at a time."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ft_ckpt.errors import ConfigError, CorruptError, SelectionError, listing
from ft_ckpt.formats.layout import Spec, TensorFile
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.read_ahead import ByteRun
from ft_ckpt.storage.store import read_text

SLICE_BYTES = 4 << 20  # small, since what several threads free stays with their heaps
DTYPES = ("float64", "float32", "bfloat16", "float16")
FLOAT_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
Names = Mapping[str, str]


def read_map(source: str | Path | Names | None) -> dict[str, str]:
    """Old names and new ones: a mapping, or a file of JSON or of lines "old new" (# begins a comment).

    A name may end in *, for every name that begins so. Raises ConfigError when it is none of this.
    """
    given = {} if source is None else source
    pairs = list(given.items()) if isinstance(given, Mapping) else _parse_map(open_place(given))
    wrong = [f"{old!r}" for old, new in pairs if old.endswith("*") != new.endswith("*")]
    twice = sorted({f"{old!r}" for old, _ in pairs if [one for one, _ in pairs].count(old) > 1})
    if wrong or twice:
        raise ConfigError(
            f"{listing(wrong + twice, ', ')}: expected each old name once, and * at the end of both or none"
        )
    return dict(pairs)


def _parse_map(path: Place) -> list[tuple[str, str]]:
    text = read_text(path.store, path.name)
    if text.lstrip().startswith("{"):
        try:
            return [(str(old), str(new)) for old, new in json.loads(text, object_pairs_hook=list)]
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON ({error}); expected old names and new ones") from error
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if bad := [" ".join(line) for line in lines if len(line) != 2]:
        raise ConfigError(f"{path}: {listing(bad)}: expected an old name and a new one in each line")
    return [(line[0], line[1]) for line in lines]


def check_used(table: Names, names: Iterable[str], source: str) -> None:
    """Raise SelectionError for old names that none of `names` is, or begins with."""
    there = list(names)
    prefixes = [old for old in table if old.endswith("*") and any(name.startswith(old[:-1]) for name in there)]
    if unknown := sorted(table.keys() - {*there, *prefixes}):
        raise SelectionError(
            f"{listing(unknown, ', ')}: to be renamed, but not in {source}; `ft-ckpt show` lists names"
        )


def rename_tensors(names: Iterable[str], table: Names) -> dict[str, str]:
    """New names by old. An exact rule goes before one with *, a longer one before a shorter.

    Raises SelectionError naming tensors that would come to have one name.
    """
    prefixes = sorted((old for old in table if old.endswith("*")), key=len, reverse=True)
    new = {}
    for name in names:
        rule = next((old for old in prefixes if name.startswith(old[:-1])), None)
        if name in table or rule is None:
            new[name] = table.get(name, name)
        else:
            new[name] = table[rule][:-1] + name[len(rule) - 1 :]
    taken: dict[str, str] = {}
    both = [f"{name} and {taken[now]} -> {now}" for name, now in new.items() if taken.setdefault(now, name) != name]
    if both:
        raise SelectionError(f"{listing(both)}: two tensors would have one name; rename one of them differently")
    return new


class TranslatedFile:
    """`file` with its tensors renamed by `names` (see `read_map`) and its floats in `dtype`, None: as they are."""

    def __init__(self, file: TensorFile, names: Names, dtype: str | None) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
        ties: Names = getattr(file, "ties", {})
        new = rename_tensors([*file.specs, *ties], names)
        self.file, self.old = file, {new[name]: name for name in file.specs}
        self.specs = {
            new[name]: Spec(new[name], spec.shape, dtype if dtype and spec.dtype in FLOAT_DTYPES else spec.dtype)
            for name, spec in file.specs.items()
        }
        self.ties = {new[name]: new[kept] for name, kept in ties.items()}
        self.metadata: dict[str, str] = dict(getattr(file, "metadata", {}))
        self.skipped: tuple[str, ...] = tuple(getattr(file, "skipped", ()))
        self.overflown: set[str] = set()  # with values that became infinite

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of a tensor, unless it is cast."""
        old = self.old[name]
        return tensor_runs(self.file, old) if self.file.specs[old].dtype == self.specs[name].dtype else None

    @property
    def casts(self) -> dict[str, int]:
        """ "float32->bfloat16": number of tensors, those that the file itself has cast included."""
        found: dict[str, int] = dict(getattr(self.file, "casts", {}))
        for name, spec in self.specs.items():
            before = self.file.specs[self.old[name]].dtype
            if before != spec.dtype:
                found[f"{before}->{spec.dtype}"] = found.get(f"{before}->{spec.dtype}", 0) + 1
        return found

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the tensor with the new name `name`: 1-D, on the CPU, in its new type."""
        data = self.file.read(self.old[name], start, stop)
        wanted = getattr(torch, self.specs[name].dtype)
        if data.dtype == wanted:
            return data.contiguous()
        cast = data.to(wanted)
        if wanted == torch.float16 and bool((cast.isinf() & data.to(torch.float64).isfinite()).any()):
            self.overflown.add(name)
        return cast

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()


class UntiedFile:
    """`file` with every name of a tied tensor as a tensor of its own, for formats that know no ties."""

    def __init__(self, file: TensorFile) -> None:
        ties: Names = getattr(file, "ties", {})
        self.file = file
        self.old = {**{name: name for name in file.specs}, **ties}
        self.specs = {name: Spec(name, file.specs[old].shape, file.specs[old].dtype) for name, old in self.old.items()}
        self.metadata: dict[str, str] = dict(getattr(file, "metadata", {}))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name`."""
        return self.file.read(self.old[name], start, stop)

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()


def tensor_runs(file: TensorFile, name: str) -> list[ByteRun] | None:
    """The byte ranges of a tensor; None when they do not lie in a file as they are."""
    ask = getattr(file, "runs", None)
    found: list[ByteRun] | None = None if ask is None else ask(name)
    return found and [replace(run, name=name) for run in found]


def read_slices(file: TensorFile, specs: list[Spec]) -> Iterator[tuple[Spec, Tensor]]:
    """Every tensor of `specs` in order, as slices of at most SLICE_BYTES."""
    for spec in specs:
        count = spec.numel
        step = SLICE_BYTES * count // max(spec.size_bytes, 1) or 1
        for low in range(0, count, step):
            yield spec, file.read(spec.name, low, min(low + step, count))


def check_copy(wanted: TensorFile, found: TensorFile, source: str) -> None:
    """Raise CorruptError naming every tensor of `found` that is not, bit for bit, what `wanted` has; slice by slice."""
    wrong = copy_differences(wanted, found)
    for name, spec in wanted.specs.items():
        if name in found.specs and found.specs[name] == spec and not _equal_bytes(wanted, found, spec):
            wrong.append(f"{name}: other values")
    if wrong:
        raise CorruptError(
            f"{source}: {listing(wrong)}: not what was to be written; nothing is kept. Is the disk sound?"
        )


def copy_differences(wanted: TensorFile, found: TensorFile) -> list[str]:
    """The differences in names, shapes and types, ties included."""
    return spec_differences(_all_specs(wanted), _all_specs(found))


def spec_differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """A line for each name that is missing, unexpected, or has another shape and dtype in `theirs`."""
    wrong = [f"{name}: missing" for name in ours if name not in theirs]
    wrong += [f"{name}: unexpected" for name in theirs if name not in ours]
    wrong += [f"{n}: {theirs[n]}, expected {ours[n]}" for n in ours if n in theirs and theirs[n] != ours[n]]
    return wrong


def _all_specs(file: TensorFile) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {name: (spec.shape, spec.dtype) for name, spec in file.specs.items()}
    return found | {name: found[kept] for name, kept in getattr(file, "ties", {}).items()}


def _equal_bytes(wanted: TensorFile, found: TensorFile, spec: Spec) -> bool:
    pairs = zip(read_slices(wanted, [spec]), read_slices(found, [spec]), strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for (_, one), (_, other) in pairs)
