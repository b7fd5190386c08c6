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
    """Steps as (batch, loss); `stop_after` ends the run after so many steps, as a kill would."""

    def __init__(self, *args: Any, stop_after: int | None = None, **settings: Any) -> None:
        self.seen: list[Any] = []
        super().__init__(*args, **settings)
        if stop_after is not None:
            self.add_callback(Stop(stop_after))

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        loss = super().training_step(model, inputs, *rest)
        self.seen.append((inputs["input_ids"].tolist(), float(loss)))
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
    """A model of that kind; a callable makes it itself."""
    torch.manual_seed(seed)
    if callable(kind):
        return kind()
    base = models.llama(attention_dropout=0.2)
    return models.lora(base) if kind == "lora" else base


def even_llama() -> Any:
    """A Llama whose rows divide by four ranks: otherwise FSDP2 computes with two copies of tied
    embeddings.
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
    """A trainer of 2 samples a batch for 2 epochs of 7 batches, saving at every step by default."""
    names = ("train_dataset", "eval_dataset", "stop_after", "compute_metrics", "processing_class")
    own = {name: settings.pop(name) for name in names if name in settings}
    defaults = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "save_steps": 1,
        "save_strategy": "steps",
    }
    args = TrainingArguments(
        str(folder), **{**SILENT, "learning_rate": 0.01, **defaults, **settings}
    )
    return cls(
        model(kind, seed),
        args,
        train_dataset=own.pop("train_dataset", Sentences()),
        callbacks=list(callbacks),
        **own,
    )


def ours(folder: Path, **settings: Any) -> Any:
    """Like `trainer`, saving and resuming through ft_ckpt."""
    names = ("attribute", "dtype", "keep", "on_resumed", "state")
    told = {name: settings.pop(name) for name in names if name in settings}
    return trainer(folder, [FtCkptCallback(on_difference="ignore", **told)], **settings)


def run(made: Any, resume: Any = None) -> list[Any]:
    """All steps until the run ends or is stopped."""
    with suppress(Stop.Killed):
        made.train(resume_from_checkpoint=resume)
    return list(made.seen)
