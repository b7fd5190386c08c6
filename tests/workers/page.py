"""Run the blocks of a page in order, in a folder of its own.

A case is the page's path in the repository.

If the folder of a case has a `page.md`, that page is run instead.
"""

import os
from pathlib import Path

import harness
from given import names_for
from page_blocks import in_child, run_script
from pages import Block, blocks_of, scripts_of
from places import ROOT

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def do(name: str, folder: Path) -> None:
    """Run the scripts of a page, each in its own process."""
    page = folder / "page.md"
    blocks = blocks_of(page if page.exists() else ROOT / name)
    os.chdir(folder)
    for number, script in scripts_of(blocks).items():
        told = [block for block in script if block.not_run is None and not block.is_of_clients]
        code, output = in_child(lambda number=number, told=told: run_one(told, number))
        assert code == 0, output


def run_one(blocks: list[Block], number: int) -> int:
    """Run the blocks of script `number` of a page, with the names and files that it assumes."""
    return run_script(blocks, names_for(blocks[0].page, number)) if blocks else 0


if __name__ == "__main__":
    for variable in LAUNCHED:  # a page's script is started by itself
        os.environ.pop(variable, None)
    os.environ.update(
        ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", COLUMNS="110"
    )
    harness.run(do)
