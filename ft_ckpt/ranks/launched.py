"""Connects the processes of a command that a launcher has started several times.

These ranks have a key-value store and no process group.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ft_ckpt.errors import RankError
from ft_ckpt.ranks.key_value import AnsweringStore
from ft_ckpt.ranks.nodes import announce_node
from ft_ckpt.ranks.ranks import Ranks

# Two ranks must start within this time.
_START_SECONDS = 120.0
# Rank 0 waits at most this long for the other ranks to end.
_END_SECONDS = 20.0
# A Slurm job takes a port of this range by its id.
_FIRST_PORT = 15_000
_PORTS = 10_000
# Matches the first name of a list of nodes: "gpu[03-07,9],cpu1" -> "gpu", "03".
_FIRST_NODE = re.compile(r"([^,\[]+)(?:\[([^],-]+)[^]]*\])?")


@dataclass(frozen=True)
class Launch:
    """One process of a launch, and the address of rank 0's store."""

    rank: int
    size: int
    address: str
    port: int


def launch_of_process() -> Launch | None:
    """Return how torchrun, accelerate or srun launched this process, or None if it is alone."""
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        launch = Launch(
            _number("RANK"),
            _number("WORLD_SIZE", 1),
            os.environ["MASTER_ADDR"],
            _number("MASTER_PORT", _FIRST_PORT),
        )
    elif "SLURM_STEP_NUM_TASKS" in os.environ:
        port = _FIRST_PORT + _number("SLURM_JOB_ID", 0) % _PORTS
        first_node = os.environ.get("SLURM_STEP_NODELIST", "localhost")
        launch = Launch(
            _number("SLURM_PROCID"),
            _number("SLURM_STEP_NUM_TASKS"),
            os.environ.get("MASTER_ADDR", first_name(first_node)),
            _number("MASTER_PORT", port),
        )
    else:
        return None

    return launch if launch.size > 1 else None


def first_name(nodes: str) -> str:
    """Return the first node of a Slurm node list such as "gpu[03-07,9],cpu1"."""
    match = _FIRST_NODE.match(nodes)
    return nodes if match is None else f"{match[1]}{match[2] or ''}"


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """Yield the ranks that were launched together, or this process as the only rank.

    Rank 0 leaves the block last. Raises RankError if the processes do not reach each other.
    """
    launch = launch_of_process()
    if launch is None:
        yield Ranks(0, 1)
        return

    store = _connect(launch)
    ranks = Ranks(launch.rank, launch.size, AnsweringStore(store))
    announce_node(ranks.store, ranks.size)
    try:
        yield ranks
    finally:
        # Rank 0 may be the server of the store, so it waits for the ranks that read from it.
        with suppress(RuntimeError):
            store.set(f"end/{launch.rank}", "")
            if launch.rank == 0:
                keys = [f"end/{rank}" for rank in range(launch.size)]
                store.wait(keys, timedelta(seconds=_END_SECONDS))


def _connect(launch: Launch) -> Any:
    # Set before torch is imported. Otherwise torch logs a warning each second while a rank waits.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    where = f"tcp://{launch.address}:{launch.port}"
    url = f"{where}?rank={launch.rank}&world_size={launch.size}"
    try:
        store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=_START_SECONDS)))
        prefixed = PrefixStore("ft_ckpt", store)
        prefixed.set(f"start/{launch.rank}", "")
        keys = [f"start/{rank}" for rank in range(launch.size)]
        prefixed.wait(keys, timedelta(seconds=_START_SECONDS))
    except (RuntimeError, OSError, ValueError) as error:
        raise RankError(
            f"rank {launch.rank} of {launch.size}: no connection with the others through {where} "
            f"({str(error).splitlines()[0]}); set MASTER_ADDR and MASTER_PORT to an address of "
            "rank 0 that every node reaches"
        ) from error

    return prefixed


def _number(variable: str, default: int | None = None) -> int:
    text = os.environ.get(variable, "" if default is None else f"{default}")
    if not text.isdigit():
        raise RankError(f"{variable}={text!r} in the environment; expected a whole number")
    return int(text)
