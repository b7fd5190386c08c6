"""Checkpoints for inference servers: two base models, with full fine-tunes and adapters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_models import base_model, tokenizer, with_adapter

from ft_ckpt import CheckpointSaver


@dataclass(frozen=True)
class EngineFiles:
    """Paths of the checkpoints, by kind."""

    root: Path
    base: Path  # a Llama
    weights: tuple[Path, ...]  # fine-tunes of it, at steps 1, 2 and 3
    adapters: tuple[Path, ...]  # on it, at steps 100, 200 and 1000
    qwen: Path  # grouped heads, tied head
    qwen_weights: Path

    def versions(self, what: str) -> tuple[Path, ...]:
        """Return the checkpoints of the "weights" or the "adapter", oldest first."""
        return self.weights if what == "weights" else self.adapters


def save(model: Any, path: Path, **options: Any) -> Path:
    """Save a checkpoint; return its path."""
    with CheckpointSaver(None) as saver:
        saver.save(model, path, **options)
    return path


def engine_files(root: Path, **sizes: int) -> EngineFiles:
    """Save all checkpoints in `root`; `sizes` are settings of `base_model`."""
    words = tokenizer()
    base = base_model("llama", **sizes)
    weights, adapters = [], []
    for step in (1, 2, 3):
        path = root / f"run/checkpoint-{step}"
        weights.append(save(base_model("llama", step, **sizes), path, step=step, tokenizer=words))
    for step in (100, 200, 1000):
        model = with_adapter(base_model("llama", **sizes), step)
        adapters.append(save(model, root / f"sft/checkpoint-{step}", step=step, adapter_only=True))
    return EngineFiles(
        root,
        save(base, root / "base", tokenizer=words),
        tuple(weights),
        tuple(adapters),
        save(base_model("qwen", **sizes), root / "qwen/base", tokenizer=words),
        save(base_model("qwen", 1, **sizes), root / "qwen/checkpoint-1", step=1, tokenizer=words),
    )
