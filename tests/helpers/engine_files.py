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
    weights: tuple[Path, ...]  # fine-tunes of it
    adapters: tuple[Path, ...]  # on it, at steps 100, 200 and 1000
    qwen: Path  # grouped heads, tied head
    qwen_weights: Path


def engine_files(root: Path) -> EngineFiles:
    """Save them in `root`."""
    words = tokenizer()

    def save(model: Any, path: Path, **options: Any) -> Path:
        with CheckpointSaver(None) as saver:
            saver.save(model, path, **options)
        return path

    base = base_model("llama")
    return EngineFiles(
        root,
        save(base, root / "base", tokenizer=words),
        tuple(
            save(base_model("llama", seed), root / f"run/checkpoint-{seed}", step=seed, tokenizer=words)
            for seed in (1, 2)
        ),
        tuple(
            save(with_adapter(base_model("llama"), step), root / f"sft/checkpoint-{step}", step=step, adapter_only=True)
            for step in (100, 200, 1000)
        ),
        save(base_model("qwen"), root / "qwen/base", tokenizer=words),
        save(base_model("qwen", 1), root / "qwen/checkpoint-1", step=1, tokenizer=words),
    )
