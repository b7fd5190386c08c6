"""Reads the config of a stored adapter with PEFT, and explains why PEFT refuses one."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import CheckpointError, LoadError, listing, shown
from ft_ckpt.messages import short_repr
from ft_ckpt.model.empty import part_folder
from ft_ckpt.model.files import adapter_settings, path_in_part
from ft_ckpt.model.tensors import keeps_base
from ft_ckpt.storage import Store, read_text
from ft_ckpt.storage.places import Place

_CONFIG_FILE = "adapter_config.json"


def read_adapter_config(
    checkpoint: OpenCheckpoint, record: PartRecord, *, base_is_stored: bool
) -> Any:
    """Read the PeftConfig of an adapter, for inference.

    If `base_is_stored`, the base is in the same checkpoint, with the changes by the initialisation
    of the adapter. Then the initialisation must not change it again.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    with (
        explain_peft_errors(checkpoint, [record]),
        part_folder(checkpoint, record, lambda name: name == _CONFIG_FILE) as folder,
    ):
        settings = adapter_settings(Place(checkpoint.store, record.path).folder)
        # The class of the method reads the config, because PeftConfig does not convert configs of
        # older versions.
        config_class: Any = PEFT_TYPE_TO_CONFIG_MAPPING[settings["peft_type"]]
        config = config_class.from_pretrained(str(folder))

    config.inference_mode = True
    if base_is_stored and not keeps_base(config):
        config.init_lora_weights = True
    return config


@contextmanager
def explain_peft_errors(
    checkpoint: OpenCheckpoint, records: Sequence[PartRecord]
) -> Iterator[None]:
    """Convert errors of PEFT in the `with` block to LoadError.

    The LoadError names the invalid settings in the adapters' configs. If none is found, it names
    the configs.
    """
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        files = [path_in_part(record, _CONFIG_FILE) for record in records]
        invalid = []
        for file in files:
            for problem in _invalid_settings(checkpoint.store, file):
                invalid.append(f"{file}: {problem}")
        raise LoadError(
            f"{listing(invalid or files)}: PEFT cannot make the adapter in {checkpoint.store.url} "
            f"({shown(error)}); use another copy, or the version of PEFT that wrote it"
        ) from error


def _invalid_settings(store: Store, file: str) -> list[str]:
    """Return a text for each invalid setting in the adapter config `file`.

    A setting is invalid if it is an unknown method, a value of another type than PEFT declares, or
    an invalid regular expression.
    """
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    settings = json.loads(read_text(store, file))
    if not isinstance(settings, dict):
        return ["no JSON object"]
    config_classes = {str(kind.value): cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    method = settings.get("peft_type")

    # The value can be unhashable, so it is looked up in a list.
    if method not in list(config_classes):
        return [f"peft_type: {short_repr(method)}, expected a method of PEFT {peft.__version__}"]
    hints = get_type_hints(config_classes[method])
    problems = []
    for name, value in settings.items():
        if name in hints and not _is_of_type(value, hints[name]):
            expected = str(hints[name]).replace("typing.", "")
            problems.append(f"{name}: {short_repr(value)}, expected {expected}")

    return problems + _invalid_patterns(settings)


def _invalid_patterns(settings: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, value in settings.items():
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, (list, dict)):
            continue
        for text in texts:
            if isinstance(text, str) and not _is_pattern(text):
                problems.append(f"{name}: {short_repr(text)} is no regular expression")
    return problems


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _is_of_type(value: Any, hint: Any) -> bool:
    """Check whether a JSON value is of an annotated type.

    Returns True for annotations that are not supported here.
    """
    kind = get_origin(hint)
    arguments = get_args(hint)
    if kind in (Union, UnionType):
        return any(_is_of_type(value, argument) for argument in arguments)
    if kind is Literal:
        return value in arguments
    if kind in (list, tuple, set):
        return isinstance(value, list) and all(_is_of_type(item, arguments[0]) for item in value)
    if kind is dict or is_dataclass(hint):
        return isinstance(value, dict)
    if hint in (int, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in [member.value for member in hint]
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)
