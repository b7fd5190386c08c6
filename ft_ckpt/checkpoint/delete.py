"""Takes one checkpoint, or its training state, off the disk; stopped anywhere, `settle` finishes.

A checkpoint is dropped by renaming its manifest to a tombstone: in that one step it stops being one, and what has to
be deleted stays on record. Only then are pins and leases looked at once more; where there is one, the manifest goes
back. Files that the manifest never listed stay. Stripping a checkpoint of its training state is the same with a new
manifest, without the state, in the old one's place:

    a tombstone, no manifest    delete what it lists, then the tombstone, then the folder if that left it empty
    a tombstone, a manifest     delete what the first lists and the second does not, then the tombstone
"""

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint import pins
from ft_ckpt.checkpoint.catalog import read_manifest
from ft_ckpt.checkpoint.manifest import MANIFEST_LIMIT_BYTES, MANIFEST_NAME, Manifest, from_json, to_json
from ft_ckpt.errors import CheckpointError, CorruptError, listing
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.paths import is_inside
from ft_ckpt.storage.placing import PREFIX, write_text

STATE = "state"  # kind of the parts that hold a training state
_NOTE = "the training state was removed when it was no longer to be kept"
_BUSY = tuple(f"{PREFIX}{what}-" for what in ("stage", "old"))  # of a save that pours into the folder


@dataclass(frozen=True)
class Removal:
    """What became of a checkpoint that was to go, or to lose its state."""

    path: Path
    why: tuple[str, ...] = ()  # it stays as it was, for these reasons
    dropped: bool = False
    stripped: bool = False
    freed_bytes: int = 0
    left: tuple[Path, ...] = ()  # files in its folder that it never listed, which stay


def drop(path: Path) -> Removal:
    """Delete the checkpoint `path`, unless somebody needs it. Raises OSError or CorruptError, and `settle` goes on."""
    if why := _obstacles(path):
        return Removal(path, why=why)
    with contextlib.suppress(FileNotFoundError):  # somebody else was faster
        local_disk.move(path / MANIFEST_NAME, path / pins.DROPPED)
        local_disk.sync(path)
        return settle(path)
    return Removal(path)


def strip(path: Path) -> Removal:
    """Delete the training state of the checkpoint `path`, unless somebody needs it. Raises as `drop` does."""
    if why := _obstacles(path):
        return Removal(path, why=why)
    manifest = read_manifest(path)
    write_text(path / pins.DROPPED, local_disk.read_text(path / MANIFEST_NAME, MANIFEST_LIMIT_BYTES))
    write_text(path / MANIFEST_NAME, to_json(without_state(manifest)))
    return settle(path)


def settle(path: Path) -> Removal:
    """Do what the tombstone in `path` asks for, as the table on top says; may be interrupted and repeated."""
    if _name_of_gone(path):
        return _vanish(path)
    if why := guards(path):
        return Removal(path, why=why if _put_back(path) else ())
    committed = (path / MANIFEST_NAME).exists()
    doomed = listed(path / pins.DROPPED) - (listed(path / MANIFEST_NAME) if committed else frozenset())
    freed = size_of(path, doomed)
    local_disk.delete(doomed, path)
    local_disk.prune(doomed, path)
    if not committed:
        return dataclasses.replace(_close(path), freed_bytes=freed)
    _unlink(path / pins.DROPPED)
    local_disk.sync(path)
    return Removal(path, stripped=True, freed_bytes=freed)


def unfinished(root: Path) -> list[Path]:
    """The folders in `root` that wait for `settle`: with a tombstone, or emptied and on their way out."""
    found = [path for path in entries(root) if not path.is_symlink()]
    return [path for path in found if _name_of_gone(path) or (path / pins.DROPPED).is_file()]


def guards(path: Path) -> tuple[str, ...]:
    """Why the checkpoint `path` may not be touched now, as its own folder and the one around it tell."""
    pinned = pins.pinned(path)
    saving = ("a save to it is not finished",) if _is_saved(path) else ()
    return (*((pinned,) if pinned else ()), *pins.leased(path), *saving)


def without_state(manifest: Manifest) -> Manifest:
    """The manifest of the same checkpoint without its training state."""
    inside = tuple(f"{part.path}/" for part in manifest.parts if part.kind == STATE)
    return dataclasses.replace(
        manifest,
        parts=tuple(part for part in manifest.parts if part.kind != STATE),
        files=tuple(file for file in manifest.files if not file.path.startswith(inside)),
        notes=(*manifest.notes, _NOTE),
    )


