"""Layouts are data: each element has one owner, boxes are those of torch, and equal layouts are
equal.
"""

import math
import pickle
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from seeds import examples
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from ft_ckpt.ranks.sharding import (
    FlatSharding,
    Mesh,
    MeshSharding,
    OpaqueSharding,
    OwnedSharding,
    ReplicatedSharding,
)
from ft_ckpt.ranks.sharding.runs import MAX_RUNS
from ft_ckpt.storage.digests import Cut, chunk_of_rank, cut_chunks

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def mesh_shardings(draw):
    """A tensor over a grid of at most 3 dimensions, each of which cuts another dimension or none;
    rank 0 is in it.
    """
    view = draw(shapes)
    grid = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    dims = draw(st.permutations([*range(len(view)), *[None] * len(grid)]))[: len(grid)]
    ranks = draw(st.permutations(range(math.prod(grid))))
    return MeshSharding(view, Mesh(grid, tuple(ranks)), tuple(dims))


@st.composite
def flat_shardings(draw):
    numel, first = draw(st.integers(0, 40)), draw(st.integers(0, 20))
    shard = draw(st.integers(1, 20))
    members = range(max(1, -(-(first + numel) // shard)) + draw(st.integers(0, 2)))
    return FlatSharding(numel, first, shard, tuple(members))


@st.composite
def strided_shardings(draw):
    """One dimension cut twice, in either order."""
    view = draw(st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 3)))
    ranks = draw(st.permutations(range(6)))
    dim = draw(st.integers(0, 2))
    order = draw(st.sampled_from([(), (1, 0)]))
    return MeshSharding(view, Mesh((2, 3), tuple(ranks)), (dim, dim), order=order)


layouts = (
    mesh_shardings()
    | strided_shardings()
    | flat_shardings()
    | shapes.map(ReplicatedSharding)
    | st.builds(OwnedSharding, shapes, st.integers(0, 3))
)


@settings(max_examples=examples(200), deadline=None)
@given(layouts)
def test_each_element_is_in_the_box_of_one_owner(sharding):
    seen = torch.zeros(sharding.view, dtype=torch.int)
    for rank in sharding.owners:
        assert sharding.boxes(rank) == sharding.local_boxes(rank)
        for box in sharding.boxes(rank):
            seen[slices_of(box)] += 1
    assert bool((seen == 1).all())
    assert [
        rank for rank in range(200) if sharding.boxes(rank) and rank not in sharding.owners
    ] == []


def slices_of(box):
    return tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))


@settings(max_examples=examples(200), deadline=None)
@given(mesh_shardings())
def test_boxes_are_those_of_torch(sharding):
    placements = [Replicate() if dim is None else Shard(dim) for dim in sharding.cuts]
    grid = product(*(range(size) for size in sharding.mesh.shape))
    for rank, place in zip(sharding.mesh.ranks, grid, strict=True):
        expected = _compute_local_shape_and_global_offset(
            sharding.view, sharding.mesh.shape, lambda dim, place=place: place[dim], placements
        )
        boxes = [(box.sizes, box.offsets) for box in sharding.local_boxes(rank)]
        assert boxes == ([tuple(map(tuple, expected))] if all(expected[0]) else [])


@pytest.mark.parametrize(
    "sharding",
    [
        MeshSharding((4, 2), Mesh((2, 2), (4, 5, 6, 7)), (None, 0), is_replicated=True),
        FlatSharding(10, 3, 5, (4, 5, 6), is_replicated=True),
    ],
)
def test_a_group_without_rank_0_holds_again_and_contributes_nothing(sharding):
    assert (sharding.owners, sharding.is_sharded) == ((), True)
    assert not any(sharding.boxes(rank) for rank in range(8))
    assert sharding.local_boxes(4)
    assert not sharding.local_boxes(0)


@settings(max_examples=examples(50), deadline=None)
@given(layouts)
def test_layouts_are_hashable_comparable_and_can_be_sent(sharding):
    sharding.owners  # noqa: B018 - what is worked out once must not change what it equals
    again = pickle.loads(pickle.dumps(sharding))
    assert again == sharding
    assert (
        len({again, sharding, OpaqueSharding(sharding.view), OwnedSharding(sharding.view, None)})
        == 3
    )


@settings(max_examples=examples(400), deadline=None)
@given(layouts)
def test_runs_are_the_boxes(sharding):
    """Arithmetic says what looking at each owner's box would: whose every element is."""
    owners = np.full(sharding.view, -1)
    for rank in sharding.owners:
        for box in sharding.boxes(rank):
            owners[slices_of(box)] = rank
    expected, found = owners.reshape(-1), sharding.runs
    told = [
        rank
        for one in found
        for low, high, rank in cut_chunks(Cut(0, one.numel, one.chunk, one.lead, one.owner))
        for _ in range(low, high)
    ]
    if found:
        assert told == expected.tolist()
        return
    changes = 1 + int((expected[1:] != expected[:-1]).sum())
    is_nobodys = (
        not expected.size or int(expected.min()) < 0 or isinstance(sharding, ReplicatedSharding)
    )
    assert is_nobodys or changes > MAX_RUNS or isinstance(sharding, FlatSharding)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(0, 30),
    st.integers(0, 90),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 5),
)
def test_the_chunk_of_a_rank(start, size, chunk, lead, owner):
    cut = Cut(start, start + size, max(chunk, lead), lead, owner)
    expected = {rank: (low, high) for low, high, rank in cut_chunks(cut)}
    assert {rank: one for rank in range(110) if (one := chunk_of_rank(cut, rank))} == expected
