"""The notebooks run from top to bottom, and print what they show."""

import re
import runpy

import nbformat
import pytest
from pages import is_shown
from places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KEY_RESULTS = {
    "lora_killed_and_resumed": [
        "120 steps, exit code 0",
        "exit code -9",
        "continued with step",
        "steps that were trained: 120 of 120",
        "all losses equal: True",
        "final adapters equal: True",
        "runs/killed/final: ok",
    ],
    "adapter_to_hub": [
        "adapter: ok",
        "merged: ok",
        "the adapter changes the logits by more than 1: True",
        "merged and adapted differ by less than 0.0001: True",
        "new: True",
        "new: False",
        "pulled and merged are equal: True",
        "loaded by name and merged are equal: True",
        "model.safetensors: digest",
    ],
}
MOST_BYTES = 100_000
CHANGING = [  # besides those of pages
    (re.compile(r"\x1b\[\d*m"), ""),  # bold heads of tables
    (re.compile(r"\b(step |checkpoint-)\d+"), r"\1N"),  # a kill comes when it comes
    (re.compile(r"\b\d\.\d+\b"), "LOSS"),  # other processors, other last digits
]

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def printed(notebook):
    """All that the cells print, as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def settled(text):
    for pattern, word in CHANGING:
        text = pattern.sub(word, text)
    return text


@pytest.mark.slow
@notebooks
def test_a_notebook_prints_what_it_shows(path, tmp_path):
    made = runpy.run_path(str(ROOT / "scripts/notebooks.py"))["run_notebook"](path, tmp_path)
    shown, text = printed(nbformat.read(path, as_version=4)), printed(made)
    assert [words for words in KEY_RESULTS[path.stem] if words not in text] == []
    assert is_shown(settled(shown), settled(text)), (
        f"{path.name} shows\n{shown}\n-- it prints\n{text}"
    )


@notebooks
def test_a_notebook_is_kept_small_and_was_run_from_top_to_bottom(path):
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < MOST_BYTES
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert [
        output
        for output in outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ] == []


def test_every_notebook_is_linked():
    for page, folder in {"README.md": "notebooks", "docs/index.md": "../notebooks"}.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [path.name for path in NOTEBOOKS if f"]({folder}/{path.name})" not in text] == []
