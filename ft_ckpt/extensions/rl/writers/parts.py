"""Stores the files that a writer hands in, and reads them from a checkpoint for a resume.

The part of a writer is the folder of its files in a checkpoint.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.errors import WriterError
from ft_ckpt.extensions.rl.writers.session_files import PARTS, STATE_FILE, is_same_content
from ft_ckpt.extensions.tools import load
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord, read_record, record_of
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, copy_object, open_place

Files = Mapping[str, str | os.PathLike[str] | bytes]


@dataclass(frozen=True)
class Part:
    """The part of a writer in a checkpoint."""

    path: Path | str
    """The checkpoint."""
    step: int | None
    """Its step."""
    states: Mapping[str, Any] = field(repr=False)
    """The states by the name of the writer that handed them in. Usually there is one. Tensors are
    on the CPU.
    """
    files: Mapping[str, tuple[Path, ...]]
    """The files, copied to the folder given to `resume`, by the name of the writer that handed them
    in.
    """

    @property
    def state(self) -> Any:
        """The state if there is one. Raises WriterError if there is none, or several."""
        if len(self.states) != 1:
            raise WriterError(
                f"{self.path}: {len(self.states)} states ({', '.join(self.states)}); see `states`"
            )
        return next(iter(self.states.values()))


def is_committed(record: FileRecord, committed: Mapping[str, FileRecord]) -> bool:
    """Check whether the last checkpoint has the file with the same bytes."""
    file = committed.get(record.path)
    return file is not None and is_same_content(file, record)


def store_file(
    store: Store,
    path: str,
    source: str | os.PathLike[str] | bytes,
    committed: Mapping[str, FileRecord],
) -> FileRecord:
    """Store a file or bytes at `path` in `store`, and return the record.

    A file that the last checkpoint has with the same bytes is not stored. Its record is `linked`.
    """
    if isinstance(source, bytes):
        record = record_of(path, source)
        if is_committed(record, committed):
            return replace(record, linked=True)
        store.write(path, source)
        return record

    place = open_place(source)
    record = replace(read_record(place.store, place.name), path=path)
    if is_committed(record, committed):
        return replace(record, linked=True)

    # The file is copied and not linked, because the process may change it later.
    with closing(place.open()) as opened:
        copy_object(opened, store, path)
    return read_record(store, path)


def load_states(checkpoint: OpenCheckpoint, paths: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Load the states of writers. `paths` has the paths of the files of each writer, by name."""
    states = {}
    for name in paths:
        if STATE_FILE in paths[name]:
            place = Place(checkpoint.store, f"{PARTS}/{name}/{STATE_FILE}")
            states[name] = load(place, map_location="cpu", mapped=False)
    return states


def copy_files(
    checkpoint: OpenCheckpoint, paths: Mapping[str, Sequence[str]], folder: Path
) -> dict[str, tuple[Path, ...]]:
    """Copy the files of writers, but not their states, into `folder`/NAME.

    After an error, the files that were copied before are deleted.
    """
    copied: dict[str, tuple[Path, ...]] = {}
    with ExitStack() as undo:
        for name in paths:
            target = folder / name
            copied[name] = tuple(target / path for path in paths[name] if path != STATE_FILE)
            for path in paths[name]:
                if path == STATE_FILE:
                    continue
                with closing(checkpoint.store.open(f"{PARTS}/{name}/{path}")) as opened:
                    copy_object(opened, LocalStore(target), path)
                undo.callback((target / path).unlink, missing_ok=True)
        undo.pop_all()
    return copied
