"""Commits a save to a disk: a stage folder becomes the whole checkpoint, or nothing changes.

A stage is filled and then sealed: it is compared with the manifest, gets the manifest, and all its
files and folders are synced. It is then put in place in one of three ways:

    target missing or empty     rename
    target committed            exchange the two folders in one step; the stage then holds the old
                                checkpoint
    anything else               move the files. First the old manifest and then all files in the way
                                go into a hidden old folder in the target. Then the new files come
                                in, the new manifest last.

The third way serves folders that cannot be moved (a mount point, the working directory), file
systems without exchange, mounted buckets, and folders of foreign files. If it is interrupted, the
files on the disk determine the remaining work, see `recovery`.

At every instant the old or the new checkpoint is in place, or `recover_target` can restore one of
them. Files that no manifest of ft_ckpt listed stay.
"""

import errno
import os
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ft_ckpt.checkpoint.checks import SIGNATURE_NAME
from ft_ckpt.checkpoint.commit.recovery import (
    listed_files,
    old_folder_of,
    parse_leftover,
    recover_or_warn,
    recover_target,
)
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    check_paths,
    manifest_to_json,
    misleading_files,
    next_number,
)
from ft_ckpt.errors import CorruptError, NoSpaceError, TargetError, explained, listing
from ft_ckpt.storage import (
    folder_mode,
    holds_cwd,
    holds_mount,
    is_folder,
    local_disk,
    permission_bits,
    real_path,
    walk_tree,
)
from ft_ckpt.storage.local import (
    LocalStore,
    clear_drafts,
    holding_lock,
    is_on_bucket,
    make_locked_folder,
    refuse_unfit,
    release_lock,
)

_open_stages: set[Path] = set()  # unfinished stages of this process
_CANNOT_STAGE_BESIDE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
_CANNOT_SWAP = {
    # the parent folder of another user, or a sandbox that forbids the call
    *(errno.EACCES, errno.EPERM),
    *(errno.EBUSY, errno.EXDEV),  # mount points, overlay file systems
    # no exchange on this file system or kernel
    *(errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY),
    *(errno.EEXIST, errno.ENOTEMPTY),  # the empty folder is no longer empty
}


def check_target(target: Path, needed_bytes: int) -> None:
    """Check that a checkpoint of `needed_bytes` can be written to `target`.

    The check may make a temporary hidden folder. An overwrite needs space for both checkpoints, so
    the old one does not count as free. Raises TargetError if `target` is a file or cannot be
    created or written; NoSpaceError if its device has less than `needed_bytes` free.
    """
    with explained(target):
        target = real_path(target)
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


def make_stage(target: Path) -> Path:
    """Make the stage for `target`, a new hidden folder next to it, and return its path.

    The stage is inside `target` if a mount or permissions require that. It is locked until it is
    committed or discarded, so that no other process takes it for a leftover, and until then only
    this user may enter it. Leftovers of earlier saves to `target` are recovered first. Raises
    TargetError or NoSpaceError.
    """
    check_target(target, 0)
    with explained(target):
        target = real_path(target)
        recover_target(target)
        local_disk.make_folder(target.parent)
        stage = _new_stage(target)
        _open_stages.add(stage)
    return stage


def commit_stage(stage: Path, target: Path, manifest: Manifest, max_mode: int = 0o777) -> None:
    """Make `stage` the checkpoint `target`, durably, with `manifest`.

    The manifest must list every file in the stage. Files of `target` that belong to no checkpoint
    stay, except weights that readers would mix up with the new ones. Files and folders get the
    permissions of the ones they replace, limited by `max_mode` (see LocalStore). Leftovers that
    cannot be deleted are a warning, and left to the next save.

    Raises CorruptError if stage and manifest differ, ManifestError if a path leads out of the
    folder, TargetError or NoSpaceError if `target` cannot be written. The old checkpoint is then
    unchanged. One TargetError is raised after the commit, with a message of its own: the new
    checkpoint is in place but might not survive a power cut.
    """
    with explained(target):
        target = real_path(target)
        # The lock is on the folder that is `target` now. An exchange moves it to the stage's path.
        with holding_lock(target):
            try:
                _seal_and_place(stage, target, manifest, max_mode)
            finally:
                _release_stage(stage)


