"""Checks that the files of a local folder are regular files inside it, not links that lead out."""

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ft_ckpt.errors import CorruptError, damaged_input, listing
from ft_ckpt.storage.look_ups import list_entries, walk_tree
from ft_ckpt.storage.store import Store


def leads_out(folder: Store, name: str) -> bool:
    """Check whether a link in the path of `name` leads out of `folder`.

    A folder of the Hub's cache (models--.../snapshots/REVISION) has links to models--.../blobs.
    These do not count.
    """
    top = PurePosixPath(folder.identity)
    real = PurePosixPath(folder.within(name).identity)
    roots = [top]
    if top.parent.name == "snapshots":
        roots.append(top.parent.parent / "blobs")
    return not any(real.is_relative_to(root) for root in roots)


def check_files_inside(folder: Store, names: Iterable[str] | None = None) -> None:
    """Raise CorruptError if some of `names` are not regular files inside `folder`.

    If `names` is None, everything in `folder` is checked. Links to files inside the folder are
    allowed. Names that do not exist are skipped. Does nothing for a bucket.
    """
    top = folder.local_folder
    if top is None:
        return
    allows_folders = names is None  # links to folders inside the folder are among its contents
    if names is None:
        names = _all_names(top)
    invalid = []
    for name in names:
        path = top / name
        if not os.path.lexists(path):
            continue
        with damaged_input(path):
            is_allowed = path.is_file() or (allows_folders and path.is_dir())
        if leads_out(folder, name) or not is_allowed:
            invalid.append(name)

    if invalid:
        raise CorruptError(
            f"{top}: {listing(invalid, ', ')}: expected regular files inside of the folder"
        )


def check_prefix_inside(folder: Store, prefix: str) -> None:
    """Check the files whose names begin with `prefix`, as `check_files_inside` does."""
    if folder.local_folder is None:
        return
    above, _, start = prefix.rpartition("/")
    entries = list_entries(folder.local_folder / above)
    names = [entry.name for entry in entries if entry.name.startswith(start)]
    check_files_inside(folder, [f"{above}/{name}".lstrip("/") for name in names])


def _all_names(top: Path) -> list[str]:
    """List everything below `top` except its real folders."""
    names = []
    with damaged_input(top):
        for path in walk_tree(top):
            if path.is_symlink() or not path.is_dir():
                names.append(path.relative_to(top).as_posix())
    return names
