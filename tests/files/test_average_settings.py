"""Averages of checkpoints whose weights fit and whose settings differ: refused, or the settings
compute the same.

Every field of every config is changed by itself. Where there is an average, both settings give the
same outputs.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from compare import logits
from methods import METHODS, with_adapter
from peft import PeftModel
from seeds import chosen_seed
from transformers import AutoModelForCausalLM

from ft_ckpt import average
from ft_ckpt.errors import CheckpointError

ARCHITECTURES = ("llama", "gpt2", "qwen3", "mixtral", "olmo2")
CONFIG, ADAPTER = "config.json", "adapter_config.json"


def others(value: Any) -> Iterator[Any]:
    """Values that are not `value`, most of them of its kind."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (value + 1, value / 2 if isinstance(value, float) else value * 2)
    elif isinstance(value, str):
        yield from (f"{value}x", None)
    elif isinstance(value, list):
        yield from ([*value, 1], value[::-1])
    elif isinstance(value, dict):
        yield {**value, "another": 1}
        yield from ({**value, key: new} for key, inner in value.items() for new in others(inner))
    else:
        yield from (1, True, "another", [1, 2], {"another": 1})


def changes(folder: Path, file: str) -> list[tuple[str, Any]]:
    """(field, another value) for all fields in a file of settings; ... for a field that is gone."""
    settings = json.loads((folder / file).read_text())
    gone = [(name, ...) for name in settings]
    return [
        ("another", 1),
        *gone,
        *((name, new) for name, value in settings.items() for new in others(value)),
    ]


def judge(
    first: Path, other: Path, file: str, change: tuple[str, Any], load: Callable[[Path], Any]
) -> bool:
    """Change `other` and average the two: whether there is an average, of two models that compute
    alike.
    """
    field, value = change
    settings = {**json.loads((first / file).read_text()), field: value}
    told = {name: each for name, each in settings.items() if each is not ...}
    (other / file).write_text(json.dumps(told))
    target = other.parent / "averaged"
    try:
        average([first, other], target, progress=False)
    except CheckpointError:
        assert not target.exists()
        return False
    shutil.rmtree(target)
    try:
        loaded = load(other)
    except Exception:
        return True
    assert torch.equal(logits(load(first)), logits(loaded)), change
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Makes two folders of one model, as transformers writes them."""
    root = tmp_path_factory.mktemp("models")

    def save(name: str) -> tuple[Path, Path]:
        folders = root / f"{name} a", root / f"{name} b"
        if not folders[1].exists():
            model: Any = models.build(name)
            for folder in folders:
                model.save_pretrained(folder)
        return folders

    return save


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Makes two folders of one trained adapter, as PEFT writes them, and loads a model from such a
    folder.
    """
    root = tmp_path_factory.mktemp("adapters")
    models.build("qwen3").save_pretrained(root / "base")

    def save(method: str) -> tuple[Path, Path]:
        folders = root / f"{method} a", root / f"{method} b"
        if not folders[1].exists():
            base = AutoModelForCausalLM.from_pretrained(root / "base")
            model = with_adapter(base, METHODS[method](["q_proj", "v_proj"]))
            for folder in folders:
                model.save_pretrained(folder)
        return folders

    def load(folder: Path) -> Any:
        return PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(root / "base"), folder
        )

    return save, load


load_plain = partial(AutoModelForCausalLM.from_pretrained, attn_implementation="eager")


def test_some_fields(saved, tuned):
    chance = random.Random(f"{chosen_seed()} settings")
    for name in chance.sample(ARCHITECTURES, 2):
        first, other = saved(name)
        for change in chance.sample(changes(first, CONFIG), 5):
            judge(first, other, CONFIG, change, load_plain)
    save, load = tuned
    for method in chance.sample(sorted(METHODS), 3):
        first, other = save(method)
        for change in chance.sample(changes(first, ADAPTER), 5):
            judge(first, other, ADAPTER, change, load)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_field_of_configs(saved, name):
    first, other = saved(name)
    found = [
        change
        for change in changes(first, CONFIG)
        if judge(first, other, CONFIG, change, load_plain)
    ]
    assert ("use_cache", False) in found, "it may differ"


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_field_of_adapters(tuned, method):
    save, load = tuned
    first, other = save(method)
    found = [
        change for change in changes(first, ADAPTER) if judge(first, other, ADAPTER, change, load)
    ]
    assert ("inference_mode", False) in found, "it may differ"
