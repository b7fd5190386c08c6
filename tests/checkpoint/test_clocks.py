"""Nodes whose clocks are ten minutes off, each in the other direction: nothing is decided by
comparing them.
"""

import multiprocessing
import socket
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from preloaded import Preloaded, set_clock
from torch import nn

from ft_ckpt import CheckpointSaver, Keep, latest, processes
from ft_ckpt.checkpoint.leases import leases, reader_leases
from ft_ckpt.errors import LeaseTakenError
from ft_ckpt.runs.folder import lease as run_lease, prune_run
from ft_ckpt.storage.local import locks
from ft_ckpt.storage.places import open_place

APART = [(-600, 600), (600, -600)]
STEPS = (1, 2, 3)


class User:
    """A saver that uses a lease."""


USER = User()


@pytest.fixture(scope="module")
def preloaded(shim):
    process = Preloaded(shim, __file__)
    yield process
    process.close()


@pytest.mark.parametrize(("own_seconds", "other_seconds"), APART)
@pytest.mark.parametrize("case", ["prune_beside_a_reader", "take_the_lease", "go_on"])
def test_clocks_that_differ(preloaded, tmp_path, case, own_seconds, other_seconds):
    ended = preloaded.run(globals()[case], tmp_path, own_seconds, other_seconds)
    assert ended.status == 0, ended.text


# In the preloaded process


@contextmanager
def other_node(act, folder, seconds):
    """A process of another node does `act` until the block ends or kills it."""
    context = multiprocessing.get_context("fork")
    # not an Event, which waits by the clock
    here, there = context.Pipe()

    def live():
        set_clock(seconds)
        socket.gethostname = lambda: "node-1"
        processes.machine_id = locks.machine_id = lambda: "another"
        reader_leases.lock_descriptor = lambda descriptor: False  # not seen from another node
        with act(folder):
            there.send("ready")
            there.recv()

    process = context.Process(target=live, daemon=True)
    process.start()
    while not here.poll(0.1):
        assert process.is_alive(), "the other node has failed"
    try:
        yield process
    finally:
        here.send("over")
        process.join(10)
        process.kill()


def save_steps(folder, steps):
    model = nn.Linear(3, 2)
    with CheckpointSaver() as saver:
        for step in steps:
            saver.save(model, folder / f"checkpoint-{step}", step=step)


def names_in(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def read_oldest(folder):
    leases.RENEWAL_SECONDS = 0.05
    return reader_leases.hold_lease(open_place(folder / "checkpoint-1"))


def prune_beside_a_reader(folder, own_seconds, other_seconds):
    set_clock(own_seconds)
    save_steps(folder, STEPS)
    with other_node(read_oldest, folder, other_seconds):
        time.sleep(0.2)  # so that it has renewed its lease
        prune_run(open_place(folder), Keep(last=1))
        assert names_in(folder) == ["checkpoint-1", "checkpoint-3"]
    prune_run(open_place(folder), Keep(last=1))
    assert names_in(folder) == ["checkpoint-3"]


@contextmanager
def train(folder):
    run_lease.RENEW_SECONDS = 0.1
    lease = run_lease.lease_run(open_place(folder), USER)
    yield
    lease.release()


def take_the_lease(folder, own_seconds, other_seconds):
    """It is refused while the other one lives, and taken over when it is renewed no more."""
    set_clock(own_seconds)
    with (
        patch.object(run_lease, "LEASE_SECONDS", 2.0),
        other_node(train, folder, other_seconds) as process,
    ):
        with pytest.raises(LeaseTakenError, match="node-1 trains into it"):
            run_lease.lease_run(open_place(folder), USER)
        process.kill()
        process.join()
        run_lease.lease_run(open_place(folder), USER).release()


def go_on(folder, own_seconds, other_seconds):
    """A run goes on on a node with another clock: the newest is the one with the last step."""
    for seconds, steps in ((own_seconds, 2), (other_seconds, 2)):
        set_clock(seconds)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        with CheckpointSaver(None, folder, every=1, keep=Keep(last=1)) as saver:
            saver.register(model=model, optimizer=optimizer)
            saver.resume()
            for _ in range(steps):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                saver.step()
    assert latest(folder).name == "checkpoint-4"
    # the one that it resumed from stays while it goes on
    assert names_in(folder) == ["checkpoint-2", "checkpoint-4"]
