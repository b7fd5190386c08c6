"""A path or URL as a store and a name in it."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_ckpt.errors import ConfigError, CorruptError, LoadError, MissingError, UnreadableError
from ft_ckpt.messages import install_extra, without_secrets
from ft_ckpt.storage.local_disk import HUB_BUCKETS, local_path
from ft_ckpt.storage.local_store import LocalStore, linked_path, readable_mode
from ft_ckpt.storage.store import Readable, Store, is_name

if TYPE_CHECKING:
    from ft_ckpt.extensions.buckets import ObjectStore

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "memory")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/]*)/*(.*)", re.DOTALL)
_OPEN: dict[str, "tuple[ObjectStore, dict[str, Any]]"] = {}
# prefixes of the environment variables that a client reads
_SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether `place` is the URL of an object store, not a path."""
    found = _URL.fullmatch(os.fspath(place))
    return found is not None and found[1].lower() in SCHEMES


def is_hub_bucket(place: "str | os.PathLike[str] | Place") -> bool:
    """Whether `place` is in a storage bucket of the Hugging Face Hub."""
    text = str(place) if isinstance(place, Place) else os.fspath(place)
    return text.lower().startswith(HUB_BUCKETS)


def open_store(place: str | os.PathLike[str], **options: Any) -> Store:
    """The store at `place`: the path of a local folder, or a URL (s3://, gs://, az://, memory://).

    `options` go to the client of an object store, which is shared for equal bucket, options and
    variables; credentials, endpoint and region come from the environment variables of the services'
    tools. Raises ConfigError for a URL that no client supports or that contains a key, and if the
    package for object stores is not installed.
    """
    text = os.fspath(place)
    found = _URL.fullmatch(text)
    if found is None:
        return LocalStore(Path(place))
    refuse_secrets(
        text,
        "the variables of its tools, such as AWS_SECRET_ACCESS_KEY, or as options of open_place",
    )
    if not is_url(text):
        raise ConfigError(
            f"{text}: {found[1]}://: unsupported scheme; expected {', '.join(SCHEMES)}"
        )
    client = _open_bucket(f"{found[1]}://{found[2]}", options)
    folder = found[3].strip("/")
    return client.within(folder) if folder else client


def refuse_secrets(url: str, other_way: str) -> None:
    """Raise ConfigError for a URL with user info or a signing parameter, which errors, logs and
    marks would show.
    """
    if without_secrets(url) != url:
        raise ConfigError(
            f"{url}: a URL with a key, password or token, which is refused; give it by {other_way}"
        )


def _open_bucket(url: str, options: dict[str, Any]) -> "ObjectStore":
    """The store of a whole bucket: one client for equal options and variables, so that its
    connections are reused.
    """
    try:
        # lazily: local runs do not need the client
        from ft_ckpt.extensions.buckets import ObjectStore
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{url}: object stores need obstore; {install_extra('remote')}"
        ) from error
    variables = sorted(item for item in os.environ.items() if item[0].upper().startswith(_SETTINGS))
    key = repr((url, sorted(options.items()), variables))
    if key not in _OPEN:
        # kept alive: repr may identify them by address
        _OPEN[key] = ObjectStore.from_url(url, **options), options
    return _OPEN[key][0]


@dataclass(frozen=True)
class Place:
    """The object or folder `name` of a store; the store itself if `name` is empty.

    `str` gives the path or URL.
    """

    store: Store
    name: str = ""

    def __str__(self) -> str:
        return self.store.where(self.name)

    @property
    def location(self) -> Path | str:
        """The location in messages: a local path, or a URL."""
        return Path(str(self)) if self.is_local else str(self)

    @property
    def absolute(self) -> "Place":
        """The same place, independent of the working directory."""
        return replace(self, store=self.store.absolute)

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk of this machine."""
        return self.store.local_folder is not None

    @property
    def beside(self) -> Store:
        """The folder that contains it; itself at the top of a bucket."""
        return self.folder.parent or self.folder

    @property
    def basename(self) -> str:
        """The last component of its name."""
        return self.name.rpartition("/")[2] or _basename(self.store)

    @property
    def folder(self) -> Store:
        """The store of its contents."""
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
        """This folder and its parents, nearest first, each with the name of this place in it.

        For a symbolic link, those of its destination follow.
        """
        yield from _parents(self, levels)
        destination = linked_path(Path(str(self))) if self.is_local else None
        if destination is not None:
            yield from _parents(open_place(destination), levels)


def _parents(place: Place, levels: int) -> Iterator[tuple[Store, str]]:
    here, name = place.folder, ""
    for _ in range(levels):
        yield here, name
        above = here.parent
        if above is None:
            return
        here, name = above, f"{_basename(here)}/{name}".rstrip("/")


def open_place(place: "str | os.PathLike[str] | Place", **options: Any) -> Place:
    """The place of a path or URL (s3://, gs://, az://, memory://); functions take a `Place`, too.

    `options` go to the client of an object store, as for `obstore.store.from_url` (endpoint,
    region, keys, "client_options", "retry_config"); the variables AWS_*, GOOGLE_* and AZURE_* give
    the others. A `Place` is returned as it is. No request is made yet. Raises ConfigError for a URL
    of an unknown kind, of a bucket of the Hub, for anything that is no path, and if the package for
    object stores is not installed.
    """
    if isinstance(place, Place):
        return place
    _refuse_no_path(place)
    if is_url(place):
        store = open_store(place, **options)
        return Place(store) if store.parent is None else Place(store.parent, _basename(store))
    path = local_path(place)
    if not is_name(path.name):  # the root, "." or ".."
        return Place(LocalStore(path))
    return Place(LocalStore(path.parent), path.name)


def _refuse_no_path(place: object) -> None:
    if not isinstance(place, (str, os.PathLike)) or "\0" in str(place):
        raise ConfigError(f"{place!r:.80}: no path; expected a path, a URL or a Place")


def shown_location(location: "str | os.PathLike[str]") -> str:
    """A path or URL for messages: relative to the working directory if it is below that."""
    path = Path(location)
    try:
        working_folder = Path.cwd()
    except OSError:  # it was deleted
        return str(location)
    return (
        str(path.relative_to(working_folder))
        if path.is_relative_to(working_folder)
        else str(location)
    )


def absolute_location(place: str | os.PathLike[str] | Place) -> str | Place:
    """The same path, URL or place, independent of the working directory.

    Raises ConfigError for a URL of an unknown kind.
    """
    if isinstance(place, Place):
        return place.absolute
    _refuse_no_path(place)
    return os.fspath(place) if is_url(place) else str(local_path(place).absolute())


def source_mode(source: Place, goal: Place) -> int:
    """The `max_mode` of what is made at `goal` from the file or folder `source`.

    On local disks, see `readable_mode`; no limit if a bucket is involved.
    """
    folder = source.store.local_folder
    if folder is None or not goal.is_local:
        return 0o777
    return readable_mode(folder / source.name, Path(str(goal)))


def location_name(location: Path | str) -> str:
    """The last component of a `Place.location`."""
    return location.name if isinstance(location, Path) else location.rpartition("/")[2]


def _basename(store: Store) -> str:
    if store.local_folder is None:
        return store.url.rpartition("/")[2]
    return Path(store.url).absolute().name