def place_files(stage: Path, target: Path) -> None:
    """Make the files in `stage`, without a manifest, the folder `target`, durably.

    `target` must be missing or empty. The files appear together, unless the folder cannot be moved
    (a mount point, the working directory).
    """
    with explained(target):
        target = real_path(target)
        everything = list(walk_tree(stage))
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
    name = parse_leftover(stage.name)
    if name is None:
        raise TargetError(f"{stage}: not a stage made by make_stage; nothing was deleted")
    # If the stage is not open, `commit_stage` has ended, and the next save deletes its leftovers.
    if stage in _open_stages:
        target = stage.parent / name.target if name.target else stage.parent
        try:
            recover_or_warn(stage, target)
        finally:
            _release_stage(stage)


def _seal_and_place(stage: Path, target: Path, manifest: Manifest, max_mode: int) -> None:
    sealed = None
    try:
        check_paths(manifest, str(target))
        if manifest.step is None and manifest.number is None:
            number = next_number(LocalStore(target), LocalStore(target.parent))
            manifest = replace(manifest, number=number)
        _seal_stage(stage, manifest, target, max_mode)
        sealed = (stage / MANIFEST_NAME).lstat()
        _place_stage(stage, target, manifest)
    except OSError as error:
        if sealed is not None and _holds_manifest(target, sealed):
            # the old checkpoint stays: after a power cut it may be the only one
            raise _durability_error(stage, target, error) from error
        recover_or_warn(stage, target)
        raise
    except BaseException:
        recover_or_warn(stage, target)
        raise

    recover_or_warn(stage, target, manifest)


def _release_stage(stage: Path) -> None:
    _open_stages.discard(stage)
    release_lock(stage)


def _holds_manifest(target: Path, sealed: os.stat_result) -> bool:
    try:
        return os.path.samestat((target / MANIFEST_NAME).lstat(), sealed)
    except OSError:
        return False


def _durability_error(stage: Path, target: Path, error: OSError) -> TargetError:
    kept = ""
    for old in (stage, old_folder_of(stage, target)):
        if os.path.lexists(old):
            kept = f"; the old checkpoint is kept in {old.name} until the next save"
    durability_error = TargetError(
        f"{target}: the new checkpoint is in place, but might not survive a power cut "
        f"({error}){kept}; save again"
    )
    durability_error.errno = error.errno
    return durability_error


def _new_stage(target: Path) -> Path:
    if not holds_mount(target):
        try:
            return make_locked_folder(
                lambda owner: target.parent / f".{target.name}.ft_ckpt-stage-{owner}", 0o700
            )
        except OSError as error:
            if error.errno not in _CANNOT_STAGE_BESIDE or not target.is_dir():
                raise
    return make_locked_folder(lambda owner: target / f".ft_ckpt-stage-{owner}", 0o700)


def _seal_stage(stage: Path, manifest: Manifest, target: Path, max_mode: int) -> None:
    """Make the stage complete and durable.

    The manifest is synced together with the files, because no reader trusts a manifest in a stage.
    """
    clear_drafts(stage)  # hidden files, which would else stay in the checkpoint
    _check_contents(stage, manifest)
    LocalStore(stage, syncs=False, max_mode=max_mode).write(
        MANIFEST_NAME, manifest_to_json(manifest).encode()
    )
    everything = [*walk_tree(stage), stage]
    _set_modes(stage, everything, target, max_mode)
    local_disk.sync_all(everything)


def _set_modes(stage: Path, everything: list[Path], target: Path, max_mode: int) -> None:
    """Give files and folders the permissions of what they replace, or those of the manifest.

    Every file gets its mode in this step, because libraries may create files for the owner only. A
    file that is linked to an earlier checkpoint keeps its mode.
    """
    manifest_mode = permission_bits(stage / MANIFEST_NAME)
    replaced_manifest = _replaced(target / MANIFEST_NAME)
    if replaced_manifest is not None:
        manifest_mode = replaced_manifest.st_mode & max_mode | stat.S_IRUSR
    stats = {path: path.lstat() for path in everything}
    names_in_stage = Counter(path_stat.st_ino for path_stat in stats.values())
    for path, path_stat in stats.items():
        is_folder = stat.S_ISDIR(path_stat.st_mode)
        if not is_folder and path_stat.st_nlink > names_in_stage[path_stat.st_ino]:
            continue  # linked to an earlier checkpoint
        replaced = _replaced(target / path.relative_to(stage))
        if replaced is not None and stat.S_ISDIR(replaced.st_mode) == is_folder:
            local_disk.take_mode(path, replaced, max_mode)
        elif is_folder:
            special_bits = path_stat.st_mode & 0o7000  # inherited from the folder around it
            local_disk.set_mode(path, folder_mode(manifest_mode) | special_bits)
        else:
            local_disk.set_mode(path, manifest_mode)


