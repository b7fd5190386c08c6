"""Chains of deltas: a folder, or a prefix in a bucket, in which most checkpoints hold only the
elements that changed.

Each entry is a committed folder. An anchor has all files of its checkpoint but the training state.
A delta has

    ft_ckpt.json                    its manifest, of the kind "delta": names its base, and the
                                    digests of both contents
    checkpoint.json                 the manifest of the checkpoint that it stands for
    deltas/PATH/00001.safetensors   of the file PATH, for each tensor NAME with changes
                                    NAME.indices (flat positions, ascending) and NAME.values;
                                    a long tensor goes on in the next file
    headers/PATH                    the header of the file PATH, if it differs from that in the base
    files/PATH                      each other file that differs from that in the base

Elements are compared as bytes, so rebuilt files have the digests in the manifest of their
checkpoint.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint import (
    MANIFEST_LIMIT_BYTES,
    CheckpointInfo,
    Manifest,
    OpenCheckpoint,
    in_run_order,
    list_checkpoints,
    load_manifest,
    manifest_to_json,
    open_checkpoint,
    open_staging_at,
    parse_manifest,
    text_identity,
)
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    ManifestError,
    NameTakenError,
    NotACheckpointError,
    UnreadableError,
    listing,
)
from ft_ckpt.extensions.transfer import CopyReport, content_key, copy_open, weights_manifest
from ft_ckpt.formats import (
    ITEM_BYTES,
    HeaderEntry,
    SafetensorsHeader,
    Spec,
    lay_out_safetensors,
    parse_header,
)
from ft_ckpt.messages import warn
from ft_ckpt.runs import remove_checkpoints
from ft_ckpt.storage import (
    PREFIX,
    FileRecord,
    ListedStore,
    LocalStore,
    Place,
    Readable,
    RunningDigest,
    Store,
    Stored,
    copy_object,
    digest_of_bytes,
    etag_of,
    read_range,
    read_text,
    record_of,
)

DELTA = "delta"  # the kind in its manifest
CHECKPOINT_NAME = "checkpoint.json"
# an empty file in each checkpoint that `mark_staged` was called for
STAGED_NAME = f"{PREFIX}staged"
_MOST_SHARE = 0.5  # of the bytes of the checkpoint; a larger delta is not worth it
_SLICE_BYTES = 4 << 20  # compared at once
_PIECE_BYTES = 8 << 20  # a file of a delta ends once its changes have this size
_KEPT_PIECES = 3  # files of a delta in memory, for each rebuilt file
_INT32_ELEMENTS = 1 << 31
_REPAIR = "publish an anchor (`ft-ckpt publish CHECKPOINT CHAIN --delta --anchor-every 1`)"


@dataclass(frozen=True)
class AppendReport:
    """An entry that was appended to a chain, or was there already."""

    path: Path | str
    """The entry: a path, or a URL."""
    kind: str
    """"anchor" or "delta"."""
    base: str | None
    """The entry that a delta is based on."""
    is_new: bool
    """False if the entry was there already."""
    bytes: int
    """Size of its files, in bytes."""
    full_bytes: int
    """Size of the files that it stands for, in bytes."""
    seconds: float
    """Duration."""


def content_digest(manifest: Manifest) -> str:
    """A digest of the paths, sizes and digests of the files of a checkpoint, without its training
    state.
    """
    lines = sorted(
        f"{file.digest} {file.size_bytes} {file.path}" for file in weights_manifest(manifest).files
    )
    return digest_of_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))


# Appending


def append_checkpoint(checkpoint: Place, chain: Place, anchor_every: int) -> AppendReport:
    """Append the committed `checkpoint`, under its name, to the folder or bucket prefix `chain`;
    all or nothing.

    Appends a delta on the newest entry. The files of this entry are read beside the checkpoint if
    they are still there, else rebuilt from the chain as they are read. Appends an anchor instead if
    the chain is empty, after `anchor_every - 1` deltas in a row, if a tensor has another name,
    shape or type, if the delta would have more than half of the bytes, and with a warning if the
    newest entry is damaged. Digests are compared on the way; memory holds a few slices.

    Raises NameTakenError if the chain has another checkpoint of this name, or a newer one;
    otherwise as `copy` does.
    """
    begun = time.monotonic()
    with open_checkpoint(checkpoint) as held:
        manifest = replace(weights_manifest(held.manifest), export=held.manifest.export, token=None)
        goal = Place(chain.folder, held.place.basename)
        full_bytes = sum(file.size_bytes for file in manifest.files)

        def report(written: Manifest, *, is_new: bool) -> AppendReport:
            kind, size = (
                DELTA if written.delta else "anchor",
                sum(file.size_bytes for file in written.files),
            )
            seconds = time.monotonic() - begun
            return AppendReport(
                goal.location, kind, written.delta.get("base"), is_new, size, full_bytes, seconds
            )

        entries = _entries(chain)
        there = next((info.manifest for info in entries if info.name == goal.basename), None)
        if there is not None and _content_of(there) == content_digest(manifest):
            return report(there, is_new=False)
        _refuse_older(entries, CheckpointInfo(goal.folder, manifest))
        if entries and _deltas_in_a_row(entries) + 1 < anchor_every:
            try:
                if (written := _append_delta(held, manifest, entries[-1], goal)) is not None:
                    return report(written, is_new=True)
            except CorruptError as error:
                warn(
                    f"{goal}: writing an anchor, because there is no delta on "
                    f"{entries[-1].name}: {error}",
                    stacklevel=3,
                )
        copy_open(held, goal, manifest, overwrite=False, shown=False)
        return report(manifest, is_new=True)


def _entries(chain: Place) -> list[CheckpointInfo]:
    """The entries of a chain, oldest first.

    Raises UnreadableError, and ConfigError if `chain` is a checkpoint.
    """
    listed = list_checkpoints(chain)
    listed.require_readable()
    listed.warn_left_out()
    if any(info.store.identity == chain.folder.identity for info in listed.found):
        raise ConfigError(f"{chain}: a checkpoint, expected the folder of a chain")
    return list(listed.found)


def _content_of(manifest: Manifest) -> str:
    """The content digest of the checkpoint that an entry with this manifest stands for."""
    return manifest.delta.get("content") or content_digest(manifest)


def _refuse_older(entries: Sequence[CheckpointInfo], coming: CheckpointInfo) -> None:
    if any(info.name == coming.name for info in entries):
        raise NameTakenError(
            f"{coming.path}: the chain has another checkpoint of this name, expected a new one; "
            "publish to a new chain, or delete the entries from this one on"
        )
    if in_run_order([*entries, coming])[-1] is not coming:
        raise NameTakenError(
            f"{coming.path}: older than {entries[-1].name}, the newest entry; publish a newer "
            "checkpoint, or to a new chain, or delete the newer entries"
        )


def _deltas_in_a_row(entries: Sequence[CheckpointInfo]) -> int:
    """The number of deltas after the last anchor."""
    return next(
        (count for count, info in enumerate(reversed(entries)) if not info.manifest.delta),
        len(entries),
    )


def _append_delta(
    held: OpenCheckpoint, manifest: Manifest, newest: CheckpointInfo, goal: Place
) -> Manifest | None:
    """Commit a delta; None if it would be too large, or a tensor has another name, shape or
    type.
    """
    if manifest.step is None and manifest.number is None:
        manifest = replace(manifest, number=(newest.manifest.number or 0) + 1)
    files = tuple(replace(file, linked=False, etag=None) for file in manifest.files)
    manifest = replace(manifest, files=files)
    content = content_digest(manifest)
    max_mode = Place(held.store).mode_at(goal)
    with open_checkpoint(newest.place) as entry, open_whole(entry, held.place.beside) as base:
        staging = open_staging_at(goal, run_id=f"delta to {content}", max_mode=max_mode)
        try:
            records = _write_changes(held, manifest, base, staging.store)
            if records is None:
                return None
            delta = {
                "base": newest.name,
                "base_content": content_digest(base.manifest),
                "content": content,
            }
            written = replace(
                manifest,
                parts=(),
                files=records,
                kind=DELTA,
                world={},
                versions={"ft_ckpt": __version__},
                shared=(),
                notes=(f"a delta on {newest.name}; `ft-ckpt pull` makes the checkpoint",),
                delta=delta,
            )
            staging.commit(written)
            return written
        finally:
            staging.discard()


def _write_changes(
    held: OpenCheckpoint, manifest: Manifest, base: OpenCheckpoint, store: Store
) -> tuple[FileRecord, ...] | None:
    """Write all files of a delta but its manifest; None as soon as it has too many bytes, or cannot
    be a delta.
    """
    known, records = {file.path: file for file in base.manifest.files}, list[FileRecord]()
    most_bytes = _MOST_SHARE * sum(file.size_bytes for file in manifest.files)

    def put(path: str, content: bytes) -> None:
        store.write(path, content)
        records.append(replace(record_of(path, content), etag=etag_of(store, path)))

    put(CHECKPOINT_NAME, manifest_to_json(manifest).encode())
    for file in manifest.files:
        old = known.get(file.path)
        if old is not None and content_key(old) == content_key(file):
            continue
        if old is None or not file.path.endswith(".safetensors"):
            if sum(record.size_bytes for record in records) + file.size_bytes > most_bytes:
                return None
            records.append(_copy_file(held, file, store))
            continue
        with (
            closing(held.store.open(file.path)) as new_file,
            closing(base.store.open(file.path)) as old_file,
        ):
            new, before = _DigestedFile(new_file, file), _DigestedFile(old_file, old)
            if not _is_alike(new.header, before.header):
                return None
            if new.head != before.head:
                put(f"headers/{file.path}", new.head)
            for number, content in enumerate(_changed_pieces(file.path, new, before), 1):
                put(f"deltas/{file.path}/{number:05}.safetensors", content)
                if sum(record.size_bytes for record in records) > most_bytes:
                    return None
            new.check()
            before.check()
    return tuple(records)


def _copy_file(held: OpenCheckpoint, file: FileRecord, store: Store) -> FileRecord:
    """Copy a file that the base lacks, or has with other content."""
    path, running = f"files/{file.path}", RunningDigest(file.size_bytes, file.cuts, file.ranks)
    with closing(held.store.open(file.path)) as opened:
        if opened.size_bytes == file.size_bytes:
            copy_object(opened, store, path, running.update)
        _refuse_other(opened, file, running)
    return replace(file, path=path, etag=etag_of(store, path))


class _DigestedFile:
    """An open safetensors file that is read once, in order, and digested on the way."""

    def __init__(self, file: Readable, record: FileRecord) -> None:
        self.file, self.record = file, record
        self.running = RunningDigest(record.size_bytes, record.cuts, record.ranks)
        self.head = b""
        if file.size_bytes != record.size_bytes:
            _refuse_other(file, record, self.running)
        self.header = parse_header(self._read_head, file.size_bytes)

    def read(self, start: int, size_bytes: int) -> bytes:
        """Read bytes; each call goes on where the last one ended."""
        content = read_range(self.file, start, size_bytes)
        self.running.update(memoryview(content))
        return content

    def check(self) -> None:
        """Raise CorruptError if the bytes are not those of the record."""
        _refuse_other(self.file, self.record, self.running)

    def _read_head(self, start: int, size_bytes: int) -> bytes:
        content = self.read(start, size_bytes)
        self.head += content
        return content


def _refuse_other(file: Readable, record: FileRecord, running: RunningDigest) -> None:
    if file.size_bytes != record.size_bytes or running.text() != record.digest:
        raise CorruptError(
            f"{file.where}: its bytes are not those that its manifest lists; use another checkpoint"
        )


def _in_file_order(header: SafetensorsHeader) -> list[tuple[str, HeaderEntry]]:
    return sorted(header.tensors.items(), key=lambda item: (item[1].start, item[1].end))


def _is_alike(one: SafetensorsHeader, other: SafetensorsHeader) -> bool:
    """Whether two files have tensors of the same names, shapes and types in the same order, all of
    supported types.
    """
    tensors, others = (
        [(name, *entry[:2]) for name, entry in _in_file_order(each)] for each in (one, other)
    )
    return tensors == others and all(entry.dtype in ITEM_BYTES for entry in one.tensors.values())


def _changed_pieces(path: str, new: _DigestedFile, old: _DigestedFile) -> Iterator[bytes]:
    """The files of a delta between two files of the same layout, each for a byte range of the new
    one.
    """
    changes, size_bytes, begun = dict[str, list[Any]](), 0, len(new.head)
    shift = len(new.head) - len(old.head)
    for name, entry in _in_file_order(new.header):
        width, numel = ITEM_BYTES[entry.dtype], Spec(name, entry.shape, entry.dtype).numel
        kind, index_kind = (
            np.dtype(f"<u{width}"),
            np.dtype("<i8" if numel >= _INT32_ELEMENTS else "<i4"),
        )
        for start in range(entry.start, entry.end, _SLICE_BYTES):
            size = min(_SLICE_BYTES, entry.end - start)
            now = np.frombuffer(new.read(start, size), kind)
            found = np.flatnonzero(now != np.frombuffer(old.read(start - shift, size), kind))
            if found.size:
                first = (start - entry.start) // width
                changes.setdefault(name, []).append(
                    ((found + first).astype(index_kind), now[found], entry.dtype)
                )
                size_bytes += found.size * (width + index_kind.itemsize)
            if size_bytes >= _PIECE_BYTES:
                yield _piece(path, changes, begun, start + size)
                changes, size_bytes, begun = {}, 0, start + size
    if changes:
        yield _piece(path, changes, begun, new.file.size_bytes)


def _piece(path: str, changes: Mapping[str, list[Any]], start: int, stop: int) -> bytes:
    """A safetensors file of the changes in bytes [start, stop) of the file `path`."""
    arrays, specs = dict[str, Any](), list[Spec]()
    for name, parts in changes.items():
        columns = zip(*parts, strict=True)
        for ending, column in zip((".indices", ".values"), columns, strict=False):
            arrays[name + ending] = np.concatenate(column)
        count, dtypes = (
            arrays[name + ".indices"].shape,
            (arrays[name + ".indices"].dtype.name, parts[0][2]),
        )
        specs += [
            Spec(name + end, count, kind)
            for end, kind in zip((".indices", ".values"), dtypes, strict=True)
        ]
    layout = lay_out_safetensors(
        specs, {"format": "pt", "file": path, "start": str(start), "stop": str(stop)}
    )
    return b"".join([layout.header, *(arrays[spec.name].tobytes() for spec in layout.specs)])


# Rebuilding


@contextmanager
def open_whole(entry: OpenCheckpoint, near: Store | None = None) -> Iterator[OpenCheckpoint]:
    """The checkpoint that an open entry of a chain stands for; the files of a delta are rebuilt
    while they are read.

    Each base is read from the folder `near` if that has its content under its name, else from the
    chain. File digests are not compared here, only the content digests that link the entries.
    Raises CorruptError, also in place of an error of the block, naming each entry that is missing,
    damaged, or not the base that its delta was computed from.
    """
    entries = [entry]
    with ExitStack() as stack:
        try:
            manifest = _manifest_of(entry)
            store = _whole_store(entries, manifest, near, stack)
            identity = (
                text_identity(manifest_to_json(manifest).encode())
                if entry.manifest.delta
                else entry.identity
            )
            yield replace(entry, store=store, manifest=manifest, identity=identity)
        except UnreadableError:
            raise  # a later try may succeed
        except (CorruptError, ManifestError) as error:
            damaged = [
                f"{each.location}: {line}"
                for each in entries
                for line in each.find_problems(deep=True)
            ]
            raise CorruptError(f"{listing(damaged) if damaged else error}; {_REPAIR}") from error


def _whole_store(
    entries: list[OpenCheckpoint], manifest: Manifest, near: Store | None, stack: ExitStack
) -> Store:
    """The files of the checkpoint that the last of `entries` stands for; its bases are appended to
    `entries`.
    """
    entry, name = entries[-1], entries[-1].place.basename
    there = _place_near(near, name, content_digest(manifest))
    if there is not None and there.folder.identity != entry.place.folder.identity:
        return stack.enter_context(open_checkpoint(there)).store
    if not entry.manifest.delta:
        return entry.store
    base = entry.manifest.delta["base"]
    if any(each.place.basename == base for each in entries):
        raise CorruptError(f"{entry.location}: based on {base}, which is based on it")
    try:
        place = Place(entry.place.beside.within(base))
        entries.append(stack.enter_context(open_checkpoint(place)))
    except NotACheckpointError as error:
        raise CorruptError(
            f"{entry.location}: based on {base}, which is not in the chain"
        ) from error
    before = _manifest_of(entries[-1], entry.manifest.delta["base_content"])
    return _RebuiltStore.of(entry, manifest, _whole_store(entries, before, near, stack))


def fetch_whole(
    entry: OpenCheckpoint, near: Store | None, copy: Callable[[OpenCheckpoint], CopyReport]
) -> CopyReport:
    """`copy` the checkpoint that an open delta stands for, see `open_whole`; a damaged base in
    `near` is not used.
    """
    if near is not None:
        with suppress(CorruptError), open_whole(entry, near) as whole:
            return copy(whole)
    with open_whole(entry) as whole:
        return copy(whole)


def is_staged(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is a copy that was made for servers, and not that of a
    run.
    """
    return LocalStore(folder).stat(STAGED_NAME) is not None


