"""Lightning's DDP on several ranks, each with its share of the data: "llama" or "lora"."""

from pathlib import Path

import harness  # first: it arms the stack dump
from lightnings import Kill, loader, module, ours, run, trainer

from ft_ckpt import verify

DDP = {"strategy": "ddp", "devices": harness.WORLD}


def case(kind: str, folder: Path) -> None:
    """Killed in the middle of an epoch, and resumed: each rank's batches and losses."""
    expected = run(trainer(**DDP), module(kind=kind), loader())
    first = run(ours(folder / "run", [Kill(2)], **DDP), module(kind=kind), loader())
    again = module(0 if kind == "lora" else 1, kind=kind)
    assert first + run(ours(folder / "run", **DDP), again, loader()) == expected
    assert len(expected) == 8
    assert verify(folder / "run" / "checkpoint-8").ok


if __name__ == "__main__":
    harness.run(case)
