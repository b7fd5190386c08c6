"""Frozen tensors are written once: the next checkpoint takes their files over from the one before.

Tensors that are not trained go into files of their own. Such a file is hard-linked into the next checkpoint beside it,
or copied where there are no links, while every rank finds its parameters as they were: the same objects in the same
memory with the same version counters. A write through `.data` passes the counters by. A look at elements all over each
tensor tells it if it reached many of them, and from then on this saver trusts no counter; what it reached few of is not
told, so whoever does that to frozen tensors says reuse_frozen="off".
"""

import os
import shutil
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt import engines
from ft_ckpt.catalog import read_manifest
from ft_ckpt.deliver import PartPlan
from ft_ckpt.digests import digest_like
from ft_ckpt.engines import Source
from ft_ckpt.errors import ManifestError
from ft_ckpt.manifest import FileRecord, Manifest
from ft_ckpt.resume import RestoreReport, read_document
from ft_ckpt.select import Entry, Part
from ft_ckpt.write import FilePlan

LEAST_BYTES = 64 << 20  # of frozen tensors, for which a second file pays
LEAST_SHARE = 0.25  # of a part
_ENGINES = {"plain", "fsdp2", "tensor parallel"}  # whose shards have counters of their own
_SPOTS = 128  # elements looked at in each tensor, the first and the last among them
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Key = tuple[str, bytes]


@dataclass(frozen=True, eq=False)
class Mark:
    """What tells that a live tensor still is what it was, without reading all of it."""

    live: "weakref.ref[Any]"
    counters: tuple[int, ...]  # versions of the tensor and of this rank's shard; -1: it has none
    place: tuple[int, ...]  # address, shape and strides of what this rank has
    look: bytes

    def counts_as(self, other: "Mark") -> bool:
        """Whether the two are of one tensor that nobody has written to, as far as it tells."""
        same = self.live() is not None and self.live() is other.live()
        return same and self.counters == other.counters and -1 not in self.counters and self.place == other.place


@dataclass(frozen=True, eq=False)
class _Known:
    """A file of frozen tensors in an earlier checkpoint."""

    word: str  # the same on all ranks that speak of the same checkpoint
    marks: tuple[Mark, ...]
    folder: Path
    identities: Mapping[str, tuple[int, ...]]  # on rank 0: of the files it may be, by path in the checkpoint


@dataclass(frozen=True, eq=False)
class _Resumed:
    """The checkpoint that the live tensors came from, and what told them apart right then."""

    word: str
    marks: Mapping[int, Mark]  # by the identity of a source
    folder: Path
    identities: Mapping[str, tuple[int, ...]]


