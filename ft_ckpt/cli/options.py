"""Declares options that several commands share, and prints to the standard streams."""

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
from ft_ckpt.messages import expected_one_of, printable


def add_json(parser: ArgumentParser) -> None:
    """Declare --json, as `as_json`."""
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="Print the result as JSON."
    )


def add_force(parser: ArgumentParser) -> None:
    """Declare --force."""
    parser.add_argument("--force", action="store_true", help="Replace existing files.")


def add_dry_run(parser: ArgumentParser) -> None:
    """Declare --dry-run."""
    parser.add_argument(
        "--dry-run", action="store_true", help="Print what would be done; change nothing."
    )


def one_of(*choices: str) -> Callable[[str], str]:
    """Return the argument type of one of `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ArgumentTypeError(f"{text}: {expected_one_of(text, choices)}")
        return text

    return parse


def bounded(
    kind: Callable[[str], float], low: float, high: float = math.inf
) -> Callable[[str], float]:
    """Return the argument type of a finite number from `low` to `high`."""
    number = "a whole number" if kind is int else "a number"

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = kind(text)
            if low <= value <= high and math.isfinite(value):
                return value
        upper = "" if math.isinf(high) else f" to {high:g}"
        raise ArgumentTypeError(f"{text}: expected {number} from {low:g}{upper}")

    return parse


# Control characters (as characters or as undecodable bytes), line separators, and marks that change
# the direction of text.
_CONTROLS = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\udc80-\udc9f]"
)
# a shell reports this exit code of a program that SIGPIPE has ended
_BROKEN_PIPE = 141


def accept_any_text() -> None:
    """Make the standard streams print any text without an error.

    File names that cannot be decoded are printed as their bytes. Characters that cannot be encoded
    are printed as escapes.
    """
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
    """Print each of `lines` as one printable line without secrets, to standard output or `file`."""
    print(*map(printable, lines), sep="\n", file=file)


def print_path(path: object) -> None:
    """Print a path as its bytes, so that scripts can use it.

    A path with control characters is escaped instead.
    """
    print(printable(str(path)) if _CONTROLS.search(str(path)) else path)


@contextmanager
def checked_output() -> Iterator[None]:
    """Flush what the block prints.

    Raises TargetError if it cannot be written. On a broken pipe the process exits with 141. Without
    this context, Python would print a message of its own at exit, and exit with 120.
    """
    try:
        try:
            yield
        finally:
            _flush_output()
    except BrokenPipeError:
        sys.exit(_BROKEN_PIPE)


def _flush_output() -> None:
    if sys.stdout is None:  # closed by the parent process
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the buffer
        if isinstance(error, BrokenPipeError):
            raise
        raise TargetError(f"standard output: {error.strerror}; the output is incomplete") from error
