"""Opens the folders of a run, and tests them before the first save.

A run has a directory for its checkpoints, on a disk or in a bucket. A run in a bucket may also have
an upload folder on a local disk (the setting `staging`).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ft_ckpt.checkpoint.catalog import list_checkpoints
from ft_ckpt.checkpoint.commit import check_target
from ft_ckpt.checkpoint.manifest import Manifest, load_manifest
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    ManifestError,
    NameTakenError,
    TargetError,
    listing,
)
from ft_ckpt.messages import warn
from ft_ckpt.storage import PREFIX, Store
from ft_ckpt.storage.local import IF_NEW, folder_of, try_place
from ft_ckpt.storage.places import Place, open_place

# the abilities of a store that `try_bucket` tries
_QUICK_TRIALS = {IF_NEW, "reading ranges", "listing at once"}
# file in an upload folder that names its bucket
_CLAIM = f"{PREFIX}staging"


def check_directory(directory: Place, config: SaverConfig, *, is_main: bool) -> None:
    """Raise an error if checkpoints cannot be saved in `directory`.

    Only rank 0 (`is_main`) tries a bucket. Raises ConfigError for settings that cannot work there,
    and what `check_target` and `try_bucket` raise.
    """
    store = directory.folder
    if store.local_folder is not None:
        check_target(store.local_folder, 0)
        return
    if "{step}" not in config.name_template and not config.overwrite:
        raise ConfigError(
            f"name_template={config.name_template!r}: saves replace each other, which in a bucket "
            "takes overwrite=True; give each a name of its own by {step}"
        )
    if is_main:
        try_bucket(store)


def try_bucket(store: Store) -> None:
    """Try the bucket: write an object twice, read it, list it and delete it.

    Warns if the store ignores the condition that a write must create a new object. Raises
    ConfigError if there is no such bucket, and TargetError if it refuses the credentials or writes.
    """
    try:
        abilities = try_place(store, _QUICK_TRIALS)
    except ConfigError:
        raise
    except CheckpointError as error:
        raise TargetError(f"{store.url}: {_why_unwritable(store)} ({error})") from error

    failed = [
        f"{ability.name}: {ability.detail}"
        for ability in abilities
        if not ability.works and ability.name != IF_NEW
    ]
    if failed:
        raise TargetError(
            f"{store.url}: can be written, but not read or listed ({listing(failed)})"
        )

    if not all(ability.works for ability in abilities):
        warn(
            f"{store.url}: the store ignores conditional writes, so two runs that save the same "
            "step would mix their files; let one run at a time save there",
        )


def _why_unwritable(store: Store) -> str:
    """Return why the bucket cannot be written, and what to do."""
    try:
        store.list_folder()
    except (CheckpointError, OSError):
        return "cannot be used with these credentials, endpoint and region; correct them"
    return "can be read, and not written; use credentials that may write there"


@dataclass(frozen=True)
class RunPlaces:
    """The folders of a run.

    Attributes:
        directory: Where the checkpoints of the run are; None for a saver without a directory.
        upload_folder: A local folder. If there is one, saves are committed here and then uploaded
            to `directory`.
    """

    directory: Place | None = None
    upload_folder: Place | None = None

    @property
    def target(self) -> Place | None:
        """The folder that saves are committed to."""
        return self.directory if self.upload_folder is None else self.upload_folder

    @property
    def folders(self) -> tuple[Place, ...]:
        places = (self.directory, self.upload_folder)
        return tuple(place for place in places if place is not None)

    def copies_of(self, checkpoint: Place) -> tuple[Place, ...]:
        """Return where copies of a checkpoint may be: one place in each folder of the run.

        For a checkpoint outside of these folders, the result is its own place.
        """
        if not any(checkpoint.beside.identity == place.folder.identity for place in self.folders):
            return (checkpoint,)
        return tuple(Place(place.folder, checkpoint.basename) for place in self.folders)


def open_run_places(
    directory: Place | None,
    config: SaverConfig,
    is_main: Callable[[], bool],
) -> RunPlaces:
    """Open and test the folders of a run. Rank 0 tests a bucket by writing to it.

    The places in the result are absolute. Raises ConfigError for settings that cannot work there
    and for a staging folder of another run. Raises what `check_directory` raises.
    """
    if directory is None:
        if config.staging is not None:
            raise ConfigError(
                f"staging={str(config.staging)!r}: for a run in a bucket; give "
                "the saver its directory"
            )
        return RunPlaces()

    place = directory.absolute
    if config.staging is not None and place.is_local:
        raise ConfigError(
            f"staging={str(config.staging)!r}: {place} is on a disk itself; leave staging out"
        )

    check_directory(place, config, is_main=is_main())
    if config.staging is None:
        return RunPlaces(place)
    upload_folder = open_place(config.staging)
    check_target(folder_of(upload_folder.folder), 0)
    if is_main():
        _claim_upload_folder(upload_folder, place)
    return RunPlaces(place, upload_folder)


def _claim_upload_folder(upload_folder: Place, directory: Place) -> None:
    """Record in an upload folder which bucket it is for.

    Without the record its checkpoints would be uploaded to any other bucket as well.
    """
    store, url = upload_folder.folder, directory.folder.url
    claim = None
    if store.stat(_CLAIM) is not None:
        claim = store.read(_CLAIM).decode(errors="replace")
    if claim is None and list_checkpoints(upload_folder).checkpoints:
        raise ConfigError(
            f"{upload_folder}: holds checkpoints that were not staged there; `ft-ckpt sync "
            f"{upload_folder} {url}` brings them to the bucket; use an empty folder"
        )

    try:
        store.write(_CLAIM, url.encode(), create_only=True)
    except NameTakenError:
        if claim != url:
            raise ConfigError(
                f"{upload_folder}: for {claim}, expected {url}; give each run a staging folder of "
                "its own"
            ) from None


def has_training_state(manifest: Manifest) -> bool:
    return any(part.kind == "state" for part in manifest.parts)


def refuse_replacing(target: Place, has_state: bool, run_ids: Collection[str] | None) -> None:
    """Raise TargetError if `target` holds a checkpoint that the save must not replace.

    A save without training state (`has_state`) must not replace a checkpoint that has one. If
    `run_ids` is not None, it has the ids of a run, and the save must not replace a checkpoint of
    any other run. Raises UnreadableError if the manifest cannot be read now.
    """
    try:
        manifest = load_manifest(target.folder)
    except ManifestError:
        return  # there is no checkpoint, or a damaged one

    if has_training_state(manifest) and not has_state:
        raise TargetError(
            f"{target}: holds training state, which a save of weights alone would delete; save to "
            "another path"
        )

    if run_ids is not None and manifest.run_id is not None and manifest.run_id not in run_ids:
        raise TargetError(
            f"{target}: belongs to another run, {manifest.run_id[:6]}; use another directory, "
            "resume that run, or delete its checkpoints"
        )
