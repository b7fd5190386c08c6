"""Reads the settings in a folder of weights: the config of a model or adapter."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ft_ckpt.errors import CorruptError, damaged_input
from ft_ckpt.storage import Store, read_text

EXTRA_FILE = "extra_state.json"  # has the non-tensor values of a state dict
# The settings file of each kind of part. A plain module has none.
SETTINGS_FILES = {"model": "config.json", "adapter": "adapter_config.json"}
# No model has more layers, experts, heads or the like.
_MAX_COUNT = 1 << 16
_COUNT = re.compile(r"\w*(layer|block|depth|stage|expert|head)s?")


def text_of(store: Store, name: str) -> str | None:
    """Read the text of a file. Return None if there is no such file."""
    return read_text(store, name) if store.stat(name) is not None else None


def read_settings(store: Store, name: str) -> dict[str, Any] | None:
    """Read the JSON object in a file. Return None if there is no such file, or if it has null.

    Raises CorruptError for other contents.
    """
    text = text_of(store, name)
    return None if text is None else parse_settings(store, name, text)


def parse_settings(store: Store, name: str, text: str) -> dict[str, Any] | None:
    """Parse the text of the file `name`, which is a JSON object. Return None for null.

    Raises CorruptError for other contents.
    """
    with damaged_input(store.where(name)):
        settings = json.loads(text)
    if settings is not None and not isinstance(settings, dict):
        raise CorruptError(f"{store.where(name)}: not a JSON object of settings; use another copy")
    return settings


def adapter_settings(store: Store) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises MissingError if there is none, CorruptError if it is not an object.
    """
    name = SETTINGS_FILES["adapter"]
    return parse_settings(store, name, read_text(store, name)) or {}


def quantisation_of(store: Store) -> str | None:
    """Return the name of the field in config.json that describes a quantisation, or None."""
    settings = read_settings(store, "config.json") or {}
    for name in ("quantization_config", "compression_config"):
        if settings.get(name):
            return name
    return None


def absurd_counts(config: Mapping[str, Any]) -> list[str]:
    """Return a text for each count in a config that is too large for any model."""
    return [f"{name}: {value:,}" for name, value in _counts_in(config) if value > _MAX_COUNT]


def _counts_in(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield the numbers of layers, heads and the like in a config, at any depth, by name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _counts_in(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _counts_in(inner, name)
    elif isinstance(value, (int, float)) and _COUNT.fullmatch(name):
        yield name, int(value) if abs(value) < 1e300 else 10**300
