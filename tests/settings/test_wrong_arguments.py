"""Arguments of the wrong kind are refused where they are given, with the argument that they belong
to.
"""

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import models
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer

import ft_ckpt
from ft_ckpt import CheckpointSaver, Every, Keep, SaverConfig
from ft_ckpt.errors import CheckpointError, ConfigError
from ft_ckpt.integrations.lightning import LightningCheckpoint
from ft_ckpt.integrations.trainer import FtCkptCallback, checkpointed


def linear():
    return torch.nn.Linear(2, 2)


class NamedTrainer:
    """What a Trainer shows of itself."""

    accelerator = None

    def train(self):
        """Not called."""


IN_THE_ACCELERATORS_PLACE = {
    "folder": (
        lambda: "runs/sft",
        r"'runs/sft', expected .*CheckpointSaver\(accelerator, 'runs/sft'\).*directory=",
    ),
    "path": (
        lambda: Path("runs/sft"),
        r"the folder comes second, CheckpointSaver\(accelerator, 'runs/sft'\)",
    ),
    "place": (lambda: ft_ckpt.open_place("memory://runs/sft"), r"the folder comes second"),
    "model": (linear, r"a Linear, expected .*saver\.register\(model=model"),
    "optimizer": (
        lambda: torch.optim.SGD(linear().parameters()),
        r"a SGD, .*register\(optimizer=optimizer",
    ),
    "number": (lambda: 500, r"500, expected .* a schedule is every="),
    "schedule": (lambda: Every(steps=5), r"a Every, expected .* a schedule is every="),
    "settings": (SaverConfig, r"config=SaverConfig"),
    "dict": (lambda: {"every": 5}, r"settings are keywords"),
    "tokenizer": (models.tokenizer, r"a tokenizer is tokenizer="),
    "class": (lambda: torch.nn.Linear, r"the class Linear, .*pass an instance"),
    "trainer": (NamedTrainer, r"checkpointed\(Trainer\).*trainer\.accelerator"),
    "other": (
        lambda: object(),
        r"a object, expected an accelerate\.Accelerator or None; leave it out",
    ),
}


@pytest.mark.parametrize("kind", IN_THE_ACCELERATORS_PLACE)
def test_what_stands_in_the_accelerators_place(tmp_path, kind):
    make, words = IN_THE_ACCELERATORS_PLACE[kind]
    with pytest.raises(ConfigError, match=f"^accelerator: .*{words}"):
        CheckpointSaver(make(), tmp_path)


