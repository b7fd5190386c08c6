"""Writes the config and code files of a Hugging Face model, as `save_pretrained` does.

This runs on rank 0 only. Parameters can be sharded, so no tensor is read. Training continues with
the same objects, so fields are set on copies.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import nn
from transformers.dynamic_module_utils import custom_object_save, get_relative_import_files

from ft_ckpt.errors import CompanionError
from ft_ckpt.messages import warn
from ft_ckpt.model.sidecars.generation import misplaced_settings
from ft_ckpt.model.sidecars.quantisation import is_quantised
from ft_ckpt.ranks.wrappers import user_class
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import copy_object


def write_model(folder: Path, model: Any, *, dtype: str, generation: Any = None) -> None:
    """Write configs and code of a Hugging Face model into the existing `folder`.

    `dtype` is torch's name of the stored dtype, such as "bfloat16". `generation` is the result of
    `generation_config`. Raises CompanionError when the config refuses to be saved.
    """
    config = _saved_config(model, dtype)
    _write_code(folder, model, config)
    try:
        config.save_pretrained(str(folder))
    except Exception as error:
        raise CompanionError(
            f"config.json: {type(config).__name__} refuses to be saved: {error}"
        ) from error
    if generation is not None:
        # Not by its save_pretrained, which refuses some published configs.
        generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def _saved_config(model: Any, dtype: str) -> Any:
    config = copy.deepcopy(model.config)
    unsaved = [*misplaced_settings(config)]
    if not is_quantised(model, config):
        unsaved += ["quantization_config", "_pre_quantization_dtype"]
    for name in unsaved:
        vars(config).pop(name, None)
    is_cast = dtype != str(model.dtype).removeprefix("torch.")
    for nested in nested_configs(config):
        nested._name_or_path = ""  # It would be stored, and it can be a local path.
        if is_cast and nested.dtype is not None:
            nested.dtype = dtype

    config.dtype = dtype
    config.architectures = [user_class(type(model)).__name__]
    return config


def nested_configs(config: Any) -> Iterator[Any]:
    """Yield the configs of submodels in a config, at any depth."""
    for name in getattr(config, "sub_configs", ()):
        nested = getattr(config, name, None)
        if hasattr(nested, "sub_configs"):
            yield nested
            yield from nested_configs(nested)


def _write_code(folder: Path, model: nn.Module, config: Any) -> None:
    """Copy the files that define a custom model, and set `config.auto_map` to these files.

    No code of the model is run.
    """
    cls = user_class(type(model))
    if getattr(cls, "_auto_class", None) is None:
        return
    source = getattr(sys.modules[cls.__module__], "__file__", None)
    if cls.__module__ == "__main__" or source is None:
        warn(
            f"{cls.__name__}: its code is in {cls.__module__} and cannot be saved with the model; "
            "move the class to a file of its own",
        )
        return

    # transformers copies the source file of an object's class. FSDP2 replaces the class of the
    # model by one of torch, so an empty instance of the user's class is given.
    custom_object_save(object.__new__(cls), str(folder), config=config)
    auto_map = getattr(config, "auto_map", None)
    if auto_map:
        folder_of_code = Path(source).parent
        local_map = {}
        for name, entry in auto_map.items():
            local_map[name] = _localised_entry(entry, folder, folder_of_code)
        config.auto_map = local_map


def _localised_entry(entry: Any, folder: Path, source: Path) -> Any:
    """Copy the file of an `auto_map` entry, and return the entry without "repo--".

    If the file is not in the folder `source`, the entry is returned unchanged.
    """
    if isinstance(entry, (list, tuple)):
        return [_localised_entry(item, folder, source) for item in entry]
    if not isinstance(entry, str):
        return entry
    local = entry.rpartition("--")[2]
    file = source / (local.split(".")[0] + ".py")
    if LocalStore(file.parent).stat(file.name) is None:
        return entry
    for needed in (file, *map(Path, get_relative_import_files(file))):
        with closing(LocalStore(needed.parent).open(needed.name)) as code:
            copy_object(code, LocalStore(folder), needed.name)
    return local
