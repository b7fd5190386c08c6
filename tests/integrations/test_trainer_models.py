"""State that a Trainer or a callback holds beside the trained model: resumed as in the run nobody
stopped, or named.
"""

import copy
import json
import warnings
from contextlib import suppress

import pytest
import torch
import trainers
from torch import nn
from trainers import Recorded, ours, run, trainer
from transformers import TrainerCallback

from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import LoadError
from ft_ckpt.storage.places import open_place

STEPS = 5


class Moving(TrainerCallback):
    """Moves a model towards the trained one, through `.data`, as TRL's reference models are
    moved.
    """

    def __init__(self, target, first_step=1):
        self.target, self.first_step = target, first_step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step < self.first_step:
            return
        with torch.no_grad():
            for moved, live in zip(self.target.parameters(), model.parameters(), strict=True):
                moved.data.mul_(0.5).add_(live.data, alpha=0.5)


class WithReference(Recorded):
    """The loss depends on a reference model that moves from `first_step` on; None: it stays."""

    first_step = 1

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.reference = copy.deepcopy(self.model).eval()
        if self.first_step is not None:
            self.add_callback(Moving(self.reference, self.first_step))

    def reference_logits(self, inputs):
        return self.reference(**inputs).logits

    def compute_loss(self, model, inputs, *rest, **settings):
        with torch.no_grad():
            expected = self.reference_logits(inputs)
        outputs = model(**inputs)
        return outputs.loss + (outputs.logits - expected).square().mean()


class LateReference(WithReference):
    first_step = 3


class FrozenReference(WithReference):
    first_step = None


class InList(WithReference):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.teachers = {"all": [self.reference]}
        del self.reference

    def reference_logits(self, inputs):
        return self.teachers["all"][0](**inputs).logits


