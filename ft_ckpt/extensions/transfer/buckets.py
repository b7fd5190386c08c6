"""Push to and pull from buckets; pull from folders, including chains of deltas."""

from dataclasses import fields
from functools import partial
from pathlib import Path

from ft_ckpt.checkpoint import MANIFEST_NAME, SIGNATURE_NAME, OpenCheckpoint, open_checkpoint
from ft_ckpt.errors import ConfigError, listing
from ft_ckpt.extensions.transfer.copies import CopyReport, copy_open, destination_place
from ft_ckpt.extensions.transfer.outgoing import (
    PullReport,
    PushOptions,
    PushReport,
    weights_manifest,
)
from ft_ckpt.extensions.transfer.pull_cache import pull_cached
from ft_ckpt.extensions.transfer.signatures import read_signature
from ft_ckpt.storage import LocalStore, Place, open_place

_MEANT_HERE = {"state", "quiet"}


def destination_url(destination: str | Place, options: PushOptions) -> str:
    """The URL of the destination. Raises ConfigError for options that only repositories have."""
    refuse_options(destination, options, allowed=set())
    return str(destination)


def refuse_options(destination: str | Place, options: PushOptions, *, allowed: set[str]) -> None:
    """Raise ConfigError for options that a bucket does not have, but those `allowed`."""
    plain = PushOptions()
    names = [option.name for option in fields(options)]
    changed = [name for name in names if getattr(options, name) != getattr(plain, name)]
    if wrong := [name for name in changed if name not in _MEANT_HERE | allowed]:
        raise ConfigError(
            f"{destination}: {listing(wrong, ', ')}: only for repositories on "
            "the Hub; leave it out here"
        )


def send_checkpoint(
    held: OpenCheckpoint, destination: str | Place, options: PushOptions
) -> PushReport:
    """Push an open checkpoint, see `push.push`."""
    destination_url(destination, options)
    goal = destination_place(destination, held.place.basename)
    manifest = held.manifest if options.state else weights_manifest(held.manifest)
    return push_report(
        held, copy_open(held, goal, manifest, overwrite=False, shown=not options.quiet)
    )


def push_report(held: OpenCheckpoint, report: CopyReport) -> PushReport:
    """The report of a push, from the report of the copy of an open checkpoint to a bucket."""
    left_out = sorted({file.path for file in held.manifest.files} - set(report.files))
    if left_out and read_signature(held.place.folder) is not None:
        left_out.append(f"{SIGNATURE_NAME}, which covers them")
    return PushReport(
        path=held.location,
        url=str(report.path),
        repo_id="",
        oid=held.identity,
        commit_url=f"{report.path}/{MANIFEST_NAME}",
        is_new=report.is_new,
        files=report.files,
        deleted=(),
        bytes=report.bytes,
        seconds=report.seconds,
        notes=(f"{listing(left_out, ', ')}: left out",) if left_out else (),
    )


def fetch_checkpoint(
    source: str | Place, folder: Path | None, *, token: str | None, overwrite: bool
) -> PullReport:
    """Fetch the checkpoint `source` into `folder`, or into the cache, see `push.pull`."""
    if token is not None:
        raise ConfigError(
            f"{source}: token= is for the Hub; a bucket's keys come from its "
            "tools' variables, or open_place"
        )

    def fetch(held: OpenCheckpoint, *, exact: bool = False) -> CopyReport:
        if folder is None:
            return pull_cached(held, held.manifest, exact=exact)
        goal = Place(LocalStore(folder))
        return copy_open(held, goal, held.manifest, overwrite=overwrite, renews=True, exact=exact)

    with open_checkpoint(open_place(source)) as held:
        if held.manifest.delta:
            from ft_ckpt.extensions.rl import fetch_whole  # on use: numpy is slow to import

            near = None if folder is None else LocalStore(folder.parent)
            report = fetch_whole(held, near, partial(fetch, exact=True))
        else:
            report = fetch(held)
    return PullReport(
        path=Path(report.path),
        url=str(report.source),
        oid=held.identity,
        verified=True,
        files=report.files,
        bytes=report.bytes,
        seconds=report.seconds,
    )
