"""Exchanges the names of the nodes of the ranks; errors name them if there are several."""

import os
import socket
import time
from typing import Any

# An error waits at most this long for ranks that have not announced their nodes yet.
_ANNOUNCE_SECONDS = 1.0
_POLL_SECONDS = 0.1


def launch_prefix(size: int) -> str:
    """Return the prefix of all keys in the store of `size` ranks.

    The prefix separates these ranks from the ranks before a restart by torchrun, which keeps the
    store.
    """
    return f"ft_ckpt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-{size}"


def announce_node(store: Any, size: int) -> None:
    """Announce the host name of this rank; each rank calls it once."""
    prefix = launch_prefix(size)
    name = socket.gethostname()
    first = store.compare_set(f"{prefix}/node", "", name)
    if first.decode() != name:
        store.set(f"{prefix}/several-nodes", "")
    store.add(f"{prefix}/announced", 1)


def node_name(store: Any, size: int) -> str | None:
    """Return the host name of this rank, or None if all ranks are on one node.

    A rank can fail at its first call, before the other ranks have made theirs. So this waits up to
    a second until all ranks have announced their nodes, or two have announced different nodes.
    """
    prefix = launch_prefix(size)
    end = time.monotonic() + _ANNOUNCE_SECONDS
    while not store.check([f"{prefix}/several-nodes"]):
        if store.add(f"{prefix}/announced", 0) >= size or time.monotonic() > end:
            break
        time.sleep(_POLL_SECONDS)
    if store.check([f"{prefix}/several-nodes"]):
        return socket.gethostname()
    return None
