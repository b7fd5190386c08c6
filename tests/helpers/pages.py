"""The code blocks of a page in order, each with the output that the page shows; cells of notebooks.

A comment on the line above a fence changes how its block is run; readers do not see it:

    <!-- not run: REASON -->      the block cannot run in a test
    <!-- new script -->           the names of the blocks before are undefined from here on
    <!-- run by tests/clients --> the block needs programs that only tests/clients has

A `diff` block shows a change of a Python script: the lines after the change are run.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

RUN = {"python", "sh", "console"}
PARSED = {"yaml", "json", "toml"}
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?: +(?P<rest>.*))?$")
_COMMENT = re.compile(
    r"<!-- (?P<word>not run|new script|run by tests/clients)(?:: (?P<reason>.+))? -->"
)
_TITLE = re.compile(r'title="([^"]+)"')
# parts of an output that differ from run to run, and their placeholders in both texts
_CHANGING = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?( UTC|Z)?"), "<date>"),
    (re.compile(r"\b[0-9a-f]{8,}\b"), "<id>"),
    (re.compile(r"\bby \w+:"), "by <user>:"),
    (re.compile(r"\b\d+(\.\d+)? (B|KB|MB|GB|ms|s|min|h|d)\b(/s)?"), "<amount>"),
    (re.compile(r"\b\d+\.\d{3,}(e-?\d+)?\b"), "<number>"),
    (re.compile(r"-{3,}|[ \t]+"), " "),
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int  # of its first line of code
    language: str
    code: str
    title: str | None = None
    not_run: str | None = None  # the reason
    begins_script: bool = False
    is_of_clients: bool = False
    answer: str | None = None  # the output that the page shows below it

    def __str__(self) -> str:
        return f"{self.page}.md:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in order.

    A `text` block right below one that is run is the answer of that one.
    """
    blocks: list[Block] = []
    end = -1  # line after the last block, with empty lines behind it
    for block, last, above in _fences(page):
        is_below_run = bool(blocks) and above == end and blocks[-1].language in RUN
        if block.language == "text" and is_below_run:
            blocks[-1] = replace(blocks[-1], answer=block.code)
        else:
            blocks.append(block)
        end = last
    return blocks


def _fences(page: Path) -> Iterator[tuple[Block, int, int]]:
    """Yield each block with the line it ends in, and the last line above it that is not empty."""
    lines = page.read_text(encoding="utf-8").splitlines()
    opened, mark, above = None, None, -1
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened = number, fence
        elif opened is not None and line.strip() == "```":
            start, fence = opened
            indent = len(fence["indent"])
            code = "".join(f"{code_line[indent:]}\n" for code_line in lines[start + 1 : number])
            title = _TITLE.search(fence["rest"] or "")
            word, reason = (mark["word"], mark["reason"]) if mark else (None, None)
            language = fence["language"] or "text"
            if language == "diff":
                language, code = "python", after_change(code)
            block = Block(
                page.stem,
                start + 2,
                language,
                code,
                title=title and title[1],
                not_run=reason if word == "not run" else None,
                begins_script=word == "new script",
                is_of_clients=word == "run by tests/clients",
            )
            yield block, number, above
            opened, mark, above = None, None, number
        elif opened is None and line.strip():
            mark, above = _COMMENT.fullmatch(line.strip()), number


def after_change(diff: str) -> str:
    """Return the lines of a diff after the change; those that it removes are empty."""
    lines = diff.splitlines()
    return "".join("\n" if line.startswith("-") else f"{line[1:]}\n" for line in lines)


def scripts_of(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    """Return the blocks that share their names, by the number of their script on the page."""
    scripts: dict[int, list[Block]] = {}
    number = 0
    for block in blocks:
        number += block.begins_script
        scripts.setdefault(number, []).append(block)
    return scripts


def cells_of(notebook: Path) -> list[Block]:
    """Return the code cells of a notebook as blocks of one script.

    Shell commands in them become comments.
    """
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    blocks = []
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        code = "".join(cell["source"])
        file = re.match(r"%%writefile (.+)\n", code)
        code = re.sub(r"^([!%])", r"# \1", code, flags=re.MULTILINE)
        title = file[1] if file else None
        blocks.append(Block(f"{notebook.name}, cell {number}", 1, "python", code, title=title))
    return blocks


def commands_of(code: str) -> list[str]:
    """Return the command lines of a shell block without comments; continuations are joined."""
    lines = [line.strip() for line in code.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def dialogue_of(code: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with the output that is shown below it."""
    pairs = []
    for turn in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, _, output = turn.replace("\\\n", " ").partition("\n")
        pairs.append((command.strip(), output))
    return pairs


def is_shown(expected: str, actual: str) -> bool:
    """Check whether an output matches the page.

    `...` matches any lines or words, a time or a size any other.
    """
    pattern = ""
    for line in _comparable(expected):
        pattern += "(?:.*\n)*" if line == "..." else _any_words(line)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _comparable(actual))) is not None


def _any_words(line: str) -> str:
    return ".*".join(map(re.escape, line.split("..."))) + "\n"


def _comparable(text: str) -> list[str]:
    for pattern, word in _CHANGING:
        text = pattern.sub(word, text)
    return [line.strip() for line in text.splitlines() if line.strip()]
