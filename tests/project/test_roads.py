"""The steps that pages list are the calls of the functions that take them."""

import ast
import builtins
import importlib
import inspect
import re
import textwrap

import pytest
from places import ROOT

# Each road: the function whose body is its steps, the column of ft_ckpt/README.md and the section
# of docs/how-it-works.md that list them.
ROADS = {
    "save": ("ft_ckpt.saving.execute:try_save", "Save", "A save"),
    "load": ("ft_ckpt.model.load.loading:load_model", "Load", "Load"),
    "resume": ("ft_ckpt.runs.resume.resuming:resume_run", "Resume", "Resume"),
    "publish": ("ft_ckpt.extensions.rl.publishing.steps:publish", "Publish", "A publish"),
}
MAX_STEPS = 8
ITEM = re.compile(r"^ *\d+\. `(\w+)`", re.MULTILINE)
ROW = re.compile(r"^\| \d+ \|(.*)\|$", re.MULTILINE)
STEP = re.compile(r" *`(\w+)`")


def steps_of(function):
    """Returns the names of the public functions that the body of `function` calls, in order.

    Methods, classes, builtins and private functions are no steps, nor is opening the place of an
    argument.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [
        (node.lineno, node.func.id)
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id[0].islower()
    ]
    public = [name for _, name in sorted(names) if not hasattr(builtins, name)]
    public = [name for name in public if name != "open_place"]
    return list(dict.fromkeys(public))


def column(title):
    """Returns the steps that the table of ft_ckpt/README.md lists under this title."""
    text = (ROOT / "ft_ckpt/README.md").read_text(encoding="utf-8")
    header = re.search(r"^\| \|(.* Publish: .*)\|$", text, re.MULTILINE)[1].split("|")
    titles = [cell.partition(":")[0].strip() for cell in header]
    cells = [row.split("|")[titles.index(title)] for row in ROW.findall(text)]
    return [STEP.match(cell)[1] for cell in cells]


def section(title):
    """Returns the section of docs/how-it-works.md with this title."""
    text = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    return re.search(rf"^## {title}\n.*?(?=^## |\Z)", text, re.M | re.S)[0]


@pytest.mark.parametrize("road", ROADS)
def test_pages_list_the_steps_of_a_road(road):
    place, in_plan, in_docs = ROADS[road]
    module, _, name = place.partition(":")
    steps = steps_of(getattr(importlib.import_module(module), name))
    assert len(steps) <= MAX_STEPS
    assert column(in_plan) == steps
    assert ITEM.findall(section(in_docs)) == steps
