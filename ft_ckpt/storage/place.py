"""One object or folder of a store: what the paths lead to that people give."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ft_ckpt.errors import CorruptError, LoadError, MissingError, UnreadableError
from ft_ckpt.storage.local_disk import local_path
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.paths import is_inside
from ft_ckpt.storage.store import Readable, Store


@dataclass(frozen=True)
class Place:
    """The object or folder `name` of a store; the store itself where that is empty. As text, what people write."""

    store: Store
    name: str = ""

    def __str__(self) -> str:
        return self.store.where(self.name)

    @property
    def last_step(self) -> str:
        """The last step of its name: what a file or folder is called."""
        return self.name.rpartition("/")[2] or _last_step(self.store)

    @property
    def folder(self) -> Store:
        """The store of what is below it."""
        return self.store.within(self.name) if self.name else self.store

    @property
    def is_object(self) -> bool:
        """Whether an object is there."""
        return bool(self.name) and self.store.stat(self.name) is not None

    @property
    def is_folder(self) -> bool:
        """Whether a folder is there."""
        return not self.is_object and self.folder.list_folder().exists

    @property
    def exists(self) -> bool:
        """Whether anything is there."""
        return self.is_object or self.folder.list_folder().exists

    def open(self) -> Readable:
        """Open the object. Raises MissingError when nothing is there, LoadError for what is no file."""
        try:
            return self.store.open(self.name)
        except (MissingError, UnreadableError):
            raise
        except CorruptError as error:
            raise LoadError(f"{self}: a folder, or no regular file; name a file") from error

    def folders_around(self, levels: int = 4) -> Iterator[tuple[Store, str]]:
        """It as a folder, and those it lies in, the nearest first; each with the name of this place there."""
        here, name = self.folder, ""
        for _ in range(levels):
            yield here, name
            above = here.parent
            if above is None:
                return
            here, name = above, f"{_last_step(here)}/{name}".rstrip("/")


def open_place(place: "str | os.PathLike[str] | Place") -> Place:
    """What a path leads to; a `Place` is one already. Raises ConfigError for a URL."""
    if isinstance(place, Place):
        return place
    path = local_path(place)
    if not is_inside(path.name):  # the root, "." or ".."
        return Place(LocalStore(path))
    return Place(LocalStore(path.parent), path.name)


def _last_step(store: Store) -> str:
    if isinstance(store, LocalStore):
        return store.folder.absolute().name
    return store.url.rpartition("/")[2]