class LossWithHead(nn.Module):
    """A loss that contains the trained model, and a head that is trained with it."""

    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(101, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        outputs = self.model(**inputs)
        return outputs.loss + self.scale * self.head(outputs.logits).square().mean()


class ClearingGradients(TrainerCallback):
    """The Trainer clears those of the trained model only."""

    def __init__(self, module):
        self.module = module

    def on_step_end(self, args, state, control, **kwargs):
        self.module.zero_grad()


class WithLoss(Recorded):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.loss = LossWithHead(self.model)
        self.add_callback(ClearingGradients(self.loss))

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW(self.loss.parameters(), lr=0.01)
        return self.optimizer

    def compute_loss(self, model, inputs, *rest, **settings):
        return self.loss(inputs)


class WithCritic(Recorded):
    """A further model with an optimizer and a schedule of its own."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.critic = nn.Linear(101, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        self.critic_schedule = torch.optim.lr_scheduler.ExponentialLR(self.critic_optimizer, 0.5)

    def compute_loss(self, model, inputs, *rest, **settings):
        outputs = model(**inputs)
        self.critic_optimizer.zero_grad()
        self.critic(outputs.logits.detach()).square().mean().backward()
        self.critic_optimizer.step()
        self.critic_schedule.step()
        return outputs.loss + self.critic(outputs.logits).mean()


class Weighting:
    """An object with a state dict, which the script passes to the trainer."""

    def __init__(self):
        self.factor = 1.0

    def state_dict(self):
        return {"factor": self.factor}

    def load_state_dict(self, state):
        self.factor = state["factor"]


class WithObject(Recorded):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.weighting = Weighting()

    def compute_loss(self, model, inputs, *rest, **settings):
        self.weighting.factor *= 1.25
        return model(**inputs).loss * self.weighting.factor


class Generating(Recorded):
    """As TRL's trainers that generate samples once for three steps."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self._step, self._buffered_inputs = 0, None

    def training_step(self, model, inputs, *rest):
        if self._step % 3 == 0:
            self._buffered_inputs = [
                {"ids": torch.randint(101, (2, 8)), "note": None} for _ in range(3)
            ]
        rows = self._buffered_inputs[self._step % 3]["ids"]
        self._step += 1
        return super().training_step(model, {"input_ids": rows, "labels": rows.clone()}, *rest)


KINDS = {
    "reference": WithReference,
    "late reference": LateReference,
    "frozen reference": FrozenReference,
    "in a list": InList,
    "head of a loss": WithLoss,
    "critic": WithCritic,
    "object": WithObject,
    "generation": Generating,
}


@pytest.mark.sample("late reference", "critic")
@pytest.mark.parametrize("cls", KINDS.values(), ids=KINDS)
def test_resumed_like_the_run_nobody_stopped(tmp_path, cls):
    shape = {"cls": cls, "max_steps": STEPS}
    expected = run(trainer(tmp_path / "plain", save_strategy="no", **shape))
    first = run(ours(tmp_path / "run", **shape, stop_after=4))
    assert first == expected[:4]
    for stop in (2, 4):
        again = ours(tmp_path / "again", **{**shape, "save_strategy": "no"})
        assert run(again, tmp_path / "run" / f"checkpoint-{stop}") == expected[stop:], stop


def stored_items(folder):
    return json.loads((folder / "state" / "training.json").read_text())["items"]


def test_a_model_that_does_not_move_is_not_stored(tmp_path):
    run(ours(tmp_path / "late", cls=LateReference, stop_after=4))
    assert [
        "trainer.reference" in stored_items(tmp_path / "late" / f"checkpoint-{step}")
        for step in (1, 2, 3, 4)
    ] == [
        False,
        False,
        True,
        True,
    ]
    run(ours(tmp_path / "frozen", cls=FrozenReference, stop_after=1))
    run(ours(tmp_path / "without", stop_after=1))
    sizes = [
        sum(
            file.size_bytes
            for file in read_manifest(open_place(tmp_path / name / "checkpoint-1")).files
            if "json" not in file.path
        )
        for name in ("frozen", "without")
    ]
    assert sizes[0] == sizes[1]


class OtherReference(FrozenReference):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        with torch.no_grad():
            next(self.reference.parameters()).add_(1)


def test_another_model_than_in_the_saved_run_is_named(tmp_path):
    run(ours(tmp_path / "run", cls=FrozenReference, stop_after=1))
    saved, reports = tmp_path / "run" / "checkpoint-1", []
    shape = {"cls": OtherReference, "stop_after": 2}
    run(
        ours(
            tmp_path / "other",
            **shape,
            on_resumed=lambda saver: reports.append(saver.progress.report),
        ),
        saved,
    )
    assert [line for line in reports[0].differences if "trainer.reference" in line]
    strict = [trainers.FtCkptCallback(on_difference="raise")]
    with pytest.raises(LoadError, match=r"trainer\.reference: has other values"):
        run(trainer(tmp_path / "other", strict, **shape), saved)


class Averaging(TrainerCallback):
    """Averages in a list of tensors, made when the training begins."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.averages = [parameter.detach().clone() for parameter in model.parameters()]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for average, live in zip(self.averages, model.parameters(), strict=True):
            average.mul_(0.9).add_(live.detach(), alpha=0.1)


def test_state_that_cannot_be_restored_is_named(tmp_path):
    made = ours(tmp_path / "run", stop_after=2)
    made.add_callback(Averaging())
    with pytest.warns(UserWarning, match=r"Averaging\.averages: changes during the training"):
        run(made)
    reports = []
    run(
        ours(
            tmp_path / "run",
            stop_after=2,
            on_resumed=lambda saver: reports.append(saver.progress.report),
        ),
        True,
    )
    assert reports[0].notes == (
        "Averaging.averages: not in the checkpoint, begins as the script makes it",
    )


def test_a_checkpoint_without_an_object_of_this_run(tmp_path):
    """Saved by a trainer without it, or by a version that did not know it."""
    run(ours(tmp_path / "run", stop_after=1))
    reports = []
    made = ours(
        tmp_path / "run",
        cls=WithObject,
        stop_after=2,
        on_resumed=lambda saver: reports.append(saver.progress.report),
    )
    assert len(run(made, True)) == 1
    assert reports[0].notes == (
        "trainer.weighting: not in the checkpoint, begins as the script makes it",
    )
    assert "trainer.weighting" in stored_items(tmp_path / "run" / "checkpoint-2")


TRL_CASES = [
    *(
        "sft",
        "sft packed",
        "sft averaged",
        "dpo",
        "dpo lora",
        "dpo synced",
        "dpo synced late",
        "dpo given reference",
    ),
    *(
        "dpo precomputed",
        "dpo averaged reference",
        "kto",
        "reward",
        "grpo",
        "grpo reference",
        "grpo synced",
    ),
    *(
        "grpo iterations",
        "grpo generates ahead",
        "rloo",
        "rloo synced",
        "rloo iterations",
        "distillation",
    ),
    *("sdpo teacher", "sdft teacher", "cpo", "orpo", "gkd", "online dpo"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRL_CASES)
def test_trainers_of_trl(tmp_path, name):
    """Each option that holds a second model, a buffer or a moving state: the same losses and
    weights, or named.
    """
    pytest.importorskip("trl")
    from trl_trainers import CASES, make_base, make_trl

    case, base = CASES[name], tmp_path / "base"
    make_base(base)
    whole = make_trl(case, base, tmp_path / "whole", [], save_strategy="no")
    whole.train()
    first = make_trl(case, base, tmp_path / "run", [trainers.FtCkptCallback(), trainers.Stop(3)])
    with warnings.catch_warnings(record=True) as caught, suppress(trainers.Stop.Killed):
        warnings.simplefilter("always")
        first.train()
    named = [
        str(warning.message)
        for warning in caught
        if "is not in the checkpoints" in str(warning.message)
    ]
    reports = []
    callback = trainers.FtCkptCallback(
        on_difference="ignore", on_resumed=lambda saver: reports.append(saver.progress.report)
    )
    again = make_trl(case, base, tmp_path / "run", [callback])
    again.train(resume_from_checkpoint=True)
    live, expected = again.model.state_dict(), whole.model.state_dict()
    is_same = losses(again) == losses(whole) and all(
        torch.equal(live[key], expected[key]) for key in expected
    )
    notes = [note for note in reports[0].notes if "not in the checkpoint" in note]
    assert bool(named) is bool(notes)
    assert is_same or notes
    assert bool(notes) is ("averaged" in name), (is_same, notes)


def losses(made):
    return [row["loss"] for row in made.state.log_history if "loss" in row]
