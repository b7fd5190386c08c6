"""Folders of `accelerator.save_state` are resumed to the losses that follow accelerate's own
load.
"""

import os
import pickle
import random
import shutil

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import QUIET, Trained, network, rows

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import LoadError

RESTORED = {"weights", "model_1", "optimizer", "optimizer_1", "scheduler", "scaler", "rng"}


class Counter:
    """An object with a state."""

    def __init__(self):
        self.state = {"seen": 0}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def run_of(*, loader=None, accumulate=1, **settings):
    """A fresh run with two models, two optimizers and a scaler."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **settings)
    accelerator.gradient_state._set_sync_gradients(True)
    model, critic = network(), nn.Linear(3, 1)
    decayed = {"params": model[3].parameters(), "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([{"params": model[:3].parameters()}, decayed], lr=1e-2)
    second = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loader = loader or DataLoader(TensorDataset(rows()), 2, shuffle=True)
    model, critic, optimizer, second, scheduler, loader = accelerator.prepare(
        model, critic, optimizer, second, scheduler, loader
    )
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = Trained(accelerator, model, optimizer, scheduler, loader)
    run.critic, run.second = critic, second
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(77)
    return run


def train(run, batches, count):
    """Losses of `count` steps, and of random numbers of every kind beside them."""
    losses = []
    for _, (batch,) in zip(range(count), batches, strict=False):
        with run.accelerator.accumulate(run.model):
            loss = ((run.model(batch) - run.critic(batch)) ** 2).mean()
            loss.backward()  # unscaled
            run.optimizer.step()
            run.second.step()
            run.scheduler.step()
            run.optimizer.zero_grad()
            run.second.zero_grad()
        losses.append(
            [loss.item(), random.random(), np.random.rand(), run.optimizer.param_groups[1]["lr"]]
        )
    return losses


@pytest.fixture(scope="module", params=["safetensors", "bin"])
def saved(request, tmp_path_factory):
    folder, run = tmp_path_factory.mktemp("accelerate"), run_of()
    train(run, run.loader, 4)
    run.accelerator.scaler.scale(torch.ones(()))
    run.accelerator.scaler.update(2048.0)
    run.accelerator.save_state(folder, safe_serialization=request.param == "safetensors")
    return folder


def test_the_next_losses_are_those_after_load_state(saved, tmp_path):
    theirs = run_of()
    theirs.accelerator.load_state(saved)
    expected = train(theirs, theirs.loader, 6)
    run = run_of()
    with CheckpointSaver(run.accelerator, tmp_path / "run", **QUIET) as saver:
        progress = saver.resume(saved, allow=["data"])
        assert {
            item.name for item in progress.report.items if item.status == "restored"
        } == RESTORED
        assert [line.split(":")[:2] for line in progress.report.problems] == [["data", " absent"]]
        assert (progress.step, progress.resumed_from) == (4, saved)
        assert "step 4: as the optimizer counts its own" in progress.report.notes
        assert run.accelerator.step == 4
        assert run.accelerator.scaler.state_dict() == theirs.accelerator.scaler.state_dict()
        assert train(run, run.loader, 6) == expected
        saver.save_state()
    expected = train(run, run.loader, 2)
    again = run_of()
    with CheckpointSaver(again.accelerator, tmp_path / "run", **QUIET) as saver:
        assert saver.resume("must").report.problems == ()
        assert train(again, again.loader, 2) == expected


def test_what_is_not_there_is_refused_unless_it_is_allowed(saved):
    run = run_of()
    with CheckpointSaver(run.accelerator, **QUIET) as saver:
        saver.register(average=Counter())
        with pytest.raises(
            LoadError, match=r"average: absent: not prepared.*; data: absent"
        ) as caught:
            saver.resume(saved)
    assert "weights" not in str(caught.value)


def test_places_of_stateful_loaders_are_gone_on_from(tmp_path):
    """Also from a checkpoint of ours that is made within that pass."""

    def stateful():
        config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
        return run_of(dataloader_config=config)

    run = stateful()
    train(run, run.loader, 2)
    run.accelerator.save_state(tmp_path / "theirs")
    theirs = stateful()
    theirs.accelerator.load_state(tmp_path / "theirs")
    expected = [train(theirs, theirs.loader, 9) for _ in range(2)]
    assert [len(losses) for losses in expected] == [4, 6]
    run = stateful()
    with CheckpointSaver(run.accelerator, tmp_path / "run", **QUIET) as saver:
        assert saver.resume(tmp_path / "theirs").report.problems == ()
        assert train(run, run.loader, 9) == expected[0]  # without `remaining`, too
    run = stateful()
    with CheckpointSaver(run.accelerator, tmp_path / "run", **QUIET) as saver:
        saver.resume(tmp_path / "theirs")
        assert train(run, saver.remaining(run.loader), 1) == expected[0][:1]
        saver.save_state(path=tmp_path / "within")
    run = stateful()
    with CheckpointSaver(run.accelerator, tmp_path / "run", **QUIET) as saver:
        saver.resume(tmp_path / "within")
        assert train(run, saver.remaining(run.loader), 9) == expected[0][1:]
        assert train(run, saver.remaining(run.loader), 9) == expected[1]


def test_the_newest_of_a_project_is_taken_by_its_number(tmp_path):
    settings = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    run = run_of(project_config=settings)
    settings.iteration = 9
    for _ in range(2):
        train(run, run.loader, 1)
        run.accelerator.save_state()
    with CheckpointSaver(run.accelerator, tmp_path / "ours", **QUIET) as saver:
        assert saver.resume("auto").resumed_from is None
        for given in (tmp_path, tmp_path / "checkpoints"):
            progress = saver.resume(given, allow=["data"])
            assert (progress.resumed_from.name, progress.step) == ("checkpoint_10", 2)


def test_batches_between_steps(saved):
    run = run_of(accumulate=3)
    with CheckpointSaver(run.accelerator, **QUIET) as saver:
        progress = saver.resume(saved, allow=["data", "gradients"])
    assert (
        "gradients: absent: saved 1 batches after a step, whose gradients are not in the folder"
        in (progress.report.problems)
    )


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


FILES = ["optimizer.bin", "optimizer_1.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl"]
HARMED = [(name, harm) for name in FILES for harm in ("evil", "cut short", "missing")]
HARMED.remove(("random_states_0.pkl", "missing"))  # by which the folder is recognized
HARMED.append(("pytorch_model.bin", "evil"))


@pytest.mark.parametrize(("name", "harm"), HARMED)
def test_nothing_is_executed_and_nothing_overwritten(saved, tmp_path, monkeypatch, name, harm):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    shutil.copytree(saved, folder)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / name).unlink(missing_ok=True)
    if harm == "evil":
        torch.save({"step": 1, "state": {}, "evil": Evil()}, folder / name, pickle_module=pickle)
    elif harm == "cut short":
        (folder / name).write_bytes(b"PK\3\4 cut short")
    refuse_unchanged(folder, name)


def refuse_unchanged(folder, words):
    """The resume is refused with these words, nothing has run, and the model is as it was."""
    run = run_of()
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with CheckpointSaver(run.accelerator, **QUIET) as saver:
        with pytest.raises(LoadError, match=words):
            saver.resume(folder, allow=True)
        saver.step()
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert not (folder.parent / "ran").exists()


def test_objects_that_accelerate_unpickles_are_refused(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    shutil.copytree(saved, folder)
    torch.save({"seen": Evil()}, folder / "custom_checkpoint_0.pkl", pickle_module=pickle)
    refuse_unchanged(
        folder,
        r"custom_checkpoint_0.pkl: Accelerate executes .* accelerator.load_state in a script",
    )
    run = run_of()
    run.accelerator.register_for_checkpointing(Counter())
    with (
        CheckpointSaver(run.accelerator, **QUIET) as saver,
        pytest.raises(LoadError, match=r"pass them to saver.reg"),
    ):
        saver.resume(saved, allow=True)


def test_a_run_without_an_accelerator_is_refused(saved):
    with (
        CheckpointSaver(**QUIET) as saver,
        pytest.raises(LoadError, match=r"save_state, which only Accelerate reads"),
    ):
        saver.resume(saved, model=network(), allow=True)


def test_another_model_or_optimizer_is_named(saved, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(saved, folder)
    state = torch.load(folder / "optimizer_1.bin")
    state["state"][0]["momentum_buffer"] = torch.zeros(3, 1)
    torch.save(state, folder / "optimizer_1.bin")
    torch.save(
        {"state": {}, "param_groups": [{"params": [0], "lr": 1.0}]}, folder / "optimizer.bin"
    )
    (folder / "pytorch_model_1.bin").unlink(missing_ok=True)
    (folder / "model_1.safetensors").unlink(missing_ok=True)
    torch.save(
        {"weight": torch.zeros(1, 4), "further": torch.zeros(1)}, folder / "pytorch_model_1.bin"
    )
    words = [
        r"weight: \[1, 4\], \[1, 3\] in the model",
        "further: not in the model",
        "bias: not in the file, and the model has it",
        "optimizer.bin: groups of 1 parameters in the folder, of 4, 2 here",
        r"optimizer_1.bin: weight: momentum_buffer has shape \[3, 1\], the parameter \[1, 3\]",
    ]
    refuse_unchanged(folder, ".*".join(words))


def test_sharded_and_unfinished_folders_are_refused_with_what_to_do(saved, tmp_path):
    run = run_of()
    (tmp_path / "sharded" / "pytorch_model_fsdp_0").mkdir(parents=True)
    shutil.copy(saved / "random_states_0.pkl", tmp_path / "sharded")
    shutil.copytree(tmp_path / "sharded", tmp_path / "unfinished")
    (tmp_path / "unfinished" / "pytorch_model_fsdp_0").rmdir()
    shutil.copytree(saved, tmp_path / "of more")
    shutil.copy(saved / "random_states_0.pkl", tmp_path / "of more" / "random_states_1.pkl")
    with CheckpointSaver(run.accelerator, **QUIET) as saver:
        with pytest.raises(
            LoadError, match=r"pytorch_model_fsdp_0: sharded by FSDP.*accelerator.load_state"
        ):
            saver.resume(tmp_path / "sharded")
        with pytest.raises(LoadError, match=r"model.safetensors: not in the folder"):
            saver.resume(tmp_path / "unfinished")
        with pytest.raises(
            LoadError, match=r"random_states_1.pkl: more ranks have saved it than the 1 here"
        ):
            saver.resume(tmp_path / "of more")


def layers_of(
    order, decays=(0.1, 0.1), rates=(0.1, 0.1), *, named=False, momentum=0.9, last=3, schedule=True
):
    """A run of two layers, each a group of the optimizer, in this order; one step is done."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, last))
    groups = []
    for number in order:
        pairs = [
            (f"{number}.{name}", parameter) for name, parameter in model[number].named_parameters()
        ]
        members = pairs if named else [parameter for _, parameter in pairs]
        groups.append({"params": members, "weight_decay": decays[number], "lr": rates[number]})
    optimizer = torch.optim.SGD(groups, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 if schedule else 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    return accelerator, model, optimizer


ORDERS = {
    "decays": ({"decays": (0.0, 0.1)}, "group 0 has the settings of group 1 here"),
    "rates": ({"rates": (0.1, 0.2)}, "group 0 has the settings of group 1 here"),
    "shapes": ({"last": 2}, r"momentum_buffer has shape \[3, 3\], the parameter \[2, 3\]"),
    "decays, without moments": (
        {"decays": (0.0, 0.1), "last": 2, "momentum": 0.0},
        "group 0 has the settings of",
    ),
    "names": ({"named": True}, "group 0: 0.weight in the folder, 1.weight here"),
}
ALLOWED = ["data"]


@pytest.mark.parametrize("case", ORDERS)
def test_groups_in_another_order_are_refused(tmp_path, case):
    settings, words = ORDERS[case]
    accelerator, _, optimizer = layers_of((0, 1), **settings)
    accelerator.save_state(str(tmp_path))
    other, *_ = layers_of((1, 0), **settings)
    with CheckpointSaver(other, **QUIET) as saver, pytest.raises(LoadError, match=words):
        saver.resume(tmp_path, allow=ALLOWED)
    again, _, resumed = layers_of((0, 1), **settings)
    with CheckpointSaver(again, **QUIET) as saver:
        saver.resume(tmp_path, allow=ALLOWED)
    for before, after in zip(optimizer.param_groups, resumed.param_groups, strict=True):
        for one, two in zip(before["params"], after["params"], strict=True):
            moments = [
                each.state[p].get("momentum_buffer")
                for each, p in ((optimizer, one), (resumed, two))
            ]
            assert moments == [None, None] or torch.equal(*moments)
