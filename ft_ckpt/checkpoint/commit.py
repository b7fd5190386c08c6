"""Commits a save: a stage folder becomes the whole checkpoint, or nothing changes.

Recovers after a crash.

A stage is filled, then sealed: compared with the manifest, which is put into it, and every file and
folder synced. It is then put in place in one of three ways:

    target missing or empty     rename
    target committed            exchange the two folders in one step; the stage then holds the old
                                checkpoint
    anything else               pour: what is in the way goes to a hidden sideline in the target,
                                the old manifest first; the new files come in, the new manifest last

The third serves folders that cannot be moved (a mount point, the working directory), file systems
without exchange, mounted buckets, and folders of foreign files. The files on the disk determine the
remaining work, see `recover_target`.

At every instant the old or the new checkpoint is in place, or `recover_target` can restore one of
them after an interrupted pour. Files that no manifest of ours listed stay.
"""

import errno
import json
import os
import re
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path

from ft_ckpt.checkpoint.catalog import next_number, read_manifest
from ft_ckpt.checkpoint.checks import is_misleading, misleading_files
from ft_ckpt.checkpoint.guards import lease_reasons
from ft_ckpt.checkpoint.leases import LEASE
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    Manifest,
    check_paths,
    manifest_to_json,
)
from ft_ckpt.checkpoint.signature import SIGNATURE_NAME
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ManifestError,
    NoSpaceError,
    TargetError,
    UnreadableError,
    explained,
    listing,
)
from ft_ckpt.messages import warn
from ft_ckpt.storage import (
    ABANDONED_SECONDS,
    LocalStore,
    clear_drafts,
    is_inside,
    is_on_bucket,
    local_disk,
    locks,
    make_locked_folder,
    read_text,
    refuse_unfit,
)

LEFTOVER = re.compile(
    rf"\.(?:(?P<target>.+)\.)?ft_ckpt-(?P<what>stage|old)-(?P<owner>{locks.OWNER})", re.DOTALL
)


def recover_target(target: Path) -> tuple[str, ...]:
    """Undo or finish interrupted saves to `target`; returns a line for each.

    A leftover stays while its owner lives, see `locks`. Leftovers of other machines are settled at
    once if they were being put in place, unsealed stages after a day: `target` must have no other
    writer. Leftovers of saves beside it are settled too once their owners have ended. A leftover
    that cannot be settled is a warning, or a TargetError or UnreadableError if the previous
    checkpoint could not be restored.
    """
    with explained(target):
        target = local_disk.real_path(target)
        done = []
        for found in (*_find_leftovers(target, target), *_find_leftovers(target.parent, None)):
            _, of, entry = found
            named = LEFTOVER.fullmatch(entry.name)
            in_place = (named is not None and named["what"] == "old") or (
                entry / MANIFEST_NAME
            ).exists()
            seconds = 0.0 if in_place and of == target else ABANDONED_SECONDS
            done.append(_recover_leftover(*found, seconds))
        return tuple(line for line in done if line)


def uncommit(path: Path) -> None:
    """Delete the manifest of `path`, durably: it stops being a checkpoint, and deleting the rest
    may be interrupted.
    """
    local_disk.delete_files([MANIFEST_NAME], path)


def settle_or_warn(stage: Path, target: Path, manifest: Manifest | None = None) -> None:
    """`settle_stage` with errors as warnings: the next save tries again."""
    try:
        settle_stage(stage, target, manifest)
    except (CheckpointError, OSError) as error:
        _warn_left(stage, target, error)


def sideline_of(stage: Path, target: Path) -> Path:
    """The hidden folder in `target` that holds the old checkpoint while the new one is moved in."""
    named = LEFTOVER.fullmatch(stage.name)
    return target / f".ft_ckpt-old-{named['owner'] if named else stage.name}"


