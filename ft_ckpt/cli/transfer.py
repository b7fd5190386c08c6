"""`ft-ckpt push CHECKPOINT URL` and `ft-ckpt pull URL FOLDER`. The client of the place is imported when it is used."""

import dataclasses
from typing import Annotated

import typer

from ft_ckpt.cli import views
from ft_ckpt.cli.arguments import given_words
from ft_ckpt.cli.options import ForceOption, JsonOption
from ft_ckpt.config import human_size
from ft_ckpt.errors import ConfigError

_Private = Annotated[bool, typer.Option("--private", help="Make the repository a private one, if it is not there.")]
_State = Annotated[bool, typer.Option("--state", help="The training state goes along.")]
_BaseId = Annotated[str | None, typer.Option(help="Name of the base model on the Hub.")]
_Message = Annotated[str | None, typer.Option(help="Of the commit.")]


def push_command(
    context: typer.Context,
    private: _Private = False,
    state: _State = False,
    base_id: _BaseId = None,
    message: _Message = None,
    as_json: JsonOption = False,
) -> None:
    """Push CHECKPOINT to URL, hf://user/name[@revision][/folder]: one commit, without its training state."""
    checkpoint, url = given_words(context, "CHECKPOINT", "URL")
    from ft_ckpt.transfer.places import push_now
    from ft_ckpt.transfer.reports import PushOptions

    options = PushOptions(private=private or None, state=state, base_id=base_id, message=message)
    report = push_now(checkpoint, _checked_url(url), options)
    if as_json:
        views.print_json({**dataclasses.asdict(report), "path": str(report.path)})
        return
    facts = f"{len(report.files)} files, {human_size(report.bytes)}, {report.seconds:.1f} s"
    print(f"{checkpoint} -> {report.url}: {facts if report.is_new else 'all of it was there, no commit made'}")
    for note in (*report.notes, *(f"{name}: deleted, of an older checkpoint" for name in report.deleted)):
        print(f"  {note}")


def pull_command(context: typer.Context, force: ForceOption = False, as_json: JsonOption = False) -> None:
    """Fetch what is at URL, hf://user/name[@revision][/folder], into FOLDER, and compare it with its manifest."""
    url, folder = given_words(context, "URL", "FOLDER")
    from ft_ckpt.transfer.places import pull

    report = pull(_checked_url(url), folder, overwrite=force)
    if as_json:
        views.print_json({**dataclasses.asdict(report), "path": str(report.path)})
        return
    found = "verified" if report.verified else "not verified: no manifest there"
    print(f"{url} -> {report.path}: {len(report.files)} files, {human_size(report.bytes)}, {found}")


def _checked_url(text: str) -> str:
    """A URL; a name alone could be a folder. Raises ConfigError."""
    if "://" not in text:
        raise ConfigError(f"{text}: expected a URL such as hf://user/name")
    return text
