"""Lightning's Trainer saves and resumes through ft_ckpt."""

import os
import signal

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning_runs import Counted, Kill, Stream, loader, module, ours, run, trainer
from on_ranks import WORLD, on_ranks
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM

import ft_ckpt
from ft_ckpt import Every, Keep, verify
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.errors import ConfigError, LoadError, SelectionError
from ft_ckpt.integrations.lightning import LightningCheckpoint
from ft_ckpt.storage.places import open_place

# settings of the trainer, of the module, of the data; steps after which a run is resumed
SHAPES = {
    "shuffled": ({}, {}, {}, (1, 7, 8)),
    "accumulating": ({"accumulate_grad_batches": 3}, {}, {}, (2, 3)),
    "limited": ({"limit_train_batches": 4}, {}, {}, (3, 4)),
    "by steps": ({"max_steps": 10, "max_epochs": -1}, {"kind": "lora"}, {}, (5, 7)),
    "workers": ({}, {}, {"num_workers": 1}, (7, 9)),
    "stream": ({"limit_train_batches": 5}, {}, {"dataset": Stream(), "shuffle": False}, (4, 5)),
    "plateau of epochs": ({}, {"plateau": "epoch"}, {}, (6, 7)),
    "plateau of steps": ({"val_check_interval": 2}, {"plateau": "step"}, {}, (2, 7)),
}


@pytest.mark.sample("by steps")
@pytest.mark.parametrize("name", SHAPES)
def test_resumed_after_any_step(tmp_path, name):
    """Other batches, random numbers and losses after a resume; a validation that is left out, or
    done twice.
    """
    settings, of, data, stops = SHAPES[name]
    checked = loader(shuffle=False) if "plateau" in of else None
    expected = run(trainer(**settings), module(**of), loader(**data), checked)
    made, whole = ours(tmp_path, **settings), module(**of)
    assert run(made, whole, loader(**data), checked) == expected
    steps = made.global_step
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
        f"checkpoint-{n}" for n in range(1, steps + 1)
    }
    for stop in stops:
        own = {
            "replay": name == "workers" or None,
            "resume": f"checkpoint-{stop}",
            "every": Every(epochs=9),
            "name_template": f"after-{stop}-{{step}}",
        }
        seed = 0 if "kind" in of else 1
        again = module(seed, **of)
        resumed = ours(tmp_path, own=own, **settings)
        seen = run(resumed, again, loader(**data), checked)
        assert seen == expected[-len(seen) :], stop
        assert (
            len(seen) == len(expected) - 7 * (stop // 3) - stop % 3 * 3
            if name == "accumulating"
            else steps - stop
        )
        assert resumed.global_step == steps
        live, other = whole.state_dict(), again.state_dict()
        assert all(torch.equal(live[key], other[key]) for key in live)


@pytest.mark.slow
def test_killed_and_started_again(tmp_path):
    """What a script does: callbacks, the data module and hooks of the checkpoint have their state
    again.
    """
    whole = Counted()
    expected = run(trainer([whole]), module(), Data())
    first = run(ours(tmp_path, [Counted(), Kill(9)]), module(), Data())
    counted, data = Counted(), Data()
    assert first + run(ours(tmp_path, [counted]), module(1), data) == expected
    assert (
        (counted.batches, counted.put, data.epochs) == (whole.batches, whole.put, 2) == (14, 14, 2)
    )
    assert run(ours(tmp_path), module(1), Data()) == []  # the run is finished


class Data(LightningDataModule):
    """Data that counts the epochs it was asked for."""

    def __init__(self):
        super().__init__()
        self.epochs = 0

    def train_dataloader(self):
        self.epochs += 1
        return loader()

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"] + 1 - 1


@pytest.mark.sample("short2-long2")
@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"max_epochs": 1}, {"max_epochs": 2}),
        ({"max_steps": 5, "max_epochs": -1}, {"max_steps": 12, "max_epochs": -1}),
        ({"max_steps": 7, "max_epochs": -1}, {"max_steps": 12, "max_epochs": -1}),
        ({"max_epochs": 1, "limit_train_batches": 4}, {"max_epochs": 2, "limit_train_batches": 4}),
    ],
)
def test_a_run_that_goes_on_for_longer(tmp_path, short, long):
    """What is saved when training ends is as good as what is saved before it does."""
    own = {"every": Every(steps=1000)}
    expected = run(trainer(**long), module(), loader())
    first = run(ours(tmp_path, own=own, **short), module(), loader())
    assert first + run(ours(tmp_path, own=own, **long), module(1), loader()) == expected


