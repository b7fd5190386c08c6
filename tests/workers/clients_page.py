"""Runs the blocks of a page that need the programs of tests/clients: `clients_page.py PAGE FOLDER`.

Prints "done", or the block that failed.
"""

import os
import sys
from pathlib import Path

import given
from page_blocks import run_script
from pages import blocks_of
from places import ROOT


def do(name: str, folder: Path) -> None:
    """Run the blocks in `folder`, in an order that a reader would follow, with the names that the
    page assumes.
    """
    os.chdir(folder)
    blocks = [block for block in blocks_of(ROOT / "docs" / f"{name}.md") if block.is_of_clients]
    assert blocks, f"docs/{name}.md has no block that tests/clients runs"
    run_script(blocks, given.names_for(name, 0))


if __name__ == "__main__":
    page, place = sys.argv[1:]
    do(page, Path(place))
    print("done")
