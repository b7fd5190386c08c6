"""Steps that several batches make: counted once, and their gradients kept, whoever accumulates
them.
"""

import models
import pytest
import torch
from accelerate import Accelerator
from on_ranks import RANK, on_ranks
from torch import nn
from wrappers import WRAPPERS

from ft_ckpt import CheckpointSaver

QUIET = {"on_difference": "ignore"}


@pytest.mark.sample("fsdp2-False")
@pytest.mark.parametrize(
    ("wrapper", "unsynced"), [("ddp", False), ("fsdp2", False), ("fsdp2", True)]
)
@on_ranks(2)
def test_two_ranks(tmp_path, wrapper, unsynced):
    """Without Accelerate: three batches make a step, and gradients of an unfinished one are
    kept.
    """

    def batch(live, number):
        if unsynced:
            live.model.set_requires_gradient_sync(number % 3 == 2)
        loss = live.model(**models.batch(seed=31 * number + RANK)).loss
        loss.backward()
        if number % 3 == 2:
            live.optimizer.step()
            live.optimizer.zero_grad()
        return float(loss.detach())

    def made(seed):
        live = WRAPPERS[wrapper](models.build("llama", seed))
        saver = CheckpointSaver(None, tmp_path, enter_timeout_seconds=30, **QUIET)
        saver.register(model=live.model, optimizer=live.optimizer)
        return live, saver

    live, saver = made(0)
    expected = []
    for number in range(9):
        expected.append(batch(live, number))
        saver.step()
        if number in (3, 4, 5):
            saver.save_state(path=tmp_path / f"after-{number}")
    assert saver.progress.step == 3, saver.progress
    for number in (3, 4, 5):
        fresh, saver = made(1)
        report = saver.resume(f"after-{number}").report
        assert any(item.name == "gradients" for item in report.items) == (number != 5), report
        assert [batch(fresh, later) for later in range(number + 1, 9)] == expected[number + 1 :], (
            number
        )


class Script:
    """Accumulation by hand over three batches, of two models with an optimizer each."""

    def __init__(self, folder, accelerator=None):
        torch.manual_seed(0)
        self.models = nn.Linear(3, 3), nn.Linear(3, 1)
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in self.models]
        if accelerator is not None:
            self.models = accelerator.prepare(*self.models)
            self.optimizers = list(accelerator.prepare(*self.optimizers))
        self.saver = CheckpointSaver(accelerator, folder, **QUIET)
        if accelerator is None:
            first, second = self.optimizers
            self.saver.register(
                model=self.models[0], head=self.models[1], optimizer=first, second=second
            )

    def backward(self, number):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        loss = self.models[1](self.models[0](inputs)).square().mean()
        loss.backward()
        return loss.item()

    def step(self):
        for one in self.optimizers:
            one.step()

    def batch(self, number, before_step=lambda: None, set_to_none=True):
        loss = self.backward(number)
        if number % 3 == 2:
            before_step()
            self.step()
            for one in self.optimizers:
                one.zero_grad(set_to_none=set_to_none)
        return loss


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("stop", [3, 4, 5, 6])
def test_gradients_of_both_models_come_back(tmp_path, stop, accelerated):
    """Without an Accelerator, or with one that the script does not let accumulate, gradients were
    dropped.
    """
    script = Script(tmp_path, Accelerator(cpu=True) if accelerated else None)
    losses = []
    for number in range(9):
        losses.append(script.batch(number))
        script.saver.step()
        if number == stop:
            script.saver.save_state(path=tmp_path / "checkpoint")
    assert script.saver.progress.step == 3
    fresh = Script(tmp_path, Accelerator(cpu=True) if accelerated else None)
    fresh.backward(77)  # gradients that the checkpoint does not have
    progress = fresh.saver.resume("checkpoint")
    assert any(item.name == "gradients" for item in progress.report.items) == (stop != 5)
    assert [fresh.batch(number) for number in range(stop + 1, 9)] == losses[stop + 1 :]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_save_between_backward_and_step(tmp_path, set_to_none):
    script = Script(tmp_path)
    for number in range(5):
        script.batch(number, set_to_none=set_to_none)
    script.batch(5, lambda: script.saver.save_state(path=tmp_path / "checkpoint"), set_to_none)
    losses = [script.batch(number, set_to_none=set_to_none) for number in range(6, 9)]
    fresh = Script(tmp_path)
    fresh.saver.resume("checkpoint")
    fresh.step()
    for one in fresh.optimizers:
        one.zero_grad(set_to_none=set_to_none)
    assert [fresh.batch(number) for number in range(6, 9)] == losses


def test_gradients_that_were_taken_in_are_not_kept(tmp_path):
    script = Script(tmp_path)
    script.backward(0)
    script.step()  # and zero_grad() comes at the begin of the next batch
    script.saver.step()
    script.saver.save_state()
    assert not any("gradients" in name for name in names_in(tmp_path / "checkpoint-1"))
    script.backward(1)  # on top of them
    script.saver.save_state(path=tmp_path / "later")
    assert any("gradients" in name for name in names_in(tmp_path / "later"))


def names_in(checkpoint):
    from safetensors import safe_open

    with safe_open(checkpoint / "state" / "training.safetensors", "pt") as file:
        return list(file.keys())


def test_every_call_counts_where_no_optimizer_is_known(tmp_path):
    model = nn.Linear(1, 1)
    saver = CheckpointSaver(None, tmp_path)
    saver.register(model=model)
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        saver.step()
    assert saver.progress.step == 3


def test_the_hooks_are_taken_off(tmp_path):
    script = Script(tmp_path)
    with script.saver:
        assert all(one._optimizer_step_post_hooks for one in script.optimizers)
    assert not any(one._optimizer_step_post_hooks for one in script.optimizers)
