"""The contract of integrations, on trainers of transformers, TRL and Lightning, on loops with and
without accelerate, and on the functions of open-instruct.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning_runs
import models
import pytest
import torch
import trainers
import trl_trainers
from accelerate import Accelerator
from contract_integration import Integration, IntegrationContract, WeightsContract
from torch.utils.data import DataLoader
from trainers import Recorded, Sentences, Stop, trainer
from transformers import TrainerCallback

from ft_ckpt import CheckpointSaver
from ft_ckpt.integrations.lightning import LightningCheckpoint
from ft_ckpt.integrations.open_instruct import clean_last_n_checkpoints, save_with_accelerate
from ft_ckpt.integrations.trainer import FtCkptCallback, checkpointed

STEPS = 6


class OfTrainer(Integration):
    """transformers' Trainer: with the callback, of a class, or with a trainer that exists."""

    def __init__(self, way: str) -> None:
        self.way = way

    def make(self, folder: Path, settings: dict[str, Any], **arguments: Any) -> Any:
        if self.way == "callback":
            return trainer(folder, [FtCkptCallback(**settings)], **arguments)
        if self.way == "class":
            return trainer(folder, cls=checkpointed(Recorded, **settings), **arguments)
        return checkpointed(trainer(folder, **arguments), **settings)

    def train(self, folder, *, resume=None, background=False, keep=None, **arguments):
        if folder is None:
            made = trainer(Path("none"), max_steps=STEPS, save_strategy="no", **arguments)
        else:
            settings = {"on_difference": "ignore", "background": background, "keep": keep}
            made = self.make(folder, settings, max_steps=STEPS, **arguments)
        steps = trainers.run(made, resume)
        self.model = made.model
        return steps


class Logged(TrainerCallback):
    """The losses that a trainer logs."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


class OfTrl(Integration):
    """A trainer of TRL."""

    def __init__(self, name: str, base: Path) -> None:
        self.case, self.base = trl_trainers.CASES[name], base
        trl_trainers.make_base(base)

    def train(
        self, folder, *, kind="llama", stop_after=None, resume=None, seed=0, keep=None, **settings
    ):
        logged = Logged()
        callbacks: list[Any] = [logged]
        if stop_after is not None:
            callbacks.append(Stop(stop_after))
        if folder is not None:
            callbacks.append(FtCkptCallback(on_difference="ignore", keep=keep, **settings))
        made = trl_trainers.make_trl(
            replace(self.case, is_lora=kind == "lora"),
            self.base,
            folder or Path("none"),
            callbacks,
            save_strategy="no" if folder is None else "steps",
        )
        with suppress(Stop.Killed):
            made.train(resume_from_checkpoint=resume)
        self.model = made.model
        return logged.losses


class OfLightning(Integration):
    """Lightning's Trainer."""

    def train(self, folder, *, kind="llama", stop_after=None, resume=None, seed=0, **settings):
        callbacks: list[Any] = []
        if stop_after is not None:
            callbacks.append(lightning_runs.Kill(stop_after))
        if folder is not None:
            mode = "never" if resume is None else resume
            callbacks.append(
                LightningCheckpoint(
                    folder, every=1, resume=mode, on_difference="ignore", **settings
                )
            )
        module = lightning_runs.module(seed, kind=kind)
        made = lightning_runs.trainer(
            callbacks,
            max_steps=STEPS,
            max_epochs=-1,
            enable_checkpointing=folder is not None,
            log_every_n_steps=1,
        )
        steps = lightning_runs.run(made, module, lightning_runs.loader())
        self.model = module.net
        return steps


class OfLoop(Integration):
    """A loop of its own with a saver, with accelerate or without."""

    def __init__(self, with_accelerate: bool) -> None:
        self.with_accelerate = with_accelerate

    def train(self, folder, *, kind="llama", stop_after=None, resume=None, seed=0, **settings):
        accelerator = Accelerator(cpu=True) if self.with_accelerate else None
        model = trainers.model(kind, seed)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader: Any = DataLoader(Sentences(), 2, shuffle=True)
        if accelerator is not None:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        self.model = model
        every = None if folder is None else 1
        with CheckpointSaver(
            accelerator, folder, every=every, on_difference="ignore", **settings
        ) as saver:
            if accelerator is None:
                saver.register(model=model, optimizer=optimizer)
            torch.manual_seed(5)
            if resume is not None:
                saver.resume(resume)
            steps: list[Any] = []
            while True:
                for batch in saver.remaining(loader, replay=True):
                    if saver.progress.step in (stop_after, STEPS):
                        return steps
                    loss = model(**batch).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    steps.append((batch["input_ids"].tolist(), float(loss)))
                    saver.step({"loss": float(loss)})


class OfOpenInstruct(Integration):
    """A script that saves with the functions of open-instruct."""

    def train(self, folder, *, kind="llama", keep=None):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(trainers.model(kind))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model = model
        for step, batch in enumerate(DataLoader(Sentences(), 2)):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            save_with_accelerate(
                accelerator,
                model,
                models.tokenizer(),
                str(folder / f"step_{step}"),
                use_lora=kind == "lora",
            )
            if keep is not None:
                clean_last_n_checkpoints(str(folder), keep)


class TestTrainer(IntegrationContract):
    way = "callback"

    @pytest.fixture
    def integration(self):
        return OfTrainer(self.way)


@pytest.mark.slow
class TestCheckpointedClass(TestTrainer):
    way = "class"


@pytest.mark.slow
class TestCheckpointedTrainer(TestTrainer):
    way = "trainer"


class TestSft(IntegrationContract):
    name = "sft"

    @pytest.fixture
    def integration(self, tmp_path_factory):
        pytest.importorskip("trl")
        return OfTrl(self.name, tmp_path_factory.mktemp("base") / "base")


@pytest.mark.slow
class TestDpo(TestSft):
    name = "dpo"


@pytest.mark.slow
class TestGrpo(TestSft):
    name = "grpo"


class TestLightning(IntegrationContract):
    @pytest.fixture
    def integration(self):
        return OfLightning()


class TestAccelerate(IntegrationContract):
    with_accelerate = True

    @pytest.fixture
    def integration(self):
        return OfLoop(self.with_accelerate)


class TestLoop(TestAccelerate):
    with_accelerate = False


class TestOpenInstruct(WeightsContract):
    @pytest.fixture
    def integration(self):
        return OfOpenInstruct()
