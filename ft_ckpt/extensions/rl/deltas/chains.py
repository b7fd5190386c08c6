"""Appends checkpoints to a chain of deltas, which has only the elements that changed.

A chain is a folder on a disk or in a bucket. Each entry is a committed folder that stands for one
checkpoint. An entry is an anchor or a delta. An anchor has all files of its checkpoint except the
training state. A delta has the differences from the entry before, which is its base:

   ft_ckpt.json                    the manifest of the delta, with the name of its base and the
                                   content digests of both checkpoints
   checkpoint.json                 the manifest of the checkpoint that the delta stands for
   deltas/PATH/00001.safetensors   the changes of the file PATH: for each tensor NAME with changes,
                                   NAME.indices has the flat positions in ascending order, and
                                   NAME.values has the new elements. The changes of a long tensor
                                   continue in the next file.
   headers/PATH                    the header of the file PATH, if it differs from the base's
   files/PATH                      any other file that differs from the base's

`files` writes and reads the files in deltas/, and `rebuilding` opens the checkpoint that an entry
stands for. Elements are compared as bytes, so rebuilt files have the digests in the manifest of
their checkpoint.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.checkpoint.catalog import CheckpointInfo, in_run_order, list_checkpoints
from ft_ckpt.checkpoint.commit import open_staging_at
from ft_ckpt.checkpoint.manifest import Manifest, manifest_to_json
from ft_ckpt.errors import ConfigError, CorruptError, NameTakenError
from ft_ckpt.extensions.rl.deltas.files import (
    DigestedFile,
    changed_pieces,
    is_alike,
    refuse_other_bytes,
)
from ft_ckpt.extensions.rl.deltas.rebuilding import (
    CHECKPOINT_NAME,
    content_digest,
    content_of,
    open_whole,
)
from ft_ckpt.extensions.transfer.copies import content_key, copy_open
from ft_ckpt.extensions.transfer.endpoints import weights_manifest
from ft_ckpt.messages import warn
from ft_ckpt.storage import Store, etag_of
from ft_ckpt.storage.digests import FileRecord, RunningDigest, record_of
from ft_ckpt.storage.places import Place, copy_object

DELTA = "delta"  # the kind of a delta in its manifest
# An anchor is written instead of a delta that would have a larger share of the checkpoint's bytes.
_MAX_SHARE = 0.5


@dataclass(frozen=True)
class AppendReport:
    """An entry that was appended to a chain, or was there already."""

    path: Path | str
    """The entry: a path, or a URL."""
    kind: str
    """"anchor" or "delta"."""
    base: str | None
    """The entry on which a delta is based."""
    is_new: bool
    """False if the entry was there already."""
    bytes: int
    """Size of the entry's files, in bytes."""
    full_bytes: int
    """Size of the files of the checkpoint that it stands for, in bytes."""
    seconds: float
    """Duration of the call."""


def append_checkpoint(checkpoint: Place, chain: Place, anchor_every: int) -> AppendReport:
    """Append the committed `checkpoint`, under its name, to the folder or bucket prefix `chain`.

    The checkpoint is appended as a delta on the newest entry. A failed call appends nothing. The
    files of the newest entry are read in the folder of the checkpoint if they still exist there.
    Otherwise they are rebuilt from the chain while they are read.

    An anchor is appended instead in these cases:

    - The chain is empty, or ends in `anchor_every - 1` deltas.
    - A tensor has another name, shape or dtype.
    - The delta would have more than half of the bytes.
    - The newest entry is damaged, which is also reported as a warning.

    Digests are compared while files are read, and memory holds a few slices. Raises NameTakenError
    if the chain has another checkpoint of this name, or a newer one. Otherwise it raises what
    `copy` raises.
    """
    start = time.monotonic()
    with open_checkpoint(checkpoint) as opened:
        export = opened.manifest.export
        manifest = replace(weights_manifest(opened.manifest), export=export, token=None)
        entry_place = Place(chain.folder, opened.place.basename)
        entries = _entries(chain)
        written = _entry_with(manifest, entry_place.basename, entries)
        is_new = written is None
        if written is None:
            _refuse_older(entries, CheckpointInfo(entry_place.folder, manifest))
            if entries and _deltas_since_anchor(entries) + 1 < anchor_every:
                written = _append_delta_if_possible(opened, manifest, entries[-1], entry_place)
        if written is None:
            copy_open(opened, entry_place, manifest, overwrite=False, shown=False)
            written = manifest

    return AppendReport(
        path=entry_place.location,
        kind=DELTA if written.delta else "anchor",
        base=written.delta.get("base"),
        is_new=is_new,
        bytes=_size_of(written),
        full_bytes=_size_of(manifest),
        seconds=time.monotonic() - start,
    )


def _size_of(manifest: Manifest) -> int:
    return sum(file.size_bytes for file in manifest.files)


def _entry_with(
    manifest: Manifest, name: str, entries: Sequence[CheckpointInfo]
) -> Manifest | None:
    """Return the manifest of the entry `name` if it stands for the checkpoint of `manifest`."""
    for info in entries:
        if info.name == name and content_of(info.manifest) == content_digest(manifest):
            return info.manifest
    return None


def _entries(chain: Place) -> list[CheckpointInfo]:
    """List the entries of a chain, oldest first.

    Raises UnreadableError, and ConfigError if `chain` is a checkpoint.
    """
    listed = list_checkpoints(chain)
    listed.require_readable()
    listed.warn_left_out()
    if any(info.store.identity == chain.folder.identity for info in listed.checkpoints):
        raise ConfigError(f"{chain}: a checkpoint, expected the folder of a chain")
    return list(listed.checkpoints)


