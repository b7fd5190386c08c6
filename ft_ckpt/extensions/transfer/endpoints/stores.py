"""Pushes checkpoints to folders and to buckets of object stores, and pulls them from there.

`push`, `pull` and `copy` use `StoreEndpoint` for a path such as "/data/checkpoints" and for a URL
such as "s3://bucket/run". A `Place` is a folder on a disk or a prefix in a bucket.

A pull of a delta needs more than a copy. A delta stores only what changed since its base
checkpoint, so the pull rebuilds the whole checkpoint from the delta and its bases. The copy of it
must be exact: it has the manifest of the rebuilt checkpoint unchanged.
"""

from dataclasses import dataclass
from functools import partial
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
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place

_ALLOWED_OPTIONS = {"state", "quiet"}
# The function `fetch_whole`, which rebuilds a delta. It is imported when the first delta is pulled,
# because numpy is slow to import.
_REBUILD_DELTA = "ft_ckpt.extensions.rl.deltas.rebuilding:fetch_whole"


@dataclass(frozen=True)
class StoreEndpoint(CopyEndpoint):
    """A checkpoint in a folder or in a bucket of an object store.

    `CopyEndpoint` and `Endpoint` explain the methods.

    Attributes:
        place: The folder or the prefix of the checkpoint.
        is_parent: Whether the user wrote a slash at the end, as in "s3://bucket/runs/". A
            checkpoint that is sent to `place` then gets a folder of its own name in it.
    """

    place: Place
    is_parent: bool = False

    @classmethod
    def at(cls, place: PlaceLike) -> Self:
        ends_with_slash = isinstance(place, str) and place.endswith("/")
        return cls(open_place(place), is_parent=ends_with_slash)

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
        return copy_open(
            checkpoint, self.place, manifest, overwrite=overwrite, shown=not options.quiet
        )

    def pull(self, folder: Path | None, *, overwrite: bool) -> PullReport:
        with open_checkpoint(self.place) as checkpoint:
            if checkpoint.manifest.delta:
                report = _pull_delta(checkpoint, folder, overwrite=overwrite)
            else:
                report = _copy_into(folder, checkpoint, overwrite=overwrite, exact=False)
            return pull_report(report, checkpoint.identity)


def _pull_delta(delta: OpenCheckpoint, folder: Path | None, *, overwrite: bool) -> CopyReport:
    """Rebuild the whole checkpoint of `delta`, and copy it into `folder` or the cache.

    The parent of `folder` is searched first for a base that was pulled before. Such a base need
    not be fetched again.
    """
    copy_rebuilt = partial(_copy_into, folder, overwrite=overwrite, exact=True)
    store_with_bases = None if folder is None else LocalStore(folder.parent)
    rebuild_delta = load_extension(_REBUILD_DELTA)
    report: CopyReport = rebuild_delta(delta, store_with_bases, copy_rebuilt)
    return report


def _copy_into(
    folder: Path | None, checkpoint: OpenCheckpoint, *, overwrite: bool, exact: bool
) -> CopyReport:
    """Copy the checkpoint into `folder`, or into the cache if `folder` is None.

    An existing copy with damaged files is replaced, even without `overwrite`. `exact` commits the
    manifest of the checkpoint unchanged.
    """
    manifest = checkpoint.manifest
    if folder is None:
        return pull_cached(checkpoint, manifest, exact=exact)
    return copy_open(
        checkpoint,
        Place(LocalStore(folder)),
        manifest,
        overwrite=overwrite,
        renews=True,  # this replaces a damaged copy
        exact=exact,
    )
