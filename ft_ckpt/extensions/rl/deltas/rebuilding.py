"""Opens the checkpoint that an entry of a chain stands for.

The files of a delta are rebuilt while they are read. `chains` describes what an entry has. A staged
copy is a rebuilt checkpoint in a folder that inference servers read.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from ft_ckpt.checkpoint import OpenCheckpoint, open_checkpoint, text_identity
from ft_ckpt.checkpoint.catalog import list_checkpoints
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_LIMIT_BYTES,
    Manifest,
    load_manifest,
    manifest_to_json,
    parse_manifest,
)
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ManifestError,
    NotACheckpointError,
    UnreadableError,
    listing,
)
from ft_ckpt.extensions.rl.deltas.files import Changes, DeltaPiece, is_alike
from ft_ckpt.extensions.transfer.copies import CopyReport
from ft_ckpt.extensions.transfer.endpoints import weights_manifest
from ft_ckpt.formats.safetensors import parse_header
from ft_ckpt.runs.folder import remove_checkpoints
from ft_ckpt.storage import PREFIX, Readable, Store, Stored, read_range, read_text
from ft_ckpt.storage.digests import FileRecord, digest_of_bytes
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import ListedStore, Place

CHECKPOINT_NAME = "checkpoint.json"
# An empty file in each staged copy.
STAGED_NAME = f"{PREFIX}staged"
_MAX_LOADED_PIECES = 3  # how many pieces of a delta each rebuilt file has in memory
_APPLIED_ELEMENTS = 64 << 10  # how many elements are changed at a time
_REPAIR = "publish an anchor (`ft-ckpt publish CHECKPOINT CHAIN --delta --anchor-every 1`)"


def content_digest(manifest: Manifest) -> str:
    """Return a digest of the paths, sizes and digests of a checkpoint's files.

    Files of the training state are left out.
    """
    lines = sorted(
        f"{file.digest} {file.size_bytes} {file.path}" for file in weights_manifest(manifest).files
    )
    return digest_of_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))


def content_of(manifest: Manifest) -> str:
    """Return the content digest of the checkpoint that an entry with this manifest stands for."""
    return manifest.delta.get("content") or content_digest(manifest)


@contextmanager
def open_whole(entry: OpenCheckpoint, near: Store | None = None) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint that an open entry of a chain stands for.

    The files of a delta are rebuilt while they are read. A base is read from the folder `near` if
    that has a checkpoint with its name and content, and from the chain otherwise. Only the content
    digests that link the entries are compared here, and not the digests of files.

    Raises CorruptError naming each entry that is missing, damaged, or not the base from which its
    delta was computed. CorruptError and ManifestError of the block are raised as such an error.
    """
    entries = [entry]
    with ExitStack() as stack:
        try:
            manifest = _manifest_of(entry)
            store = _whole_store(entries, manifest, near, stack)
            identity = entry.identity
            if entry.manifest.delta:
                identity = text_identity(manifest_to_json(manifest).encode())
            yield replace(entry, store=store, manifest=manifest, identity=identity)
        except UnreadableError:
            raise  # a later try may succeed
        except (CorruptError, ManifestError) as error:
            damaged = []
            for opened in entries:
                problems = opened.find_problems(deep=True)
                damaged += [f"{opened.location}: {problem}" for problem in problems]
            raise CorruptError(f"{listing(damaged) if damaged else error}; {_REPAIR}") from error


def _whole_store(
    entries: list[OpenCheckpoint], manifest: Manifest, near: Store | None, stack: ExitStack
) -> Store:
    """Return the store with the files of the checkpoint that the last of `entries` stands for.

    The function opens the bases of that entry, and appends them to `entries`. `manifest` is that of
    the checkpoint.
    """
    entry = entries[-1]
    copy = _place_near(near, entry.place.basename, content_digest(manifest))
    if copy is not None and copy.folder.identity != entry.place.folder.identity:
        return stack.enter_context(open_checkpoint(copy)).store
    if not entry.manifest.delta:
        return entry.store
    base = entry.manifest.delta["base"]
    if any(opened.place.basename == base for opened in entries):
        raise CorruptError(f"{entry.location}: based on {base}, which is based on it")
    try:
        place = Place(entry.place.beside.within(base))
        entries.append(stack.enter_context(open_checkpoint(place)))
    except NotACheckpointError as error:
        raise CorruptError(
            f"{entry.location}: based on {base}, which is not in the chain"
        ) from error

    base_manifest = _manifest_of(entries[-1], entry.manifest.delta["base_content"])
    base_store = _whole_store(entries, base_manifest, near, stack)
    return _RebuiltStore.of(entry, manifest, base_store)


def fetch_whole(
    entry: OpenCheckpoint, near: Store | None, copy: Callable[[OpenCheckpoint], CopyReport]
) -> CopyReport:
    """Call `copy` with the checkpoint that an open delta stands for; see `open_whole`.

    If a base in `near` is damaged, `copy` is called once more with the bases in the chain.
    """
    if near is not None:
        with suppress(CorruptError), open_whole(entry, near) as whole:
            return copy(whole)
    with open_whole(entry) as whole:
        return copy(whole)


def is_staged(folder: Path) -> bool:
    """Check whether the checkpoint in `folder` is a staged copy, and not saved by a run."""
    return LocalStore(folder).stat(STAGED_NAME) is not None


def mark_staged(folder: Path) -> None:
    """Record that the checkpoint in `folder` is a staged copy, which may be deleted."""
    LocalStore(folder).write(STAGED_NAME, b"")


