"""`ft-ckpt` in this process, in another or on a terminal, and checks of what it prints."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from ft_ckpt.cli import main

PROGRAM = "import sys; from ft_ckpt.cli import main; main()"
SECRET = "S3CRET"
# In the names of files, where some characters cannot be, and elsewhere.
NAME_MARK = f"\x1b]0;own\x07\x7f\u202e\r\nforged: ok\udc9b?sig={SECRET}"
_MARKUP = "<script>alert(1)</script>[/red] $\\x"
_URL = f"https://u:{SECRET}@h/p"
MARK = f"\x9b31m\u2028{NAME_MARK}&X-Amz-Credential={SECRET} {_MARKUP} {_URL}"


@dataclass(frozen=True)
class Answer:
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON on standard output. Raises ValueError for anything else, also for NaN."""
        return json.loads(self.out, parse_constant=_refuse)

    @property
    def rows(self) -> list[Any]:
        """The JSON documents on standard output, or the rows of the only one."""
        decoder = json.JSONDecoder(parse_constant=_refuse)
        rows: list[Any] = []
        rest = self.out.lstrip()
        while rest:
            document, stop = decoder.raw_decode(rest)
            rows += document if isinstance(document, list) else [document]
            rest = rest[stop:].lstrip()
        return rows


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def ft_ckpt(*words: object, encoding: str = "utf-8") -> Answer:
    """Run the command in this process; the encoding is that of the terminal."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    code: object = None
    with (
        patch.object(sys, "argv", ["ft-ckpt", *map(str, words)]),
        patch.object(sys, "excepthook", sys.excepthook),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("default")
        try:
            main()
        except SystemExit as end:
            code = end.code
        except Exception:  # as Python does: its hook is the command's
            sys.excepthook(*sys.exc_info())
            code = 1
    assert code is None or isinstance(code, int)
    return Answer(code or 0, _text(out, encoding), _text(err, encoding))


def _text(stream: io.TextIOWrapper, encoding: str) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(encoding, "surrogateescape")


def ft_ckpt_alone(*words: object, code: str = PROGRAM, **variables: str) -> Answer:
    """Run the command, or Python `code`, in a fresh interpreter, with further variables."""
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = {**os.environ, **variables}
    result = subprocess.run(command, capture_output=True, env=environment, check=False)
    out = result.stdout.decode("utf-8", "surrogateescape")
    err = result.stderr.decode("utf-8", "surrogateescape")
    return Answer(result.returncode, out, err)


def ft_ckpt_on_terminal(*words: object, columns: int = 80) -> tuple[int, list[str]]:
    """Run the command on a terminal; return its exit code and the lines there, with their codes."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
    )
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while block := os.read(ours, 1 << 16):
            output += block
    os.close(ours)
    text = output.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    return process.wait(), text.splitlines()


def problems_in(text: str, *, lines: bool = True) -> list[str]:
    """Return what is wrong with a text for a terminal, or for a line of a log if not `lines`."""
    checked = text.replace("\n", "") if lines else text
    controls = {letter for letter in checked if not letter.isprintable()}
    problems = [f"{letter!r} printed" for letter in sorted(controls)]
    if SECRET in text:
        problems.append("a secret printed")
    if any(line.startswith("forged") for line in text.split("\n")):
        problems.append("a line forged")
    return problems
