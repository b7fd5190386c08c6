"""A small `Trainer` that records the batch and the loss of each step."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import models
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from ft_ckpt.integrations.trainer import FtCkptCallback

SAMPLES = 14
SILENT = {
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "log_level": "error",
    "use_cpu": True,
}


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Token rows that random augmentation changes at every reading."""

    def __init__(self, noise: bool = True) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.arange(index, index + 8) % models.VOCABULARY
        if self.noise:
            row[int(torch.randint(8, ()))] = int(torch.randint(models.VOCABULARY, ()))
        return {"input_ids": row, "labels": row.clone()}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        rows = Sentences()
        yield from (rows[index] for index in range(SAMPLES))


class Recorded(Trainer):
    """Records each step as (tokens, loss); `stop_after` ends the run after so many, as a kill."""

    def __init__(self, *args: Any, stop_after: int | None = None, **settings: Any) -> None:
        self.steps: list[Any] = []
        super().__init__(*args, **settings)
        if stop_after is not None:
            self.add_callback(Stop(stop_after))

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        loss = super().training_step(model, inputs, *rest)
        self.steps.append((inputs["input_ids"].tolist(), float(loss)))
        return loss


class Stop(TrainerCallback):
    class Killed(BaseException):
        pass

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after:
            raise Stop.Killed


def model(kind: Any = "llama", seed: int = 0) -> Any:
    """Make a model of that kind; a callable makes it itself."""
    torch.manual_seed(seed)
    if callable(kind):
        return kind()
    base = models.llama(attention_dropout=0.2)
    return models.lora(base) if kind == "lora" else base


def even_llama() -> Any:
    """Make a Llama whose rows divide by four ranks.

    With other rows FSDP2 computes with two copies of tied embeddings.
    """
    return models.llama(attention_dropout=0.2, vocab_size=104)


def trainer(
    folder: Path,
    callbacks: Any = (),
    kind: Any = "llama",
    seed: int = 0,
    cls: type = Recorded,
    **settings: Any,
) -> Any:
    """Make a trainer for 2 epochs of 7 batches of 2 samples, which saves at every step by default.

    `settings` are of the trainer and of its arguments.
    """
    names = ("train_dataset", "eval_dataset", "stop_after", "compute_metrics", "processing_class")
    of_trainer = {name: settings.pop(name) for name in names if name in settings}
    of_trainer.setdefault("train_dataset", Sentences())
    defaults = {
        **SILENT,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "save_steps": 1,
        "save_strategy": "steps",
    }
    args = TrainingArguments(str(folder), **{**defaults, **settings})
    return cls(model(kind, seed), args, callbacks=list(callbacks), **of_trainer)


def ours(folder: Path, **settings: Any) -> Any:
    """Make a trainer as `trainer` does, which saves and resumes through ft_ckpt."""
    names = ("attribute", "dtype", "keep", "on_resumed", "state")
    options = {name: settings.pop(name) for name in names if name in settings}
    return trainer(folder, [FtCkptCallback(on_difference="ignore", **options)], **settings)


def run(trainer: Any, resume: Any = None) -> list[Any]:
    """Train until the run ends or is stopped; return all steps."""
    with suppress(Stop.Killed):
        trainer.train(resume_from_checkpoint=resume)
    return list(trainer.steps)