def mark_staged(folder: Path) -> None:
    """Record that the checkpoint in `folder` is a copy that was made for servers: it may be
    replaced and deleted.
    """
    LocalStore(folder).write(STAGED_NAME, b"")


def drop_rebuilt(chain: Place, folder: Path, keep: int = 2) -> None:
    """Delete the staged copies of checkpoints of the chain in `folder`, except the `keep` newest.

    Checkpoints in use, and those that cannot be deleted, stay until the next call.
    """
    manifests = {info.name: info.manifest for info in list_checkpoints(chain).found}
    if not any(manifest.delta for manifest in manifests.values()):
        return
    rebuilt = [
        info
        for info in list_checkpoints(folder).found
        if info.name in manifests
        and is_staged(folder / info.name)
        and content_digest(info.manifest) == _content_of(manifests[info.name])
    ]
    remove_checkpoints(
        Place(LocalStore(folder)), [folder / info.name for info in rebuilt[:-keep]], ()
    )


def _manifest_of(entry: OpenCheckpoint, wanted: str = "") -> Manifest:
    """The manifest of the checkpoint that an entry stands for.

    Raises CorruptError for another content digest.
    """
    manifest, expected = entry.manifest, wanted
    if manifest.delta:
        text = read_text(entry.store, CHECKPOINT_NAME, MANIFEST_LIMIT_BYTES)
        manifest = parse_manifest(text, entry.place.folder.where(CHECKPOINT_NAME))
        expected = wanted or entry.manifest.delta["content"]
    if expected and content_digest(manifest) != expected:
        raise CorruptError(
            f"{entry.location}: not the checkpoint that the entries after it are built on"
        )
    return manifest


