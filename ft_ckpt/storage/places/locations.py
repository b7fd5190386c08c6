"""Tells paths from URLs, and opens the store of a path or URL.

A table has the store of each scheme of URLs. Other packages add a store by an entry point of the
group `ft_ckpt.stores`. The name of the entry point is the scheme. Its object is a function like
`ObjectStore.from_url`, which takes the URL of a bucket (scheme://name) and the options of
`open_place`, and returns a `Store`. Installed packages are searched when a scheme is not in the
table.
"""

import os
import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeAlias

from ft_ckpt.errors import ConfigError
from ft_ckpt.extension_points import load_extension
from ft_ckpt.messages import install_hint, without_secrets
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.store import Store

HUB_BUCKETS = "hf://buckets/"  # prefix of the URLs of storage buckets of the Hugging Face Hub
# A scheme has at least two characters. A URL that was made a Path has one slash.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_HUB_BUCKET_ADVICE = (
    "a bucket of the Hub takes and gives whole checkpoints, by push, pull and cp; to save a run "
    "there, or to list and read in place, use its S3 gateway: s3://NAME/folder for "
    "hf://buckets/NAMESPACE/NAME/folder, with AWS_ENDPOINT_URL=https://s3.hf.co/NAMESPACE, "
    "AWS_REGION=us-east-1 and keys made from a token"
)


def local_path(location: str | os.PathLike[str]) -> Path:
    """Return `location` as a path of this machine.

    Raises ConfigError for a URL ("s3://...", "hf://...", "file://..."), which would become a folder
    of that name.
    """
    text = os.fspath(location)
    if text.lower().startswith(HUB_BUCKETS):
        raise ConfigError(f"{text}: {_HUB_BUCKET_ADVICE}")
    match = _SCHEME.match(text)
    if match is not None:
        scheme = match[1]
        if scheme == "file":
            advice = "leave out the scheme"
        else:
            advice = "give a local folder, or, where buckets are supported, s3://, gs:// or az://"
        raise ConfigError(f"{text}: {scheme}://: not a local path; {advice}")
    return Path(location)


def refuse_secrets(url: str, other_way: str) -> None:
    """Raise ConfigError for a URL with a user name, a password or a signature.

    Errors, logs and files of a checkpoint would show them. `other_way` tells the user how to give
    them instead.
    """
    if without_secrets(url) != url:
        raise ConfigError(
            f"{url}: a URL with a key, password or token, which is refused; give it by {other_way}"
        )


def shown_location(location: str | os.PathLike[str]) -> str:
    """Return a path or URL for messages. A path below the working directory becomes relative."""
    path = Path(location)
    try:
        working_folder = Path.cwd()
    except OSError:  # it was deleted
        return str(location)
    if path.is_relative_to(working_folder):
        return str(path.relative_to(working_folder))
    return str(location)


def location_name(location: Path | str) -> str:
    """Return the last component of a `Place.location`."""
    return location.name if isinstance(location, Path) else location.rpartition("/")[2]


Opener: TypeAlias = Callable[..., Store]

ENTRY_POINTS = "ft_ckpt.stores"
_OBJECT_STORE = "ft_ckpt.extensions.buckets.object_store:ObjectStore.from_url"
_OPENERS = {
    "s3": _OBJECT_STORE,
    "s3a": _OBJECT_STORE,
    "gs": _OBJECT_STORE,
    "az": _OBJECT_STORE,
    "azure": _OBJECT_STORE,
    "adl": _OBJECT_STORE,
    "abfs": _OBJECT_STORE,
    "abfss": _OBJECT_STORE,
    "memory": _OBJECT_STORE,
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/]*)/*(.*)", re.DOTALL)
# Clients read the environment variables with these prefixes.
_CLIENT_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
# Each opened bucket with its options. The key is the repr of the bucket's URL, the options and the
# variables. The repr of an option can be its address, so the options are kept alive.
_clients: dict[str, tuple[Store, dict[str, Any]]] = {}


def is_url(location: str | os.PathLike[str]) -> bool:
    """Check whether `location` is the URL of a store. Otherwise it is a path."""
    match = _URL.fullmatch(os.fspath(location))
    if match is None:
        return False
    scheme = match[1].lower()
    return scheme in _OPENERS or scheme in _installed_openers()


def schemes() -> tuple[str, ...]:
    """Return the schemes of the URLs of stores."""
    return (*_OPENERS, *_installed_openers())


def open_store(location: str | os.PathLike[str], **options: Any) -> Store:
    """Open the store at `location`, a local path or a URL (s3://, gs://, az://, memory://).

    `options` go to the client of an object store. Equal buckets, options and environment variables
    share one client. Credentials, endpoint and region come from the environment variables of the
    services' own tools. Raises ConfigError for a URL that no client supports or that contains a
    key, and if the package for object stores is not installed.
    """
    text = os.fspath(location)
    match = _URL.fullmatch(text)
    if match is None:
        return LocalStore(Path(location))
    refuse_secrets(
        text,
        "the variables of its tools, such as AWS_SECRET_ACCESS_KEY, or as options of open_place",
    )
    scheme, bucket, folder = match[1], match[2], match[3].strip("/")
    if scheme.lower() not in schemes():
        raise ConfigError(
            f"{text}: {scheme}://: unsupported scheme; expected {', '.join(schemes())}"
        )

    client = _open_client(f"{scheme}://{bucket}", scheme.lower(), options)
    return client.within(folder) if folder else client


def _open_client(url: str, scheme: str, options: dict[str, Any]) -> Store:
    """Return the store of a whole bucket, with the client that was opened for it before, if any."""
    variables = []
    for name, value in os.environ.items():
        if name.upper().startswith(_CLIENT_VARIABLES):
            variables.append((name, value))
    key = repr((url, sorted(options.items()), sorted(variables)))
    if key not in _clients:
        _clients[key] = _opener_of(url, scheme)(url, **options), options
    return _clients[key][0]


def _opener_of(url: str, scheme: str) -> Opener:
    opener: Opener
    try:
        if scheme in _OPENERS:
            opener = load_extension(_OPENERS[scheme])
        else:
            opener = _installed_openers()[scheme].load()
    except ModuleNotFoundError as error:
        if error.name == "obstore":
            advice = f"object stores need obstore; {install_hint('remote')}"
        else:
            advice = f"its store cannot be imported ({error}); install what its package needs"
        raise ConfigError(f"{url}: {advice}") from error
    return opener


@cache
def _installed_openers() -> dict[str, Any]:
    """Return the entry points of installed packages, by scheme."""
    return {point.name.lower(): point for point in entry_points(group=ENTRY_POINTS)}
