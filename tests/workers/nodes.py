"""A run on several nodes: each rank has a file system, or a client of a shared one, of its own at
the path of the run.

A case is "leave/WHERE", "take/WHERE" or "cut/WHEN". WHERE: the run is in a bucket, or at the same
path of every node ("disk": disks of their own, of which the first is kept between launches;
"shared": one disk, through a client on each node; CLIENTS names their mounts, KIND the kind of file
system that saves take it for). The folder
SHARED, which all see, has the expected values. NODES names the processes that keep the namespaces
of nodes, over which the ranks are spread; without it each rank is a node.
"""

import faulthandler
import json
import os
import shutil
import sys
import time
import uuid
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness  # first: it arms the stack dump
import pytest
import torch.distributed as dist
from exact_runs import live_model, optimizer_state, same, saver_of, train
from faulty_stores import as_client
from namespaces import take_disk, take_machine_id
from networks import LINK, address_of, cut_link, join_node
from safetensors.torch import load_file, save_file
from wrappers import truth

from ft_ckpt import CheckpointSaver, verify
from ft_ckpt.checkpoint.commit import LocalStaging
from ft_ckpt.errors import CheckpointError

SHARED = Path(os.environ["SHARED"])
DISK = SHARED / "disk"
NODES = json.loads(os.environ.get("NODES", "[]"))
NODE = harness.RANK * (len(NODES) or harness.WORLD) // harness.WORLD  # the number of this rank's
CLIENTS = json.loads(os.environ.get("CLIENTS", "[]"))
KIND = os.environ.get("KIND", "")
PLACES = {"bucket": "s3://bucket/run", "disk": DISK / "run", "shared": DISK / "run"}
TOLD_OF = {  # error of each rank; None: it has all its data
    "early": ("receiving tensors of rank 1: ", "sending tensors to rank 0: "),
    "late": (None, "store of the process group has not answered"),
}
PATIENCE = 4.0  # enter_timeout_seconds of a saver
MODEL = "llama"
SECONDS = float(os.environ.get("SECONDS", "60"))  # timeout of collectives and of the store


def leave(where: str) -> None:
    """A run of two steps, and its weights alone beside it, in several files."""
    live, place = live_model("fsdp2", MODEL), PLACES[where]
    with (
        as_client(KIND, NODE) if KIND else nullcontext(),
        saver_of(live, place, each_rank_writes="on", max_shard_size=20_000) as saver,
    ):
        train(live, saver, 0, 2)
        saver.save_state()
        saver.save(live.model, f"{place}/weights")
        saver.save(live.model, f"{place}/behind", background=True).result()
    tensors, moments = truth(live), optimizer_state(live)
    if harness.RANK == 0:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            SHARED / "truth.safetensors",
        )
        save_file(moments, SHARED / "moments.safetensors")
        if where in ("disk", "shared"):
            for name in ("weights", "behind"):
                shutil.copytree(DISK / "run" / name, SHARED / name)
    elif where == "disk" and NODE:
        assert not [*DISK.rglob("*.safetensors")], "it is rank 0's disk that has the run"


def take(where: str) -> None:
    """The run resumes on any number of ranks."""
    live = live_model("fsdp2", MODEL, seed=1)
    with saver_of(live, PLACES[where]) as saver:
        progress = saver.resume("must")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        far = any("do not see" in note for note in progress.report.notes)
        assert far is (where == "disk" and harness.WORLD > 1), progress.report
        same(load_file(SHARED / "truth.safetensors"), truth(live))
        moments = optimizer_state(live)
        if harness.RANK == 0:
            same(load_file(SHARED / "moments.safetensors"), moments)
        train(live, saver, 2, 1)
        saver.save_state()


def cut(when: str) -> None:
    """The link goes down before rank 0 receives tensors, or after its commit: ranks learn of it
    within the timeouts.
    """
    live, place = live_model("fsdp2", MODEL), PLACES["disk"]
    saver = CheckpointSaver(
        live.accelerator, place, enter_timeout_seconds=PATIENCE, on_difference="ignore"
    )
    saver.register(model=live.model, optimizer=live.optimizer)
    owner, name = {"early": (dist, "recv"), "late": (LocalStaging, "commit")}[when]
    real, told = getattr(owner, name), TOLD_OF[when][harness.RANK]

    def cutting(*given: Any, **named: Any) -> Any:
        if when == "early":
            cut_link()
        found = real(*given, **named)
        if when == "late":
            cut_link()
        return found

    begun = time.monotonic()
    with (
        patch.object(owner, name, cutting),
        pytest.raises(CheckpointError, match=told) if told else nullcontext(),
    ):
        saver.save_state()
    assert time.monotonic() - begun < SECONDS + 10 + PATIENCE + 5, (
        "the group's, the store's, the saver's"
    )
    whole = [verify(each.parent) for each in DISK.rglob("ft_ckpt.json")]
    assert len(whole) == (when == "late" and not NODE), "whole or not there"


def case(name: str, folder: Path) -> None:
    action, where = name.split("/")
    {"leave": leave, "take": take, "cut": cut}[action](where)
    if where == "bucket":
        assert not [each for each in DISK.rglob("*") if each.is_file()], "nothing on a disk"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if NODES:
        faulthandler.cancel_dump_traceback_later()  # it has a thread
        join_node(NODES[NODE])
        harness.arm_dump()
        os.environ |= {
            "MASTER_ADDR": address_of(0),
            "GLOO_SOCKET_IFNAME": LINK,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
    elif CLIENTS:
        take_disk(DISK, Path(CLIENTS[harness.RANK]))
        identity = SHARED / f"boot id of node {harness.RANK}"
        identity.write_text(f"{uuid.uuid5(uuid.NAMESPACE_DNS, str(identity))}\n")
        take_machine_id(identity)
    else:
        take_disk(DISK, None if harness.RANK else SHARED / "disk of rank 0")
    os.environ["TMPDIR"] = str(DISK)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    harness.run(case)
    sys.stdout.flush()
