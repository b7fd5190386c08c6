"""Runs a script in a terminal, as a user does, and gives what it shows."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def shown_in_terminal(script: str, folder: Path) -> str:
    """The raw output of the Python `script`, whose streams are a terminal; it runs in `folder` and
    must succeed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # rows and columns
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, path],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env=environment,
    )
    os.close(theirs)
    blocks = []
    try:
        while block := os.read(ours, 1 << 16):
            blocks.append(block)
    except OSError:  # the script has ended
        pass
    finally:
        os.close(ours)
    output = b"".join(blocks).decode()
    assert process.wait() == 0, output
    return output


def screen_after(output: str) -> list[str]:
    """The lines that stay on the screen after `output`, of the controls that bars use."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif match := re.fullmatch(r"\x1b\[(\d*)A", token):
            row = max(0, row - int(match[1] or 1))
        elif re.fullmatch(r"\x1b\[2?K", token):
            lines[row] = "" if token == "\x1b[2K" else lines[row][:column]
        elif not _CONTROL.fullmatch(token):
            lines[row] = (
                lines[row].ljust(column)[:column] + token + lines[row][column + len(token) :]
            )
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]
