"""The commands `push`, `pull`, `cp` and `sync`. The client of the place is imported when it is used."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_ckpt.cli import views
from ft_ckpt.cli.options import DryRunOption, ForceOption, JsonOption, given_words, print_lines, print_path
from ft_ckpt.config import human_size
from ft_ckpt.errors import ConfigError, listing
from ft_ckpt.storage.place import location_name

if TYPE_CHECKING:
    from ft_ckpt.transfer.copies import CopyReport
    from ft_ckpt.transfer.sync import SyncReport

_Private = Annotated[bool, typer.Option("--private", help="Make the repository a private one, if it is not there.")]
_State = Annotated[bool, typer.Option("--state", help="The training state goes along.")]
_BaseId = Annotated[str | None, typer.Option(help="Name of the base model on the Hub.")]
_Delete = Annotated[bool, typer.Option("--delete", help="Delete there what the run has deleted since.")]
_Message = Annotated[str | None, typer.Option(help="Of the commit.")]


def push_command(
    context: typer.Context,
    private: _Private = False,
    state: _State = False,
    base_id: _BaseId = None,
    message: _Message = None,
    as_json: JsonOption = False,
) -> None:
    """Push CHECKPOINT to URL, hf://user/name[@revision][/folder] or in a bucket, without its training state."""
    checkpoint, url = given_words(context, "CHECKPOINT", "URL")
    from ft_ckpt.transfer.outgoing import PushOptions
    from ft_ckpt.transfer.push import push_now

    options = PushOptions(private=private or None, state=state, base_id=base_id, message=message)
    report = push_now(checkpoint, _checked_url(url), options)
    if as_json:
        views.print_json({**dataclasses.asdict(report), "path": str(report.path)})
        return
    facts = f"{len(report.files)} files, {human_size(report.bytes)}, {report.seconds:.1f} s"
    print_lines(f"{checkpoint} -> {report.url}: {facts if report.is_new else 'all of it was there, no commit made'}")
    for note in (*report.notes, *(f"{name}: deleted, of an older checkpoint" for name in report.deleted)):
        print_lines(f"  {note}")


def pull_command(context: typer.Context, force: ForceOption = False, as_json: JsonOption = False) -> None:
    """Fetch what is at URL, hf://user/name[@revision][/folder] or in a bucket, and compare it with its manifest.

    Without FOLDER, what is in a bucket comes into the cache, and its path is printed.
    """
    url, *folder = given_words(context, *(("URL",) if len(context.args) == 1 else ("URL", "FOLDER")))
    from ft_ckpt.transfer.push import pull

    report = pull(_checked_url(url), *folder, overwrite=force)
    if as_json:
        views.print_json({**dataclasses.asdict(report), "path": str(report.path)})
        return
    if not folder:
        print_path(report.path)
        return
    found = "verified" if report.verified else "not verified: no manifest there"
    print_lines(f"{url} -> {report.path}: {len(report.files)} files, {human_size(report.bytes)}, {found}")


def copy_command(context: typer.Context, force: ForceOption = False, as_json: JsonOption = False) -> None:
    """Copy the checkpoint SOURCE to DESTINATION, paths or URLs, whole or not at all; all digests are compared.

    After a DESTINATION that ends in a slash comes the name of SOURCE.
    """
    source, destination = given_words(context, "SOURCE", "DESTINATION")
    from ft_ckpt.transfer.copies import copy

    report = copy(source, destination, overwrite=force)
    if as_json:
        views.print_json(_json_of_copy(report))
        return
    print_lines(f"{report.source} -> {report.path}: {_copy_facts(report)}")


def _copy_facts(report: "CopyReport") -> str:
    """What a copy came to, in words."""
    size = f"{len(report.files)} files, {human_size(report.bytes)}"
    if not report.is_new:
        return f"{size}, all of it was there"
    sent = "" if report.sent_bytes == report.bytes else f", {human_size(report.sent_bytes)} of it sent"
    return f"{size}{sent}, {report.seconds:.1f} s"


def sync_command(
    context: typer.Context, delete: _Delete = False, dry_run: DryRunOption = False, as_json: JsonOption = False
) -> None:
    """Copy the checkpoints of the run SOURCE that DESTINATION lacks, paths or URLs, newest first.

    Exit code 1 when something was not copied, or not deleted.
    """
    source, destination = given_words(context, "SOURCE", "DESTINATION")
    from ft_ckpt.transfer.sync import sync

    report = sync(source, destination, delete=delete, dry_run=dry_run)
    if as_json:
        copied = [_json_of_copy(each) for each in report.copied]
        views.print_json({**dataclasses.asdict(report), "copied": copied, "kept": dict(report.kept)})
    else:
        print_lines(*_sync_lines(report, dry_run=dry_run))
    if report.problems:
        raise typer.Exit(1)


def _json_of_copy(report: "CopyReport") -> dict[str, Any]:
    return {**dataclasses.asdict(report), "path": str(report.path), "source": str(report.source)}


def _sync_lines(report: "SyncReport", *, dry_run: bool) -> Iterator[str]:
    """What a sync did, or would do, a line each."""
    would = "would be " if dry_run else ""
    yield from (f"{location_name(each.path)}: {_copy_facts(each)}" for each in report.copied)
    yield from (f"{name}: would be copied" for name in report.missing if dry_run)
    yield from (f"{name}: {would}deleted there" for name in report.dropped)
    yield from (f"{name}: {would}deprived of its training state there" for name in report.stripped)
    yield from (f"{name}: stays there: {listing(list(why))}" for name, why in report.kept.items())
    yield from report.problems
    yield f"{len(report.present)} of {len(report.present) + len(report.missing)} were there"


def _checked_url(text: str) -> str:
    """A URL; a name alone could be a folder. Raises ConfigError."""
    if "://" not in text:
        raise ConfigError(f"{text}: expected a URL such as hf://user/name")
    return text