def test_a_schedule_without_a_directory():
    """Its first save would fail, hours later."""
    for settings in ({"every": 10}, {"config": SaverConfig(every=Every(minutes=30))}):
        with pytest.raises(
            ConfigError,
            match=r"every=: a schedule, and no directory .*directory='runs/sft', every=",
        ):
            CheckpointSaver(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer": "gpt2"}, "tokenizer: 'gpt2', expected a tokenizer or processor"),
        ({"config": {"every": 5}}, "config: a dict, expected SaverConfig"),
        ({"on_saved": 5}, "on_saved=5: expected a function"),
        ({"on_saved": [print, "x"]}, "on_saved='x': expected a function"),
        ({"background": "yes"}, "background='yes': expected True or False"),
        ({"overwrite": 1}, "overwrite=1: expected True or False"),
        ({"verify_resume": "no"}, "verify_resume='no': expected True or False"),
        ({"attribute": 5}, "attribute=5: expected text or None"),
        ({"chat_template_name": 5}, "chat_template_name=5: expected text or None"),
        ({"base_id": 5}, "base_id=5: expected text or None"),
        ({"store_options": "x"}, "store_options=.*: expected a mapping"),
    ],
)
def test_settings_of_the_wrong_kind(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        CheckpointSaver(None, tmp_path, **settings)


CALLS = {
    "tokenizer": (
        lambda saver, model: saver.save(model, "out", tokenizer="gpt2"),
        "tokenizer: 'gpt2'",
    ),
    "state_dict": (
        lambda saver, model: saver.save(model, "out", state_dict=[1]),
        "state_dict: a list, expected a map",
    ),
    "extra_files": (
        lambda saver, model: saver.save(model, "out", extra_files=["x"]),
        "extra_files: a list, expected",
    ),
    "extra_files of a run": (
        lambda saver, model: saver.save_state(model, extra_files=["x"]),
        "extra_files: a list",
    ),
    "background": (
        lambda saver, model: saver.save(model, "out", background="x"),
        "background='x': expected True",
    ),
    "push_to_hub": (
        lambda saver, model: saver.save(model, "out", push_to_hub=5),
        "push: 5, expected a Hub repository",
    ),
    "model in resume": (
        lambda saver, model: saver.resume(model),
        "a Linear, expected .*by name, as model=model",
    ),
    "number in resume": (lambda saver, _model: saver.resume(10), r"resume\(\): 10, expected"),
    "metrics": (lambda saver, _model: saver.step(0.5), "metrics=0.5: expected a name and a number"),
    "loader": (lambda saver, _model: list(saver.remaining(5)), "loader: 5, expected a DataLoader"),
    "model as loader": (
        lambda saver, model: list(saver.remaining(model)),
        "loader: a Linear, expected a DataLoader",
    ),
    "epochs": (
        lambda saver, _model: list(saver.remaining(DataLoader([1]), epochs="2")),
        "epochs='2': expected a",
    ),
    "negative epochs": (
        lambda saver, _model: list(saver.remaining(DataLoader([1]), epochs=-1)),
        "epochs=-1: expected",
    ),
    "into": (
        lambda _saver, _model: ft_ckpt.load_model("saved", into="x"),
        "into='x': expected a torch.nn.Module",
    ),
    "classes": (
        lambda _saver, _model: ft_ckpt.load_model("saved", classes="x"),
        "classes='x': expected a class",
    ),
    "device": (
        lambda _saver, _model: ft_ckpt.load_model("saved", device="gpu"),
        "device='gpu': unknown to torch",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_of_calls(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    run, words = CALLS[call]
    model = linear()
    with CheckpointSaver(None, tmp_path / "run") as saver:
        saver.save(model, "saved")
        with pytest.raises(CheckpointError, match=words):
            run(saver, model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["Trainer", 5, linear(), dict])
def test_what_is_no_trainer_class(given):
    assert issubclass(checkpointed(Trainer), Trainer)
    with pytest.raises(
        ConfigError, match=r"checkpointed\(\): .*, expected .* a trainer that exists"
    ):
        checkpointed(given)


INTEGRATIONS = {
    "keep": (lambda: checkpointed(Trainer, keep="3"), "keep='3': expected Keep"),
    "allow": (lambda: checkpointed(Trainer, allow=5), "allow: 5: expected names"),
    "state": (lambda: checkpointed(Trainer, state="yes"), "state='yes': expected True or False"),
    "on_resumed": (lambda: FtCkptCallback(on_resumed=5), "on_resumed=5: expected a function"),
    "directory of Lightning": (
        lambda: LightningCheckpoint(linear()),
        "Linear.*: no path; expected a path",
    ),
    "resume of Lightning": (
        lambda: LightningCheckpoint("run", resume=5),
        r"resume\(\): 5, expected",
    ),
    "pull": (lambda: ft_ckpt.pull(5), "pull: 5, expected hf://"),
}


@pytest.mark.parametrize("kind", INTEGRATIONS)
def test_arguments_of_integrations(kind):
    call, words = INTEGRATIONS[kind]
    with pytest.raises(ConfigError, match=words):
        call()


NAMES = {
    "setting of a schedule": (
        lambda: Every(step=5),
        r"Every\(step=\.\.\.\): not an .*did you mean steps\?",
    ),
    "rule": (
        lambda: Keep(lst=3),
        r"Keep\(lst=\.\.\.\): not an argument of it; did you mean last\?",
    ),
    "no rule": (lambda: Keep(xyz=3), r"Keep\(xyz=\.\.\.\): .*expected some of last, every_steps"),
    "number alone": (lambda: Keep(3), r"Keep\(3\): expected a name for it, such as last="),
    "dtype": (
        lambda: SaverConfig(dtype="bfloat61"),
        r"dtype='bfloat61': expected one of .*did you mean bfloat16\?",
    ),
    "format": (
        lambda: SaverConfig(format="safetensor"),
        r"format='safetensor': .*did you mean safetensors\?",
    ),
    "choice": (lambda: SaverConfig(when_full="wiat"), r"when_full='wiat': .*did you mean wait\?"),
    "publish": (
        lambda: CheckpointSaver(publish={"url": "http://127.0.0.1:1", "verison": "prod"}),
        r"ServerOptions\(verison=...\): not an argument of it; did you mean version\?",
    ),
    "attribute": (
        lambda: CheckpointSaver().save(
            torch.nn.ModuleDict({"policy": linear()}), "out", attribute="polcy"
        ),
        r"attribute 'polcy': ModuleDict has no 'polcy'; did you mean policy\?",
    ),
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_answered_with_the_nearest(kind):
    call, words = NAMES[kind]
    with pytest.raises(CheckpointError, match=words) as refused:
        call()
    assert isinstance(refused.value, ValueError)


def test_names_in_a_checkpoint_are_answered_with_the_nearest(tmp_path):
    model = torch.nn.ModuleDict({"policy": linear(), "value": linear()})
    with CheckpointSaver(None, tmp_path / "run") as saver:
        report = saver.save(model, tmp_path / "out", attribute=["policy", "value"])
        with pytest.raises(
            CheckpointError, match=r"part 'polcy': not in .*out; did you mean policy\?"
        ):
            ft_ckpt.load_model(report.path, part="polcy")
        saver.save_state(model)
        with pytest.raises(CheckpointError, match=r"not found; did you mean auto\? "):
            saver.resume("autoo")


def test_rules_are_copied_and_pickled():
    for value in (Every(steps=5), Keep(last=3, state=Keep(last=1))):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == replace(value) == value
