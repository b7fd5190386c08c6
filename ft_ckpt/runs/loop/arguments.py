"""Checks the arguments of a saver that are objects of the script.

Each check raises ConfigError. The error names the argument that the object belongs to.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import ConfigError, is_number
from ft_ckpt.messages import short_repr
from ft_ckpt.schedule import Every
from ft_ckpt.storage.places import Place

# attributes of an Accelerator with the objects that it has prepared
_PREPARED = ("_models", "_optimizers", "_schedulers", "_dataloaders")
# how many characters of an argument an error shows
_MAX_TEXT = 60


def check_accelerator(accelerator: Any) -> None:
    """Raise ConfigError if `accelerator` is neither an Accelerator nor None."""
    if accelerator is None:
        return
    is_accelerator = all(isinstance(getattr(accelerator, name, None), list) for name in _PREPARED)
    if isinstance(accelerator, type) or not is_accelerator:
        raise ConfigError(
            f"accelerator: {in_words(accelerator)}, expected an accelerate.Accelerator or None; "
            f"{_right_argument(accelerator)}"
        )


def check_tokenizer_argument(tokenizer: Any) -> None:
    """Raise ConfigError if `tokenizer` is no tokenizer, no processor and not None."""
    if tokenizer is None:
        return
    if isinstance(tokenizer, type) or not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            f"tokenizer: {in_words(tokenizer)}, expected a tokenizer or processor; pass what "
            "AutoTokenizer.from_pretrained or AutoProcessor.from_pretrained returned"
        )


def check_schedule(config: SaverConfig, directory: Any) -> None:
    """Raise ConfigError for a schedule without a directory, as its first save would fail."""
    if config.every is not None and directory is None:
        raise ConfigError(
            "every=: a schedule, and no directory for its checkpoints; expected "
            "CheckpointSaver(accelerator, 'runs/sft', every=...), or without Accelerate "
            "CheckpointSaver(directory='runs/sft', every=...)"
        )


def check_mappings(**arguments: Any) -> None:
    """Raise ConfigError if one of `arguments`, by name, is neither a mapping nor None."""
    for name, value in arguments.items():
        if not isinstance(value, Mapping | None):
            raise ConfigError(f"{name}: {in_words(value)}, expected a mapping, or None")


def check_loop(loader: Any, epochs: Any) -> None:
    """Raise ConfigError if the arguments of `remaining` are not data and a number of epochs."""
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ConfigError(
            f"loader: {in_words(loader)}, expected a DataLoader, or batches that can be read again"
        )
    if epochs is not None and not is_number(epochs, 0, whole=True):
        raise ConfigError(
            f"epochs={short_repr(epochs)}: expected a whole number from 0 on, or None for one epoch"
        )


def in_words(value: Any) -> str:
    """Return a value of the wrong kind in words: a text or number as it is, else its class."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, int, float, os.PathLike)):
        return short_repr(value, _MAX_TEXT)
    return f"a {type(value).__name__}"


def _right_argument(value: Any) -> str:
    """Return what to do with an object that was passed as the accelerator."""
    if isinstance(value, type):
        return "pass an instance of the class"
    if isinstance(value, (str, os.PathLike, Place)):
        folder = short_repr(str(value), _MAX_TEXT)
        return (
            f"the folder comes second, CheckpointSaver(accelerator, {folder}); without Accelerate, "
            f"CheckpointSaver(directory={folder})"
        )

    if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        name = "model" if isinstance(value, nn.Module) else "optimizer"
        return (
            "without Accelerate, CheckpointSaver(directory=...) and then "
            f"saver.resume({name}={name}, ...) or saver.register({name}={name}, ...)"
        )

    if isinstance(value, (int, Every)) and not isinstance(value, bool):
        return "a schedule is every=, as every=500"
    if isinstance(value, (SaverConfig, Mapping)):
        return "settings are keywords, or config=SaverConfig(...)"
    if hasattr(value, "accelerator") and hasattr(value, "train"):
        return (
            "a Trainer saves and resumes by itself: "
            "ft_ckpt.integrations.trainer.checkpointed(Trainer)(...); for a saver of its own, pass "
            "trainer.accelerator"
        )

    if hasattr(value, "save_pretrained"):
        return "a tokenizer is tokenizer="
    return (
        "leave it out without Accelerate, and register the objects of the run: "
        "saver.register(model=model, ...)"
    )
