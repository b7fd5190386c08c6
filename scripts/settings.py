"""Writes docs/settings.md from the docstring of each field of `SaverConfig` and `Every`."""

import ast
import inspect
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from ft_ckpt import Every, SaverConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_HEAD = """# Settings

Every setting with its default, meaning and unit. Values that cannot work raise one error that names
all problems, when the object is made. (`python scripts/settings.py` writes this page from the
source.)

## `SaverConfig`

Pass them to `CheckpointSaver` as keywords, or together as `config=SaverConfig(...)`. `checkpointed`
takes them too, except `every`, because the Trainer decides when to save. Both also take `on_saved`,
functions that are called [after each save](push.md#after-each-save).
"""
_TAIL = """
## `Keep`

The checkpoints of a run that stay: see [What to keep](schedule.md#what-to-keep).
"""


def page() -> str:
    """Return the whole page as Markdown."""
    every = f"## `Every`\n\nWhen `saver.step()` saves.\n\n{table(Every)}"
    return f"{_HEAD}\n{table(SaverConfig)}\n{every}{_TAIL}"


def table(kind: type) -> str:
    """Make a table with a row for each field of a dataclass: name, default, and docstring."""
    meanings = _docstrings(kind)
    text = "| setting | default | meaning |\n|---|---|---|\n"
    for field in fields(kind):
        text += f"| `{field.name}` | `{_shown(field.default)}` | {meanings[field.name]} |\n"
    return text


def _docstrings(kind: type) -> dict[str, str]:
    """Return the string below each annotated name in the source of a class."""
    body = ast.parse(inspect.getsource(kind)).body[0].body
    docstrings = {}
    for name, string in pairwise(body):
        if isinstance(name, ast.AnnAssign) and isinstance(string, ast.Expr):
            text = " ".join(string.value.value.split())
            docstrings[name.target.id] = _with_links(text.replace("|", "\\|"))
    return docstrings


def _with_links(words: str) -> str:
    """Replace pages that are named by their path by links with their titles."""
    return re.sub(r"docs/(\w+\.md)", lambda path: f"[{_title(path[1])}]({path[1]})", words)


def _title(page: str) -> str:
    return (PAGE.parent / page).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def _shown(value: Any) -> str:
    if type(value) is int and value >= 1 << 16 and value % (1 << 16) == 0:
        return f"{value >> 20} << 20"
    return repr(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: written")
