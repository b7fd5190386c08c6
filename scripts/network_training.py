"""The runs of `scripts/network_disk`: one that is killed at any moment, and two ranks of FSDP2."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ft_ckpt import CheckpointSaver
from scripts.killed_run import BATCHES, LOG, SAVE_EVERY

SAVED_STEPS, STEPS = (2, 4), 6
BATCH = 8
SIZE = 509  # of a layer of two ranks, no multiple of a page: ranks write into the same pages


def train_until_killed(folder: Path, epochs: int, *, background: bool) -> None:
    """Train the killed run; the script is started in the same way after each kill."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    logging.getLogger("ft_ckpt").setLevel(logging.WARNING)
    model = nn.Sequential(nn.Linear(128, 512), nn.Dropout(0.1), nn.Linear(512, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(BATCH * BATCHES, 128))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        CheckpointSaver(None, folder, every=SAVE_EVERY, keep=2, background=background) as saver,
        (folder / LOG).open("a") as log,
    ):
        saver.resume(model=model, optimizer=optimizer)
        for (inputs,) in saver.remaining(loader, epochs=epochs):
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(json.dumps([saver.progress.step + 1, loss.item().hex()]) + "\n")
            log.flush()
            saver.step({"loss": loss.item()})
        saver.save(model, folder / "final")


def train_on_rank(folder: Path) -> None:
    dist.init_process_group("gloo")
    try:
        for background in (False, True):
            name = "later" if background else "now"
            save_and_resume(folder / name, background)
    finally:
        dist.destroy_process_group()


def save_and_resume(run: Path, background: bool) -> None:
    """Train a run, resume it from its last save, and compare both.

    Raises AssertionError if they differ.
    """
    settings: dict[str, Any] = {"each_rank_writes": "on", "max_shard_size": "1MB", "keep": 2}
    model, optimizer = make_model(seed=0)
    losses: list[float] = []
    weights: dict[str, torch.Tensor] = {}
    with CheckpointSaver(None, run, background=background, **settings) as saver:
        saver.register(model=model, optimizer=optimizer)
        for step in range(1, STEPS + 1):
            losses.append(train_step(model, optimizer, step))
            saver.step(step=step)
            if step in SAVED_STEPS:
                saver.save_state()
            if step == SAVED_STEPS[-1]:
                weights = local_weights(model)
    model, optimizer = make_model(seed=1)
    with CheckpointSaver(None, run, **settings) as saver:
        progress = saver.resume("must", model=model, optimizer=optimizer)
        assert progress.step == SAVED_STEPS[-1], f"resumed at step {progress.step}"
        for name, tensor in local_weights(model).items():
            assert torch.equal(tensor, weights[name]), f"{name}: other weights after the resume"
        for step in range(SAVED_STEPS[-1] + 1, STEPS + 1):
            loss = train_step(model, optimizer, step)
            assert loss == losses[step - 1], f"step {step}: loss {loss}, before {losses[step - 1]}"


def make_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [nn.Linear(SIZE, SIZE) for _ in range(6)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, SIZE, generator=generator)
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def local_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy this rank's shards."""
    weights = {}
    for name, parameter in model.named_parameters():
        weights[name] = parameter.to_local().detach().clone()
    return weights
