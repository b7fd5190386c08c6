"""An error at any call of one of two ranks that save onto a network file system.

The ranks are on two nodes, each with its client. The error is raised on both and names the file and
the node. A third client finds the earlier checkpoint whole, and the next save works.
"""

import shutil
import time
from contextlib import closing

import models
import pytest
from faults import try_worlds
from faulty_nodes import on_client, on_two_nodes
from network_disks import NETWORK_DISKS
from preloaded import Preloaded, System
from torch.nn.parallel import DistributedDataParallel

from ft_ckpt import CheckpointSaver, latest, load_model, verify
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.storage.places import open_place

pytestmark = pytest.mark.slow
ERRORS = ("EIO", "ESTALE", "ENOTCONN", "EDQUOT")
CACHE_SECONDS = 1
WORLDS = 60  # that are drawn on each file system but the first, where every call is met


def save_step(folder, clients, step, faulty_rank, background):
    """Each rank writes its share of the checkpoint of a step; calls of one of them may fail."""

    def act():
        model = DistributedDataParallel(models.Two(step))
        with CheckpointSaver(each_rank_writes="on", background=background) as saver:
            saver.save(model, folder / f"checkpoint-{step}", step=step)

    on_two_nodes(act, faulty_rank, on_client(clients, folder.parent))


def steps_in(folder):
    """The steps of the checkpoints there, each of which is verified and has the values of its
    step.
    """
    steps = set()
    for info in discover(open_place(folder)):
        assert verify(info.path).problems == ()
        model, step = models.Two(0), info.manifest.step
        load_model(info.path, into=model)
        assert all(bool((tensor == step).all()) for tensor in model.state_dict().values())
        steps.add(step)
    return steps


def await_steps(folder, expected):
    """Check that the third client has these steps, once its cache of names has ended."""
    end = time.monotonic() + CACHE_SECONDS + 5
    while steps_in(folder) != expected and time.monotonic() < end:
        time.sleep(0.1)
    assert steps_in(folder) == expected


@pytest.mark.parametrize(
    ("faulty_rank", "background"),
    [(0, False), (1, False), (1, True)],
    ids=["rank 0", "rank 1", "rank 1 in the background"],
)
@pytest.mark.parametrize("kind", NETWORK_DISKS, ids=lambda kind: kind.name)
def test_a_fault_of_a_save_by_two_nodes(shim, kind, tmp_path, faulty_rank, background):
    with closing(Preloaded(shim, __file__)) as preloaded, kind(tmp_path / "disk") as disk:
        *clients, reader = disk.clients(3, CACHE_SECONDS)
        place = tmp_path / "shared"

        def save(name, step, run=preloaded.run):
            words = (list(map(str, clients)), step, faulty_rank, background)
            return run(save_step, place / name, *words)

        def trial(world):
            folder = shutil.copytree(reader / "origin", reader / world.name)
            ended = save(world.name, 2, world.run)
            assert ended.is_right, ended
            if not world.fault:
                assert ended.status == 0, ended
            if ended.text:
                assert str(place / world.name) in ended.text, f"names no file: {ended}"
            # an error of the last sync says that the checkpoint is there
            is_saved = not ended.text or "the new checkpoint is in place" in ended.text
            steps = {1, 2} if is_saved else {1}
            await_steps(folder, steps)
            after = save(world.name, 3)
            assert after.status == 0, (ended, after)
            await_steps(folder, {*steps, 3})
            assert latest(folder) == folder / "checkpoint-3"
            shutil.rmtree(folder)

        (reader / "origin").mkdir()
        assert save("origin", 1).status == 0
        max_worlds = 0 if kind is NETWORK_DISKS[0] else WORLDS
        report = try_worlds(trial, System(preloaded, *ERRORS), max_worlds=max_worlds)
    # where each file has one writer, rank 1 may write none
    assert report.calls > (20 if faulty_rank == 0 else 0)
    print(kind.name, report)