@pytest.mark.parametrize("kind", ["llama", "lora"])
def test_the_folder_is_the_model_inside(tmp_path, kind):
    made = module(kind=kind)
    run(ours(tmp_path, own={"every": Every(epochs=1)}, max_epochs=1), made, loader())
    folder = tmp_path / "checkpoint-7"
    assert ft_ckpt.verify(folder).ok
    if kind == "lora":
        loaded = PeftModel.from_pretrained(module().net, folder)
        assert not (folder / "model.safetensors").exists()
    else:
        loaded = LlamaForCausalLM.from_pretrained(folder)
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded.eval()(tokens).logits, made.net.eval()(tokens).logits)
    beside = load_file(folder / "state" / "training.safetensors")
    assert {"weights/head.weight", "weights/frozen.weight"} <= beside.keys()
    assert not any(name.startswith("weights/net.") for name in beside)


def test_another_base_is_refused(tmp_path):
    run(ours(tmp_path, max_steps=1), module(kind="lora"), loader())
    with pytest.raises(
        LoadError, match="base: failed: not the base that the adapters were trained on"
    ):
        run(ours(tmp_path), module(1, kind="lora"), loader())


def test_metrics_decide(tmp_path):
    """`best` and `keep` by what the module has logged; Lightning adds no callback that saves."""
    own = {
        "every": Every(best=("val_loss", "min"), epochs=1),
        "keep": Keep(last=1, best=("val_loss", "min")),
    }
    made = ours(tmp_path, own=own, val_check_interval=3, max_epochs=1)
    run(made, module(), loader(), loader(shuffle=False))
    assert [type(one) for one in made.checkpoint_callbacks] == [LightningCheckpoint]
    saved = discover(open_place(tmp_path))
    assert len(saved) <= 2
    assert all({"val_loss", "loss"} <= one.manifest.metrics.keys() for one in saved)


