"""Parts of parameters that ZeRO cuts again, where the cut cannot be worked out: refused by name."""

from types import SimpleNamespace

import pytest
import torch

from ft_ckpt.distributed.sharding import Mesh, MeshSharding
from ft_ckpt.distributed.tensors import source_of_tensor
from ft_ckpt.distributed.zero import zero_partitions
from ft_ckpt.errors import SelectionError


class DeepSpeedZeroOptimizer(SimpleNamespace):
    """As much of stage 2 as is asked for."""


def partitions(sharding, **more):
    weight = torch.zeros(8, 2)
    source = source_of_tensor("q.weight", "q.weight", weight)
    object.__setattr__(source, "sharding", sharding or source.sharding)
    optimizer = DeepSpeedZeroOptimizer(
        optimizer=SimpleNamespace(param_groups=[{"params": [weight]}]),
        single_partition_of_fp32_groups=[torch.zeros(16)],
        bit16_groups=[[weight]],
        round_robin_bit16_groups=[[weight]],
        real_dp_process_group=[None],
        nccl_start_alignment_factor=2,
        **more,
    )
    return zero_partitions(optimizer, {id(weight): [source]})


def test_a_buffer_that_is_laid_out_otherwise():
    uneven = MeshSharding((12, 2), Mesh((2,), (0, 1)), (0,), sizes=(4, 8))
    with pytest.raises(SelectionError, match=r"q\.weight and 0 more: cut by tensor parallelism, in a flat buffer"):
        partitions(uneven, model_parallel_world_size=2)


def test_groups_that_are_no_copies_of_one_another():
    even = MeshSharding((16, 2), Mesh((2,), (0, 1)), (0,))
    with pytest.raises(SelectionError, match=r"q\.weight: groups of ranks that form no grid, \[0\] and \[0, 1\] here"):
        partitions(even, model_parallel_world_size=2)  # of a process alone


def test_model_parallelism_that_tells_nothing():
    assert partitions(None)
    with pytest.raises(SelectionError, match="model parallelism that says of no parameter how it is cut"):
        partitions(None, model_parallel_world_size=2)
