"""Objects that are no model, in a model's place: the error says what to pass instead."""

import models
import pytest
import torch

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import CheckpointError, SelectionError


class Pipeline:
    """An object that has models."""

    def __init__(self):
        self.unet = torch.nn.Linear(2, 2)


OBJECTS = {
    "state dict": (lambda: torch.nn.Linear(2, 2).state_dict(), "pass the model itself"),
    "optimizer": (lambda: torch.optim.SGD(torch.nn.Linear(2, 2).parameters()), "register it"),
    "path": (lambda: "runs/sft", "the path comes second"),
    "class": (lambda: torch.nn.Linear, "pass an instance of the class"),
    "list": (lambda: [torch.nn.Linear(2, 2)], "pass one model to each save"),
    "tokenizer": (models.tokenizer, "tokenizer=..."),
    "pipeline": (Pipeline, r"\.unet"),
    "number": (lambda: 5, "pass the model that was trained"),
}
CALLS = {
    "save": lambda saver, thing, path: saver.save(thing, path),
    "merged": lambda saver, thing, path: saver.save(thing, path, merged=True),
    "background": lambda saver, thing, path: saver.save(thing, path, background=True),
    "save_state": lambda saver, thing, path: saver.save_state(thing, path),
    "register": lambda saver, thing, _path: saver.register(model=thing),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", OBJECTS)
def test_what_is_no_model_is_refused_with_what_to_pass(tmp_path, kind, call):
    make, advice = OBJECTS[kind]
    with CheckpointSaver(directory=tmp_path / "run") as saver:
        with pytest.raises(SelectionError, match=advice) as refused:
            CALLS[call](saver, make(), tmp_path / "saved")
        assert isinstance(refused.value, CheckpointError)
        assert isinstance(refused.value, ValueError), "a builtin exception too"
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("call", ["save", "merged"])
def test_nothing_in_the_place_of_a_model(tmp_path, call):
    with (
        CheckpointSaver() as saver,
        pytest.raises(SelectionError, match="pass the model that was trained"),
    ):
        CALLS[call](saver, None, tmp_path / "saved")
