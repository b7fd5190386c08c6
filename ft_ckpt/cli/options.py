"""Options and arguments that several commands share; the streams that they print to."""

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TextIO

import typer

from ft_ckpt.checkpoint import catalog
from ft_ckpt.checkpoint.catalog import CheckpointInfo
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import ConfigError, NotACheckpointError, TargetError
from ft_ckpt.formats.registry import written_formats
from ft_ckpt.messages import printable
from ft_ckpt.storage.place import Place, open_place

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_FORMATS = ", ".join(known.name for known in written_formats())
FormatOption = Annotated[str | None, typer.Option(help=f"Of {_FORMATS}; else by suffix.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="Cast floating-point tensors to float64, float32, bfloat16, float16.")
]
ShardOption = Annotated[str | None, typer.Option(help='Largest weight file of a folder, as in "5GB".')]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Read the result back and compare it, bit for bit.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there already.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


def given_words(context: typer.Context, *expected: str) -> list[str]:
    """The words that are no options, one for each `expected` name. Raises ConfigError for another number of them."""
    if len(context.args) != len(expected):
        given, command = " ".join(context.args) or "nothing", context.info_name
        raise ConfigError(f"{command}: {given} given, expected {' '.join(expected)}; see `ft-ckpt {command} --help`")
    return list(context.args)


def given_paths(context: typer.Context, *expected: str) -> list[str]:
    """The paths and URLs that are given, one for each `expected` name. Raises ConfigError for what is neither."""
    for word in given_words(context, *expected):
        open_place(word)
    return list(context.args)


def several_paths(context: typer.Context, expected: str) -> list[str]:
    """The words that are no options, two or more of them. Raises ConfigError for fewer."""
    if len(context.args) < 2:
        given, command = " ".join(context.args) or "nothing", context.info_name
        raise ConfigError(f"{command}: {given} given, expected {expected}; see `ft-ckpt {command} --help`")
    return given_paths(context, *context.args)


def only_place(context: typer.Context, expected: str = "PATH") -> Place:
    """What the one path or URL given leads to. Raises ConfigError for none or several, and for what is neither."""
    return open_place(given_words(context, expected)[0])


def run_checkpoints_in(run: Place) -> list[CheckpointInfo]:
    """The checkpoints of a run. Raises NotACheckpointError when the folder is a checkpoint itself."""
    infos = catalog.run_checkpoints(run)
    if not infos and run.folder.stat(MANIFEST_NAME) is not None:
        raise NotACheckpointError(f"{run}: a checkpoint, expected the folder of a run; `ft-ckpt show` shows one")
    return infos


def run_folder(context: typer.Context) -> Place:
    """The one folder given, of a run. Raises NotACheckpointError when it is not there."""
    run = only_place(context, "RUN")
    if not run.is_folder:
        raise NotACheckpointError(f"{run}: no such folder; give one that holds checkpoints")
    return run


# Control characters, in undecodable bytes too; line separators; marks of direction.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\udc80-\udc9f]")
_NOBODY_READS = 141  # what a shell says of a program that a closed pipe has ended


def accept_any_text() -> None:
    """Print names of files as the bytes that they are, and other letters that the terminal lacks as escapes."""
    codecs.register_error("ft_ckpt", _escape_text)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ft_ckpt")


def _escape_text(error: UnicodeError) -> tuple[str | bytes, int]:
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def print_lines(*lines: str, file: TextIO | None = None) -> None:
    """Print `lines`, each in one printable line, to standard output or `file`: every output of the command."""
    print(*map(printable, lines), sep="\n", file=file)


def print_path(path: object) -> None:
    """Print a path as the bytes that it is, so that a script can use it; where it has control characters, escaped."""
    print(printable(str(path)) if _CONTROLS.search(str(path)) else path)


@contextmanager
def checked_output() -> Iterator[None]:
    """All that the block prints has been written at its end. Raises TargetError; exits with 141 when nobody reads.

    Left to the end of the process it would be a complaint of Python's, and 120.
    """
    try:
        try:
            yield
        finally:
            _flush_output()
    except BrokenPipeError:
        sys.exit(_NOBODY_READS)


def _flush_output() -> None:
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still waiting to be written
        if isinstance(error, BrokenPipeError):
            raise
        raise TargetError(f"standard output: {error.strerror}; what was to be printed is not all there") from error