def drop_rebuilt(chain: Place, folder: Path, keep: int = 2) -> None:
    """Delete the staged copies of checkpoints of the chain in `folder`, except the `keep` newest.

    Checkpoints in use, and those that cannot be deleted, stay until the next call.
    """
    manifests = {info.name: info.manifest for info in list_checkpoints(chain).checkpoints}
    if not any(manifest.delta for manifest in manifests.values()):
        return
    rebuilt = []
    for info in list_checkpoints(Place(LocalStore(folder))).checkpoints:
        path = folder / info.name
        entry = manifests.get(info.name)
        if entry is None or not is_staged(path):
            continue
        if content_digest(info.manifest) == content_of(entry):
            rebuilt.append(path)
    remove_checkpoints(Place(LocalStore(folder)), rebuilt[:-keep], ())


def _manifest_of(entry: OpenCheckpoint, expected: str = "") -> Manifest:
    """Return the manifest of the checkpoint that an entry stands for.

    Raises CorruptError if its content digest is not `expected`, or not that of the delta.
    """
    manifest = entry.manifest
    if manifest.delta:
        text = read_text(entry.store, CHECKPOINT_NAME, MANIFEST_LIMIT_BYTES)
        manifest = parse_manifest(text, entry.place.folder.where(CHECKPOINT_NAME))
        expected = expected or entry.manifest.delta["content"]
    if expected and content_digest(manifest) != expected:
        raise CorruptError(
            f"{entry.location}: not the checkpoint that the entries after it are built on"
        )
    return manifest


def _place_near(near: Store | None, name: str, content: str) -> Place | None:
    """Return the place of the checkpoint `name` in `near`, or None if it has other content.

    `content` is the expected content digest.
    """
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
    """The files of the checkpoint that a delta stands for.

    Attributes:
        delta: The files of the delta.
        base: The files of the checkpoint that its base stands for.
        files: The records of the files of the delta, by path.
    """

    delta: Store | None = None
    base: Store | None = None
    files: Mapping[str, FileRecord] | None = None

    @classmethod
    def of(cls, entry: OpenCheckpoint, manifest: Manifest, base: Store) -> "_RebuiltStore":
        listed = {}
        for file in manifest.files:
            listed[file.path] = Stored(file.path, file.size_bytes, 0.0, file.digest)
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
        self.name = name
        self.where = where
        self.size_bytes = size_bytes
        self.version = base.version
        self.base = base
        self.stack = ExitStack()
        old_head = _head_of(base)
        self.head = old_head if head is None else head
        self.shift = len(self.head) - len(old_head)
        before = parse_header(_reader(old_head), base.size_bytes)
        header = parse_header(_reader(self.head), size_bytes)
        if not is_alike(before, header):
            raise CorruptError(f"{where}: its tensors are not those of its base")
        self.tensors = header.tensors
        self.pieces = sorted(map(DeltaPiece.of, pieces), key=attrgetter("start"))
        self.starts = [piece.start for piece in self.pieces]
        self._loaded: dict[int, list[Changes]] = {}
        self._lock = threading.Lock()

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
        first = max(0, bisect_right(self.starts, start) - 1)
        for number, piece in enumerate(self.pieces[first:], first):
            if piece.start >= end:
                break
            if piece.stop > start:
                for changes in self._changes(number):
                    _apply(changes, target, start)

    def map(self) -> None:
        return

    def check(self) -> None:
        self.base.check()

    def close(self) -> None:
        self.stack.close()

    def _changes(self, number: int) -> list[Changes]:
        """Return the changes in a piece, which are loaded or in memory."""
        with self._lock:  # one thread loads a piece, and others wait for it
            changes = self._loaded.pop(number, None)
            if changes is None:
                changes = self.pieces[number].load(self.tensors)
            # The piece is inserted again, so that the first one is the least recently used.
            self._loaded[number] = changes
            if len(self._loaded) > _MAX_LOADED_PIECES:
                oldest = next(iter(self._loaded))
                del self._loaded[oldest]
            return changes


def _apply(changes: Changes, target: Any, start: int) -> None:
    """Write changed elements into `target`, the bytes of the rebuilt file from `start` on."""
    width = changes.rows.shape[1]

    # Where the target begins in the tensor, in bytes. Negative if it begins before the tensor.
    target_start = start - changes.start
    target_stop = target_start + len(target)

    # The elements that are in the target, completely or in part, have the positions
    # [first_position, stop_position).
    first_position = target_start // width
    stop_position = (target_stop + width - 1) // width
    ends = np.array([first_position, stop_position])
    ends = ends.clip(0, np.iinfo(changes.positions.dtype).max).astype(changes.positions.dtype)
    low, high = np.searchsorted(changes.positions, ends)
    for first in range(low, high, _APPLIED_ELEMENTS):
        part = slice(first, min(first + _APPLIED_ELEMENTS, high))
        offsets = changes.positions[part].astype(np.int64) * width - target_start
        for byte in range(width):
            # Bytes are copied one by one, because an element may cross an end of the target.
            byte_offsets = offsets + byte
            is_inside = (byte_offsets >= 0) & (byte_offsets < len(target))
            target[byte_offsets[is_inside]] = changes.rows[part, byte][is_inside]


def _head_of(file: Readable) -> bytes:
    """Read the header of an open safetensors file, including the 8 bytes of its length."""
    return read_range(file, 0, 8 + int.from_bytes(read_range(file, 0, 8), "little"))


def _reader(content: bytes) -> Callable[[int, int], bytes]:
    return lambda start, size_bytes: content[start : start + size_bytes]
