"""Runs that are saved and resumed to the bit, by the same ranks or by others."""

from pathlib import Path
from typing import Any

import models
import torch
from on_ranks import RANK
from safetensors.torch import load_file, save_file
from wrappers import WRAPPERS, Live, truth

from ft_ckpt import CheckpointSaver
from ft_ckpt.ranks import current_ranks
from ft_ckpt.ranks.moving import gather_tensors
from ft_ckpt.runs.items import RunObjects, run_sources, walk_models
from ft_ckpt.runs.state import assemble_state, exchange_descriptions, local_state

OPTIONS: dict[str, Any] = {"enter_timeout_seconds": 60, "on_difference": "ignore"}


def live_model(wrapper: str, model: str, seed: int = 0) -> Live:
    live = WRAPPERS[wrapper](models.build(model, seed))
    torch.compiler.set_stance("force_eager")
    return live


def saver_of(live: Live, folder: Path | str, **settings: Any) -> CheckpointSaver[Any]:
    saver: CheckpointSaver[Any] = CheckpointSaver(live.accelerator, folder, **OPTIONS, **settings)
    saver.register(model=live.model, optimizer=live.optimizer)
    return saver


def train(live: Live, saver: CheckpointSaver[Any], first: int, count: int) -> list[float]:
    """Train on data that differs by step and rank; return each loss plus a random number."""
    # tensor parallel: one input
    rank = 0 if hasattr(next(live.model.parameters()), "placements") else RANK
    losses = []
    for step in range(first, first + count):
        losses.append(live.step(models.batch(seed=97 * step + rank)) + float(torch.rand(())))
        saver.step()
    return losses


def exact(wrapper: str, model: str, run: Path | str, **settings: Any) -> None:
    """Save a run after two steps and resume it: the next two have the same losses, to the bit."""
    live = live_model(wrapper, model)
    with saver_of(live, run, **settings) as saver:
        train(live, saver, 0, 2)
        saver.save_state()
        before = truth(live)
        expected = train(live, saver, 2, 2)
        after = truth(live)
    # a base is not part of an adapter's run
    fresh = live_model(wrapper, model, seed=0 if model == "lora" else 1)
    torch.manual_seed(1234)
    with saver_of(fresh, run, **settings) as saver:
        progress = saver.resume("must")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        same(before, truth(fresh))
        assert train(fresh, saver, 2, 2) == expected
        same(after, truth(fresh))


def save_run(wrapper: str, model: str, folder: Path) -> None:
    """Save a run of two steps in a folder, and its weights and moments next to it."""
    live = live_model(wrapper, model)
    with saver_of(live, folder / "run") as saver:
        train(live, saver, 0, 2)
        saver.save_state()
    tensors, moments = truth(live), optimizer_state(live)
    if RANK == 0:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / "truth.safetensors")
        save_file(moments, folder / "moments.safetensors")


def resume_run(wrapper: str, model: str, folder: Path) -> None:
    """Resume the run of `save_run`, and train another step."""
    live = live_model(wrapper, model, seed=1)
    with saver_of(live, folder / "run") as saver:
        progress = saver.resume("must")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        assert "requires_grad" not in " ".join(progress.report.differences), progress
        same(load_file(folder / "truth.safetensors"), truth(live))
        moments = optimizer_state(live)
        if RANK == 0:
            same(load_file(folder / "moments.safetensors"), moments)
        train(live, saver, 2, 1)


def optimizer_state(live: Live) -> dict[str, torch.Tensor]:
    """Gather the optimizer's tensors, whole, on rank 0. Collective."""
    objects = RunObjects()
    objects.register({"model": live.model, "optimizer": live.optimizer})
    items = [item for item in objects.items() if item.kind == "optimizer"]
    sources = run_sources(walk_models(live.model, items), items)
    ranks = current_ranks()
    local = local_state(items, sources, {})
    descriptions, trees = exchange_descriptions(local, items, ranks, sources)
    state = assemble_state(local, descriptions, trees, items, sources, ranks.rank)
    stored = [entry.source for entry in state.entries if entry.source is not None]
    return gather_tensors(stored, ranks)


def same(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    """Assert the same names, and for each the same values."""
    assert expected.keys() == actual.keys(), expected.keys() ^ actual.keys()
    different = [name for name in expected if not torch.equal(expected[name], actual[name])]
    assert not different, different
