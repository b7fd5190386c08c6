"""Files and folders that are made beside their place and then put there in one step."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ft_ckpt.storage import local_disk, owners

PREFIX = ".ft_ckpt-"  # of every hidden name of ours inside of a checkpoint
ABANDONED_SECONDS = 24 * 3600  # after which what another machine made, where we cannot ask for its owner, is nobody's
_FILE = ".ft_ckpt-file-"  # in the names of folders that a file is made in
_NAME_BYTES = 150  # of a target's name in that of a hidden folder; 255 are allowed


def write_text(file: Path, text: str) -> None:
    """Put a small file in place in one step, durably, readable by whom the one it replaces was.

    Raises OSError, and leaves what was there.
    """
    draft = file.with_name(f"{PREFIX}{file.name.lstrip('.')}.draft")
    try:
        with contextlib.suppress(FileNotFoundError):  # of one who died
            local_disk.unlink(draft)
        with draft.open("xb") as stream:  # exclusive: never through a link
            stream.write(text.encode("utf-8"))
        if file.exists():
            local_disk.chmod(draft, local_disk.mode(file))
        local_disk.sync(draft)
        local_disk.move(draft, file)
    except BaseException:
        with contextlib.suppress(OSError):
            local_disk.unlink(draft)
        raise
    local_disk.sync(file.parent)


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path for the block to make a file at, which then takes the place of the file `target`, durably.

    Nothing is left of it, and `target` is what it was, when the block raises. It may be read by whom the file it
    replaces was. Raises OSError.
    """
    with _workplace(target) as folder:
        file = folder / target.name
        yield file
        with contextlib.suppress(FileNotFoundError):
            old = target.stat()
            local_disk.take_group(file, old.st_gid)
            local_disk.chmod(file, stat.S_IMODE(old.st_mode))
        local_disk.move(file, target)
        local_disk.sync(target.parent)


def clear(folder: Path) -> None:
    """Delete what `replacing` has left anywhere in `folder`, which is the caller's alone. Raises TargetError."""
    for path in list(local_disk.tree(folder)):
        if _FILE in path.name and local_disk.is_folder(path):
            local_disk.delete_folder(path)


def make_held(place: Callable[[str], Path]) -> Path:
    """Make a new folder whose lock this process holds; `place` says where, from the name of its owner."""
    while True:
        folder = place(owners.new_owner())
        local_disk.mkdir(folder)
        if owners.hold(folder) is not False:  # else another took it for a dead one's in that instant
            return folder


@contextlib.contextmanager
def _workplace(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target`, locked; gone afterwards, as what earlier ones left whose process is dead."""
    start = f".{os.fsencode(target.name)[:_NAME_BYTES].decode('utf-8', 'ignore')}{_FILE}"
    for name in local_disk.names(target.parent):
        if name.startswith(start):
            with owners.claimed(target.parent / name, name, ABANDONED_SECONDS) as gone:
                if gone:
                    local_disk.rmtree(target.parent / name)
    folder = make_held(lambda owner: target.parent / f"{start}{owner}")
    try:
        yield folder
    finally:
        local_disk.rmtree(folder)
        owners.let_go(folder)
