"""Numbers the checkpoints that have no step, in the order they are saved in. Needs no torch."""

import re
from contextlib import closing

from ft_ckpt.checkpoint.catalog import visible_folders
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CorruptError
from ft_ckpt.storage.store import Store, read_range

_HEAD_BYTES = 64 << 10  # of a manifest: the fields that are one number or one line


def next_number(target: Store, beside: Store) -> int:
    """The number of a checkpoint without a step that is saved to `target`: one more than the largest `beside` it."""
    numbers = []
    for store in (target, beside):
        below = [store.within(folder.name) for folder in visible_folders(store.list_folder())]
        numbers += [_number_in_head(each) for each in (store, *below)]
    return 1 + max(numbers)


def _number_in_head(store: Store) -> int:
    """The number of the checkpoint in `store`, from the head of its manifest alone; 0 when it has none."""
    try:
        with closing(store.open(MANIFEST_NAME)) as file:
            head = read_range(file, 0, _HEAD_BYTES)
    except CorruptError:
        return 0
    found = re.search(rb'^  "number": (\d{1,18}),$', head, re.MULTILINE)
    return int(found[1]) if found else 0