def _place_near(near: Store | None, name: str, content: str) -> Place | None:
    """The checkpoint `name` in the folder `near`, if it has this content."""
    if near is None:
        return None
    place = Place(near.within(name))
    with suppress(CheckpointError):
        manifest = load_manifest(place.folder)
        if not manifest.delta and content_digest(manifest) == content:
            return place
    return None


@dataclass(frozen=True)
class _RebuiltStore(ListedStore):
    """The files of the checkpoint that a delta stands for."""

    delta: Store | None = None
    base: Store | None = None
    files: Mapping[str, FileRecord] | None = None

    @classmethod
    def of(cls, entry: OpenCheckpoint, manifest: Manifest, base: Store) -> "_RebuiltStore":
        listed = {
            file.path: Stored(file.path, file.size_bytes, 0.0, file.digest)
            for file in manifest.files
        }
        stored = {file.path: file for file in entry.manifest.files}
        return cls(entry.place.folder, listed, delta=entry.store, base=base, files=stored)

    def open(self, name: str) -> Readable:
        assert self.delta is not None
        assert self.base is not None
        assert self.files is not None
        if f"files/{name}" in self.files:
            return self.delta.open(f"files/{name}")
        pieces = sorted(path for path in self.files if path.startswith(f"deltas/{name}/"))
        head = f"headers/{name}"
        if not pieces and head not in self.files:
            return self.base.open(name)
        with ExitStack() as stack:
            base = stack.enter_context(closing(self.base.open(name)))
            opened = [stack.enter_context(closing(self.delta.open(path))) for path in pieces]
            new_head = self.delta.read(head) if head in self.files else None
            rebuilt = _RebuiltFile(
                name, self.where(name), self.listed[name].size_bytes, base, opened, new_head
            )
            rebuilt.stack = stack.pop_all()
            return rebuilt


