"""Files and folders in a bucket: obstore's in-memory store."""

import os
import uuid
from pathlib import Path

import pytest

from ft_ckpt.storage import Store
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place


def new_bucket(prefix: str = "team/runs") -> Store:
    """Make an empty bucket; return a folder in it."""
    pytest.importorskip("obstore")
    return open_place(f"memory://{uuid.uuid4().hex}").folder.within(prefix)


def in_bucket(path: str | os.PathLike[str], bucket: Store | None = None) -> Place:
    """Copy the file or folder at `path` into a bucket, a new one by default, under its name."""
    source = Path(path)
    if bucket is None:
        bucket = new_bucket()
    if source.is_file():
        bucket.write(source.name, source.read_bytes())
    else:
        folder, target = LocalStore(source), bucket.within(source.name)
        for stored in folder.list():
            target.write(stored.name, folder.read(stored.name))
    return Place(bucket, source.name)
