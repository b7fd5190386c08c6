"""Scripts that run in a terminal, as a user runs them, and what it shows."""

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
from typing import Any

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def shown_in_terminal(script: str, folder: Path) -> str:
    """Run the Python `script` in `folder`, on a terminal; return its output. It must succeed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # rows and columns
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    environment = {**os.environ, "TERM": "xterm"}
    streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen([sys.executable, path], cwd=folder, env=environment, **streams)
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
    """Return the lines that stay on the screen after `output`, with the controls that bars use."""
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
            before, after = lines[row].ljust(column)[:column], lines[row][column + len(token) :]
            lines[row] = before + token + after
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]
