"""Runs the blocks of a page in the current folder, and compares what they print with what the page
shows.
"""

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
    """Run blocks that share a namespace, which begins with the `assumed` names; a block with a
    title becomes a file.
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
    """What a block prints; an error of ours is printed where the page shows an answer."""
    code = compile("\n" * (block.line - 1) + block.code, f"{block.page}.md", "exec")
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            exec(code, names)
        except CheckpointError as error:
            if block.answer is None:
                raise
            print(f"{type(error).__module__}.{type(error).__name__}: {error}")
    return printed.getvalue()


def run_command(block: Block, line: str, *, shown: bool = False) -> str:
    """The output of a command; it must succeed unless the page shows its output."""
    words = shlex.split(line, comments=True)
    if words[0] == "ft-ckpt":
        code, output = in_child(lambda: run_ft_ckpt(words))
    else:
        done = subprocess.run(
            ["bash", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        code, output = done.returncode, done.stdout
    wanted = {0, ANSWERS_NO.get(words[1] if words[1:] else "", 0)}
    if code not in wanted and not shown:
        sys.exit(f"{block}: {line}\nended with {code}:\n{output}")
    return output


def run_ft_ckpt(words: list[str]) -> int:
    sys.argv = words
    ft_ckpt_command()
    return 0


def compare(block: Block, told: str, answer: str | None, output: str) -> None:
    if answer is not None and not is_shown(answer, output):
        sys.exit(f"{block}: {told}\n-- the page shows\n{answer}\n-- it answers\n{output}")


def in_child(action: Any) -> tuple[int, str]:
    """The exit code and output of `action` in a process of its own, which begins where this one
    is.
    """
    with tempfile.TemporaryFile("w+") as log:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(os.fdopen(handle, "wb", closefd=False)) for handle in (1, 2)
            )
            os._exit(exit_code_of(action))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        log.seek(0)
        return code, log.read()


def exit_code_of(action: Any) -> int:
    """The status that an interpreter would end with, after what it would have printed."""
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
