"""Runs of several nodes on network file systems: each rank has a client of its own at one path.

A further client, that of the tests' process, reads.
"""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from compare import assert_same_tensors
from exact_runs import live_model, optimizer_state, same, saver_of, train
from network_nodes import Nodes, needs_deepspeed, run_on
from on_ranks import RANK
from safetensors.torch import load_file, save_file
from wrappers import truth

from ft_ckpt import load_model, verify

pytestmark = pytest.mark.slow
MODEL = "llama"
MODES = ["foreground", "background"]
RUNS = [
    *((wrapper, "safetensors") for wrapper in ("ddp", "fsdp2")),
    *(pytest.param(stage, "safetensors", marks=needs_deepspeed) for stage in ("zero2", "zero3")),
    *(("fsdp2", form) for form in ("h5", "dual")),
]


def save_a_run(nodes: Nodes, run: str, wrapper: str, mode: str, form: str) -> None:
    """A run of four steps with a checkpoint of two, and weights that are saved again and again."""
    background = mode == "background"
    with nodes.joined() as place:
        live = live_model(wrapper, MODEL)
        settings = {"format": form, "each_rank_writes": "on", "background": background}
        with saver_of(live, place / run, **settings) as saver:
            train(live, saver, 0, 2)
            saver.save_state()
            saver.wait()
            leave_truth(live, nodes.local / run)
            for step in (2, 3):
                train(live, saver, step, 1)
                saver.save(live.model, place / run / "final", overwrite=True)
            saver.wait()
            leave_truth(live, nodes.local / f"{run}-final")


def leave_truth(live: Any, folder: Path) -> None:
    tensors, moments = truth(live), optimizer_state(live)
    if RANK == 0:
        folder.mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / "truth.safetensors")
        save_file(moments, folder / "moments.safetensors")
    dist.barrier()


def resume_a_run(nodes: Nodes, run: str, wrapper: str) -> None:
    """The state is that of two steps, on any number of ranks; a further step is saved."""
    with nodes.joined() as place:
        live = live_model(wrapper, MODEL, seed=1)
        with saver_of(live, place / run) as saver:
            progress = saver.resume("must")
            assert (progress.step, progress.report.problems) == (2, ()), progress
            same(load_file(nodes.local / run / "truth.safetensors"), truth(live))
            moments = optimizer_state(live)
            if RANK == 0:
                same(load_file(nodes.local / run / "moments.safetensors"), moments)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("wrapper", "form"), RUNS)
def test_a_run_of_two_nodes(nodes, wrapper, mode, form):
    """Saved by two, read by another client, and gone on with by one and by three."""
    run = f"{wrapper}-{mode}-{form}"
    run_on(nodes, 2, save_a_run, run, wrapper, mode, form, zero=wrapper.startswith("zero"))
    final = nodes.reader / run / "final"
    read = load_model(final).state_dict()
    written = load_file(nodes.local / f"{run}-final" / "truth.safetensors")
    assert_same_tensors({name: read[name] for name in written}, written)
    for checkpoint in (final, *(nodes.reader / run).glob("checkpoint-*")):
        assert verify(checkpoint).problems == ()
    run_on(nodes, 1, resume_a_run, run, "none")
    run_on(nodes, 3, resume_a_run, run, "fsdp2")