@dataclass
class Memory:
    """What a saver knows of the checkpoints it has made; one for all its saves."""

    files: dict[_Key, _Known] = field(default_factory=dict)
    resumed: _Resumed | None = None
    trusts: bool = True
    links: bool = True  # until a file system has refused one


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A file to be that holds frozen tensors alone."""

    file: FilePlan
    key: _Key
    marks: tuple[Mark, ...]
    identities: tuple[int, ...]  # of the sources, as the marks
    exact: bool  # nothing is cast on the way to the file


@dataclass(frozen=True, eq=False)
class Reuse:
    """What one save may take over: `chosen` as this rank sees it, on rank 0 what is in the stage already."""

    candidates: Mapping[str, _Candidate] = field(default_factory=dict)  # by path
    chosen: Mapping[str, _Known] = field(default_factory=dict)
    records: Mapping[str, FileRecord] = field(default_factory=dict)

    @property
    def votes(self) -> dict[str, str]:
        """By path, the checkpoint that this rank would take the file from."""
        return {path: known.word for path, known in self.chosen.items()}


def frozen(found: Mapping[str, Source]) -> frozenset[int]:
    """Identities of the parameters that are not trained and whose versions can be told."""
    return frozenset(
        source.identity
        for source in found.values()
        if not source.trainable and isinstance(source.live, nn.Parameter) and source.engine in _ENGINES
    )


def apart(part: Part, still: frozenset[int], mode: str) -> frozenset[str]:
    """Stored names of `part` that belong into files of their own: all that come from `still` tensors, if that pays."""
    if mode == "off" or part.kind not in ("model", "module"):
        return frozenset()
    names = {entry.name for entry in part.entries if {s.identity for s in _sources(entry)} <= still}
    sizes = {entry.name: torch.Size(entry.shape).numel() * entry.dtype.itemsize for entry in part.entries}
    held = sum(sizes[name] for name in names)
    pays = mode == "on" or held >= max(LEAST_BYTES, LEAST_SHARE * sum(sizes.values()))
    return frozenset(names) if pays else frozenset()


def choose(memory: Memory | None, plans: Sequence[PartPlan], target: Path) -> Reuse:
    """The planned files whose tensors are, on this rank, as they were in a checkpoint beside `target`."""
    if memory is None:
        return Reuse()
    candidates = {one.file.path: one for plan in plans for one in _candidates(plan)}
    chosen = {path: known for path, one in candidates.items() if (known := _known(memory, one, target)) is not None}
    return Reuse(candidates, chosen if memory.trusts else {})


def saved_bytes(memory: Memory | None, reuse: Reuse) -> int:
    """Bytes of the disk that need not be free, as they are linked."""
    links = memory is not None and memory.links
    return sum(reuse.candidates[path].file.layout.size_bytes for path in reuse.chosen) if links else 0


def bring(memory: Memory | None, reuse: Reuse, stage: Path) -> Reuse:
    """On rank 0: the chosen files in the `stage`, linked or copied; those that are no longer there are not chosen."""
    records: dict[str, FileRecord] = {}
    manifests: dict[Path, Manifest | None] = {}
    for path, known in reuse.chosen.items():
        if known.folder not in manifests:
            manifests[known.folder] = _manifest(known.folder)
        manifest = manifests[known.folder]
        record = None if manifest is None else _record(manifest, known, reuse.candidates[path].file)
        taken = None if record is None else _take(known, record, stage / path)
        if taken is not None:
            records[path] = replace(taken, path=path)
    if memory is not None and records:
        memory.links = all(record.linked for record in records.values())
    return replace(reuse, chosen={path: reuse.chosen[path] for path in records}, records=records)


def agreed(votes: Sequence[Mapping[str, str]]) -> frozenset[str]:
    """The files that all ranks would take from the same checkpoint."""
    return frozenset(path for path, word in votes[0].items() if all(vote.get(path) == word for vote in votes))


def doubtful(votes: Sequence[Mapping[str, str]]) -> frozenset[str]:
    """The files that some ranks would take over, and that are written since others would not."""
    return frozenset(path for vote in votes for path in vote) - agreed(votes)


def settle(reuse: Reuse, taken: frozenset[str], stage: Path) -> list[FileRecord]:
    """On rank 0: the records of the `taken` files; the others leave the stage, to be written."""
    for path in reuse.records.keys() - taken:
        (stage / path).unlink()
    return [record for path, record in reuse.records.items() if path in taken]


def to_write(plans: Sequence[PartPlan], taken: frozenset[str]) -> tuple[PartPlan, ...]:
    """The plans without the files that are `taken`."""
    return tuple(replace(one, files=tuple(file for file in one.files if file.path not in taken)) for one in plans)


def remember(memory: Memory | None, reuse: Reuse, word: str, target: Path, leads: bool) -> None:
    """After the commit of `target` by the save that all ranks call `word`: what the next one may take from it."""
    if memory is None:
        return
    memory.files = {key: known for key, known in memory.files.items() if _alive(known)}
    for path, one in reuse.candidates.items():
        identities = _identities(target, [path]) if leads else {}
        memory.files[one.key] = _Known(word, one.marks, target, identities)


def note_resumed(memory: Memory, report: RestoreReport, model: nn.Module, leads: bool) -> None:
    """After a resume from a checkpoint whose digests were compared: what `model` got from it is what it holds."""
    memory.files.clear()
    manifest = _manifest(report.path)
    if manifest is None or not any(item.name == "weights" and item.status == "restored" for item in report.items):
        return
    found, weights = engines.sources(model), read_document(report.path)["weights"]
    still = frozen({name: source for name, source in found.items() if name in weights})
    marks = {source.identity: _mark(source) for source in found.values() if source.identity in still}
    identities = _identities(report.path, [file.path for file in manifest.files]) if leads else {}
    memory.resumed = _Resumed(f"resumed {manifest.created}", marks, report.path, identities)


def _sources(entry: Entry) -> Sequence[Source]:
    return entry.group.sources if entry.group is not None else [entry.source] if entry.source is not None else []


def _candidates(plan: PartPlan) -> Iterable[_Candidate]:
    entries = {entry.name: entry for entry in plan.part.entries}
    for file in plan.files:
        held = [entries[spec.name] for spec in file.layout.specs]
        if not held or not plan.apart.issuperset(entry.name for entry in held):
            continue
        sources = {id(source): source for entry in held for source in _sources(entry)}.values()
        yield _Candidate(
            file,
            (plan.part.name, file.layout.header),
            tuple(_mark(source) for source in sources),
            tuple(source.identity for source in sources),
            all(entry.dtype == entry.memory_dtype for entry in held),
        )


def _mark(source: Source) -> Mark:
    live, local = source.live, source.holding.local
    held = [tensor for tensor in (live, getattr(live, "_local_tensor", None)) if tensor is not None]
    counters = tuple(-1 if tensor.is_inference() else tensor._version for tensor in held)
    if local is None:
        return Mark(weakref.ref(live), counters, (), b"")
    return Mark(weakref.ref(live), counters, (local.data_ptr(), *local.shape, *local.stride()), _look(local))


@torch.no_grad()
def _look(local: Tensor) -> bytes:
    """The bits of elements all over the tensor; on an accelerator, where it costs next to nothing, the sum of all."""
    count = local.numel()
    if not count:
        return b""
    bits = local.view(_BITS.get(local.element_size(), local.dtype))
    where = torch.arange(_SPOTS, device=bits.device) * (count - 1) // (_SPOTS - 1)
    flat = bits.is_contiguous()
    seen = bits.view(-1)[where] if flat else bits[torch.unravel_index(where, bits.shape)]
    seen = seen.to(torch.int64)
    if bits.device.type != "cpu":
        seen = torch.cat([seen, bits.sum(dtype=torch.int64).reshape(1)])
    return seen.cpu().numpy().tobytes()


def _known(memory: Memory, one: _Candidate, target: Path) -> _Known | None:
    """Where the file is already, with every tensor in it as it was. Finds out, too, whether counters can be trusted."""
    known = memory.files.get(one.key) or _from_resumed(memory.resumed, one)
    if known is None or known.folder.parent != target.parent or len(known.marks) != len(one.marks):
        return None
    pairs = list(zip(known.marks, one.marks, strict=True))
    if not all(old.counts_as(new) for old, new in pairs):
        return None
    if all(old.look == new.look for old, new in pairs):
        return known
    if memory.trusts:
        memory.trusts = False
        warnings.warn(
            f"{one.file.path}: frozen tensors have changed though no version counter of torch says so (written to "
            "through .data?); from now on they are written with every checkpoint",
            stacklevel=2,
        )
    return None


def _from_resumed(resumed: _Resumed | None, one: _Candidate) -> _Known | None:
    if resumed is None or not one.exact or not resumed.marks.keys() >= set(one.identities):
        return None
    marks = tuple(resumed.marks[identity] for identity in one.identities)
    return _Known(resumed.word, marks, resumed.folder, resumed.identities)


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except (ManifestError, OSError):  # deleted since
        return None


def _record(manifest: Manifest, known: _Known, file: FilePlan) -> FileRecord | None:
    """The file of the checkpoint that is laid out as `file`: with the same header, so the same tensors."""
    header = file.layout.header
    for record in manifest.files:
        if record.path not in known.identities or record.size_bytes != file.layout.size_bytes:
            continue
        with suppress(OSError), (known.folder / record.path).open("rb") as stream:
            if stream.read(len(header)) == header:
                return record
    return None


def _take(known: _Known, record: FileRecord, goal: Path) -> FileRecord | None:
    """Link or copy the file of the record to `goal`; None where it is gone, or not what was committed."""
    source = known.folder / record.path
    goal.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, goal)
        linked = True
    except OSError:
        linked = False
        try:
            shutil.copyfile(source, goal)
        except OSError:  # no room is told by the write that follows
            goal.unlink(missing_ok=True)
            return None
    place = goal if linked else source
    sound = _identities(place.parent, [place.name]).get(place.name) == known.identities[record.path]
    if sound and (linked or digest_like(goal, record) == record.digest):
        return replace(record, linked=linked)
    goal.unlink()
    return None


def _identities(folder: Path, paths: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """What changes when somebody replaces a file or writes to it, by path."""
    found: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with suppress(OSError):
            status = (folder / path).lstat()
            found[path] = (status.st_ino, status.st_dev, status.st_size, status.st_mtime_ns)
    return found


def _alive(known: _Known) -> bool:
    return all(mark.live() is not None for mark in known.marks)
