"""Opens the store that a path or a URL names."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_ckpt.errors import ConfigError
from ft_ckpt.messages import without_secrets
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.store import Store

if TYPE_CHECKING:
    from ft_ckpt.storage.object_store import ObjectStore

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "memory")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/]*)/*(.*)", re.DOTALL)
_OPEN: dict[str, "tuple[ObjectStore, dict[str, Any]]"] = {}
_SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")  # begin the variables that a client reads when it is made


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether `place` is the URL of a store of objects, and no path."""
    found = _URL.fullmatch(os.fspath(place))
    return found is not None and found[1].lower() in SCHEMES


def open_store(place: str | os.PathLike[str], **options: Any) -> Store:
    """The store at `place`: the path of a local folder, or a URL (s3://, gs://, az://, memory://).

    `options` go to the client of an object store, which is made once for a bucket and its options; credentials,
    endpoint and region are taken from the variables that the stores' own tools take them from. Raises ConfigError for
    a URL that no client knows or that holds a key, and where the package for object stores is missing.
    """
    text = os.fspath(place)
    found = _URL.fullmatch(text)
    if found is None:
        return LocalStore(Path(place))
    refuse_secrets(text, "the variables of its tools, such as AWS_SECRET_ACCESS_KEY, or as options of open_place")
    if not is_url(text):
        raise ConfigError(f"{text}: {found[1]}:// is no store that can be opened; expected {', '.join(SCHEMES)}")
    client = _open_bucket(f"{found[1]}://{found[2]}", options)
    folder = found[3].strip("/")
    return client.within(folder) if folder else client


def refuse_secrets(url: str, other_way: str) -> None:
    """Raise ConfigError for a URL with user info or a signing parameter: errors, logs and marks would repeat it."""
    if without_secrets(url) != url:
        raise ConfigError(f"{url}: a URL with a key, password or token, which is refused; give it by {other_way}")


def _open_bucket(url: str, options: dict[str, Any]) -> "ObjectStore":
    """The store of a whole bucket: one client for the same options and variables, so that its connections are kept."""
    try:
        from ft_ckpt.storage.object_store import ObjectStore  # here, so that local runs do not need the client
    except ModuleNotFoundError as error:
        raise ConfigError(f"{url}: object stores need obstore; run `pip install 'ft_ckpt[remote]'`") from error
    variables = sorted(item for item in os.environ.items() if item[0].upper().startswith(_SETTINGS))
    asked = repr((url, sorted(options.items()), variables))
    if asked not in _OPEN:
        _OPEN[asked] = ObjectStore.from_url(url, **options), options  # what repr names by its address has to stay
    return _OPEN[asked][0]
