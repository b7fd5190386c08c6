"""Names and places of what single ranks hold of a tensor that several ranks have."""

import json
from dataclasses import replace

from ft_ckpt.distributed.sharding import Holding
from ft_ckpt.distributed.wrappers import Source

WEIGHTS = "weights"  # the folder, in such names, of the model that is saved


def place_of(holding: Holding) -> str:
    """Where in the tensor this rank's part lies: its offsets and sizes as JSON, "" for all of it."""
    mine = holding.mine
    return "" if mine is None or mine.sizes == holding.view else json.dumps([mine.offsets, mine.sizes])


def own_name(name: str, rank: int) -> str:
    """The stored name of what `rank` alone has of the tensor `name`."""
    return f"rank-{rank}/{name}"


def own_part(source: Source) -> Source:
    """What this rank holds of the source, as a tensor for itself: as `own_name` is stored."""
    holding = source.holding
    if holding.mine is None or not place_of(holding):
        return source
    sizes = holding.mine.sizes
    mine = replace(holding.mine, offsets=(0,) * len(sizes))
    return replace(source, shape=sizes, holding=Holding(sizes, holding.local, (), lambda rank: None, mine=mine))
