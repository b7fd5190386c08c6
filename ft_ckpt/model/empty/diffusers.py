"""Writes the config.json of diffusers' models, and makes the empty model from it.

Only a load imports diffusers.
"""

import copy
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ft_ckpt.checkpoint.manifest import is_hub_name
from ft_ckpt.errors import CompanionError, LoadError, listing, shown
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.model.tensors import DIFFUSERS, Part, library_of, model_below
from ft_ckpt.ranks.wrappers import user_class
from ft_ckpt.storage.local import LocalStore


def is_diffusers(module: nn.Module) -> bool:
    """Check whether a module is a model of diffusers, or a PeftModel around one."""
    return library_of(model_below(module)) is DIFFUSERS


def write_config(folder: Path, part: Part) -> None:
    """Write the config.json of a model into the existing `folder`, without local paths.

    The live config is not changed. Raises CompanionError when the config refuses to be saved, or
    when `from_pretrained` would make a model from it that has other tensors than the stored ones.
    """
    cls = user_class(type(part.module))

    # diffusers writes the name of the class, which FSDP2 replaces. So an instance of the user's
    # class writes the config.
    instance: Any = object.__new__(cls)
    nn.Module.__init__(instance)
    instance._internal_dict = copy.deepcopy(part.module._internal_dict)
    try:
        config = json.loads(instance.to_json_string())
    except Exception as error:
        raise CompanionError(
            f"config.json: {cls.__name__} refuses to be saved: {shown(error)}"
        ) from error

    origin = config.get("_name_or_path")
    if origin and not is_hub_name(origin):
        del config["_name_or_path"]
    text = f"{json.dumps(config, indent=2, sort_keys=True)}\n"
    _refuse_other_tensors(part, cls, text)
    LocalStore(folder).write("config.json", text.encode())


def _refuse_other_tensors(part: Part, cls: Any, text: str) -> None:
    """Raise CompanionError if a model made from the config `text` has other tensors than stored."""
    stored = {entry.name: entry.shape for entry in part.entries}
    aliases: set[str] = set()
    for names in part.ties:
        aliases.update(names)
    expected = _shapes_of_config(cls, text)
    problems = []
    for name, shape in stored.items():
        if name not in expected:
            problems.append(f"{name}: trained, and not in the model of the config")
        elif shape != expected[name]:
            problems.append(f"{name}: {shape}, and {expected[name]} in the model of the config")

    for name in expected.keys() - stored.keys() - aliases:
        problems.append(f"{name}: in the model of the config only")
    if problems:
        raise CompanionError(
            f"{listing(sorted(problems))}: config.json does not describe the weights, which "
            f"{cls.__name__}.from_pretrained could not load; set the changed sizes with "
            "model.register_to_config(...)"
        )


@lru_cache(maxsize=4)  # so that a run makes the model once, because a large one takes a second
def _shapes_of_config(cls: Any, text: str) -> Mapping[str, tuple[int, ...]]:
    try:
        model = empty_of_config(cls, json.loads(text))
    except Exception as error:
        raise CompanionError(
            f"config.json: {cls.__name__} cannot be made of it ({shown(error)})"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def diffusers_class(name: str, classes: Mapping[str, type]) -> Any:
    """Return the class `name` of `classes`, or else of diffusers.

    Raises LoadError if there is none, or if diffusers is not installed.
    """
    if name in classes:
        return classes[name]
    if find_spec("diffusers") is None:
        raise LoadError(
            f"{name}: a model of diffusers, which is not installed; install it, or load the "
            "weights into a model of yours with into="
        )

    cls = getattr(import_module("diffusers"), name, None) if name.isidentifier() else None
    bases = {base.__name__ for base in getattr(cls, "__mro__", ())}
    if not DIFFUSERS.base_classes <= bases:
        raise LoadError(
            f"{name!r}: no model class of the installed diffusers; pass classes={{{name!r}: ...}}, "
            "or load the weights into a model of yours with into="
        )

    return cls


def empty_of_config(cls: Any, config: Mapping[str, Any]) -> Any:
    """Make a model from this config, without memory for its parameters. Buffers have values."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return cls.from_config(dict(config))


def model_on_file(config: Mapping[str, Any], file: TensorFile, source: str) -> nn.Module:
    """Make the model of this config, in eval mode, whose parameters are the tensors of `file`.

    `source` is the path or URL of the file, for messages. Raises LoadError for a quantised model,
    and naming the tensors that do not fit.
    """
    if config.get("quantization_config"):
        raise LoadError(
            f"{source}: its weights are quantised; name the folder of the original model"
        )

    model: nn.Module = empty_of_config(diffusers_class(str(config["_class_name"]), {}), config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = []
    for name, spec in file.specs.items():
        if shapes.get(name) != spec.shape:
            problems.append(
                f"{name}: {spec.shape} in the files, {shapes.get(name, 'absent')} in the model"
            )

    problems += [f"{name}: not in the files" for name in shapes if name not in file.specs]
    if problems:
        raise LoadError(
            f"{source}: {listing(problems)}: its files do not fit its config; use another copy"
        )

    tensors = {name: file.read(name).view(spec.shape) for name, spec in file.specs.items()}
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(False)
