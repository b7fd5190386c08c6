"""Strided shards, by arithmetic: what FSDP2 leaves of tensor-parallel parts, and packed weights;
else refused.
"""

from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from seeds import examples

from ft_ckpt.ranks.sharding import Mesh, MeshSharding
from ft_ckpt.ranks.wrappers.strided_shards import cutting_of


def pieces(shape, grid, dims, factors) -> dict[tuple[int, ...], torch.Tensor] | None:
    """What each place of the grid has of a tensor of ascending numbers, flattened; None where that
    is refused.
    """
    cutting = cutting_of(shape, grid, dims, factors)
    if cutting is None:
        return None
    ranks = range(torch.Size(grid).numel())
    sharding = MeshSharding(
        cutting.view, Mesh(grid, tuple(ranks)), cutting.cuts, False, cutting.order
    )
    whole = torch.arange(torch.Size(shape).numel()).view(cutting.view)
    found = {}
    for rank, place in enumerate(product(*map(range, grid))):
        box = next(iter(sharding.local_boxes(rank)), None)
        lows = () if box is None else zip(box.offsets, box.sizes, strict=True)
        found[place] = (
            whole[tuple(slice(low, low + size) for low, size in lows)] if box else whole[:0]
        )
    return {place: one.reshape(-1) for place, one in found.items()}


def chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    some = list(tensor.chunk(count, dim))
    return some + [tensor.narrow(dim, 0, 0)] * (count - len(some))


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(2, 4))
def test_what_fsdp2_leaves_of_tensor_parallel_rows(rows, shards, parts):
    found = pieces((rows, 3), (shards, parts), (0, 0), (parts, 1))
    whole = torch.arange(rows * 3).view(rows, 3)
    for shard, part in product(range(shards), range(parts)) if found is not None else ():
        expected = chunks(chunks(whole, parts, 0)[part], shards, 0)[shard]
        assert torch.equal(found[shard, part], expected.reshape(-1))
    assert found is not None or rows % (shards * parts), "sizes that divide are never refused"


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 9), st.integers(2, 3), st.integers(1, 4), st.sampled_from([0, 1, 2]))
def test_packed_parts_are_cut_alike(size, packed, count, dim):
    shape = tuple(size * packed if number == dim else 2 for number in range(3))
    found = pieces(shape, (count,), (dim,), (packed,))
    assert found is not None
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for place in range(count):
        expected = torch.cat(
            [chunks(group, count, dim)[place] for group in whole.chunk(packed, dim)], dim
        )
        assert torch.equal(found[(place,)], expected.reshape(-1))


@pytest.mark.parametrize(
    ("shape", "grid", "dims", "factors"),
    [
        # torch's placements and FSDP2's own cut give ranks different rows
        ((9, 8), (4, 2), (0, 0), (2, 1)),
        ((7, 8), (2,), (0,), (2,)),  # packed, of a size that has no halves
        ((8, 8), (2, 2), (0, 0), (2, 2)),  # rows of packed parts
        ((8, 8), (2, 2, 2), (0, 0, 0), (1, 2, 1)),  # from right to left in part
    ],
)
def test_what_cannot_be_told_is_refused(shape, grid, dims, factors):
    assert cutting_of(shape, grid, dims, factors) is None


def test_one_dimension_cut_again_from_left_to_right():
    found = pieces((7,), (2, 2), (0, 0), (1, 1))
    assert found is not None
    assert {place: some.tolist() for place, some in found.items()} == {
        (0, 0): [0, 1],
        (0, 1): [2, 3],
        (1, 0): [4, 5],
        (1, 1): [6],
    }