def settle_stage(stage: Path, target: Path, manifest: Manifest | None = None) -> str:
    """Undo or finish one save from the state of stage, sideline and target, see the table on top;
    repeatable.

    `manifest`: the target's, if known. The old checkpoint is deleted last, when its replacement is
    durable and no reader has a lease on it.
    """
    sideline, done = sideline_of(stage, target), f"{stage.name}: removed what was left of a save"
    if local_disk.is_folder(sideline):
        done = f"{target}: removed what a finished overwrite had put aside"
        if not (target / MANIFEST_NAME).exists():
            _undo_pour(stage, target, sideline)
            done = f"{target}: undid an unfinished overwrite"
        local_disk.sync_path(target)
        only_old = local_disk.movable_pieces(sideline, target, set())
        local_disk.remove_empty_folders(only_old, target)
        _delete_committed(sideline)
    if local_disk.is_folder(stage):
        local_disk.sync_path(stage.parent)
        _carry_foreign_files(stage, target, manifest)
        if lease_reasons(stage):
            return f"{stage.name}: kept, it is being read"
        _delete_committed(stage)
    return done


def _delete_committed(folder: Path) -> None:
    uncommit(folder)
    local_disk.delete_folder(folder)


def _undo_pour(stage: Path, target: Path, sideline: Path) -> None:
    new = listed_files(stage) or frozenset()
    local_disk.move_files(
        [path for path in new if not os.path.lexists(stage / path)], target, stage
    )
    local_disk.remove_empty_folders(new, target)
    local_disk.move_files(
        local_disk.movable_pieces(sideline, target, {MANIFEST_NAME}), sideline, target
    )
    local_disk.move_files([MANIFEST_NAME], sideline, target)  # last: only now is the old one whole


def _carry_foreign_files(stage: Path, target: Path, manifest: Manifest | None) -> None:
    """After an exchange, move files that the old checkpoint did not list into the new one,
    replacing nothing there.

    Raises UnreadableError when a manifest cannot be read now: the stage must then stay as it is.
    """
    old = listed_files(stage)
    if old is None:
        return
    try:
        manifest = manifest or read_manifest(target)
    except UnreadableError:
        raise
    except ManifestError:
        return
    ours = {MANIFEST_NAME, SIGNATURE_NAME, *old, *(file.path for file in manifest.files)}
    foreign = [
        path
        for path in local_disk.movable_pieces(stage, target, ours)
        if not path.startswith(LEASE)
    ]
    local_disk.move_files(
        [path for path in foreign if not is_misleading(path, manifest)],
        stage,
        target,
        replace=False,
    )


def listed_files(folder: Path) -> frozenset[str] | None:
    """The files of the checkpoint in `folder`; None when there is none. Accepts newer manifest
    formats.

    Raises UnreadableError when the manifest cannot be read now.
    """
    try:
        files = json.loads(read_text(LocalStore(folder), MANIFEST_NAME, MANIFEST_LIMIT_BYTES))[
            "files"
        ]
        paths = frozenset(file["path"] for file in files)
    except UnreadableError:
        raise
    except (CorruptError, FileNotFoundError, KeyError, RecursionError, TypeError, ValueError):
        return None
    return paths if all(is_inside(path) for path in paths) else None


def _find_leftovers(folder: Path, target: Path | None) -> list[tuple[Path, Path, Path]]:
    """The interrupted saves in `folder` as (stage, target, entry); the entry is the stage, or its
    sideline alone.

    Only those of `target`, when it is given.
    """
    found: dict[str, tuple[Path, Path, Path]] = {}
    for entry in map(folder.joinpath, local_disk.list_names(folder)):
        named = LEFTOVER.fullmatch(entry.name)
        if named is None or not local_disk.is_folder(entry):
            continue
        of = folder / named["target"] if named["target"] else folder
        if target in (None, of):
            beside = of.with_name(f".{of.name}.ft_ckpt-stage-{named['owner']}")
            if named["what"] == "stage" or named["owner"] not in found:
                found[named["owner"]] = (entry if named["what"] == "stage" else beside, of, entry)
    return [found[owner] for owner in sorted(found)]


def _recover_leftover(stage: Path, target: Path, entry: Path, most_seconds: float) -> str | None:
    """Undo or finish one interrupted save; returns a line about it, None when its owner may be
    alive.
    """
    named = LEFTOVER.fullmatch(entry.name)
    try:
        with locks.claim_leftover(entry, named["owner"] if named else "", most_seconds) as gone:
            return settle_stage(stage, target) if gone else None
    except (CheckpointError, OSError) as error:
        if not (target / MANIFEST_NAME).exists():
            raise  # the old checkpoint is still in the sideline
        _warn_left(stage, target, error)
        return None


