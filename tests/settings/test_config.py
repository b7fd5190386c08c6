"""Settings prove themselves when they are made."""

from dataclasses import fields

import pytest

from ft_ckpt import CheckpointSaver, SaverConfig
from ft_ckpt.config import FAMILIAR_NAMES
from ft_ckpt.errors import CheckpointError, ConfigError, RanksDisagreeError, TargetError
from ft_ckpt.values import parse_size


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "fp7"}, "dtype='fp7': expected one of as_is, config, float64"),
        ({"max_shard_size": "5 bananas"}, "max_shard_size='5 bananas': expected a size above 0"),
        ({"max_shard_size": 0}, "max_shard_size=0: expected a size above 0"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore': expected one of save, raise"),
        ({"io_threads": 0}, "io_threads=0: expected at least 1"),
        ({"name_template": "latest"}, "expected {step} or {epoch}"),
        ({"name_template": "{step}-{loss}"}, "no other field"),
        ({"name_template": "runs/{step}"}, "no slash"),
        ({"name_template": "{step"}, "expected {step} or {epoch}"),
        ({"name_template": "{step[0]}"}, "expected {step} or {epoch}"),
        ({"name_template": ".run-{step}"}, "no dot at the beginning"),
        ({"max_shard_size": "9" * 400}, "max_shard_size='99+': expected a size above 0"),
        ({"compression": ["zstd"]}, r"compression=\['zstd'\]: expected 'gzip' with format='h5'"),
        ({"base_id": 5}, "base_id=5: expected"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ConfigError, match=words):
        SaverConfig(**settings)
    with pytest.raises(ValueError, match=words):
        CheckpointSaver(**settings)


def test_all_problems_at_once():
    with pytest.raises(ConfigError, match=r"dtype=.*; nonfinite=.*; io_threads="):
        SaverConfig(dtype="x", nonfinite="y", io_threads=0)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("dtpye", r"did you mean dtype\?"),
        ("on_diference", r"did you mean on_difference\?"),
        ("save_total_limit", "use keep="),
        ("save_steps", "use every="),
        ("output_dir", "use directory, the second argument"),
        ("zzz", "settings are dtype, format, compression"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_right_one(name, advice):
    with pytest.raises(ConfigError, match=f"{name}: not a setting; {advice}"):
        CheckpointSaver(**{name: 1})


def test_familiar_names_are_no_settings_of_this_saver():
    names = {field.name for field in fields(SaverConfig)}
    assert names.isdisjoint(FAMILIAR_NAMES)


def test_settings_are_given_in_one_way():
    with pytest.raises(ConfigError, match="both given"):
        CheckpointSaver(config=SaverConfig(), dtype="float32")


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("12", 12), (7, 7), ("2kB", 2000)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_saver_refuses_at_once_what_can_never_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="a file, expected a folder"):
        CheckpointSaver(directory=tmp_path / "file")


def test_save_needs_a_place_and_an_open_saver(tmp_path):
    import torch

    saver = CheckpointSaver()
    with pytest.raises(ConfigError, match="give it a path, or both"):
        saver.save(torch.nn.Linear(1, 1))
    with CheckpointSaver(directory=tmp_path) as saver:
        assert saver.save(torch.nn.Linear(1, 1), step=7).path == tmp_path / "checkpoint-7"
    with pytest.raises(CheckpointError, match="closed"):
        saver.save(torch.nn.Linear(1, 1), step=8)


def test_launched_as_two_but_alone(tmp_path, monkeypatch):
    """A launcher that started two processes which do not know of each other: both would write."""
    import torch

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        RanksDisagreeError, match="WORLD_SIZE=2 in the environment, but this process has no"
    ):
        CheckpointSaver().save(torch.nn.Linear(1, 1), tmp_path / "out")
    assert not any(tmp_path.iterdir())