@dataclass(eq=False)
class _Piece:
    """One file of a delta, with the changes in bytes [start, stop) of the rebuilt file."""

    file: Readable
    header: SafetensorsHeader
    start: int
    stop: int

    @classmethod
    def of(cls, file: Readable) -> "_Piece":
        header = parse_header(lambda start, size: read_range(file, start, size), file.size_bytes)
        try:
            return cls(file, header, int(header.metadata["start"]), int(header.metadata["stop"]))
        except (KeyError, ValueError):
            raise CorruptError(f"{file.where}: not a file of a delta") from None

    def load(self, tensors: Mapping[str, HeaderEntry]) -> list[tuple[Any, Any]]:
        """For each tensor the offsets of its changed elements in the rebuilt file, ascending, and
        their bytes, one row per element. Raises CorruptError for unknown tensors and for positions
        outside of the tensor.
        """
        content, found = read_range(self.file, 0, self.file.size_bytes), list[tuple[Any, Any]]()
        for name in sorted(
            name.removesuffix(".indices")
            for name in self.header.tensors
            if name.endswith(".indices")
        ):
            entry, indices = tensors.get(name), self.header.tensors[f"{name}.indices"]
            values = self.header.tensors.get(f"{name}.values")
            are_positions = indices.dtype in ("int32", "int64") and len(indices.shape) == 1
            if (
                entry is None
                or values is None
                or not are_positions
                or values[:2] != (entry.dtype, indices.shape)
            ):
                raise CorruptError(
                    f"{self.file.where}: {name}: changes of no such tensor; use an older checkpoint"
                )
            at = np.frombuffer(
                content[indices.start : indices.end], "<i4" if indices.dtype == "int32" else "<i8"
            )
            width, at = ITEM_BYTES[entry.dtype], at.astype(np.int64)
            is_inside = not at.size or (at[0] >= 0 and at[-1] < (entry.end - entry.start) // width)
            if not is_inside or bool((at[1:] <= at[:-1]).any()):
                raise CorruptError(
                    f"{self.file.where}: {name}: positions that are not ascending, or outside of it"
                )
            rows = np.frombuffer(content[values.start : values.end], np.uint8).reshape(-1, width)
            found.append((entry.start + at * width, rows))
        return found


class _RebuiltFile:
    """An open safetensors file with changes, which are applied to the bytes that are read."""

    can_map = False

    def __init__(
        self,
        name: str,
        where: str,
        size_bytes: int,
        base: Readable,
        pieces: Sequence[Readable],
        head: bytes | None,
    ) -> None:
        self.name, self.where, self.size_bytes, self.version = name, where, size_bytes, base.version
        self.base, self.stack = base, ExitStack()
        old_head = _head_of(base)
        self.head = old_head if head is None else head
        self.shift = len(self.head) - len(old_head)
        before = parse_header(_reader(old_head), base.size_bytes)
        header = parse_header(_reader(self.head), size_bytes)
        if not _is_alike(before, header):
            raise CorruptError(f"{where}: its tensors are not those of its base")
        self.tensors = header.tensors
        self.pieces = sorted(map(_Piece.of, pieces), key=attrgetter("start"))
        self.starts = [piece.start for piece in self.pieces]
        self._loaded, self._lock = dict[int, list[tuple[Any, Any]]](), threading.Lock()

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        end = start + len(memory)
        if end > self.size_bytes:
            raise CorruptError(
                f"{self.where}: {self.size_bytes:,} bytes, expected at least {end:,}"
            )
        head = self.head[start:end]
        memory[: len(head)] = head
        if len(head) < len(memory):
            self.base.read_into(memory[len(head) :], start + len(head) - self.shift)
        target = np.frombuffer(memory, np.uint8)
        for number in range(max(0, bisect_right(self.starts, start) - 1), len(self.pieces)):
            if self.pieces[number].start >= end:
                break
            for offsets, rows in self._changes(number) if self.pieces[number].stop > start else ():
                width = rows.shape[1]
                low, high = np.searchsorted(offsets, (start - width + 1, end))
                for byte in range(width):  # an element may cross an end of the range
                    at = offsets[low:high] + (byte - start)
                    inside = (at >= 0) & (at < len(memory))
                    target[at[inside]] = rows[low:high, byte][inside]

    def map(self) -> None:
        return

    def check(self) -> None:
        self.base.check()

    def close(self) -> None:
        self.stack.close()

    def _changes(self, number: int) -> list[tuple[Any, Any]]:
        with self._lock:  # one thread loads a piece, others wait for it
            found = self._loaded.pop(number, None)
            self._loaded[number] = (
                self.pieces[number].load(self.tensors) if found is None else found
            )
            if len(self._loaded) > _KEPT_PIECES:
                del self._loaded[next(iter(self._loaded))]
            return self._loaded[number]


def _head_of(file: Readable) -> bytes:
    """The header of an open safetensors file, including the 8 bytes of its length."""
    return read_range(file, 0, 8 + int.from_bytes(read_range(file, 0, 8), "little"))


def _reader(content: bytes) -> Callable[[int, int], bytes]:
    return lambda start, size_bytes: content[start : start + size_bytes]
