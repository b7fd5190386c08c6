"""Finds and orders the checkpoints of a run, without changing a file or importing torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ft_ckpt.checkpoint.catalog.metrics import check_metric, read_metrics, write_metric
from ft_ckpt.checkpoint.checks import retry_transient
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    load_manifest,
    visible_folders,
    why_no_checkpoint,
)
from ft_ckpt.errors import (
    CheckpointError,
    ManifestError,
    NotACheckpointError,
    UnreadableError,
    damaged_input,
    listing,
)
from ft_ckpt.messages import warn
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import Place
from ft_ckpt.values import metrics_as_floats

_MAX_REQUESTS = 16  # concurrent requests for the manifests of a run in a bucket


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint and its manifest."""

    store: Store
    manifest: Manifest

    @property
    def place(self) -> Place:
        return Place(self.store)

    @property
    def path(self) -> Path | str:
        """The path of the checkpoint on this machine, or its URL."""
        return self.place.location

    @property
    def name(self) -> str:
        return self.place.basename

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the manifest and all metrics measured since. Raises UnreadableError."""
        return read_metrics(self.store, self.manifest)

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        """Store metrics that were measured after the save, in place of older values.

        The metrics are stored durably, one after another, in marks next to the manifest, which does
        not change. Commands and rules use them like the metrics of the save. Call this while the
        checkpoint is leased, as in the loop of `ft_ckpt.follow`. Raises ConfigError for names that
        are empty or too long and for values that are not numbers, before anything is written;
        NotACheckpointError if the checkpoint was deleted or saved again since it was listed;
        TargetError if a mark cannot be written.
        """
        numbers = metrics_as_floats(metrics)
        for name in numbers:
            check_metric(name)
        if load_manifest(self.store).created != self.manifest.created:
            raise NotACheckpointError(
                f"{self.path}: saved again since it was listed; measure the new one"
            )
        for name, value in numbers.items():
            write_metric(self.store, self.manifest, name, value)


@dataclass(frozen=True)
class Listing:
    """The checkpoints in a folder, oldest first, and the manifests that could not be read.

    A `damaged` manifest stays damaged when it is read again. An `unreadable` manifest may be whole,
    but the system could not read it.
    """

    checkpoints: tuple[CheckpointInfo, ...]
    damaged: Mapping[Path | str, CheckpointError]
    unreadable: Mapping[Path | str, CheckpointError]

    def warn_left_out(self) -> None:
        for path, error in {**self.damaged, **self.unreadable}.items():
            warn(f"{path}: left out: {error}")

    def require_readable(self) -> None:
        """Raise UnreadableError if a manifest cannot be read now, because it may be the newest."""
        if self.unreadable:
            newest = self.checkpoints[-1].path if self.checkpoints else "none"
            errors = listing([str(error) for error in self.unreadable.values()])
            raise UnreadableError(
                f"{errors}; the newest checkpoint that can be read is {newest}: "
                "try again, or name one"
            )


def list_checkpoints(root: Place, *, links: bool = True) -> Listing:
    """List the checkpoints in `root` and directly below it, and the errors of other folders.

    The order is the order of `discover`. Without `links`, folders that are links are left out, and
    nothing behind them is opened. Raises UnreadableError if `root` itself cannot be listed.
    """
    store = root.folder
    stores, identities = [store], [store.identity]
    for folder in visible_folders(store.list_folder()):
        if links or not folder.is_link:
            stores.append(store.within(folder.name))
            identities.append(folder.identity)

    infos: dict[str, CheckpointInfo] = {}
    damaged: dict[Path | str, CheckpointError] = {}
    unreadable: dict[Path | str, CheckpointError] = {}
    for store, identity, result in zip(stores, identities, _read_all(stores), strict=True):
        if isinstance(result, CheckpointInfo):
            # Links come last, so that a link to another checkpoint in `root` is not a second one.
            infos.setdefault(identity, result)
        elif isinstance(result, UnreadableError):
            unreadable[Place(store).location] = result
        elif result is not None:
            damaged[Place(store).location] = result

    return Listing(tuple(in_run_order(infos.values())), damaged, unreadable)


def discover(root: Place) -> list[CheckpointInfo]:
    """Return the committed checkpoints in `root` and directly below it, oldest first.

    Runs are ordered by their newest checkpoint. The checkpoints of one run are ordered by step;
    before them come the checkpoints without a step, in the order of their saves. Hidden folders and
    folders without a manifest are left out. Folders whose manifest is damaged or cannot be read now
    are left out with a warning. Raises UnreadableError if `root` itself cannot be listed.
    """
    listed = list_checkpoints(root)
    listed.warn_left_out()
    return list(listed.checkpoints)


def list_readable(root: Place) -> Listing:
    """List the checkpoints in `root` to choose from; damaged manifests are warnings.

    Raises UnreadableError if a manifest cannot be read in three tries, because it may be the one to
    choose; NotACheckpointError if `root` is a file.
    """
    listed = retry_transient(lambda: list_checkpoints(root), lambda listed: bool(listed.unreadable))
    listed.require_readable()
    if not listed.checkpoints and root.is_object:
        raise NotACheckpointError(why_no_checkpoint(root))
    listed.warn_left_out()
    return listed


def run_checkpoints(run: Place) -> list[CheckpointInfo]:
    """Return the committed checkpoints directly below the folder `run`, oldest first."""
    folder = run.folder
    return [info for info in discover(run) if info.store != folder]


def in_run_order(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Sort checkpoints, the oldest first.

    Runs are sorted by their newest checkpoint, so that a restarted run is newer than an earlier run
    that got further. Within a run, checkpoints are sorted by step, save number and time; the number
    comes before the time, because clocks may go back. The sort is stable.
    """
    infos = list(infos)
    newest: dict[str | None, str] = {}
    for info in infos:
        run = info.manifest.run_id
        newest[run] = max(newest.get(run, ""), info.manifest.created)

    def age(info: CheckpointInfo) -> tuple[str, int, int, str]:
        manifest = info.manifest
        step = -1 if manifest.step is None else manifest.step
        return (newest[manifest.run_id], step, manifest.number or 0, manifest.created)

    return sorted(infos, key=age)


