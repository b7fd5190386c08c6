"""The Trainer on several ranks, each with its share of the data: "exact/kind", "best/kind", "final/kind", and so on.

A kind is a model under DDP, "fsdp2", or a mesh over which transformers cuts the model.
"""

import os
import sys
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from safetensors.torch import load_file
from trainers import Sentences, even_llama, ours, run, trainer
from wrappers import cut_over_ranks

from ft_ckpt import verify
from ft_ckpt.errors import CheckpointError

EVALUATED = {"eval_dataset": Sentences(noise=False), "eval_strategy": "steps", "eval_steps": 1}
SHARDED = {
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2, "fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
}
MESHES = {
    "mesh_rows": {"fsdp_size": 2},
    "mesh_tensor": {"tp_size": 2},
    "mesh_tensor_fsdp": {"tp_size": 2, "fsdp_size": 2},
    "mesh_hybrid": {"fsdp_size": 2, "dp_replicate_size": 2},
}


def shape_of(kind: str) -> dict[str, Any]:
    own: dict[str, Any] = SHARDED if kind == "fsdp2" else {"kind": kind}
    if kind in MESHES:  # the Trainer accepts such a model only with this setting
        own = {"kind": lambda: cut_over_ranks(even_llama(), **MESHES[kind]), "save_only_model": True}
    return {"train_dataset": Sentences(noise=False), **own}


def of_rank_0(folder: Path) -> Path:
    """Rank 0's path of the folder."""
    told = [str(folder.resolve())]
    dist.broadcast_object_list(told)
    return Path(told[0])


def exact(folder: Path, kind: str) -> None:
    shape, told = shape_of(kind), {"state": kind in MESHES}
    expected = run(trainer(folder / "plain", **shape, save_strategy="no"))
    first = run(ours(folder / "run", **shape, **told, stop_after=3))
    assert first == expected[:3]
    again = run(ours(folder / "run", **shape, **told, seed=0 if kind == "lora" else 1), True)
    assert first + again == expected, (first, again, expected)
    assert verify(of_rank_0(folder) / "run" / f"checkpoint-{len(expected)}").ok


def far(folder: Path, kind: str) -> None:
    """A disk for each rank: only rank 0 has the checkpoints, and all resume, and load the best model."""
    private = folder / f"disk-{harness.RANK}"
    private.mkdir()
    home = Path.cwd()
    os.chdir(private)
    try:
        exact(Path("/proc/self/cwd"), kind)
        best(Path("/proc/self/cwd/best"), kind)
        assert not harness.RANK or not list(private.rglob("checkpoint-*"))
    finally:
        os.chdir(home)


def final(folder: Path, kind: str) -> None:
    """`save_model` as the Trainer has it: of a sharded model on all ranks, else the main process alone may call it."""
    made = ours(folder / "run", **shape_of(kind), max_steps=2, save_strategy="no")
    run(made)
    if kind == "fsdp2" or made.is_world_process_zero():
        made.save_model(str(folder / "final"))
    made.save_model(str(folder / "again"))  # as most scripts do
    dist.barrier()
    for name in ("final", "again"):
        assert verify(folder / name).ok
    saved, live = load_file(folder / "final" / "model.safetensors"), made.model.state_dict()
    whole = {name: getattr(live[name], "full_tensor", lambda name=name: live[name])() for name in saved}
    assert all(torch.equal(whole[name], tensor) for name, tensor in saved.items())


def best(folder: Path, kind: str) -> None:
    """The best model comes back on every rank, and the limit is kept."""
    metrics = iter([0.5, 0.1, *[0.7] * 20])
    made = ours(
        folder,
        **shape_of(kind),
        state=kind in MESHES,
        compute_metrics=lambda _: {"figure": next(metrics)},
        metric_for_best_model="figure",
        greater_is_better=False,
        load_best_model_at_end=True,
        save_total_limit=2,
        **EVALUATED,
    )
    made.train()
    assert made.state.best_global_step == 2
    folder = of_rank_0(folder)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-8"]
    saved, live = load_file(folder / "checkpoint-2" / "model.safetensors"), made.model.state_dict()
    whole = {name: getattr(live[name], "full_tensor", lambda name=name: live[name])() for name in saved}
    assert all(torch.equal(whole[name], tensor) for name, tensor in saved.items())


def nothing(folder: Path, kind: str) -> None:
    """All ranks learn that there is nothing to resume from."""
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        ours(folder, kind=kind).train(resume_from_checkpoint="must")


def case(name: str, folder: Path) -> None:
    action, kind = name.split("/")
    {"exact": exact, "best": best, "final": final, "nothing": nothing, "far": far}[action](folder, kind)


if __name__ == "__main__":
    if any("/mesh" in name for name in sys.argv):
        dist.init_process_group("gloo")
        # Accelerate refuses this mesh on CPUs, by the name of the device alone.
        ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    harness.run(case)
