"""`ft-ckpt`: list, verify, compare, convert and prune checkpoints.

Nothing here holds logic or imports torch at the start: commands parse, call and print. Begin at the commands below.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint import catalog
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.cli import check as checking
from ft_ckpt.cli import doctor as examining
from ft_ckpt.cli import files as averaging
from ft_ckpt.cli import files as converting
from ft_ckpt.cli import files as differing
from ft_ckpt.cli import files as merging
from ft_ckpt.cli import plan as planning
from ft_ckpt.cli import prune as pruning
from ft_ckpt.cli import prune as verifying
from ft_ckpt.cli import report as reporting
from ft_ckpt.cli import transfer as transferring
from ft_ckpt.cli import views
from ft_ckpt.cli.options import JsonOption, accept_any_text, checked_output, only_place, print_lines, run_folder
from ft_ckpt.errors import CheckpointError, NotACheckpointError

_NAME = "ft-ckpt"
_COMPLETE = "_FT_CKPT_COMPLETE"  # set by the shell that asks what a word could become
_HELP = {"help_option_names": ["-h", "--help"]}
# What typer itself would import before the first word costs half a listing (70 to 90 ms of 150, since it has values
# coerced by pydantic). Hence plain help (rich), completion only when a shell asks for it, no declared arguments, nor
# options that take a value where the answer should come at once, nor a help flag that is None: the path is what typer
# leaves over.
_LEFT_OVER = {**_HELP, "allow_extra_args": True}
_SCRIPT = {**_LEFT_OVER, "allow_interspersed_args": False}  # what follows the script is its own
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # what the parser raises; typer has no name for it


class _Lean:
    def get_help_option(self, context: Any) -> Any:
        option = super().get_help_option(context)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option


class _OrderedCommands(_Lean, TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        with checked_output():
            return super().invoke(ctx)


class _Command(_Lean, TyperCommand):
    pass


app = typer.Typer(
    name=_NAME,
    help="List, verify, compare and prune the checkpoints of ft_ckpt.",
    cls=_OrderedCommands,
    context_settings=_HELP,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_Metrics = Annotated[bool, typer.Option("--metrics", help="Show all metrics; else the two that say most.")]
_Metric = Annotated[str | None, typer.Option(help='Name of the metric, as in "eval_loss" or "eval_loss:min".')]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"{_NAME} {__version__}")
        raise typer.Exit


def _print_completion(asked: bool) -> None:
    if asked:
        shell = Path(os.environ.get("SHELL", "bash")).name
        from typer.completion import get_completion_script  # type: ignore[attr-defined]

        typer.echo(get_completion_script(prog_name=_NAME, complete_var=_COMPLETE, shell=shell))
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print version.")
    ] = False,
    show_completion: Annotated[
        bool,
        typer.Option(
            "--show-completion",
            callback=_print_completion,
            is_eager=True,
            help='Print what $SHELL needs to complete words, as in eval "$(ft-ckpt --show-completion)".',
        ),
    ] = False,
) -> None:
    pass


def _register_command(
    name: str, metavar: str, summary: str, settings: dict[str, Any] = _LEFT_OVER
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose `summary` fits beside its name in a line of the help."""
    return app.command(name, cls=_Command, options_metavar=metavar, short_help=summary, context_settings=settings)


@_register_command("ls", "RUN [OPTIONS]", "List the checkpoints of a run.")
def list_command(context: typer.Context, metrics: _Metrics = False, as_json: JsonOption = False) -> None:
    """List the checkpoints of the folder RUN, oldest first."""
    run = run_folder(context)
    infos = catalog.discover(run)
    rows = [views.checkpoint_row(info, catalog.verify(info.place, deep=False)) for info in infos]
    views.show_run(run, rows, views.ranked_metrics(infos)[: None if metrics else 2], as_json=as_json)


@_register_command("latest", "RUN [OPTIONS]", "Print the path of the newest valid checkpoint.")
def latest_command(context: typer.Context, as_json: JsonOption = False) -> None:
    """Print the newest valid checkpoint of the folder RUN."""
    run = run_folder(context)
    found = catalog.find_latest(run)
    if found is None:
        raise NotACheckpointError(f"{run}: no valid checkpoint in it; `ft-ckpt ls` and `ft-ckpt verify` say why")
    views.show_latest(found, as_json=as_json)


@_register_command("best", "RUN [OPTIONS]", "Print the path of the checkpoint with the best metric.")
def best_command(context: typer.Context, metric: _Metric = None, as_json: JsonOption = False) -> None:
    """Print the valid checkpoint of the folder RUN with the best metric; else by what the run keeps the best of."""
    run = run_folder(context)
    name, _, mode = (metric or "").rpartition(":")
    found = catalog.find_best(run, (name, mode) if mode in ("min", "max") and name else metric)
    if found is None:
        raise NotACheckpointError(
            f"{run}: no valid checkpoint with that metric in it; `ft-ckpt ls` shows what there is"
        )
    views.show_latest(found, as_json=as_json)