def _warn_left(stage: Path, target: Path, error: Exception) -> None:
    warn(f"{target}: {stage.name} is left for the next save to clear ({error})", stacklevel=5)


_open: set[Path] = set()  # unfinished stages of this process
_NOT_BESIDE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
_NO_SWAP = {
    # another user's parent folder, or a sandbox that forbids the call
    *(errno.EACCES, errno.EPERM),
    *(errno.EBUSY, errno.EXDEV),  # mount points, overlay file systems
    # no exchange on this file system or kernel
    *(errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY),
    *(errno.EEXIST, errno.ENOTEMPTY),  # the empty folder is no longer empty
}


def check_target(target: Path, needed_bytes: int) -> None:
    """Check that a checkpoint of `needed_bytes` can be written to `target`; may make a temporary
    hidden folder.

    Raises TargetError when `target` is a file or cannot be created or written; NoSpaceError when
    its device has less than `needed_bytes` free. An overwrite needs space for both checkpoints, so
    the old one does not count as free.
    """
    with explained(target):
        target = local_disk.real_path(target)
        present = next(path for path in (target, *target.parents) if path.exists())
        if not present.is_dir():
            raise TargetError(
                f"{present}: a file, expected a folder to save {target.name} in; "
                "choose another path"
            )
        if not os.access(present, os.W_OK | os.X_OK):
            raise TargetError(
                f"{present}: not writable by this process; change its permissions or choose "
                "another path"
            )
        refuse_unfit(present)
        device = os.statvfs(present)
        free = device.f_bavail * device.f_frsize
    if free < needed_bytes:
        raise NoSpaceError(
            f"{target}: {free:,} bytes free on its device, expected at least {needed_bytes:,}; "
            f"delete older checkpoints or choose another device"
        )


def open_stage(target: Path) -> Path:
    """A new hidden folder to fill for `target`, beside it (inside it, if a mount or permissions
    require that).

    It is locked until it is committed or discarded, so that no other process takes it for a
    leftover. Until then only this user may enter it. Settles leftovers of earlier saves to `target`
    first. Raises TargetError or NoSpaceError.
    """
    check_target(target, 0)
    with explained(target):
        target = local_disk.real_path(target)
        recover_target(target)
        local_disk.make_folder(target.parent)
        stage = _new_stage(target)
        _open.add(stage)
    return stage


def commit_stage(stage: Path, target: Path, manifest: Manifest, max_mode: int = 0o777) -> None:
    """Make `stage` the checkpoint `target`, durably, with `manifest`; on an exception before that,
    nothing changes.

    The manifest must list every file in the stage. Files of `target` that belong to no checkpoint
    stay, except weights that readers would mix up with the new ones. Files and folders get the
    permissions of the ones they replace, limited by `max_mode`, see LocalStore. Leftovers that
    cannot be deleted are a warning, and left to the next save.

    Raises CorruptError when stage and manifest differ, ManifestError when a path leads out of the
    folder, TargetError or NoSpaceError when `target` cannot be written: the old checkpoint is still
    there. One TargetError is raised after the commit, with a message of its own: the new checkpoint
    is in place but might not survive a power cut.
    """
    with explained(target):
        target = local_disk.real_path(target)
        # after an exchange this is the old one, at the stage's place
        with locks.holding_lock(target):
            try:
                _seal_and_place(stage, target, manifest, max_mode)
            finally:
                _release_stage(stage)


def place_files(stage: Path, target: Path) -> None:
    """Make the files in `stage`, without a manifest, the folder `target`, durably; it must be
    missing or empty.

    They appear together, unless the folder cannot be moved (a mount point, the working directory).
    """
    with explained(target):
        target = local_disk.real_path(target)
        everything = list(local_disk.walk_tree(stage))
        local_disk.make_folder(target)
        local_disk.take_mode(stage, target.stat())
        local_disk.sync_all([*everything, stage])
        if not (_is_movable(stage, target) and _swap_folders(stage, target, committed=False)):
            files = [path.relative_to(stage).as_posix() for path in everything if not path.is_dir()]
            local_disk.move_files(files, stage, target)


