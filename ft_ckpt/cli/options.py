"""Options that several commands share; the streams that they print to."""

import codecs
import io
import math
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from ft_ckpt.errors import TargetError
from ft_ckpt.messages import printable


def add_json(parser: ArgumentParser) -> None:
    """Declare --json, as `as_json`."""
    parser.add_argument("--json", action="store_true", dest="as_json", help="Print JSON.")


def add_force(parser: ArgumentParser) -> None:
    """Declare --force."""
    parser.add_argument("--force", action="store_true", help="Replace what is there already.")


def add_dry_run(parser: ArgumentParser) -> None:
    """Declare --dry-run."""
    parser.add_argument("--dry-run", action="store_true", help="Print what would be done, and do nothing.")


def bounded(kind: Callable[[str], float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """The argument type of a number from `least` to `most`."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = kind(text)
            if least <= value <= most:
                return value
        upper = "" if math.isinf(most) else f" to {most:g}"
        raise ArgumentTypeError(f"{text}: expected a number from {least:g}{upper}")

    return parse


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