def _refuse_older(entries: Sequence[CheckpointInfo], new_entry: CheckpointInfo) -> None:
    """Raise NameTakenError unless the new entry has a new name and is newer than all entries."""
    if any(info.name == new_entry.name for info in entries):
        raise NameTakenError(
            f"{new_entry.path}: the chain has another checkpoint of this name, expected a new one; "
            "publish to a new chain, or delete the entries from this one on"
        )
    if in_run_order([*entries, new_entry])[-1] is not new_entry:
        raise NameTakenError(
            f"{new_entry.path}: older than {entries[-1].name}, the newest entry; publish a newer "
            "checkpoint, or to a new chain, or delete the newer entries"
        )


def _deltas_since_anchor(entries: Sequence[CheckpointInfo]) -> int:
    """Count the deltas after the last anchor."""
    for count, info in enumerate(reversed(entries)):
        if not info.manifest.delta:
            return count
    return len(entries)


def _append_delta_if_possible(
    checkpoint: OpenCheckpoint, manifest: Manifest, newest: CheckpointInfo, entry_place: Place
) -> Manifest | None:
    """Append a delta as `_append_delta` does.

    If the newest entry is damaged, warns and returns None.
    """
    try:
        return _append_delta(checkpoint, manifest, newest, entry_place)
    except CorruptError as error:
        warn(
            f"{entry_place}: writing an anchor, because there is no delta on {newest.name}: "
            f"{error}",
        )
        return None


def _append_delta(
    checkpoint: OpenCheckpoint, manifest: Manifest, newest: CheckpointInfo, entry_place: Place
) -> Manifest | None:
    """Commit a delta on the entry `newest`, and return its manifest.

    Returns None if the delta would be too large, or if a tensor has another name, shape or dtype.
    """
    if manifest.step is None and manifest.number is None:
        manifest = replace(manifest, number=(newest.manifest.number or 0) + 1)
    files = tuple(replace(file, linked=False, etag=None) for file in manifest.files)
    manifest = replace(manifest, files=files)
    content = content_digest(manifest)
    max_mode = Place(checkpoint.store).mode_at(entry_place)
    with open_checkpoint(newest.place) as entry, open_whole(entry, checkpoint.place.beside) as base:
        staging = open_staging_at(entry_place, run_id=f"delta to {content}", max_mode=max_mode)
        try:
            records = _write_changes(checkpoint, manifest, base, staging.store)
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


class _DeltaTooLarge(Exception):  # noqa: N818 - ends the writing of a delta, and is not an error
    pass


class _DeltaWriter:
    """Writes the files of a delta to `store`. Raises _DeltaTooLarge beyond `max_bytes`."""

    def __init__(self, store: Store, max_bytes: float) -> None:
        self.store = store
        self.max_bytes = max_bytes
        self.records: list[FileRecord] = []

    def write(self, path: str, content: bytes) -> None:
        self.store.write(path, content)
        record = record_of(path, content)
        self.records.append(replace(record, etag=etag_of(self.store, path)))
        self.refuse_larger(0)

    def copy(self, checkpoint: OpenCheckpoint, file: FileRecord) -> None:
        """Copy a file that the base lacks, or has with other bytes."""
        self.refuse_larger(file.size_bytes)
        path = f"files/{file.path}"
        running = RunningDigest(file.size_bytes, file.cuts, file.ranks)
        with closing(checkpoint.store.open(file.path)) as opened:
            if opened.size_bytes == file.size_bytes:
                copy_object(opened, self.store, path, running.update)
            refuse_other_bytes(opened, file, running)
        self.records.append(replace(file, path=path, etag=etag_of(self.store, path)))

    def refuse_larger(self, more_bytes: int) -> None:
        """Raise _DeltaTooLarge if the delta would be too large with `more_bytes` more."""
        size_bytes = sum(record.size_bytes for record in self.records)
        if size_bytes + more_bytes > self.max_bytes:
            raise _DeltaTooLarge


def _write_changes(
    checkpoint: OpenCheckpoint, manifest: Manifest, base: OpenCheckpoint, store: Store
) -> tuple[FileRecord, ...] | None:
    """Write all files of a delta except its manifest, and return their records.

    Returns None as soon as the delta is too large, or a tensor has another name, shape or dtype.
    """
    base_files = {file.path: file for file in base.manifest.files}
    writer = _DeltaWriter(store, _MAX_SHARE * _size_of(manifest))
    try:
        writer.write(CHECKPOINT_NAME, manifest_to_json(manifest).encode())
        for file in manifest.files:
            base_file = base_files.get(file.path)
            if base_file is not None and content_key(base_file) == content_key(file):
                continue
            if base_file is None or not file.path.endswith(".safetensors"):
                writer.copy(checkpoint, file)
            elif not _write_changed_tensors(checkpoint, file, base, base_file, writer):
                return None
    except _DeltaTooLarge:
        return None

    return tuple(writer.records)


def _write_changed_tensors(
    checkpoint: OpenCheckpoint,
    file: FileRecord,
    base: OpenCheckpoint,
    base_file: FileRecord,
    writer: _DeltaWriter,
) -> bool:
    """Write the changes of one safetensors file.

    Returns False if a tensor has another name, shape or dtype.
    """
    with (
        closing(checkpoint.store.open(file.path)) as opened,
        closing(base.store.open(base_file.path)) as base_opened,
    ):
        new = DigestedFile(opened, file)
        old = DigestedFile(base_opened, base_file)
        if not is_alike(new.header, old.header):
            return False
        if new.head != old.head:
            writer.write(f"headers/{file.path}", new.head)
        for number, content in enumerate(changed_pieces(file.path, new, old), 1):
            writer.write(f"deltas/{file.path}/{number:05}.safetensors", content)
        new.check()
        old.check()

    return True
