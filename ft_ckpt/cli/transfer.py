"""The commands `push`, `pull`, `cp` and `sync`.

The client of a bucket or the Hub is imported on use.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.cli import output
from ft_ckpt.cli.options import add_dry_run, add_force, add_json, print_lines, print_path
from ft_ckpt.errors import ConfigError, listing
from ft_ckpt.storage.places import location_name, open_place
from ft_ckpt.values import human_size

if TYPE_CHECKING:
    from ft_ckpt.extensions.transfer.copies import CopyReport, SyncReport


def add_push(parser: ArgumentParser) -> None:
    parser.description = (
        "Upload CHECKPOINT, without its training state, to a repository of the Hub or to a bucket."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="Checkpoint: a path or URL.")
    parser.add_argument(
        "url",
        metavar="URL",
        help="hf://user/name[@revision][/folder], or a place in a bucket (s3://, hf://buckets/).",
    )
    parser.add_argument("--private", action="store_true", help="Create a private repository.")
    parser.add_argument("--state", action="store_true", help="Include the training state.")
    parser.add_argument(
        "--base-id",
        metavar="NAME",
        help="Name of the base model on the Hub, for the adapter's config.",
    )
    parser.add_argument("--message", help="Commit message.")
    add_json(parser)
    parser.set_defaults(run=_push)


def _push(options: Namespace) -> None:
    checkpoint = options.checkpoint
    from ft_ckpt.extensions.transfer.endpoints import PushOptions
    from ft_ckpt.extensions.transfer.sending import push_now

    push_options = PushOptions(
        private=options.private or None,
        state=options.state,
        base_id=options.base_id,
        message=options.message,
    )
    report = push_now(open_place(checkpoint), _checked_url(options.url), push_options)
    if options.as_json:
        output.print_json(report)
        return

    outcome = f"{len(report.files)} files, {human_size(report.bytes)}, {report.seconds:.1f} s"
    if not report.is_new:
        outcome = "all of it was there, nothing was sent"
    print_lines(f"{checkpoint} -> {report.url}: {outcome}")
    for note in report.notes:
        print_lines(f"  {note}")
    for name in report.deleted:
        print_lines(f"  {name}: deleted, of an older checkpoint")


def add_pull(parser: ArgumentParser) -> None:
    parser.description = (
        "Download a checkpoint from the Hub or a bucket to FOLDER and verify it. Pulling a delta, "
        "from a bucket or a folder, rebuilds the full checkpoint. Without FOLDER, a checkpoint in "
        "a bucket is downloaded to the cache (FT_CKPT_CACHE, or ft_ckpt in HF_HOME), and its path "
        "is printed."
    )
    parser.add_argument(
        "url",
        metavar="URL",
        help="hf://user/name[@revision][/folder], a place in a bucket, or the path of a delta.",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", help="Folder to write to (default: the cache)."
    )
    add_force(parser)
    add_json(parser)
    parser.set_defaults(run=_pull)


def _pull(options: Namespace) -> None:
    url, folder = options.url, options.folder
    from ft_ckpt.extensions.transfer.sending import pull

    place = None if "://" in url else open_place(url)
    if place is None or place.folder.stat(MANIFEST_NAME) is None:
        report = pull(_checked_url(url), folder, overwrite=options.force)
    else:
        report = pull(place, folder, overwrite=options.force)

    if options.as_json:
        output.print_json(report)
        return

    if folder is None:
        print_path(report.path)
        return

    verdict = "verified" if report.verified else "not verified: no manifest there"
    size = f"{len(report.files)} files, {human_size(report.bytes)}"
    print_lines(f"{url} -> {report.path}: {size}, {verdict}")


def add_cp(parser: ArgumentParser) -> None:
    parser.description = (
        "Copy the checkpoint SOURCE to DESTINATION and verify all digests. An interrupted copy "
        "leaves no checkpoint."
    )
    parser.add_argument("source", metavar="SOURCE", help="Checkpoint: a path or URL.")
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        help="Path or URL. If it ends in a slash, the name of SOURCE is appended.",
    )
    add_force(parser)
    add_json(parser)
    parser.set_defaults(run=_cp)


def _cp(options: Namespace) -> None:
    from ft_ckpt.extensions.transfer.sending import copy

    report = copy(options.source, options.destination, overwrite=options.force)
    if options.as_json:
        output.print_json(report)
        return
    print_lines(f"{report.source} -> {report.path}: {_copy_text(report)}")


def _copy_text(report: "CopyReport") -> str:
    size = f"{len(report.files)} files, {human_size(report.bytes)}"
    if not report.is_new:
        return f"{size}, all of it was there"
    if report.sent_bytes != report.bytes:
        size += f", {human_size(report.sent_bytes)} of it sent"
    return f"{size}, {report.seconds:.1f} s"


def add_sync(parser: ArgumentParser) -> None:
    parser.description = (
        "Copy the checkpoints of the run SOURCE that are missing in DESTINATION, newest first. The "
        "exit code is 1 if something could not be copied or deleted."
    )
    parser.add_argument("source", metavar="SOURCE", help="Folder of the run: a path or URL.")
    parser.add_argument(
        "destination", metavar="DESTINATION", help="Folder to copy to: a path or URL."
    )
    parser.add_argument(
        "--delete", action="store_true", help="Also delete what the run has deleted since."
    )
    add_dry_run(parser)
    add_json(parser)
    parser.set_defaults(run=_sync)


def _sync(options: Namespace) -> int:
    from ft_ckpt.extensions.transfer.sending import sync

    report = sync(
        options.source, options.destination, delete=options.delete, dry_run=options.dry_run
    )
    if options.as_json:
        output.print_json(report)
    else:
        print_lines(*_sync_lines(report, dry_run=options.dry_run))
    return 1 if report.problems else 0


def _sync_lines(report: "SyncReport", *, dry_run: bool) -> Iterator[str]:
    would = "would be " if dry_run else ""
    for copied in report.copied:
        yield f"{location_name(copied.path)}: {_copy_text(copied)}"
    if dry_run:
        for name in report.missing:
            yield f"{name}: would be copied"

    for name in report.dropped:
        yield f"{name}: {would}deleted there"
    for name in report.stripped:
        yield f"{name}: {would}training state deleted there"
    for name, reasons in report.kept.items():
        yield f"{name}: stays there: {listing(reasons)}"
    yield from report.problems
    yield f"{len(report.present)} of {len(report.present) + len(report.missing)} were there"


def _checked_url(text: str) -> str:
    # The library also takes "user/name"; on the command line this may be a folder.
    if "://" not in text:
        raise ConfigError(f"{text}: expected a URL such as hf://user/name")
    return text
