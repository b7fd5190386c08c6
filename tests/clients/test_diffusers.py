"""Models of diffusers, and LoRA on them: saved here, loaded by diffusers itself."""

from pathlib import Path

import pytest
import torch
from clients import KILLED, log_of, needs, run_client

NEVER = -1  # the step at which a run is killed
pytestmark = [pytest.mark.slow, needs("diffusers")]


@pytest.mark.parametrize(
    "case", ["models", "lora", "lora_settings", "lora_of_transformers", "refusals", "page"]
)
def test_diffusers_loads_what_was_saved(case: str, tmp_path: Path) -> None:
    done = run_client("clients_diffusers", case, tmp_path)
    assert done.returncode == 0, log_of(done)


def test_diffusers_loads_what_two_ranks_saved(tmp_path: Path) -> None:
    done = run_client("clients_diffusers", "sharded", tmp_path, ranks=2)
    assert done.returncode == 0, log_of(done)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_killed_run_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    done = run_client("clients_diffusers", "run", whole, kind, NEVER)
    assert done.returncode == 0, log_of(done)
    for step in (3, 8):
        done = run_client("clients_diffusers", "run", killed, kind, step)
        assert done.returncode == KILLED, log_of(done)
    done = run_client("clients_diffusers", "run", killed, kind, NEVER)
    assert done.returncode == 0, log_of(done)
    one, two = (torch.load(folder / "end.pt", weights_only=False) for folder in (whole, killed))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    expected = "config.json" if kind == "full" else "pytorch_lora_weights.safetensors"
    checkpoints = sorted((killed / "run").glob("checkpoint-*"))
    assert checkpoints
    for checkpoint in checkpoints:
        assert (checkpoint / expected).exists()
