"""Opens a path or URL as a place.

A place is a file or folder on a disk, or an object or prefix in a bucket. It consists of a store
and a name in it. For example, runs/checkpoint-5 is "checkpoint-5" in the store of the folder runs.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    LoadError,
    MissingError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.storage.local import LocalStore, linked_path, readable_mode
from ft_ckpt.storage.places.locations import HUB_BUCKETS, is_url, local_path, open_store
from ft_ckpt.storage.store import Readable, Store, is_name


@dataclass(frozen=True)
class Place:
    """Object or folder `name` of a store, or the store itself if `name` is empty.

    `str` returns the path or URL.
    """

    store: Store
    name: str = ""

    def __str__(self) -> str:
        return self.store.where(self.name)

    @property
    def is_local(self) -> bool:
        """True if it is on a disk of this machine."""
        return self.store.local_folder is not None

    @property
    def location(self) -> Path | str:
        """Its path or URL, for messages. A local path is a Path."""
        return Path(str(self)) if self.is_local else str(self)

    @property
    def absolute(self) -> "Place":
        """This place, independent of the working directory."""
        return replace(self, store=self.store.absolute)

    @property
    def resolved(self) -> "Place":
        """This place, with symbolic links resolved."""
        return _local_place(Path(self.folder.identity)) if self.is_local else self

    @property
    def beside(self) -> Store:
        """Store of the folder that contains it. At the top of a bucket, that of the bucket."""
        return self.folder.parent or self.folder

    @property
    def basename(self) -> str:
        """Last component of its path or URL."""
        return self.name.rpartition("/")[2] or _basename(self.store)

    @property
    def folder(self) -> Store:
        """Store of its contents."""
        return self.store.within(self.name) if self.name else self.store

    @property
    def is_object(self) -> bool:
        return bool(self.name) and self.store.stat(self.name) is not None

    @property
    def is_folder(self) -> bool:
        return not self.is_object and self.folder.list_folder().exists

    @property
    def exists(self) -> bool:
        return self.is_object or self.folder.list_folder().exists

    def open(self) -> Readable:
        """Open the object.

        Raises MissingError if it does not exist, LoadError if it is not a file.
        """
        try:
            return self.store.open(self.name)
        except (MissingError, UnreadableError):
            raise
        except CorruptError as error:
            if self.is_object:
                raise
            raise LoadError(f"{self}: a folder, or no regular file; name a file") from error

    def folders_around(self, levels: int = 4) -> Iterator[tuple[Store, str]]:
        """Yield this folder and its parents, `levels` in all, nearest first.

        Each comes with the name that this place has in it. For example, a/b/c yields (a/b/c, ""),
        (a/b, "c") and (a, "b/c"). For a symbolic link, the folders around its destination follow.
        """
        yield from _parents(self, levels)
        destination = linked_path(Path(str(self))) if self.is_local else None
        if destination is not None:
            yield from _parents(_local_place(destination), levels)

    def mode_at(self, target: "Place") -> int:
        """Return the limit of the permission bits of what is made from this place at `target`.

        If both are on local disks, it is `readable_mode`. A bucket sets no limit.
        """
        folder = self.store.local_folder
        if folder is None or not target.is_local:
            return 0o777
        return readable_mode(folder / self.name, Path(str(target)))

    def as_target(self) -> "Place":
        """Check that an object can be written here. Return this place with links resolved.

        Raises TargetError for a local folder, and if the parent folder does not exist. Raises
        ConfigError for a whole bucket.
        """
        if not self.is_local:
            if not self.name:
                raise ConfigError(f"{self}: a whole bucket; name an object in it")
            return self
        target = Path(os.path.realpath(str(self)))
        if target.is_dir():
            raise TargetError(f"{self}: a folder; name a file")
        if not target.parent.is_dir():
            raise TargetError(f"{self}: its folder does not exist; name a file")
        return Place(LocalStore(target.parent), target.name)


def open_place(place: str | os.PathLike[str] | Place, **options: Any) -> Place:
    """Return the place of a path or URL (s3://, gs://, az://, memory://).

    Functions that take a path take a `Place`, too. A `Place` is returned as it is. No request is
    made yet.

    `options` go to the client of an object store, as for `obstore.store.from_url` (endpoint,
    region, keys, "client_options", "retry_config"). Options that are not given come from the
    environment variables AWS_*, GOOGLE_* and AZURE_*.

    Raises ConfigError for a URL of an unknown kind, for a bucket of the Hub, for anything that is
    not a path, and if the package for object stores is not installed.
    """
    if isinstance(place, Place):
        return place
    _check_is_path(place)
    if not is_url(place):
        return _local_place(local_path(place))
    store = open_store(place, **options)
    if store.parent is None:
        return Place(store)
    return Place(store.parent, _basename(store))


def absolute_location(place: str | os.PathLike[str] | Place) -> str | Place:
    """Make a path, URL or place independent of the working directory.

    Raises ConfigError for a URL of an unknown kind.
    """
    if isinstance(place, Place):
        return place.absolute
    _check_is_path(place)
    return os.fspath(place) if is_url(place) else str(local_path(place).absolute())


def is_hub_bucket(place: str | os.PathLike[str] | Place) -> bool:
    """Check whether `place` is in a storage bucket of the Hugging Face Hub."""
    text = str(place) if isinstance(place, Place) else os.fspath(place)
    return text.lower().startswith(HUB_BUCKETS)


def _local_place(path: Path) -> Place:
    if not is_name(path.name):  # as for the root, "." and ".."
        return Place(LocalStore(path))
    return Place(LocalStore(path.parent), path.name)


def _parents(place: Place, levels: int) -> Iterator[tuple[Store, str]]:
    store = place.folder
    name = ""
    for _ in range(levels):
        yield store, name
        parent = store.parent
        if parent is None:
            return
        name = f"{_basename(store)}/{name}".rstrip("/")
        store = parent


def _check_is_path(place: object) -> None:
    if not isinstance(place, (str, os.PathLike)) or "\0" in str(place):
        raise ConfigError(f"{place!r:.80}: no path; expected a path, a URL or a Place")


def _basename(store: Store) -> str:
    if store.local_folder is None:
        return store.url.rpartition("/")[2]
    return Path(store.url).absolute().name
