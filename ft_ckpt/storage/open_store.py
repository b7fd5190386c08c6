"""Opens the store that a path or a URL names."""

import os
import re
from pathlib import Path
from typing import Any

from ft_ckpt.errors import ConfigError
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.store import Store

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def open_store(place: str | os.PathLike[str], **options: Any) -> Store:
    """The store at `place`: the path of a local folder, or a URL (s3://, gs://, az://, memory://).

    `options` go to the client of an object store. Raises ConfigError for a URL that no client knows, and where the
    package for object stores is missing.
    """
    if _URL.match(os.fspath(place)):
        try:
            from ft_ckpt.storage.object_store import ObjectStore  # here, so that local runs do not need the client
        except ModuleNotFoundError as error:
            raise ConfigError(f"{place}: object stores need obstore; run `pip install 'ft_ckpt[remote]'`") from error
        return ObjectStore.from_url(os.fspath(place), **options)
    return LocalStore(Path(place))