def listed(file: Path) -> frozenset[str]:
    """The files that a manifest or tombstone names. Understands newer ones, too. Raises OSError or CorruptError."""
    try:
        text = local_disk.read_text(file, MANIFEST_LIMIT_BYTES)
        paths = frozenset(str(each["path"]) for each in json.loads(text)["files"])
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptError(f"{file}: not a manifest ({error!r}); delete the folder by hand") from error
    if unsafe := sorted(path for path in paths if not is_inside(path)):
        raise CorruptError(f"{file}: {listing(unsafe)}: outside of the folder; delete by hand what is to go")
    return paths


def size_of(path: Path, names: Iterable[str]) -> int:
    """What the disk gains when these files of `path` go; a file by two names is one, by a third elsewhere none."""
    found = local_disk.stats(names, path)
    names_of = Counter((each.st_dev, each.st_ino) for each in found)
    once = {(each.st_dev, each.st_ino): each for each in found}
    return sum(each.st_size for key, each in once.items() if each.st_nlink <= names_of[key])


def entries(folder: Path) -> list[Path]:
    """What is in `folder`, sorted; nothing when there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _obstacles(path: Path) -> tuple[str, ...]:
    """Why `path` cannot be removed now. A tombstone must do its work before another takes its place."""
    waiting = ("an earlier removal is not finished",) if (path / pins.DROPPED).exists() else ()
    return (*guards(path), *waiting)


def _is_saved(path: Path) -> bool:
    beside = f".{path.name}{_BUSY[0]}"
    inside = any(each.name.startswith(_BUSY) for each in entries(path))
    return inside or any(each.name.startswith(beside) for each in entries(path.parent))


def _put_back(path: Path) -> bool:
    """Make `path` the checkpoint it was, as somebody needs it after all; False when it cannot be, or is another now."""
    was, now = _read(path / pins.DROPPED), _read(path / MANIFEST_NAME)
    if was is None or (now is not None and now.created != was.created) or _is_saved(path):
        return False
    if not all((path / file.path).is_file() for file in was.files):
        return False
    local_disk.move(path / pins.DROPPED, path / MANIFEST_NAME)
    local_disk.sync(path)
    return True


def _close(path: Path) -> Removal:
    """After the last file of a dropped checkpoint: the marks, the tombstone, and the folder if that empties it."""
    if not _others(path):
        gone = path.with_name(f".{path.name}{pins.DROPPED}")  # never an empty folder that looks like a checkpoint
        local_disk.move(path, gone)
        return _vanish(gone)
    _unlink(path / pins.DROPPED)
    local_disk.sync(path)
    left = tuple(each for each in sorted(local_disk.tree(path)) if each.is_symlink() or not each.is_dir())
    return Removal(path, dropped=True, left=left)


def _vanish(gone: Path) -> Removal:
    path = gone.with_name(_name_of_gone(gone))
    if _others(gone):  # somebody put something there in that instant
        local_disk.move(gone, path)
        return _close(path)
    _unlink(gone / pins.DROPPED)
    with contextlib.suppress(OSError):  # something came even now: the next sweep looks again
        gone.rmdir()
    local_disk.sync(path.parent)
    return Removal(path, dropped=True)


def _others(path: Path) -> list[Path]:
    """What is in the folder of a dropped checkpoint besides the tombstone; other marks mean nothing any more and go."""
    found = [each for each in entries(path) if each.name != pins.DROPPED]
    spent = [each for each in found if each.name.startswith(PREFIX) and not each.is_dir()]
    for each in spent:
        _unlink(each)
    return [each for each in found if each not in spent]


def _unlink(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        local_disk.unlink(file)


def _name_of_gone(path: Path) -> str:
    """The name of the folder that `_close` renamed to `path`; "" for any other."""
    named = path.name.startswith(".") and path.name.endswith(pins.DROPPED) and path.is_dir()
    return path.name[1 : -len(pins.DROPPED)] if named else ""


def _read(file: Path) -> Manifest | None:
    try:
        return from_json(local_disk.read_text(file, MANIFEST_LIMIT_BYTES), str(file))
    except (CheckpointError, OSError):
        return None
