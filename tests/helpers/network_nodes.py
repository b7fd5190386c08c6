"""Nodes on a network file system: each rank has a client of its own at one path."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from namespaces import on_node
from network_disks import NETWORK_DISKS, NetworkDisk
from on_ranks import RANK, call_on_ranks

MAX_RANKS = 3
CACHE_SECONDS = (0, 1, 60)
_ZERO = {"DS_ACCELERATOR": "cpu"}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"
)


@dataclass(frozen=True)
class Nodes:
    """Nodes with a client each of one file system, which all have at `place`."""

    name: str
    cache_seconds: int
    clients: tuple[Path, ...]
    reader: Path  # a client that none of them has
    place: Path
    local: Path  # a folder on a local disk, which all see

    @contextmanager
    def joined(self) -> Iterator[Path]:
        """Put this rank on its node during the block; yield the place of the file system there."""
        with on_node(RANK, self.clients[RANK], self.place):
            yield self.place


def stands() -> list[Any]:
    """Return every file system with each time that clients may cache for, as parameters."""
    cases = []
    for kind in NETWORK_DISKS:
        for cache_seconds in CACHE_SECONDS:
            name = f"{kind.name}-{cache_seconds}"
            if not kind.has_cache_seconds:
                if cache_seconds != CACHE_SECONDS[0]:
                    continue
                name = kind.name
            cases.append(pytest.param((kind, cache_seconds, name), id=name, marks=kind.needed()))
    return cases


@contextmanager
def running_nodes(
    kind: type[NetworkDisk], cache_seconds: int, folder: Path, name: str
) -> Iterator[Nodes]:
    """Run one file system and its clients below `folder`, which is on a local disk."""
    with kind(folder / "disk") as disk:
        *clients, reader = disk.clients(MAX_RANKS + 1, cache_seconds)
        yield Nodes(name, cache_seconds, tuple(clients), reader, folder / "shared", folder)


def run_on(
    nodes: Nodes,
    ranks: int,
    function: Callable[..., object],
    *args: object,
    zero: bool = False,
    seconds: float = 280,
) -> Any:
    """Call a function of the test's file, with `nodes` first, on ranks that join their nodes.

    `zero`: in processes in which DeepSpeed makes the process group.
    """
    options: dict[str, Any] = {"launch": nodes.name}
    if zero:
        options |= {"launch": f"{nodes.name} ZeRO", "group_seconds": None, "env": _ZERO}
    return call_on_ranks(ranks, function, nodes, *args, timeout=seconds, **options)
