"""A warning names the line of the user's program that called ft_ckpt, however deep it arose."""

import linecache
import warnings
from contextlib import contextmanager

import pytest
from torch import nn

from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.messages import CheckpointWarning


@contextmanager
def one_warning_at(line, match):
    """The block causes one warning, at the line of this file with the text `line`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (warning,) = [warning for warning in caught if warning.category is CheckpointWarning]
    assert match in str(warning.message)
    assert warning.filename == __file__
    assert line in linecache.getline(warning.filename, warning.lineno)


def raise_error(report):
    raise ValueError("no disk for the copy")


@pytest.fixture
def model():
    return nn.Linear(2, 2)


def test_of_a_save(tmp_path, model):
    with (
        CheckpointSaver(directory=tmp_path, on_saved=[raise_error]) as saver,
        one_warning_at("saver.save_state(model)", "on_saved failed"),
    ):
        saver.save_state(model)


def test_of_a_resume(tmp_path, model):
    with CheckpointSaver(directory=tmp_path) as saver:
        saver.save_state(model)
    with (
        CheckpointSaver(directory=tmp_path) as saver,
        one_warning_at('saver.resume("never", model=model)', "holds another run"),
    ):
        saver.resume("never", model=model)


def test_of_a_step(tmp_path, model):
    with CheckpointSaver(directory=tmp_path, every=1, keep=Keep(best=("loss", "min"))) as saver:
        saver.register(model=model)
        with one_warning_at('saver.step({"accuracy": 1.0})', "had the metric"):
            saver.step({"accuracy": 1.0})
