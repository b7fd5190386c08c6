"""Returns the ranks of this process: those of its process group, or itself alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ft_ckpt.errors import RanksDisagreeError
from ft_ckpt.ranks.key_value import AnsweringStore
from ft_ckpt.ranks.nodes import announce_node
from ft_ckpt.ranks.ranks import Ranks

_by_itself: ContextVar[bool] = ContextVar("_by_itself", default=False)
# By process group and channel. The key keeps the group alive, so that its id is not reused.
_shared: dict[tuple[Any, str], Ranks] = {}


def current_ranks(
    timeout_seconds: float = 600.0, channel: str = "", *, needs_group: bool = False
) -> Ranks:
    """Return the ranks of the default process group, or one rank if there is no group.

    There is one object for each process group and `channel`. It counts agreements, and all savers
    of a rank must count alike. A channel belongs to one thread, and separates the agreements of
    that thread from those of other threads. Raises RanksDisagreeError if this process was launched
    as one of several, as RANK and WORLD_SIZE show, and has no process group. With `needs_group`,
    WORLD_SIZE alone is enough.
    """
    import torch.distributed as dist  # here, because commands that list checkpoints need no torch

    alone = Ranks(0, 1, channel=channel)
    if _by_itself.get():
        return alone
    if not (dist.is_available() and dist.is_initialized()):
        _refuse_split_brain(needs_group)
        return alone

    if dist.get_world_size() == 1:
        return alone
    from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

    group = _get_default_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if (group, "") not in _shared:
        # The cached ranks are of a group that was destroyed, with its store.
        _shared.clear()
        store = AnsweringStore(_get_default_store())
        _shared[group, ""] = Ranks(rank, size, store)
        announce_node(store, size)

    # Each channel has its own client of the store, because a thread that waits in a client blocks
    # other threads that use it.
    if (group, channel) not in _shared:
        store = _shared[group, ""].store.clone()
        _shared[group, channel] = Ranks(rank, size, store, channel=channel)

    ranks = _shared[group, channel]
    ranks.timeout_seconds = ranks.store.silent_seconds = timeout_seconds
    return ranks


@contextmanager
def by_itself() -> Iterator[None]:
    """Let this process act as the only rank during the block.

    The objects that it saves or loads there must be whole on this process.
    """
    token = _by_itself.set(True)
    try:
        yield
    finally:
        _by_itself.reset(token)


def _refuse_split_brain(needs_group: bool) -> None:
    """Raise if this is one of several launched processes without a process group.

    Each of them would take itself for rank 0 and write the same folder.
    """
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1 and (needs_group or "RANK" in os.environ):
        raise RanksDisagreeError(
            f"WORLD_SIZE={launched} in the environment, but this process has no process group: "
            "every rank would take itself for the only one. Use Accelerator(cpu=True) or "
            "ACCELERATE_USE_CPU=true on a machine without accelerators, or "
            "torch.distributed.init_process_group; unset WORLD_SIZE if the process really is alone"
        )