@_register_command("show", "PATH [OPTIONS]", "List the parts and tensors of a checkpoint or weight file.")
def show_command(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the parts and tensors of the checkpoint PATH, or the tensors of a weight file or foreign folder."""
    place = only_place(context)
    store = place.folder
    committed = store.stat(MANIFEST_NAME) is not None
    if not place.exists or (not committed and catalog.discover(place)):
        raise NotACheckpointError(catalog.why_no_checkpoint(store))
    if not committed:
        converting.show_file(place, as_json=as_json)
        return
    views.show_checkpoint(catalog.CheckpointInfo(store, catalog.load_manifest(store)), as_json=as_json)


_register_command("verify", "PATH [OPTIONS]", "Compare a checkpoint, or all of a run, with its manifest.")(
    verifying.verify_command
)
_register_command("diff", "A B [OPTIONS]", "Compare the tensors of two checkpoints or files.")(differing.diff_command)
_register_command("average", "A B ... OUT [OPTIONS]", "Write the average of checkpoints.")(averaging.average_command)
_register_command("merge", "ADAPTER OUT [OPTIONS]", "Merge an adapter into its base.")(merging.merge_command)
_register_command("convert", "SRC DST [OPTIONS]", "Write weights in another format.")(converting.convert_command)
_register_command("cp", "SOURCE DESTINATION [OPTIONS]", "Copy a checkpoint to another place.")(
    transferring.copy_command
)
_register_command("sync", "SOURCE DESTINATION [OPTIONS]", "Copy the checkpoints of a run to another place.")(
    transferring.sync_command
)
_register_command("push", "CHECKPOINT URL [OPTIONS]", "Push a checkpoint to the Hub, or to a bucket.")(
    transferring.push_command
)
_register_command("pull", "URL [FOLDER] [OPTIONS]", "Fetch a checkpoint from the Hub, or from a bucket.")(
    transferring.pull_command
)
_register_command("doctor", "PLACE [OPTIONS]", "Try what saves rely on in a folder or bucket.")(
    examining.doctor_command
)
_register_command("prune", "RUN [OPTIONS]", "Delete the checkpoints that no rule keeps.")(pruning.prune_command)
_register_command("pin", "PATH [OPTIONS]", "Keep a checkpoint whatever any rule says.")(pruning.pin_command)
_register_command("unpin", "PATH", "Let rules decide about a checkpoint again.")(pruning.unpin_command)
_register_command("plan", "[FOLDER] [OPTIONS]", "Compare intervals between saves by what they cost.")(
    planning.plan_command
)
_register_command("report", "RUN [OPTIONS]", "Draw a run on one page: metrics, saves, sizes, drift.")(
    reporting.report_command
)
_register_command("check-resume", "[OPTIONS] SCRIPT [ARGS]", "Prove that a script resumes exactly.", _SCRIPT)(
    checking.check_resume
)


def main() -> None:
    """Run `ft-ckpt` on the arguments of the process.

    Exit code 0; 1 when a check failed, two differ or there was nothing to undo; 2 for an error, told in one line; 141
    when nobody reads what it prints.
    """
    accept_any_text()
    sys.excepthook = _print_crash
    warnings.showwarning = lambda message, *_rest, **_more: print_lines(f"{_NAME}: {message}", file=sys.stderr)
    if _COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name=_NAME, standalone_mode=False))
    except _UsageError as error:
        print_lines(f"{_NAME}: {_parser_message(error)}", file=sys.stderr)
    except (CheckpointError, OSError) as error:
        print_lines(f"{_NAME}: {error}", file=sys.stderr)
    sys.exit(2)


def tensorflow_to_h5() -> None:
    """Run `ft-ckpt convert` on a checkpoint of TensorFlow and an HDF5 file to be: `tensorflow-to-h5 SRC DST`."""
    sys.argv[1:] = ["convert", *sys.argv[1:], "--format", "h5"]
    main()


def h5_to_tensorflow() -> None:
    """Run `ft-ckpt convert` on a file and a folder for TensorFlow to be: `h5-to-tensorflow SRC DST`."""
    sys.argv[1:] = ["convert", *sys.argv[1:], "--format", "tensorflow"]
    main()


def _print_crash(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    print_lines(*"".join(traceback.format_exception(kind, error, at)).split("\n"), file=sys.stderr)


def _parser_message(error: Any) -> str:
    """What the parser objects to, as our own errors say it."""
    path = error.ctx.command_path if error.ctx else _NAME
    command = path.removeprefix(_NAME).strip()
    text = error.format_message().rstrip(".").replace("\n", " ")
    return f"{command + ': ' if command else ''}{text}; see `{path} --help`"
