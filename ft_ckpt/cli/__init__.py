"""`ft-ckpt`: list, verify, compare and prune checkpoints. Parse, call, print; starts without torch."""

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ft_ckpt import __version__, catalog
from ft_ckpt.cli import check as checking
from ft_ckpt.cli import convert as converting
from ft_ckpt.cli import diff as differing
from ft_ckpt.cli import plan as planning
from ft_ckpt.cli import prune as pruning
from ft_ckpt.cli import views
from ft_ckpt.errors import CheckpointError, ConfigError, NotACheckpointError
from ft_ckpt.manifest import MANIFEST_NAME

# What typer itself would import before the first word costs more than a listing. Hence plain help and no completion
# (rich), a help flag that is never None and no declared arguments (pydantic): the path is what typer leaves over.
_LEFT_OVER = {"allow_extra_args": True}
_SCRIPT = {**_LEFT_OVER, "allow_interspersed_args": False}  # what follows the script is its own


class _Lean:
    def get_help_option(self, context: Any) -> Any:
        option = super().get_help_option(context)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option


class _Group(_Lean, TyperGroup):
    pass


class _Command(_Lean, TyperCommand):
    pass


app = typer.Typer(
    name="ft-ckpt",
    help="List, verify, compare and prune the checkpoints of ft_ckpt.",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Fast = Annotated[bool, typer.Option("--fast", help="Names, sizes and headers only; do not read every byte.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ft-ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print version.")
    ] = False,
) -> None:
    pass


@app.command("ls", cls=_Command, options_metavar="RUN [OPTIONS]", context_settings=_LEFT_OVER)
def list_run(context: typer.Context, as_json: _Json = False) -> None:
    """List the checkpoints of the folder RUN, oldest first."""
    run = _folder(context)
    infos = catalog.discover(run)
    rows = [views.row(info, catalog.verify(info.path, deep=False)) for info in infos]
    views.show_run(run, rows, as_json=as_json)


@app.command(cls=_Command, options_metavar="RUN [OPTIONS]", context_settings=_LEFT_OVER)
def latest(context: typer.Context, as_json: _Json = False) -> None:
    """Print the newest valid checkpoint of the folder RUN."""
    run = _folder(context)
    found = catalog.latest(run)
    if found is None:
        raise NotACheckpointError(f"{run}: no valid checkpoint in it; `ft-ckpt ls` and `ft-ckpt verify` say why")
    views.show_latest(catalog.CheckpointInfo(found, catalog.read_manifest(found)), as_json=as_json)


@app.command(cls=_Command, options_metavar="PATH [OPTIONS]", context_settings=_LEFT_OVER)
def verify(context: typer.Context, fast: _Fast = False, as_json: _Json = False) -> None:
    """Compare PATH with its manifest; exit code 1 if they differ."""
    report = catalog.verify(_path(context), deep=not fast)
    views.show_report(report, as_json=as_json)
    raise typer.Exit(0 if report.ok else 1)


@app.command(cls=_Command, options_metavar="PATH [OPTIONS]", context_settings=_LEFT_OVER)
def show(context: typer.Context, as_json: _Json = False) -> None:
    """List the parts and tensors of the checkpoint PATH, or the tensors of a weight file or foreign folder."""
    path = _path(context)
    if path.exists() and not (path / MANIFEST_NAME).is_file():
        converting.show_file(path, as_json=as_json)
        return
    views.show_checkpoint(catalog.CheckpointInfo(path, catalog.read_manifest(path)), as_json=as_json)


app.command(cls=_Command, options_metavar="SRC DST [OPTIONS]", context_settings=_LEFT_OVER)(converting.convert)
app.command(cls=_Command, options_metavar="A B [OPTIONS]", context_settings=_LEFT_OVER)(differing.diff)
app.command(cls=_Command, options_metavar="RUN [OPTIONS]", context_settings=_LEFT_OVER)(pruning.prune)
app.command(cls=_Command, options_metavar="PATH [OPTIONS]", context_settings=_LEFT_OVER)(pruning.pin)
app.command(cls=_Command, options_metavar="PATH", context_settings=_LEFT_OVER)(pruning.unpin)
app.command(cls=_Command, options_metavar="[FOLDER] [OPTIONS]", context_settings=_LEFT_OVER)(planning.plan)
app.command("check-resume", cls=_Command, options_metavar="[OPTIONS] SCRIPT [ARGS]", context_settings=_SCRIPT)(
    checking.check_resume
)


def _path(context: typer.Context) -> Path:
    if len(context.args) != 1:
        given = " ".join(context.args) or "none"
        raise ConfigError(f"{context.info_name}: {given} given, expected one folder; see `ft-ckpt --help`")
    return Path(context.args[0])


def _folder(context: typer.Context) -> Path:
    run = _path(context)
    if not run.is_dir():
        raise NotACheckpointError(f"{run}: no such folder; give one that holds checkpoints")
    return run


def main() -> None:
    """Run `ft-ckpt` on the arguments of the process: exit code 0, 1 when a check failed, 2 for an error."""
    warnings.showwarning = lambda message, *_rest, **_more: print(f"ft-ckpt: {message}", file=sys.stderr)
    try:
        app(prog_name="ft-ckpt")
    except (CheckpointError, OSError) as error:
        print(f"ft-ckpt: {error}", file=sys.stderr)
        sys.exit(2)