def test_a_signal_saves_and_ends_the_run(tmp_path):
    class Ended(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    own = {"every": Every(steps=1000, signals=("SIGTERM",))}
    with pytest.raises(SystemExit) as end:
        run(ours(tmp_path, [Ended()], own=own), module(), loader())
    assert end.value.code == 143
    (saved,) = discover(open_place(tmp_path))
    assert saved.manifest.step == 3
    assert signal.getsignal(signal.SIGTERM) == before
    expected = run(trainer(), module(), loader())
    assert run(ours(tmp_path, own=own), module(1), loader()) == expected[3:]
    assert signal.getsignal(signal.SIGTERM) == before


class Counter(nn.Module):
    """A module with state beside its parameters, as mixed-precision libraries have it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.count = kind, 0

    def get_extra_state(self):
        return self.kind([self.count])

    def set_extra_state(self, state):
        self.count = int(state[0])


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_extra_state_of_a_module(tmp_path, kind):
    """No save was made: a list has no data_ptr, and a tensor was taken for one that a hook had put
    there.
    """
    first = module()
    first.counter = Counter(kind)
    first.counter.count = 7
    run(ours(tmp_path, max_epochs=1), first, loader())
    again = module()
    again.counter = Counter(kind)
    run(ours(tmp_path, max_epochs=1), again, loader())
    assert again.counter.count == 7


class Pooled(WeightAveraging):
    """The mean of the weights after every second step and every epoch."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None or step_idx % 2 == 1


AVERAGES = {
    "mean": WeightAveraging,
    "moving": lambda: EMAWeightAveraging(decay=0.5, update_starting_at_step=2, use_buffers=False),
    "by steps and epochs": Pooled,
}


@pytest.mark.sample("moving")
@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_of_the_weights(tmp_path, kind):
    """Both weights come back: those of training, and the average, by which validation measures and
    which stays.
    """
    checked = loader(shuffle=False)
    whole, callback = module(), AVERAGES[kind]()
    expected = run(trainer([callback]), whole, loader(), checked)
    first = run(ours(tmp_path, [AVERAGES[kind](), Kill(5)]), module(), loader(), checked)
    second = run(ours(tmp_path, [AVERAGES[kind](), Kill(7)]), module(1), loader(), checked)
    again, resumed = module(1), AVERAGES[kind]()
    reports = []
    made = ours(tmp_path, [resumed], own={"on_saved": reports.append})
    assert first + second + run(made, again, loader(), checked) == expected
    average, other = callback._average_model.state_dict(), resumed._average_model.state_dict()
    assert average["n_averaged"] == other["n_averaged"] > 0
    assert all(torch.equal(average[key], other[key]) for key in average)
    live, final = whole.state_dict(), again.state_dict()
    assert all(torch.equal(live[key], final[key]) for key in live)
    assert any("the folder has the weights of training" in note for note in reports[-1].notes)
    stored = load_file(tmp_path / "checkpoint-14" / "model.safetensors")
    assert not torch.equal(stored["model.embed_tokens.weight"], again.net.model.embed_tokens.weight)


def test_an_averaged_run_that_goes_on_for_longer(tmp_path):
    """The end of training puts the average into the model, and is not what a longer run goes on
    from.
    """
    expected = run(trainer([WeightAveraging()], max_epochs=3), module(), loader())
    own = {"every": Every(steps=1000)}
    first = run(ours(tmp_path, [WeightAveraging()], own=own), module(), loader())
    assert (
        first + run(ours(tmp_path, [WeightAveraging()], own=own, max_epochs=3), module(1), loader())
        == expected
    )


class Averaging(Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["state_dict"] = {
            name: tensor.clone() for name, tensor in checkpoint["state_dict"].items()
        }


def test_what_cannot_be_kept_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Stream: has no length.*limit_train_batches=N"):
        run(ours(tmp_path), module(), loader(Stream(), shuffle=False))
    with pytest.raises(
        SelectionError,
        match=r"net\..*: put into the checkpoint's state_dict by an on_save_checkpoint",
    ):
        run(ours(tmp_path, [Averaging()]), module(), loader())
    with pytest.raises(ConfigError, match="StochasticWeightAveraging: replaces the scheduler"):
        run(ours(tmp_path, [StochasticWeightAveraging(0.01)]), module(), loader())
    two = module()
    two.other = module().net
    with pytest.raises(SelectionError, match="net, other: 2 models in Tuned; say whose weights"):
        run(ours(tmp_path), two, loader())
    made = ours(tmp_path)
    with pytest.raises(ConfigError, match="ckpt_path='best'"):
        made.fit(module(), loader(), ckpt_path="best")
    with pytest.raises(ConfigError, match="dtypes: not a setting"):
        LightningCheckpoint(tmp_path, dtypes="float32")


def test_begun_from_a_checkpoint_of_lightnings_own(tmp_path):
    expected = run(trainer(max_epochs=2), module(), loader(shuffle=False))
    plain = trainer(max_epochs=1)
    run(plain, module(), loader(shuffle=False))
    plain.save_checkpoint(tmp_path / "old.ckpt")
    with pytest.raises(ConfigError, match=r"old\.ckpt.*resume='never'"):
        ours(tmp_path / "run").fit(module(1), loader(), ckpt_path=tmp_path / "old.ckpt")
    again = module(1)
    made = ours(tmp_path / "run", own={"resume": "never"})
    made.fit(again, loader(shuffle=False), ckpt_path=tmp_path / "old.ckpt", weights_only=False)
    assert len(again.steps) == 7
    assert [row[:2] for row in again.steps] == [row[:2] for row in expected[7:]]
    assert (tmp_path / "run" / "checkpoint-14").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "lora"])
@on_ranks(2, group_seconds=None, env={"LIGHTNING": "pytorch_lightning"})
def test_under_ddp_and_by_the_other_name(tmp_path, kind):
    """Killed in the middle of an epoch, and resumed: each rank's batches and losses."""
    ddp = {"strategy": "ddp", "devices": WORLD}
    expected = run(trainer(**ddp), module(kind=kind), loader())
    first = run(ours(tmp_path / "run", [Kill(2)], **ddp), module(kind=kind), loader())
    again = module(0 if kind == "lora" else 1, kind=kind)
    assert first + run(ours(tmp_path / "run", **ddp), again, loader()) == expected
    assert len(expected) == 8
    assert verify(tmp_path / "run" / "checkpoint-8").ok
