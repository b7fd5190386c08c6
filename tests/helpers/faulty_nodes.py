"""Two ranks on two nodes, in a run of preloaded.py: calls of one of them may fail."""

import multiprocessing
import os
import socket
import tempfile
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from namespaces import take_disk, take_machine_id
from preloaded import RUN_SECONDS, disarm
from torch import distributed

from ft_ckpt.errors import CheckpointError

_FORK = multiprocessing.get_context("fork")
_GROUP_SECONDS = 30.0
_Enter = Callable[[int], object]


def on_two_nodes(
    act: Callable[[], Any], faulty_rank: int, enter: _Enter = lambda rank: None
) -> Any:
    """What `act` returns on rank 0 of two nodes; only calls of `faulty_rank` fail.

    Each rank calls `enter` with its number first. An error is raised on both, and names the node.
    """
    with tempfile.TemporaryDirectory() as local:
        store = Path(local, "store")
        outcomes: list[SimpleQueue[Any]] = [_FORK.SimpleQueue() for _ in (0, 1)]
        ranks = []
        for rank, outcome in enumerate(outcomes):
            arguments = (rank, store, act, faulty_rank, enter, outcome)
            ranks.append(_FORK.Process(target=_be_rank, args=arguments))
        for process in ranks:
            process.start()
        codes = []
        for process in ranks:
            process.join(RUN_SECONDS / 3)
            codes.append(process.exitcode)  # None: it hangs
            process.kill()
    assert codes == [0, 0]
    (error, value), (other_error, _) = (outcome.get() for outcome in outcomes)
    assert bool(error) == bool(other_error), (error, other_error)
    for text in filter(None, (error, other_error)):
        assert f"(on node-{faulty_rank})" in text, f"names no node: {text}"
    if error:
        raise CheckpointError(error)
    return value


def on_client(clients: list[str], place: Path) -> _Enter:
    """What `on_two_nodes` enters: a node that has the mount point of its client at `place`."""

    def enter(rank: int) -> None:
        take_disk(place, Path(clients[rank]))
        with tempfile.NamedTemporaryFile("w") as identity:
            identity.write(f"{uuid.uuid5(uuid.NAMESPACE_DNS, f'node-{rank}')}\n")
            identity.flush()
            take_machine_id(Path(identity.name))  # the mount keeps the file

    return enter


def _be_rank(
    rank: int,
    store: Path,
    act: Callable[[], Any],
    faulty_rank: int,
    enter: _Enter,
    outcome: "SimpleQueue[Any]",
) -> None:
    if rank != faulty_rank:
        disarm()
    enter(rank)
    names = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }
    os.environ |= {name: str(value) for name, value in names.items()}
    socket.gethostname = lambda: f"node-{rank}"
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(store), 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_GROUP_SECONDS),
    )
    error, value = "", None
    try:
        value = act()
    except CheckpointError as raised:
        error = f"ours: {raised}"
    disarm()
    outcome.put((error, value))
    os._exit(0)