def discard_stage(stage: Path) -> None:
    """Delete a stage that will not be committed, if it still exists.

    Files that cannot be deleted are a warning, and left to the next save.
    """
    named = LEFTOVER.fullmatch(stage.name)
    if named is None:
        raise TargetError(f"{stage}: not a stage made by open_stage; nothing was deleted")
    # otherwise `commit_stage` is finished, and has left its leftovers on purpose
    if stage in _open:
        try:
            settle_or_warn(
                stage, stage.parent / named["target"] if named["target"] else stage.parent
            )
        finally:
            _release_stage(stage)


def _seal_and_place(stage: Path, target: Path, manifest: Manifest, max_mode: int) -> None:
    sealed = None
    try:
        check_paths(manifest, str(target))
        if manifest.step is None and manifest.number is None:
            manifest = replace(
                manifest, number=next_number(LocalStore(target), LocalStore(target.parent))
            )
        _seal_stage(stage, manifest, target, max_mode)
        sealed = (stage / MANIFEST_NAME).lstat()
        _place_stage(stage, target, manifest)
    except OSError as error:
        if sealed is not None and _holds_manifest(target, sealed):
            # the old checkpoint stays: after a power cut it may be the only one
            raise _durability_error(stage, target, error) from error
        settle_or_warn(stage, target)
        raise
    except BaseException:
        settle_or_warn(stage, target)
        raise
    settle_or_warn(stage, target, manifest)


def _release_stage(stage: Path) -> None:
    _open.discard(stage)
    locks.release_lock(stage)


def _holds_manifest(target: Path, sealed: os.stat_result) -> bool:
    try:
        return os.path.samestat((target / MANIFEST_NAME).lstat(), sealed)
    except OSError:
        return False


def _durability_error(stage: Path, target: Path, error: OSError) -> TargetError:
    old = next(
        (each for each in (sideline_of(stage, target), stage) if os.path.lexists(each)), None
    )
    kept = f"; the old checkpoint is kept in {old.name} until the next save" if old else ""
    found = TargetError(
        f"{target}: the new checkpoint is in place, but might not survive a power cut "
        f"({error}){kept}; save again"
    )
    found.errno = error.errno
    return found


def _new_stage(target: Path) -> Path:
    if not local_disk.holds_mount(target):
        try:
            return make_locked_folder(
                lambda owner: target.parent / f".{target.name}.ft_ckpt-stage-{owner}", 0o700
            )
        except OSError as error:
            if error.errno not in _NOT_BESIDE or not target.is_dir():
                raise
    return make_locked_folder(lambda owner: target / f".ft_ckpt-stage-{owner}", 0o700)


def _seal_stage(stage: Path, manifest: Manifest, target: Path, max_mode: int) -> None:
    """Make the stage complete and durable.

    No reader trusts a manifest in a stage, so everything is synced at once.
    """
    clear_drafts(stage)  # hidden files, which would stay in the checkpoint
    _check_contents(stage, manifest)
    LocalStore(stage, syncs=False, max_mode=max_mode).write(
        MANIFEST_NAME, manifest_to_json(manifest).encode()
    )
    everything = [*local_disk.walk_tree(stage), stage]
    _set_modes(stage, everything, target, max_mode)
    local_disk.sync_all(everything)


def _set_modes(stage: Path, everything: list[Path], target: Path, max_mode: int) -> None:
    """Give files and folders the permissions of the ones they replace, and new ones those of the
    manifest.

    Libraries may create files for the owner only, so each file gets its mode here. A file that is
    linked to an earlier checkpoint keeps its mode.
    """
    manifest_mode = local_disk.permission_bits(stage / MANIFEST_NAME)
    replaced_manifest = _replaced(target / MANIFEST_NAME)
    if replaced_manifest is not None:
        manifest_mode = replaced_manifest.st_mode & max_mode | stat.S_IRUSR
    stats = {path: path.lstat() for path in everything}
    names_in_stage = Counter(found.st_ino for found in stats.values())
    for path, found in stats.items():
        is_folder = stat.S_ISDIR(found.st_mode)
        if not is_folder and found.st_nlink > names_in_stage[found.st_ino]:
            continue
        replaced = _replaced(target / path.relative_to(stage))
        if replaced is not None and stat.S_ISDIR(replaced.st_mode) == is_folder:
            local_disk.take_mode(path, replaced, max_mode)
        elif is_folder:
            special_bits = found.st_mode & 0o7000  # inherited from the folder around it
            local_disk.set_mode(path, local_disk.folder_mode(manifest_mode) | special_bits)
        else:
            local_disk.set_mode(path, manifest_mode)


