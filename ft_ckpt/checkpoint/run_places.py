"""Where a run saves: its directory, or first a staging folder of this machine, from where a bucket gets it later."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from ft_ckpt.checkpoint import commit
from ft_ckpt.checkpoint.catalog import list_checkpoints
from ft_ckpt.checkpoint.probe import check_directory
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import ConfigError, NameTakenError
from ft_ckpt.storage.local_store import LocalStore, folder_of
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.placing import PREFIX

_CLAIM = f"{PREFIX}staging"  # in a staging folder: the bucket that it is for


@dataclass(frozen=True)
class RunPlaces:
    """The folders of one run."""

    directory: Place | None = None  # where its checkpoints are looked for
    staging: Place | None = None  # where they are committed at first, if that is another place

    @property
    def target(self) -> Place | None:
        """The folder that saves are committed in."""
        return self.directory if self.staging is None else self.staging

    @property
    def folders(self) -> tuple[Place, ...]:
        """All of them, the nearest last."""
        return tuple(each for each in (self.directory, self.staging) if each is not None)

    def beside(self, checkpoint: Place) -> tuple[Place, ...]:
        """The places that a checkpoint of the run has in all of its folders, or just its own."""
        if not any(checkpoint.beside.identity == each.folder.identity for each in self.folders):
            return (checkpoint,)
        return tuple(Place(each.folder, checkpoint.last_step) for each in self.folders)


def open_run_places(
    directory: str | os.PathLike[str] | Place | None, config: SaverConfig, leads: Callable[[], bool]
) -> RunPlaces:
    """The folders of a run, each tried: in a bucket by a real write, of the rank that `leads`.

    Raises ConfigError for settings that cannot work there, a staging folder that is of another run, and what
    `probe.check_directory` raises.
    """
    if directory is None:
        if config.staging is not None:
            raise ConfigError(f"staging={str(config.staging)!r}: for a run in a bucket; give the saver its directory")
        return RunPlaces()
    place = open_place(directory, **config.client_options)
    if config.staging is not None and isinstance(place.folder, LocalStore):
        raise ConfigError(f"staging={str(config.staging)!r}: {place} is on a disk itself; leave staging out")
    check_directory(place, config, leads=leads())
    if config.staging is None:
        return RunPlaces(place)
    staging = open_place(config.staging).absolute
    commit.check_target(folder_of(staging.folder), 0)
    if leads():
        _claim_staging(staging, place)
    return RunPlaces(place, staging)


def _claim_staging(staging: Place, directory: Place) -> None:
    """Note in a staging folder which bucket it is for: what lies in it would go to any other as well."""
    store, url = staging.folder, directory.folder.url
    found = store.read(_CLAIM).decode(errors="replace") if store.stat(_CLAIM) is not None else None
    if found is None and list_checkpoints(staging).found:
        raise ConfigError(
            f"{staging}: holds checkpoints that were not staged there; `ft-ckpt sync {staging} {url}` brings them to "
            "the bucket; use an empty folder"
        )
    try:
        store.write(_CLAIM, url.encode(), create_only=True)
    except NameTakenError:
        if found != url:
            raise ConfigError(
                f"{staging}: for {found}, expected {url}; give each run a staging folder of its own"
            ) from None
