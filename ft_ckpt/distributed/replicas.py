"""Names and places of the parts of replicated tensors that single ranks hold otherwise than the first."""

import json
from dataclasses import replace

from ft_ckpt.distributed.sharding import Box, OwnedSharding, Sharding
from ft_ckpt.distributed.source import Source

WEIGHTS = "weights"  # the folder, in such names, of the model that is saved


def place_of(sharding: Sharding, rank: int) -> str:
    """Where in the tensor the part of `rank` lies: its offsets and sizes as JSON, "" for all of it."""
    mine = _box_of_replica(sharding, rank)
    return "" if mine is None or mine.sizes == sharding.view else json.dumps([mine.offsets, mine.sizes])


def _box_of_replica(sharding: Sharding, rank: int) -> Box | None:
    """What `rank` has of a tensor that others have, too: one box, or nothing."""
    return next(iter(sharding.local_boxes(rank)), None)


def own_name(name: str, rank: int) -> str:
    """The stored name of the elements that `rank` alone has of the tensor `name`."""
    return f"rank-{rank}/{name}"


def own_part(source: Source, rank: int) -> Source:
    """The elements that `rank`, this one, holds of the source, as a tensor of their own: stored under `own_name`."""
    mine = _box_of_replica(source.sharding, rank)
    if mine is None or not place_of(source.sharding, rank):
        return source
    return replace(source, shape=mine.sizes, sharding=OwnedSharding(mine.sizes, None))