def _replaced(path: Path) -> os.stat_result | None:
    """Return the stat of the file or folder that will be replaced, or None without one.

    Return None for a link as well. Raises OSError if the path cannot be read.
    """
    try:
        path_stat = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if stat.S_ISLNK(path_stat.st_mode) else path_stat


def _check_contents(stage: Path, manifest: Manifest) -> None:
    problems = []
    sizes: dict[str, int] = {}
    for path in walk_tree(stage):
        if path.is_symlink():
            problems.append(f"{path.name}: a symbolic link in the stage")
        if path.is_symlink() or not path.is_dir():
            sizes[path.relative_to(stage).as_posix()] = path.lstat().st_size

    expected = {file.path: file.size_bytes for file in manifest.files}
    missing = expected.keys() - sizes.keys()
    problems += [f"{name}: not in the stage" for name in missing]

    # hidden files are ignored: network file systems create some of their own
    unlisted = [name for name in sizes.keys() - expected.keys() if not _is_hidden(name)]
    problems += [f"{name}: not in the manifest" for name in unlisted]
    for name in expected.keys() & sizes.keys():
        stored, described = sizes[name], expected[name]
        if stored != described:
            problem = f"{name}: {stored:,} bytes in the stage, {described:,} in the manifest"
            problems.append(problem)

    if problems:
        raise CorruptError(
            f"{listing(sorted(problems))}: the stage is not what the manifest describes; save again"
        )


def _is_hidden(path: str) -> bool:
    return PurePosixPath(path).name.startswith(".")


def _place_stage(stage: Path, target: Path, manifest: Manifest) -> None:
    old = listed_files(target)
    new = [file.path for file in manifest.files]
    _check_obstacles(target, new, old or frozenset())
    if _is_movable(stage, target) and _swap_folders(stage, target, committed=old is not None):
        return
    aside = {*new, *misleading_files(LocalStore(target), manifest)}
    if old is not None:
        aside |= {SIGNATURE_NAME, *old}
    _move_into_target(stage, target, aside, new)


def _is_movable(stage: Path, target: Path) -> bool:
    # A stage next to the target: the target contains no mount.
    # In a mounted bucket a folder is moved file by file.
    return stage.parent != target and not holds_cwd(target) and not is_on_bucket(target)


def _check_obstacles(target: Path, new: list[str], old: frozenset[str]) -> None:
    """Raise TargetError if a folder is in the way of a file, or a file in the way of a folder."""
    folders: set[str] = set()
    for path in new:
        folders.update(parent.as_posix() for parent in Path(path).parents)
    obstacles = [path for path in new if is_folder(target / path)]
    present = [path for path in folders - old - {"."} if os.path.lexists(target / path)]
    obstacles += [path for path in present if not is_folder(target / path)]
    if obstacles:
        raise TargetError(
            f"{listing(sorted(obstacles), ', ')}: a folder in {target} where the checkpoint has a "
            "file, or a file or link where it has a folder; move it away or choose another path"
        )


def _swap_folders(stage: Path, target: Path, *, committed: bool) -> bool:
    """Put the stage in place in one step; return False, without a change, if that is impossible."""
    try:
        if not target.exists() or not any(target.iterdir()):
            local_disk.move(stage, target)
        elif committed:
            local_disk.exchange_folders(stage, target)
        else:
            return False
    except OSError as error:
        if error.errno in _CANNOT_SWAP:
            return False
        raise
    local_disk.sync_path(target.parent)
    return True


def _move_into_target(stage: Path, target: Path, aside: set[str], new: list[str]) -> None:
    old_folder = old_folder_of(stage, target)
    local_disk.make_folder(target, permission_bits(stage))
    local_disk.mkdir(old_folder)
    # the manifest first: no reader may trust files that are about to move
    local_disk.move_files([MANIFEST_NAME], target, old_folder)
    local_disk.move_files(aside, target, old_folder)
    local_disk.move_files(new, stage, target)
    local_disk.move_files([MANIFEST_NAME], stage, target)
