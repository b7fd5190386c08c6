"""One object that takes its place whole, on a disk or in a bucket, or leaves what was there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ft_ckpt.errors import ConfigError
from ft_ckpt.storage.access import FREE, Access
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.placing import file_target, replace_file
from ft_ckpt.storage.source_proof import prove_sources


def object_target(path: str | os.PathLike[str] | Place) -> Place:
    """The place of an object to write; a link to a file leads to it.

    Raises TargetError for a folder on this machine, and where there is no folder to write in; ConfigError for a bucket.
    """
    place = open_place(path)
    if not isinstance(place.store, LocalStore):
        if not place.name:
            raise ConfigError(f"{place}: a whole bucket; name an object in it")
        return place
    target = file_target(str(place))
    return Place(LocalStore(target.parent), target.name)


@contextmanager
def replaced_object(target: Place, access: Access = FREE) -> Iterator[Place]:
    """Yield a place at which the block makes an object, which then becomes `target`, durably, or nothing does.

    On a disk it is open to nobody beyond `access`.

    In a bucket it is `target` itself, since objects appear whole there; if the block raises after that, the object is
    deleted. Raises OSError, TargetError, and CorruptError where the object was made of damaged checkpoints.
    """
    store = target.store
    if isinstance(store, LocalStore):
        with replace_file(Path(store.where(target.name)), access) as stage:
            yield Place(LocalStore(stage.parent, syncs=False, access=access), stage.name)
            prove_sources()
        return
    before = store.stat(target.name)
    try:
        yield target
        prove_sources()
    except BaseException:
        after = store.stat(target.name)
        if after is not None and (before is None or before.version != after.version):
            store.delete([target.name])
        raise
