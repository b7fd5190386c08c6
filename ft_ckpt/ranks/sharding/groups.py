"""Process groups of torch.distributed: the global ranks of their members."""

from collections.abc import MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

_in_order: MutableMapping[Any, Sequence[int]] = WeakKeyDictionary()  # by process group


def global_rank() -> int:
    """The rank of this process; 0 without a process group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def group_members(group: Any) -> tuple[int, ...]:
    """The global ranks of a process group in its order; rank 0 alone without one."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)


def ranks_in_order(group: Any) -> Sequence[int]:
    """The `group_members`, as a range if they are evenly spaced, because groups may be large."""
    import torch.distributed as dist

    key = dist.group.WORLD if group is None else group
    if key is None:
        return group_members(None)
    if key not in _in_order:
        members = group_members(group)
        step = members[1] - members[0] if len(members) > 1 else 1
        spaced = range(members[0], members[0] + len(members) * step, step)
        _in_order[key] = spaced if (*spaced,) == members else members
    return _in_order[key]


def is_subset_of_ranks(count: int) -> bool:
    """Whether `count` is less than the number of ranks: then the other ranks hold replicas."""
    import torch.distributed as dist

    return dist.is_initialized() and bool(count < dist.get_world_size())
