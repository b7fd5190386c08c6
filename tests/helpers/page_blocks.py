"""Runs the blocks of a page in the current folder, and compares their outputs with the page."""

import io
import os
import shlex
import subprocess
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from pages import Block, commands_of, dialogue_of, is_shown

from ft_ckpt.cli import main as ft_ckpt_command
from ft_ckpt.errors import CheckpointError

# the exit code of commands whose answer is shown in a block without outputs
ANSWERS_NO = {"diff": 1}


def run_script(blocks: list[Block], assumed: dict[str, Any]) -> int:
    """Run blocks that share a namespace, which begins with the `assumed` names.

    A block with a title becomes a file.
    """
    names = {"__name__": "__main__", **assumed}
    for block in blocks:
        if block.title:
            Path(block.title).write_text(block.code)
        elif block.language == "python":
            compare(block, block.code, block.answer, run_python(block, names))
        elif block.language == "sh":
            output = "".join(run_command(block, line) for line in commands_of(block.code))
            compare(block, block.code, block.answer, output)
        elif block.language == "console":
            for line, answer in dialogue_of(block.code):
                compare(block, line, answer, run_command(block, line, shown=True))
    return 0


def run_python(block: Block, names: dict[str, Any]) -> str:
    """Run a Python block; return its output.

    An error of ft_ckpt is printed where the page shows an answer.
    """
    code = compile("\n" * (block.line - 1) + block.code, f"{block.page}.md", "exec")
    output = io.StringIO()
    with redirect_stdout(output):
        try:
            exec(code, names)
        except CheckpointError as error:
            if block.answer is None:
                raise
            print(f"{type(error).__module__}.{type(error).__name__}: {error}")
    return output.getvalue()


def run_command(block: Block, line: str, *, shown: bool = False) -> str:
    """Run a command; return its output. It must succeed unless the page shows its output."""
    words = shlex.split(line, comments=True)
    if words[0] == "ft-ckpt":
        code, output = in_child(lambda: run_ft_ckpt(words))
    else:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        result = subprocess.run(["bash", "-c", line], text=True, **pipes)
        code, output = result.returncode, result.stdout
    command = words[1] if words[1:] else ""
    if code not in (0, ANSWERS_NO.get(command, 0)) and not shown:
        sys.exit(f"{block}: {line}\nended with {code}:\n{output}")
    return output


def run_ft_ckpt(words: list[str]) -> int:
    sys.argv = words
    ft_ckpt_command()
    return 0


def compare(block: Block, code: str, answer: str | None, output: str) -> None:
    """End with an error if the page shows another answer to `code` than this output."""
    if answer is not None and not is_shown(answer, output):
        sys.exit(f"{block}: {code}\n-- the page shows\n{answer}\n-- it answers\n{output}")


def in_child(action: Any) -> tuple[int, str]:
    """Do `action` in a fork of this process; return its exit code and its output."""
    with tempfile.TemporaryFile("w+") as log:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False))
            sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False))
            os._exit(exit_code_of(action))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        log.seek(0)
        return code, log.read()


def exit_code_of(action: Any) -> int:
    """Do `action`; print its error and return its exit code as an interpreter would."""
    try:
        return action() or 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
