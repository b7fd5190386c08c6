"""Every model class of transformers: what is committed loads in plain transformers, or was refused,
or noted.

Each class is saved as it is, and after each edit that a training script makes by hand.
"""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_classes
import numpy as np
import pytest
import torch
from compare import raw
from torch import nn

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import CompanionError

NAMES = model_classes.class_names()


def linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(path, module) for path, module in model.named_modules() if type(module) is nn.Linear]


def replace_linear(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def another_head(model: nn.Module) -> None:
    path, head = linears(model)[-1]
    replace_linear(
        model, path, nn.Linear(head.in_features, head.out_features + 3, bias=head.bias is not None)
    )


def deeper_head(model: nn.Module) -> None:
    path, head = linears(model)[-1]
    deeper = nn.Sequential(
        nn.Linear(head.in_features, 4), nn.ReLU(), nn.Linear(4, head.out_features)
    )
    replace_linear(model, path, deeper)


def another_bias(model: nn.Module) -> None:
    path, first = linears(model)[0]
    replace_linear(
        model, path, nn.Linear(first.in_features, first.out_features, bias=first.bias is None)
    )


def layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    lists = [
        module for module in model.modules() if type(module) is nn.ModuleList and len(module) > 1
    ]
    return [layers for layers in lists if any(True for _ in layers[-1].parameters())]


def fewer_layers(model: nn.Module) -> None:
    del layer_lists(model)[0][-1]


def layers_twice(model: nn.Module) -> None:
    layers = layer_lists(model)[0]
    layers.extend(copy.deepcopy(list(layers)))


def value_head(model: nn.Module) -> None:
    model.value_head = nn.Linear(3, 1)


def own_class(model: nn.Module) -> None:
    model.__class__ = type("OwnClass", (type(model),), {})


def own_class_with_head(model: nn.Module) -> None:
    own_class(model)
    value_head(model)


EDITS: dict[str, Callable[[Any], None]] = {
    edit.__name__: edit
    for edit in (
        *(another_head, deeper_head, another_bias, fewer_layers, layers_twice, value_head),
        *(own_class, own_class_with_head),
    )
}


def notes_of_save(model: nn.Module, folder: Path) -> tuple[str, ...] | None:
    """The notes of the save; None if it was refused for the config."""
    refusal = ""
    with CheckpointSaver() as saver:
        try:
            return saver.save(model, folder).notes
        except CompanionError as error:
            refusal = str(error)
    assert "config" in refusal
    assert not folder.exists()
    return None


def loads_equal(cls: Any, folder: Path, model: nn.Module) -> bool:
    loaded, info = cls.from_pretrained(folder, output_loading_info=True)
    wanted = {name: raw(tensor) for name, tensor in model.state_dict().items()}
    now = {name: raw(tensor) for name, tensor in loaded.state_dict().items()}
    return now == wanted and not info["missing_keys"] and not info["unexpected_keys"]


def random_numbers() -> tuple[Any, ...]:
    return raw(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tobytes()


@pytest.mark.sample("LlamaForCausalLM", "MixtralForCausalLM", "T5ForConditionalGeneration")
@pytest.mark.parametrize("name", NAMES)
def test_a_class_and_its_edits(name, tmp_path, monkeypatch):
    """A config that does not describe the weights, without a word."""
    model = model_classes.make_small(name)
    if model is None:
        pytest.skip("no small config was found")
    types = []
    monkeypatch.setattr(torch, "set_default_dtype", types.append)
    numbers = random_numbers()
    notes = notes_of_save(model, tmp_path / "plain")
    assert notes is not None
    assert random_numbers() == numbers
    assert not types
    monkeypatch.undo()
    assert not [note for note in notes if "config" in note or "from_pretrained(" in note], notes
    assert loads_equal(type(model), tmp_path / "plain", model)
    for edit_name, edit in EDITS.items():
        edited = copy.deepcopy(model)
        try:
            edit(edited)
        except IndexError:  # no layer of the kind
            continue
        notes = notes_of_save(edited, tmp_path / edit_name)
        said = notes is None or [note for note in notes if "load_model(folder, into=model)" in note]
        assert said or loads_equal(type(model), tmp_path / edit_name, edited), edit_name
