"""The types of calls as the pages show them. mypy checks this file; nothing runs it.

An error that must be one is ignored on its line: mypy reports an ignored line without an error.
"""

from typing import Any

import torch
from transformers import Trainer
from typing_extensions import assert_type

from ft_ckpt import (
    CheckpointSaver,
    Every,
    Keep,
    LoadReport,
    PendingSave,
    SaverConfig,
    SaveReport,
    load_model,
)
from ft_ckpt.integrations.trainer import checkpointed


def save_in_the_foreground(model: torch.nn.Module) -> None:
    every = Every(steps=500, minutes=30)
    keep = Keep(last=3, best=("loss", "min"))
    with CheckpointSaver(None, "runs/sft", every=every, keep=keep) as saver:
        saver.resume()
        assert_type(saver.step({"loss": torch.ones(())}), SaveReport | None)
        report = saver.save(model, "out", dtype=torch.bfloat16, max_shard_size="5GB")
        assert_type(report, SaveReport)
        assert_type(report.tensors, int)
        assert_type(saver.save(model, "out", background=True), PendingSave)
        assert_type(saver.save_state(), SaveReport)


def save_in_the_background(model: torch.nn.Module) -> None:
    saver = CheckpointSaver(None, "runs/sft", every=500, background=True)
    assert_type(saver.save(model).result(), SaveReport)
    assert_type(saver.save(model, background=False), SaveReport)
    assert_type(saver.save_state(), PendingSave)


def save_with_a_config(model: torch.nn.Module, config: SaverConfig) -> None:
    saver = CheckpointSaver(None, "runs/sft", config=config)
    assert_type(saver.save(model), SaveReport | PendingSave)


def save_as_a_flag_says(model: torch.nn.Module, is_last: bool) -> None:
    saver = CheckpointSaver(None, "runs/sft")
    assert_type(saver.save(model, background=not is_last), SaveReport | PendingSave)
    assert_type(saver.save_state(background=not is_last), SaveReport | PendingSave)


def settings_that_do_not_exist(model: torch.nn.Module) -> None:
    CheckpointSaver(dtpye="bfloat16")  # type: ignore[call-overload]  # a typing error
    CheckpointSaver(when_full="panic")  # type: ignore[call-overload]  # another value
    CheckpointSaver().save(model, adapter_onyl=True)  # type: ignore[call-overload]  # a typing error


def load_into_modules(head: torch.nn.Linear) -> None:
    assert_type(load_model("out/ppo", into={"value_head": head}), dict[str, Any])
    parts, report = load_model("out/ppo", into={"value_head": head}, with_report=True)
    assert_type(parts, dict[str, Any])
    assert_type(report, LoadReport)
    assert_type(load_model("out/ppo", part="value_head", into=head), torch.nn.Linear | Any)


class OwnTrainer(Trainer):
    """A trainer of a script."""

    def own_method(self) -> int:
        return 1


def make_a_trainer(model: torch.nn.Module) -> None:
    trainer_class = checkpointed(OwnTrainer, keep=3, dtype="bfloat16", background=True)
    assert_type(trainer_class, type[OwnTrainer])
    assert_type(trainer_class(model).own_method(), int)
    assert_type(checkpointed(OwnTrainer(model), keep=3), OwnTrainer)
    checkpointed(OwnTrainer, kepp=3)  # type: ignore[call-arg]  # a typing error