def _replaced(path: Path) -> os.stat_result | None:
    """The facts about the file or folder that will be replaced, if there is one; links count for
    nothing.
    """
    try:
        found = path.lstat()
    except OSError:
        return None
    return None if stat.S_ISLNK(found.st_mode) else found


def _check_contents(stage: Path, manifest: Manifest) -> None:
    places = [
        path for path in local_disk.walk_tree(stage) if path.is_symlink() or not path.is_dir()
    ]
    found = {path.relative_to(stage).as_posix(): path.lstat().st_size for path in places}
    expected = {file.path: file.size_bytes for file in manifest.files}
    wrong = [f"{path.name}: a symbolic link in the stage" for path in places if path.is_symlink()]
    wrong += [f"{name}: not in the stage" for name in expected.keys() - found.keys()]
    # Hidden files are ignored: network file systems create some of their own.
    unlisted = (
        name for name in found.keys() - expected.keys() if not Path(name).name.startswith(".")
    )
    wrong += [f"{name}: not in the manifest" for name in unlisted]
    wrong += [
        f"{name}: {found[name]:,} bytes in the stage, {expected[name]:,} in the manifest"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    ]
    if wrong:
        raise CorruptError(
            f"{listing(sorted(wrong))}: the stage is not what the manifest describes; save again"
        )


def _place_stage(stage: Path, target: Path, manifest: Manifest) -> None:
    old = listed_files(target)
    new = [file.path for file in manifest.files]
    _check_obstacles(target, new, old or frozenset())
    if not (_is_movable(stage, target) and _swap_folders(stage, target, committed=old is not None)):
        aside = set() if old is None else {SIGNATURE_NAME, *old}
        _pour_files(
            stage, target, {*aside, *new, *misleading_files(LocalStore(target), manifest)}, new
        )


def _is_movable(stage: Path, target: Path) -> bool:
    # A stage beside the target: the target contains no mount. In a mounted bucket a folder is moved
    # file by file.
    return stage.parent != target and not local_disk.holds_cwd(target) and not is_on_bucket(target)


def _check_obstacles(target: Path, new: list[str], old: frozenset[str]) -> None:
    """Raise TargetError if a folder is in the way of a file, or a file in the way of a folder;
    deletes neither.
    """
    folders = {parent.as_posix() for path in new for parent in Path(path).parents} - {"."}
    found = [path for path in new if local_disk.is_folder(target / path)]
    found += [
        path
        for path in folders - old
        if os.path.lexists(target / path) and not local_disk.is_folder(target / path)
    ]
    if found:
        raise TargetError(
            f"{listing(sorted(found), ', ')}: a folder in {target} where the checkpoint has a "
            "file, or a file or link where it has a folder; move it away or choose another path"
        )


def _swap_folders(stage: Path, target: Path, *, committed: bool) -> bool:
    """Put the stage in place in one step; False if that is impossible, and nothing has changed."""
    try:
        if not target.exists() or not any(target.iterdir()):
            local_disk.move(stage, target)
        elif committed:
            local_disk.exchange_folders(stage, target)
        else:
            return False
    except OSError as error:
        if error.errno in _NO_SWAP:
            return False
        raise
    local_disk.sync_path(target.parent)
    return True


def _pour_files(stage: Path, target: Path, aside: set[str], new: list[str]) -> None:
    sideline = sideline_of(stage, target)
    local_disk.make_folder(target, local_disk.permission_bits(stage))
    local_disk.mkdir(sideline)
    # first: no reader may trust files that are about to move
    local_disk.move_files([MANIFEST_NAME], target, sideline)
    local_disk.move_files(aside, target, sideline)
    local_disk.move_files(new, stage, target)
    local_disk.move_files([MANIFEST_NAME], stage, target)
