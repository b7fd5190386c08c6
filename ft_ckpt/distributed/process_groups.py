"""Facts of torch's process groups that layouts depend on; without a group, those of a single rank."""

from collections.abc import MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

_in_order: MutableMapping[Any, Sequence[int]] = WeakKeyDictionary()  # by process group


def global_rank() -> int:
    """This process's number among all; 0 without a process group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def group_members(group: Any) -> tuple[int, ...]:
    """The global ranks of a process group in its order; rank 0 alone without one."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)


def ranks_in_order(group: Any) -> Sequence[int]:
    """The `group_members`, where they are evenly spaced as a range: many tensors have it, of however many ranks."""
    import torch.distributed as dist

    known = dist.group.WORLD if group is None else group
    if known is None:
        return group_members(None)
    if known not in _in_order:
        members = group_members(group)
        step = members[1] - members[0] if len(members) > 1 else 1
        even = range(members[0], members[0] + len(members) * step, step) if step else members
        _in_order[known] = even if (*even,) == members else members
    return _in_order[known]


def groups_beside(members: Sequence[int], kin: Sequence[int]) -> dict[int, tuple[int, ...]] | None:
    """The groups of ranks in a grid: of each rank of a row, `kin`, its column, from the column of this rank, `members`.

    None where these do not make up all ranks, each once: where columns are no copies of another, some ranks further on.
    """
    import torch.distributed as dist

    found = {one: tuple(rank + one - global_rank() for rank in members) for one in kin}
    covered = sorted(rank for group in found.values() for rank in group)
    return found if covered == [*range(dist.get_world_size() if dist.is_initialized() else 1)] else None


def is_subset_of_ranks(count: int) -> bool:
    """Whether `count` ranks that hold a tensor together are not all: then others hold it again."""
    import torch.distributed as dist

    return dist.is_initialized() and bool(count < dist.get_world_size())
