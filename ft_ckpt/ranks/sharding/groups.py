"""Returns the global ranks of the members of process groups of torch.distributed."""

from collections.abc import MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

_in_order: MutableMapping[Any, Sequence[int]] = WeakKeyDictionary()  # by process group


def has_process_group() -> bool:
    """Check whether this process has a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def global_rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return dist.get_rank() if has_process_group() else 0


def group_members(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, in the order of the group.

    Return rank 0 alone if this process has no process group.
    """
    return tuple(dist.get_process_group_ranks(group)) if has_process_group() else (0,)


def ranks_in_order(group: Any) -> Sequence[int]:
    """Return the `group_members`, cached for each group.

    Evenly spaced ranks are returned as a range: a group may have many, and a range is searched in
    constant time.
    """
    if not has_process_group():
        return group_members(None)
    key = dist.group.WORLD if group is None else group
    if key not in _in_order:
        members = group_members(group)
        step = members[1] - members[0] if len(members) > 1 else 1
        spaced = range(members[0], members[0] + len(members) * step, step)
        _in_order[key] = spaced if (*spaced,) == members else members
    return _in_order[key]


def is_subset_of_ranks(count: int) -> bool:
    """Check whether `count` is less than the number of all ranks.

    If only these ranks share a tensor, the other ranks hold replicas of its shards.
    """
    return has_process_group() and bool(count < dist.get_world_size())
