"""Facts of torch's process groups that layouts depend on; without a group, those of a single rank."""

from typing import Any


def global_rank() -> int:
    """This process's number among all; 0 without a process group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def group_members(group: Any) -> tuple[int, ...]:
    """The global ranks of a process group in its order; rank 0 alone without one."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)


def is_subset_of_ranks(count: int) -> bool:
    """Whether `count` ranks that hold a tensor together are not all: then others hold it again."""
    import torch.distributed as dist

    return dist.is_initialized() and bool(count < dist.get_world_size())
