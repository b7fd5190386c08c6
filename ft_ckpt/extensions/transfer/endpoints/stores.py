"""Sends checkpoints to folders and to buckets of object stores, and fetches them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

from ft_ckpt.checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.errors import ConfigError
from ft_ckpt.extension_points import load_extension
from ft_ckpt.extensions.transfer.copies import CopyReport, PullReport, copy_open, pull_cached
from ft_ckpt.extensions.transfer.endpoints.endpoints import (
    CopyEndpoint,
    PlaceLike,
    PushOptions,
    pull_report,
    refuse_options,
)
from ft_ckpt.storage import Store
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place

_ALLOWED_OPTIONS = {"state", "quiet"}
# Imported when a delta is pulled, because numpy is slow to import. The function takes the
# checkpoint, a store that may have its base, and a `_Fetch`, and returns a report.
_FETCH_WHOLE_DELTA = "ft_ckpt.extensions.rl.deltas.rebuilding:fetch_whole"
_Fetch = Callable[[OpenCheckpoint], CopyReport]


@dataclass(frozen=True)
class StoreEndpoint(CopyEndpoint):
    """A checkpoint in a folder or in a bucket of an object store."""

    place: Place
    is_parent: bool = False

    @classmethod
    def at(cls, place: PlaceLike) -> Self:
        return cls(open_place(place), isinstance(place, str) and place.endswith("/"))

    @classmethod
    def destination(cls, place: str | Place, options: PushOptions) -> Self:
        refuse_options(place, options, allowed=_ALLOWED_OPTIONS)
        return cls.at(place)

    @classmethod
    def source(cls, place: str | Place, token: str | None) -> Self:
        if token is not None:
            raise ConfigError(
                f"{place}: token= is for the Hub; a bucket's keys come from its "
                "tools' variables, or open_place"
            )
        return cls.at(place)

    @property
    def url(self) -> str:
        return f"{self.place}/" if self.is_parent else str(self.place)

    @property
    def basename(self) -> str:
        return self.place.basename

    def within(self, name: str) -> Self:
        return type(self)(Place(self.place.folder, name))

    def copy_to(self, target: CopyEndpoint, *, overwrite: bool) -> CopyReport:
        with open_checkpoint(self.place) as checkpoint:
            manifest = checkpoint.manifest
            return target.receive(checkpoint, manifest, PushOptions(), overwrite=overwrite)

    def receive(
        self,
        checkpoint: OpenCheckpoint,
        manifest: Manifest,
        options: PushOptions,
        *,
        overwrite: bool = False,
    ) -> CopyReport:
        shown = not options.quiet
        return copy_open(checkpoint, self.place, manifest, overwrite=overwrite, shown=shown)

    def pull(self, folder: Path | None, *, overwrite: bool) -> PullReport:
        def fetch(checkpoint: OpenCheckpoint, *, exact: bool = False) -> CopyReport:
            manifest = checkpoint.manifest
            if folder is None:
                return pull_cached(checkpoint, manifest, exact=exact)
            target = Place(LocalStore(folder))
            return copy_open(
                checkpoint, target, manifest, overwrite=overwrite, renews=True, exact=exact
            )

        def fetch_exactly(checkpoint: OpenCheckpoint) -> CopyReport:
            return fetch(checkpoint, exact=True)

        with open_checkpoint(self.place) as checkpoint:
            if checkpoint.manifest.delta:
                base_store = None if folder is None else LocalStore(folder.parent)
                report = _fetch_whole_delta(checkpoint, base_store, fetch_exactly)
            else:
                report = fetch(checkpoint)
            return pull_report(report, checkpoint.identity)


def _fetch_whole_delta(
    checkpoint: OpenCheckpoint, base_store: Store | None, fetch: _Fetch
) -> CopyReport:
    report: CopyReport = load_extension(_FETCH_WHOLE_DELTA)(checkpoint, base_store, fetch)
    return report
