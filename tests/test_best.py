"""Which checkpoint is the newest, and which the best: of which run, and by what."""

import json

import pytest
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.catalog import discover, read_manifest
from ft_ckpt.errors import ConfigError


def saver_of(folder, **settings):
    saver = CheckpointSaver(None, folder, **settings)
    saver.register(model=nn.Linear(2, 2))
    return saver


def scored(folder, losses, **settings):
    """A run with a checkpoint for each loss."""
    saver = saver_of(folder, **settings)
    for loss in losses:
        saver.step()
        saver.save_state(metrics={"loss": loss, "other": -loss})
    return saver


def test_the_best_by_the_metric_that_the_run_ranks_by(tmp_path):
    scored(tmp_path, (3.0, 1.0, float("nan"), 1.0, 2.0), keep=Keep(last=9, best=("loss", "min")))
    assert ft_ckpt.best(tmp_path).name == ft_ckpt.best(tmp_path, "loss").name == "checkpoint-2"
    assert ft_ckpt.best(tmp_path, ("loss", "max")).name == "checkpoint-1"
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink(missing_ok=True)
    for file in (tmp_path / "checkpoint-2").glob("*.safetensors"):
        file.unlink()
    with pytest.warns(UserWarning, match="checkpoint-2: not valid, using the next best"):
        assert ft_ckpt.best(tmp_path).name == "checkpoint-4"


def test_a_metric_that_nobody_named_is_asked_for(tmp_path):
    scored(tmp_path, (3.0,))
    with pytest.raises(ConfigError, match=r"metric=None: expected \(name, 'min' or 'max'\).* have loss, other"):
        ft_ckpt.best(tmp_path)
    assert ft_ckpt.best(tmp_path, ("absent", "min")) is None
    assert ft_ckpt.best(tmp_path / "absent") is None


def test_infinite_metrics_are_standard_json(tmp_path):
    scored(tmp_path, (float("nan"), float("inf"), float("-inf")))
    for step, value in ((1, "nan"), (2, "inf"), (3, "-inf")):
        file = tmp_path / f"checkpoint-{step}" / "ft_ckpt.json"
        json.loads(file.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
        assert str(read_manifest(file.parent).metrics["loss"]) == value


def test_a_fresh_run_is_newer_than_one_that_got_further(tmp_path):
    """Auto-resume went on with the other run's checkpoint, whose step was higher."""
    scored(tmp_path, (1.0, 1.0, 1.0))
    fresh = saver_of(tmp_path)
    fresh.step(step=2)
    fresh.save_state(path=tmp_path / "fresh")
    assert [info.path.name for info in discover(tmp_path)] == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "fresh"]
    assert ft_ckpt.latest(tmp_path).name == "fresh"
    assert saver_of(tmp_path).resume().step == 2
