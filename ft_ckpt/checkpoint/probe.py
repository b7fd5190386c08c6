"""Looks at the place that a run is to save in, before it trains: by a real write where that is a bucket."""

import uuid

from ft_ckpt.checkpoint import commit
from ft_ckpt.checkpoint.marks import PROBE
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import CheckpointError, ConfigError, CorruptError, NameTakenError, TargetError
from ft_ckpt.messages import warn
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.store import Store

_PROBE, _OTHER = b"of a run that begins to save here", b"of nobody: the store was asked not to replace what is there"


def check_directory(directory: Place, config: SaverConfig, *, leads: bool) -> None:
    """Refuse a directory that checkpoints cannot be saved in. In a bucket rank 0, which `leads`, tries it.

    Raises ConfigError for settings that cannot work there, and what `commit.check_target` and `try_bucket` raise.
    """
    store = directory.folder
    if isinstance(store, LocalStore):
        commit.check_target(store.folder, 0)
        return
    if "{step}" not in config.name_template and not config.overwrite:
        raise ConfigError(
            f"name_template={config.name_template!r}: saves replace each other, which in a bucket takes "
            "overwrite=True; give each a name of its own by {step}"
        )
    if leads:
        try_bucket(store)


def try_bucket(store: Store) -> None:
    """Write an object into the bucket twice, read it, list it and delete it; warns of a store that ignores conditions.

    Raises ConfigError for a bucket that is not there, TargetError, which says whether it refuses these credentials or
    takes no writes.
    """
    name = f"{PROBE}{uuid.uuid4().hex}"
    try:
        store.write(name, _PROBE, create_only=True)
    except ConfigError:  # there is no such bucket, which it says
        raise
    except CheckpointError as error:
        raise TargetError(f"{store.url}: {_why_unwritable(store)} ({error})") from error
    try:
        _try_object(store, name)
    except (CheckpointError, OSError) as error:
        raise TargetError(f"{store.url}: can be written, but not read, listed or deleted in ({error})") from error


def _try_object(store: Store, name: str) -> None:
    try:
        has_conditions = not _creates(store, name)
        found, listed = store.read(name), [each.name for each in store.list_folder().objects]
        if found != (_PROBE if has_conditions else _OTHER) or name not in listed:
            raise CorruptError(f"{store.where(name)}: was written, and is not there as it was written")
    finally:
        store.delete([name])
    if not has_conditions:
        warn(
            f"{store.url}: the store replaces objects although it is asked not to: two runs that save one step would "
            "mix their files; let one run at a time save there",
            stacklevel=6,
        )


def _creates(store: Store, name: str) -> bool:
    """Whether the store makes an object anew that is there."""
    try:
        store.write(name, _OTHER, create_only=True)
    except NameTakenError:
        return False
    return True


def _why_unwritable(store: Store) -> str:
    """In words, why an object could not be written: what the store says when it is asked for a list."""
    try:
        store.list_folder()
    except (CheckpointError, OSError):
        return "cannot be used with these credentials, endpoint and region; mend them"
    return "can be read, and not written; use credentials that may write there"
