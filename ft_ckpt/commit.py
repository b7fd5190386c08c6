"""The point of no return: a stage folder becomes the checkpoint, or nothing has happened.

A stage is filled, then sealed: compared with the manifest, every file and folder synced, the manifest in it last.
It is then put in place in one of three ways:

    target missing or empty     rename
    target committed            exchange the two folders in one step; the stage is then the old checkpoint
    anything else               pour: what is in the way goes to a hidden sideline in the target, the old manifest
                                first; the new files come in, the new manifest last

The third serves folders that cannot be moved (a mount point, the working directory), file systems without exchange,
and folders of foreign files. What is left to do afterwards is read off the disk, in `_settle`, by the same code
whether the save went well, was interrupted, or died and is found by `recover`:

    a sideline, no manifest in the target    undo: poured files back to the stage, then the sideline back
    a sideline, a manifest in the target     the new one is in place: delete the sideline
    a stage with a manifest                  carry what that manifest does not list over to the target, then delete
    a stage without                          delete

So at every instant the old or the new checkpoint is whole, and files that were never ours stay.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import time
from dataclasses import replace
from pathlib import Path

from ft_ckpt import disk
from ft_ckpt.catalog import check_paths, is_inside, next_number, read_manifest
from ft_ckpt.checks import misleading, strays
from ft_ckpt.errors import CorruptError, ManifestError, NoSpaceError, TargetError, UnreadableError, explained, listing
from ft_ckpt.manifest import MANIFEST_LIMIT_BYTES, MANIFEST_NAME, Manifest, to_json

_LEFTOVER = re.compile(
    r"\.(?:(?P<target>.+)\.)?ft_ckpt-(?P<what>stage|old)-(?P<owner>(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8})", re.DOTALL
)
_DRAFT = f".{MANIFEST_NAME}.draft"
_ABANDONED_SECONDS = 24 * 3600  # a stage of another host, where we cannot ask for the process
_NOT_BESIDE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
_NO_SWAP = {
    *(errno.EACCES, errno.EPERM),  # the folder around the target is not ours, or a sandbox forbids the call
    *(errno.EBUSY, errno.EXDEV),  # mount points, overlay file systems
    *(errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP),  # no exchange on this file system or kernel
    *(errno.EEXIST, errno.ENOTEMPTY),  # the empty folder is no longer empty
}
_open: set[str] = set()  # stages of this process; a leftover with our pid that is not among them had the pid before us


def check_target(target: Path, needed_bytes: int) -> None:
    """Refuse a place where a checkpoint of `needed_bytes` could not be written; changes nothing.

    Raises TargetError when `target` is a file or cannot be created or written; NoSpaceError when the device has less
    free than needed. An overwrite needs room for both, so what the old checkpoint holds is not counted as free.
    """
    with explained(target):
        target = _real(target)
        present = next(path for path in (target, *target.parents) if path.exists())
        if not present.is_dir():
            raise TargetError(f"{present}: a file, expected a folder to save {target.name} in; choose another path")
        if not os.access(present, os.W_OK | os.X_OK):
            raise TargetError(f"{present}: not writable by this process; change its permissions or choose another path")
        device = os.statvfs(present)
        free = device.f_bavail * device.f_frsize
    if free < needed_bytes:
        raise NoSpaceError(
            f"{target}: {free:,} bytes free on its device, expected at least {needed_bytes:,}; "
            f"delete older checkpoints or choose another device"
        )


def open_stage(target: Path) -> Path:
    """A fresh hidden folder to fill for `target`, beside it (inside, where a mount or permissions ask for it).

    First settles what an earlier save to `target` left behind. Raises TargetError or NoSpaceError.
    """
    check_target(target, 0)
    with explained(target):
        target = _real(target)
        recover(target)
        disk.make_folder(target.parent)
        stage = _new_stage(target, f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}")
    _open.add(stage.name)
    return stage


def commit(stage: Path, target: Path, manifest: Manifest) -> None:
    """Make `stage` the checkpoint `target`, durably, with `manifest`; on an exception before that, nothing changes.

    The manifest must list every file in the stage. Files of `target` that are of no checkpoint stay, except weights
    that readers would mix up with the new ones. The stage is gone afterwards, whatever happened.

    Raises CorruptError when the stage and the manifest differ, ManifestError when a path leads out of the folder,
    TargetError or NoSpaceError when the place cannot be written.
    """
    with explained(target):
        target = _real(target)
        try:
            check_paths(manifest, str(target))
            if manifest.step is None:
                manifest = replace(manifest, number=next_number(target))
            _seal(stage, manifest)
            _place(stage, target, manifest)
        finally:
            _settle(stage, target)


def discard(stage: Path) -> None:
    """Delete a stage that will not be committed; nothing happens when it is already gone."""
    named = _LEFTOVER.fullmatch(stage.name)
    if named is None:
        raise TargetError(f"{stage}: not a stage made by open_stage; nothing was deleted")
    with explained(stage):
        _settle(stage, stage.parent / named["target"] if named["target"] else stage.parent)


def recover(target: Path) -> tuple[str, ...]:
    """Undo or finish what saves to `target` left when their process died; says what was done, a line for each.

    A leftover is left alone while its process lives on this host. From another host, where that cannot be asked, one
    that was being put in place is settled at once, an unsealed stage after a day: `target` must have no other writer.
    """
    with explained(target):
        target = _real(target)
        return tuple(_settle(stage, target) for stage in _abandoned(target))


def uncommit(path: Path) -> None:
    """Take the manifest out of `path`, durably: from here on it is no checkpoint, and deleting may be interrupted."""
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(path / MANIFEST_NAME)
    disk.sync(path)


def _real(target: Path) -> Path:
    try:
        return Path(target).resolve()  # a link stays, what it leads to is replaced
    except RuntimeError as error:  # what Python before 3.13 raises
        raise TargetError(f"{target}: a loop of symbolic links ({error}); choose another path") from error


def _host() -> str:
    return re.sub(r"[^\w.-]", "_", socket.gethostname())[:40]


def _new_stage(target: Path, owner: str) -> Path:
    if not disk.holds_mount(target):
        try:
            return _made(target.parent / f".{target.name}.ft_ckpt-stage-{owner}")
        except OSError as error:
            if error.errno not in _NOT_BESIDE or not target.is_dir():
                raise
    return _made(target / f".ft_ckpt-stage-{owner}")


def _made(folder: Path) -> Path:
    disk.mkdir(folder)
    return folder


def _seal(stage: Path, manifest: Manifest) -> None:
    """Make the stage complete and durable; its manifest appears when everything else has."""
    _check_contents(stage, manifest)
    draft = stage / _DRAFT
    draft.write_text(to_json(manifest), encoding="utf-8")
    # Files made by libraries may be for the owner only. What we just made has what the umask, or the folder, grants.
    file_mode, folder_mode = disk.mode(draft), disk.mode(stage)
    everything = [*disk.tree(stage), stage]
    for path in everything:
        wanted = folder_mode if path.is_dir() else file_mode
        if disk.mode(path) != wanted:
            disk.chmod(path, wanted)
    disk.sync_all(everything)
    disk.move(draft, stage / MANIFEST_NAME)
    disk.sync(stage)


def _check_contents(stage: Path, manifest: Manifest) -> None:
    places = [path for path in disk.tree(stage) if path.is_symlink() or not path.is_dir()]
    found = {path.relative_to(stage).as_posix(): path.lstat().st_size for path in places}
    expected = {file.path: file.size_bytes for file in manifest.files}
    wrong = [f"{path.name}: a symbolic link in the stage" for path in places if path.is_symlink()]
    wrong += [f"{name}: not in the stage" for name in expected.keys() - found.keys()]
    # Hidden files are let pass: network file systems leave some of their own.
    unlisted = (name for name in found.keys() - expected.keys() if not Path(name).name.startswith("."))
    wrong += [f"{name}: not in the manifest" for name in unlisted]
    wrong += [
        f"{name}: {found[name]:,} bytes in the stage, {expected[name]:,} in the manifest"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    ]
    if wrong:
        raise CorruptError(f"{listing(sorted(wrong))}: the stage is not what the manifest describes; save again")


def _place(stage: Path, target: Path, manifest: Manifest) -> None:
    old = _listed(target)
    new = [file.path for file in manifest.files]
    _check_obstacles(target, new, old or frozenset())
    movable = stage.parent != target and not disk.holds_cwd(target)  # beside it means that it holds no mount either
    if not (movable and _swap(stage, target, committed=old is not None)):
        _pour(stage, target, {*(old or ()), *new, *strays(target, manifest)}, new)


def _check_obstacles(target: Path, new: list[str], old: frozenset[str]) -> None:
    """A folder where a file has to go, or a file where a folder has to be, is nothing to delete unasked."""
    folders = {parent.as_posix() for path in new for parent in Path(path).parents}
    found = [path for path in new if (target / path).is_dir()]
    found += [path for path in folders - old if (target / path).exists() and not (target / path).is_dir()]
    if found:
        raise TargetError(
            f"{listing(sorted(found), ', ')}: a folder in {target} where the checkpoint has a file, or the reverse; "
            f"move it away or choose another path"
        )


def _swap(stage: Path, target: Path, *, committed: bool) -> bool:
    """Put the stage in place in one step; False where that is not possible, and nothing has changed."""
    if target.is_dir():
        disk.take_access(stage, target)
    try:
        if not target.exists() or not any(target.iterdir()):
            disk.move(stage, target)
        elif committed:
            disk.exchange(stage, target)
        else:
            return False
    except OSError as error:
        if error.errno in _NO_SWAP:
            return False
        raise
    disk.sync(target.parent)
    return True


def _pour(stage: Path, target: Path, aside: set[str], new: list[str]) -> None:
    sideline = _sideline(stage, target)
    disk.make_folder(target)
    disk.mkdir(sideline)
    disk.shift([MANIFEST_NAME], target, sideline)  # first: no reader may trust files that are about to move
    disk.shift(aside, target, sideline)
    disk.shift(new, stage, target)
    disk.shift([MANIFEST_NAME], stage, target)


def _sideline(stage: Path, target: Path) -> Path:
    named = _LEFTOVER.fullmatch(stage.name)
    return target / f".ft_ckpt-old-{named['owner'] if named else stage.name}"


def _settle(stage: Path, target: Path) -> str:
    """Bring stage, sideline and target to rest, as the table on top says; may itself be interrupted and repeated."""
    _open.discard(stage.name)
    sideline, done = _sideline(stage, target), f"{stage.name}: removed what was left of a save"
    if sideline.is_dir():
        done = f"{target}: removed what a finished overwrite had put aside"
        if not (target / MANIFEST_NAME).exists():
            _undo(stage, target, sideline)
            done = f"{target}: undid an unfinished overwrite"
        disk.prune(disk.pieces(sideline, target, set()), target)  # folders that only the old one had
        _delete(sideline)
    if stage.is_dir():
        _carry(stage, target)
        _delete(stage)
    return done


def _delete(folder: Path) -> None:
    uncommit(folder)
    disk.rmtree(folder)


def _undo(stage: Path, target: Path, sideline: Path) -> None:
    new = _listed(stage) or frozenset()
    disk.shift([path for path in new if not os.path.lexists(stage / path)], target, stage)
    disk.prune(new, target)
    disk.shift(disk.pieces(sideline, target, {MANIFEST_NAME}), sideline, target)
    disk.shift([MANIFEST_NAME], sideline, target)  # last: only now is the old one whole


def _carry(stage: Path, target: Path) -> None:
    """After an exchange: what the old checkpoint did not list goes over to the new one, whose own files win."""
    old = _listed(stage)
    try:
        manifest = read_manifest(target)
    except (ManifestError, OSError):
        return
    if old is not None:
        ours = {MANIFEST_NAME, *old, *(file.path for file in manifest.files)}
        foreign = disk.pieces(stage, target, ours)
        disk.shift([path for path in foreign if not misleading(path, manifest)], stage, target)


def _listed(folder: Path) -> frozenset[str] | None:
    """The files of the checkpoint in `folder`; None when there is none. Understands newer manifests than ours too."""
    try:
        files = json.loads(disk.read_text(folder / MANIFEST_NAME, MANIFEST_LIMIT_BYTES))["files"]
        paths = frozenset(file["path"] for file in files)
    except UnreadableError:
        raise
    except (CorruptError, FileNotFoundError, KeyError, RecursionError, TypeError, ValueError):
        return None
    return paths if all(is_inside(path) for path in paths) else None


def _abandoned(target: Path) -> list[Path]:
    """The stages whose process is gone; one that is only known from its sideline is named though it is not there."""
    stages = {}
    for folder, name in ((target, None), (target.parent, target.name)):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            named = _LEFTOVER.fullmatch(entry.name)
            if named and named["target"] == name and _gone(entry, named):
                beside = target.parent / f".{target.name}.ft_ckpt-stage-{named['owner']}"
                stages[named["owner"]] = entry if named["what"] == "stage" else beside
    return [stages[owner] for owner in sorted(stages)]


def _gone(entry: Path, named: re.Match[str]) -> bool:
    if named["host"] == _host():
        if int(named["pid"]) == os.getpid():
            return not any(name.endswith(named["owner"]) for name in _open)
        return not _alive(int(named["pid"]))
    in_place = named["what"] == "old" or (entry / MANIFEST_NAME).exists()
    return in_place or time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
