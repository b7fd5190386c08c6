"""A small Lightning run that records the batch and the loss of each step."""

import importlib
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import models
import torch
from torch import nn
from torch.utils.data import DataLoader
from trainers import Sentences, Stream

from ft_ckpt.integrations.lightning import LightningCheckpoint

lightning: Any = importlib.import_module(os.environ.get("LIGHTNING", "lightning.pytorch"))

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Killed(BaseException):
    """Stops a run in the middle."""


class Kill(lightning.Callback):
    """Stops the run at the start of the batch after `after` steps, with those before a resume."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.after:
            raise Killed


class Tuned(lightning.LightningModule):
    """A language model with dropout, with a head, a frozen layer and a counter."""

    def __init__(self, kind: str = "llama", plateau: str | None = None) -> None:
        super().__init__()
        base = models.llama(attention_dropout=0.2)
        self.net = models.lora(base) if kind == "lora" else base
        self.head = nn.Linear(models.VOCABULARY, 1)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("seen_batches", torch.zeros(()))
        self.plateau = plateau
        self.steps: list[Any] = []  # epoch, batch, tokens, loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.net(**batch)
        loss = out.loss + 0.01 * self.head(out.logits).mean() ** 2
        self.seen_batches += 1
        tokens = batch["input_ids"].tolist()
        self.steps.append((self.current_epoch, batch_idx, tokens, float(loss)))
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(**batch).loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        schedulers = torch.optim.lr_scheduler
        if not self.plateau:
            cosine = schedulers.CosineAnnealingLR(optimizer, 20)
            return [optimizer], [{"scheduler": cosine, "interval": "step"}]
        plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=9.0)
        settings = {"monitor": "val_loss", "interval": self.plateau, "strict": False}
        return [optimizer], [{"scheduler": plateau, **settings}]


class Counted(lightning.Callback):
    """A callback with a state dict and an entry in Lightning's checkpoint."""

    def __init__(self) -> None:
        self.batches = self.put = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        self.put += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["put"] = self.put

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.put = checkpoint["put"]


def loader(dataset: Any = None, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Sentences(), batch_size=2, **{"shuffle": True, **settings})


def module(seed: int = 0, **settings: Any) -> Tuned:
    torch.manual_seed(seed)
    return Tuned(**settings)


def trainer(callbacks: Any = (), **settings: Any) -> Any:
    """Make a trainer for 2 epochs of 7 batches; checkpoints are made by callbacks alone."""
    defaults = {**QUIET, "max_epochs": 2, "enable_checkpointing": False}
    return lightning.Trainer(**{**defaults, "callbacks": list(callbacks), **settings})


def ours(folder: Path, callbacks: Any = (), own: Any = None, **settings: Any) -> Any:
    """Make a trainer as `trainer` does, which saves at every step and resumes through ft_ckpt.

    `own` are settings of the checkpoint callback, `settings` those of the trainer.
    """
    options = {"every": 1, "on_difference": "ignore", **(own or {})}
    with_checkpoints = [*callbacks, LightningCheckpoint(folder, **options)]
    return trainer(with_checkpoints, **{"enable_checkpointing": True, **settings})


def run(trainer: Any, module: Tuned, data: Any, validation: Any = None) -> list[Any]:
    """Train until the run ends or is killed; return all steps."""
    lightning.seed_everything(5, verbose=False)
    texts = "does not have many workers|lower value for log_every|eval mode|metric val_loss"
    with suppress(Killed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*({texts}).*")
        trainer.fit(module, data, validation)
    return list(module.steps)


__all__ = [
    "Counted",
    "Kill",
    "Killed",
    "Stream",
    "Tuned",
    "loader",
    "module",
    "ours",
    "run",
    "trainer",
]
