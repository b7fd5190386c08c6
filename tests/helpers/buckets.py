"""Files and folders in a bucket: obstore's in-memory store."""

import os
import uuid
from pathlib import Path

import pytest

from ft_ckpt.storage import Store
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place


def new_bucket(prefix: str = "team/runs") -> Store:
    """An empty bucket below a prefix."""
    pytest.importorskip("obstore")
    return open_place(f"memory://{uuid.uuid4().hex}").folder.within(prefix)


def in_bucket(path: str | os.PathLike[str], bucket: Store | None = None) -> Place:
    """The file or folder at `path`, copied into a bucket under its name."""
    source, bucket = Path(path), new_bucket() if bucket is None else bucket
    if source.is_file():
        bucket.write(source.name, source.read_bytes())
    else:
        local, there = LocalStore(source), bucket.within(source.name)
        for each in local.list():
            there.write(each.name, local.read(each.name))
    return Place(bucket, source.name)