def _read_all(stores: Sequence[Store]) -> list[CheckpointInfo | CheckpointError | None]:
    """Call `_read_info` for each store, in parallel for buckets, where it takes a request."""
    if stores[0].local_folder is not None:
        return [_read_info(store) for store in stores]
    from concurrent.futures import ThreadPoolExecutor  # lazily: listing a disk does not need it

    with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
        return list(pool.map(_read_info, stores))


def _read_info(store: Store) -> CheckpointInfo | CheckpointError | None:
    """Return the checkpoint in `store`, the error of reading it, or None without a checkpoint."""
    try:
        with damaged_input(store.url):
            return CheckpointInfo(store, load_manifest(store))
    except NotACheckpointError:
        return None
    except CheckpointError as error:
        return error


@dataclass(frozen=True)
class EarlierCheckpoint:
    """An earlier checkpoint of the same run, with the time of its commit."""

    store: Store
    files: tuple[FileRecord, ...]
    committed: float  # unix seconds, by the clock of the store

    def link_file(self, record: FileRecord, store: Store, name: str) -> bool:
        """Copy or link a file to `name` in `store`.

        Return False if the store cannot do that, or if the file was modified after the commit.
        Raises the errors of the stores.
        """
        before = self.store.stat(record.path)
        if before is None or before.size_bytes != record.size_bytes:
            return False
        if before.modified > self.committed or not store.copy(record.path, name, self.store):
            return False
        # compared again, because the file may have been replaced while it was copied
        if self.store.stat(record.path) == before:
            return True
        store.delete([name])
        return False


def earlier_checkpoints(beside: Store, max_count: int) -> Iterator[EarlierCheckpoint]:
    """Yield up to `max_count` committed checkpoints directly below a folder, newest first."""
    committed: list[tuple[float, str]] = []
    with suppress(OSError):
        for folder in beside.list_folder().folders:
            if folder.name.startswith("."):
                continue
            with suppress(OSError):
                manifest = beside.within(folder.name).stat(MANIFEST_NAME)
                if manifest is not None:
                    committed.append((manifest.modified, folder.name))
    for time, name in sorted(committed, reverse=True)[:max_count]:
        with suppress(ManifestError, OSError):  # damaged, or deleted since
            store = beside.within(name)
            yield EarlierCheckpoint(store, load_manifest(store).files, time)
