"""Fields of adapter_config.json that were changed: followed as PEFT follows them, or refused."""

import copy
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from adapter_fields import FieldTrials
from architectures import ARCHITECTURES, make
from compare import logits
from methods import METHODS, UNMERGEABLE
from peft import LoraConfig, get_peft_model

from ft_ckpt import CheckpointSaver, errors

ALL = sorted({**METHODS, **UNMERGEABLE})


@pytest.mark.sample("lora")
@pytest.mark.parametrize("method", ["lora", "dora", "loha"])
def test_some_fields(tmp_path, method):
    trials = FieldTrials(method, tmp_path)
    some = random.Random(7).sample(trials.all_changes(), 6)
    assert not [wrong for field, value in some for wrong in trials.problems_with(field, value)]


def test_an_adapter_that_is_drawn_anew_at_each_load_is_refused(tmp_path):
    """UniLora's indices without a seed, and not in its file."""
    trials = FieldTrials("unilora", tmp_path)
    assert not [*trials.problems_with("proj_seed", None)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ALL)
def test_many_fields(tmp_path, method):
    """25 of some 500 changes of each method, others with each seed: all of them take seven
    hours.
    """
    trials = FieldTrials(method, tmp_path)
    changes = trials.all_changes()
    some = random.Random(f"{os.environ['FT_CKPT_SEED']}/{method}").sample(
        changes, min(25, len(changes))
    )
    assert not [wrong for field, value in some for wrong in trials.problems_with(field, value)]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run of LoRA that was saved, and the function that makes its model with other settings."""
    base = make(ARCHITECTURES["llama-tied"])

    def with_settings(**settings):
        config = {
            "r": 2,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "v_proj"],
            "init_lora_weights": False,
        }
        return get_peft_model(copy.deepcopy(base), LoraConfig(**{**config, **settings}))

    saved, path = with_settings(), tmp_path_factory.mktemp("run") / "saved"
    CheckpointSaver().save_state(saved, path)
    return saved, path, with_settings


def _same_tensors(model, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("lora_alpha", 12), ("use_rslora", True), ("alpha_pattern", {"q_proj": 2})),
        *(("alora_invocation_tokens", [3, 5]), ("use_dora", True), ("r", 3)),
    ],
)
def test_a_resume_onto_other_settings_is_refused(adapted, field, value):
    _, path, with_settings = adapted
    model = with_settings(**{field: value})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        errors.LoadError,
        match=rf"adapter settings: failed: default: {field}.*nothing was overwritten",
    ):
        CheckpointSaver().resume(path, model=model)
    assert _same_tensors(model, before)


@dataclass
class ConfigWithFileBeside(LoraConfig):
    """As ms-swift's: further fields, which stand in a file of their own."""

    embedding_rate: float = 0.5

    def save_pretrained(self, save_directory, **settings):
        fields = {
            name: value
            for name, value in vars(self).items()
            if name in LoraConfig.__dataclass_fields__
        }
        LoraConfig(**fields).save_pretrained(save_directory, **settings)
        Path(save_directory, "additional_config.json").write_text(
            json.dumps({"embedding_rate": self.embedding_rate})
        )


def test_a_config_that_keeps_fields_in_a_file_of_its_own(tmp_path):
    settings = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    base = make(ARCHITECTURES["llama-tied"])
    saved = get_peft_model(copy.deepcopy(base), ConfigWithFileBeside(**settings))
    CheckpointSaver().save_state(saved, tmp_path / "saved")
    assert (tmp_path / "saved" / "additional_config.json").exists()
    again = get_peft_model(copy.deepcopy(base), ConfigWithFileBeside(**settings))
    assert (
        not CheckpointSaver(on_difference="ignore")
        .resume(tmp_path / "saved", model=again)
        .report.problems
    )
    other = get_peft_model(
        copy.deepcopy(base), ConfigWithFileBeside(**{**settings, "lora_alpha": 7})
    )
    with pytest.raises(errors.LoadError, match="lora_alpha is 7, 6 in the checkpoint"):
        CheckpointSaver().resume(tmp_path / "saved", model=other)


def test_other_settings_that_are_allowed(adapted):
    saved, path, with_settings = adapted
    model = with_settings(lora_alpha=12)
    report = CheckpointSaver().resume(path, model=model, allow=["adapter settings"]).report
    assert ["lora_alpha is 12, 6 in the checkpoint" in line for line in report.problems] == [True]
    assert _same_tensors(model, saved.state_dict())


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"lora_dropout": 0.5},
            {"init_lora_weights": "gaussian"},
            {"base_model_name_or_path": "another"},
        ),
        *({"target_modules": ["v_proj", "q_proj"]}, {"inference_mode": True}, {"revision": "main"}),
    ],
)
def test_settings_that_change_no_number_are_resumed(adapted, settings):
    saved, path, with_settings = adapted
    model = with_settings(**settings)
    assert not CheckpointSaver(on_difference="ignore").resume(path, model=model).report.problems
    assert _same_tensors(model, saved.state_dict())
    assert torch.equal(logits(model), logits(saved))
