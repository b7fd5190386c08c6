"""Defines the kinds of places that checkpoints are sent to and fetched from.

A place is given as a path, a URL, the name of a Hub repository or a `Place`. Folders and buckets
keep a checkpoint as it is. A repository of the Hub gets its weights as a commit. Each kind is a
class. It is imported when a place of its kind is first used, because the clients are slow to
import.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from pathlib import Path

from typing_extensions import Self

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.checks import SIGNATURE_NAME
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest
from ft_ckpt.errors import ConfigError, listing
from ft_ckpt.extension_points import load_extension
from ft_ckpt.extensions.transfer.copies import CopyReport, PullReport, PushReport, read_signature
from ft_ckpt.extensions.transfer.endpoints.outgoing import weights_manifest
from ft_ckpt.storage.places import Place, is_hub_bucket, is_url, schemes

PlaceLike = str | os.PathLike[str] | Place
_STORE = "ft_ckpt.extensions.transfer.endpoints.stores:StoreEndpoint"
_HUB_BUCKET = "ft_ckpt.extensions.transfer.hub.buckets:HubBucketEndpoint"
_HUB = "ft_ckpt.extensions.transfer.hub.repositories:HubEndpoint"


@dataclass(frozen=True)
class PushOptions:
    """How a checkpoint is pushed.

    Attributes:
        revision: The branch of the repository.
        private: Whether a new repository is private.
        token: The token for the Hub.
        state: Whether the training state is pushed as well.
        base_id: The name of the base model on the Hub.
        message: The message of the commit.
        quiet: Whether progress bars are hidden.
        card: The text of the model card. None keeps the card of the repository.
    """

    revision: str | None = None
    private: bool | None = None
    token: str | None = field(default=None, repr=False)
    state: bool = False
    base_id: str | None = None
    message: str | None = None
    quiet: bool = False
    card: str | None = None


class Endpoint(ABC):
    """A place that checkpoints are pushed to and pulled from."""

    reads_local_files = False
    """Whether it can send only files on this machine, and no deltas."""

    @classmethod
    @abstractmethod
    def destination(cls, place: str | Place, options: PushOptions) -> Self:
        """Return the destination of a push.

        Raises ConfigError if it is invalid, or has no such option.
        """

    @classmethod
    @abstractmethod
    def source(cls, place: str | Place, token: str | None) -> Self:
        """Return the source of a pull. Raises ConfigError if it is invalid."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the place, as messages and reports show it."""

    @abstractmethod
    def push(self, checkpoint: OpenCheckpoint, options: PushOptions) -> PushReport:
        """Send an open checkpoint; see `pushing.push`."""

    @abstractmethod
    def pull(self, folder: Path | None, *, overwrite: bool) -> PullReport:
        """Fetch the checkpoint into `folder`, or into the cache if None; see `pushing.pull`."""


class CopyEndpoint(Endpoint):
    """A folder or a bucket, which keeps copies of checkpoints."""

    is_parent: bool
    """Whether it was given with a slash at its end. A checkpoint is then sent into this folder,
    under its own name.
    """

    @classmethod
    @abstractmethod
    def at(cls, place: PlaceLike) -> Self:
        """Return the endpoint at a path or URL. Raises ConfigError if it is invalid."""

    @property
    @abstractmethod
    def basename(self) -> str:
        """The last component of its name."""

    @abstractmethod
    def within(self, name: str) -> Self:
        """Return the endpoint `name` in this one."""

    @abstractmethod
    def copy_to(self, target: "CopyEndpoint", *, overwrite: bool) -> CopyReport:
        """Copy the checkpoint at this endpoint to `target`; see `syncing.copy`."""

    @abstractmethod
    def receive(
        self,
        checkpoint: OpenCheckpoint,
        manifest: Manifest,
        options: PushOptions,
        *,
        overwrite: bool = False,
    ) -> CopyReport:
        """Write the files of an open checkpoint that `manifest` lists."""

    def target_for(self, name: str) -> Self:
        """Return the endpoint to which a checkpoint of this name is sent."""
        return self.within(name) if self.is_parent else self

    def push(self, checkpoint: OpenCheckpoint, options: PushOptions) -> PushReport:
        manifest = checkpoint.manifest
        if not options.state:
            manifest = weights_manifest(manifest)
        target = self.target_for(checkpoint.place.basename)
        return push_report(checkpoint, target.receive(checkpoint, manifest, options))


def endpoint_of(place: PlaceLike) -> type[Endpoint]:
    """Return the kind of a place. Raises ConfigError for a URL scheme that is not supported."""
    is_local = isinstance(place, Place) and place.is_local
    if is_local or is_hub_bucket(place):
        return copy_endpoint_of(place)
    scheme, separator, _ = str(place).partition("://")
    if (
        not separator or scheme.lower() == "hf"
    ):  # a text without a scheme is the name of a repository
        kind: type[Endpoint] = load_extension(_HUB)
        return kind
    if is_url(str(place)):
        return copy_endpoint_of(place)
    expected = ", ".join(f"{name}://" for name in ("hf", *schemes()))
    raise ConfigError(f"{place}: unknown URL scheme {scheme.lower()}://; expected {expected}")


def copy_endpoint_of(place: PlaceLike) -> type[CopyEndpoint]:
    """Return the kind of a place for `copy`, which takes no repositories of the Hub."""
    kind: type[CopyEndpoint] = load_extension(_HUB_BUCKET if is_hub_bucket(place) else _STORE)
    return kind


def refuse_options(destination: str | Place, options: PushOptions, *, allowed: set[str]) -> None:
    """Raise ConfigError for options that are given and not `allowed`."""
    defaults = PushOptions()
    wrong = []
    for option in fields(options):
        is_changed = getattr(options, option.name) != getattr(defaults, option.name)
        if is_changed and option.name not in allowed:
            wrong.append(option.name)
    if wrong:
        raise ConfigError(
            f"{destination}: {listing(wrong, ', ')}: only for repositories on "
            "the Hub; leave it out here"
        )


def push_report(checkpoint: OpenCheckpoint, report: CopyReport) -> PushReport:
    """Return the report of a push to a bucket, from the report of the copy."""
    left_out = sorted({file.path for file in checkpoint.manifest.files} - set(report.files))
    if left_out and read_signature(checkpoint.place.folder) is not None:
        left_out.append(f"{SIGNATURE_NAME}, which covers them")
    notes = (f"{listing(left_out, ', ')}: left out",) if left_out else ()
    return PushReport(
        path=checkpoint.location,
        url=str(report.path),
        repo_id="",
        oid=checkpoint.identity,
        commit_url=f"{report.path}/{MANIFEST_NAME}",
        is_new=report.is_new,
        files=report.files,
        bytes=report.bytes,
        seconds=report.seconds,
        notes=notes,
    )


def pull_report(report: CopyReport, identity: str) -> PullReport:
    """Return the report of a pull, from the report of the copy to a disk."""
    return PullReport(
        path=Path(report.path),
        url=str(report.source),
        oid=identity,
        verified=True,
        files=report.files,
        bytes=report.bytes,
        seconds=report.seconds,
    )
