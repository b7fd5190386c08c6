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


class SaverNotMadeError(Exception):
    """A rank has no saver. It makes one alone, so the other rank waits until a launcher ends it."""


def on_two_nodes(
    act: Callable[[], Any], faulty_rank: int, enter: _Enter = lambda rank: None
) -> Any:
    """Call `act` on two ranks, on a node each; return the result of rank 0.

    Only calls of `faulty_rank` fail. Each rank calls `enter` with its number first. An error is
    raised on both, and names the node; after a `SaverNotMadeError` the other rank is ended.
    """
    with tempfile.TemporaryDirectory() as local:
        store = Path(local, "store")
        outcomes: list[SimpleQueue[Any]] = [_FORK.SimpleQueue() for _ in (0, 1)]
        processes = []
        for rank, outcome in enumerate(outcomes):
            arguments = (rank, store, act, faulty_rank, enter, outcome)
            processes.append(_FORK.Process(target=_be_rank, args=arguments))
        for process in processes:
            process.start()
        results: dict[int, tuple[str, Any, bool]] = {}
        for rank in (faulty_rank, 1 - faulty_rank):
            processes[rank].join(RUN_SECONDS / 3)
            assert processes[rank].exitcode == 0, f"rank {rank}: {processes[rank].exitcode}"
            results[rank] = outcomes[rank].get()
            if results[rank][2]:  # it has no saver
                break
        for process in processes:
            process.kill()
    error, _, has_no_saver = results[faulty_rank]
    if not has_no_saver:
        errors = [results[rank][0] for rank in (0, 1)]
        assert bool(errors[0]) == bool(errors[1]), errors
        for text in filter(None, errors):
            assert f"(on node-{faulty_rank})" in text, f"names no node: {text}"
    if error:
        raise CheckpointError(error)
    return results[0][1]


def on_client(clients: list[str], place: Path) -> _Enter:
    """Return how a rank of `on_two_nodes` enters its node: its client's mount point is `place`."""

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
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, **address}
    os.environ |= {name: str(value) for name, value in variables.items()}
    socket.gethostname = lambda: f"node-{rank}"
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(store), 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_GROUP_SECONDS),
    )
    error, value, has_no_saver = "", None, False
    try:
        value = act()
    except SaverNotMadeError as raised:
        error, has_no_saver = str(raised), True
    except CheckpointError as raised:
        error = f"ours: {raised}"
    disarm()
    outcome.put((error, value, has_no_saver))
    os._exit(0)
