"""Standard output and errors: any text can be printed, and what could not be written is an error."""

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ft_ckpt.errors import TargetError
from ft_ckpt.messages import printable

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
