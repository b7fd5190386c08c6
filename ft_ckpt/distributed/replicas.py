"""Names and places of what single ranks hold of a tensor that several ranks have."""

import json
from dataclasses import replace

from ft_ckpt.distributed.sharding import OwnedSharding, Sharding
from ft_ckpt.distributed.tensor_info import Source

WEIGHTS = "weights"  # the folder, in such names, of the model that is saved


def place_of(sharding: Sharding, rank: int) -> str:
    """Where in the tensor the part of `rank` lies: its offsets and sizes as JSON, "" for all of it."""
    mine = sharding.local_box(rank)
    return "" if mine is None or mine.sizes == sharding.view else json.dumps([mine.offsets, mine.sizes])


def own_name(name: str, rank: int) -> str:
    """The stored name of what `rank` alone has of the tensor `name`."""
    return f"rank-{rank}/{name}"


def own_part(source: Source, rank: int) -> Source:
    """What `rank`, this one, holds of the source, as a tensor for itself: as `own_name` is stored."""
    mine = source.sharding.local_box(rank)
    if mine is None or not place_of(source.sharding, rank):
        return source
    return replace(source, shape=mine.sizes, sharding=OwnedSharding(mine.sizes, None))
