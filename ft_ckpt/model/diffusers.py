"""Models of diffusers and LoRA on them, in the layout that diffusers itself writes and reads.

A model: `config.json` and `diffusion_pytorch_model.safetensors`. LoRA:
`pytorch_lora_weights.safetensors`, whose names begin with the component of a pipeline, and whose
metadata has the LoRA settings. Only a load imports diffusers.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ft_ckpt.checkpoint import DIFFUSERS_LORA_FILE, is_hub_name
from ft_ckpt.errors import CompanionError, LoadError, listing, shown
from ft_ckpt.formats import TensorFile
from ft_ckpt.model.adapters import is_peft_model
from ft_ckpt.model.base_model import keeps_base
from ft_ckpt.model.entries import Entry, Part
from ft_ckpt.model.libraries import DIFFUSERS, PREFIX, library_of
from ft_ckpt.ranks import user_class
from ft_ckpt.storage import LocalStore

_LORA_METADATA = "lora_adapter_metadata"
# Settings of the initial values, which the stored tensors replace.
_INITIAL_SETTINGS = frozenset(
    ("init_lora_weights", "eva_config", "corda_config", "loftq_config", "lora_ga_config")
)
_ORIGIN_SETTINGS = frozenset(
    ("base_model_name_or_path", "revision", "auto_mapping", "peft_version")
)


def is_diffusers(module: nn.Module) -> bool:
    """Whether it is a model of diffusers, also inside a PeftModel."""
    base: Any = module
    if is_peft_model(module):
        base = base.get_base_model()
    return library_of(base) is DIFFUSERS


def write_config(folder: Path, part: Part) -> None:
    """Write the config.json of a model into the existing `folder`, without local paths.

    The live config is unchanged.

    Raises CompanionError when the config refuses to be saved, or when `from_pretrained` would make
    of it a model with other tensors than the stored ones.
    """
    cls = user_class(type(part.module))
    # diffusers writes the class of the instance, which FSDP2 replaces
    twin: Any = object.__new__(cls)
    nn.Module.__init__(twin)
    twin._internal_dict = copy.deepcopy(part.module._internal_dict)
    try:
        config = json.loads(twin.to_json_string())
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
    """Raise CompanionError naming the tensors in which the stored model and that of the config
    `text` differ.
    """
    stored = {entry.name: entry.shape for entry in part.entries}
    aliases = {name for names in part.ties for name in names}
    made = _shapes_of_config(cls, text)
    problems = [
        f"{name}: trained, and not in the model of the config"
        for name in stored.keys() - made.keys()
    ]
    problems += [
        f"{name}: in the model of the config only" for name in made.keys() - stored.keys() - aliases
    ]
    for name in stored.keys() & made.keys():
        if stored[name] != made[name]:
            problems.append(f"{name}: {stored[name]}, and {made[name]} in the model of the config")
    if problems:
        raise CompanionError(
            f"{listing(sorted(problems))}: config.json does not describe the weights, which "
            f"{cls.__name__}.from_pretrained could not load; set the changed sizes with "
            "model.register_to_config(...)"
        )


@lru_cache(maxsize=4)  # once for all checkpoints of a run: large models take a second
def _shapes_of_config(cls: Any, text: str) -> Mapping[str, tuple[int, ...]]:
    try:
        model = empty_of_config(cls, json.loads(text))
    except Exception as error:
        raise CompanionError(
            f"config.json: {cls.__name__} cannot be made of it ({shown(error)})"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


# LoRA


def in_lora_layout(part: Part) -> Part:
    """The adapter as `load_lora_weights` reads it, if it is LoRA on a model of diffusers; other
    adapters unchanged.

    An adapter of diffusers' models that diffusers cannot read keeps PEFT's layout, with a note that
    says why.
    """
    if not is_diffusers(part.module):
        return part
    config = part.module.peft_config[part.adapter]
    if why := _why_not_loaded(part, config):
        note = (
            f"adapter {part.adapter!r}: in PEFT's layout, which PeftModel reads; "
            f"load_lora_weights cannot read {why}"
        )
        return replace(part, notes=(*part.notes, note))
    component = component_of(part.module)
    entries = tuple(_renamed(entry, component) for entry in part.entries)
    settings = {f"{component}.{name}": value for name, value in _lora_settings(config).items()}
    text = json.dumps(settings, indent=2, sort_keys=True)
    return replace(part, entries=entries, file=DIFFUSERS_LORA_FILE, metadata={_LORA_METADATA: text})


def component_of(module: Any) -> str:
    """The name in a pipeline of the model that carries adapters, from its class; diffusers' default
    is the second.
    """
    base = module.get_base_model() if is_peft_model(module) else module
    classes = [
        cls.__name__ for cls in type(base).__mro__ if cls.__module__.startswith("diffusers.")
    ]
    return "unet" if any("UNet" in name for name in classes) else "transformer"


def _why_not_loaded(part: Part, config: Any) -> str:
    """What about the adapter diffusers cannot read; "" if it reads it."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if method != "LORA":
        return f"adapters of the method {method}"
    if not keeps_base(config):
        return f"init_lora_weights={config.init_lora_weights!r}, which changes the base"
    others = [
        entry.name for entry in part.entries if "lora" not in entry.name or entry.group is not None
    ]
    return f"{listing(others, ', ')}: no matrices of LoRA" if others else ""


def _renamed(entry: Entry, component: str) -> Entry:
    return entry._replace(name=f"{component}.{entry.name.removeprefix(PREFIX)}")


def _lora_settings(config: Any) -> dict[str, Any]:
    """The arguments of LoraConfig that make the adapter, as JSON can hold them."""
    left_out = _INITIAL_SETTINGS | _ORIGIN_SETTINGS
    settings = {name: value for name, value in config.to_dict().items() if name not in left_out}
    for name, value in settings.items():
        if isinstance(value, (set, frozenset)):
            settings[name] = sorted(value)
    return settings


# Loads, and the check of a save that one is possible


def model_class(name: str, classes: Mapping[str, type]) -> Any:
    """The class `name` of `classes` or diffusers.

    Raises LoadError if there is none, or diffusers is not installed.
    """
    if name in classes:
        return classes[name]
    if find_spec("diffusers") is None:
        raise LoadError(
            f"{name}: a model of diffusers, which is not installed; install it, or load the "
            "weights into a model of yours with into="
        )
    cls = getattr(import_module("diffusers"), name, None) if name.isidentifier() else None
    if not isinstance(cls, type) or not DIFFUSERS.base_classes <= {
        base.__name__ for base in cls.__mro__
    }:
        raise LoadError(
            f"{name!r}: no model class of the installed diffusers; pass classes={{{name!r}: ...}}, "
            "or load the weights into a model of yours with into="
        )
    return cls


def empty_of_config(cls: Any, config: Mapping[str, Any]) -> Any:
    """A model of this config without memory for its parameters; buffers have their values."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return cls.from_config(dict(config))


def model_on_file(config: Mapping[str, Any], file: TensorFile, source: str) -> nn.Module:
    """The model of this config, in eval mode, on the tensors of `file`, which comes from `source`.

    Raises LoadError for a quantised model, or naming the tensors that do not fit.
    """
    if config.get("quantization_config"):
        raise LoadError(
            f"{source}: its weights are quantised; name the folder of the original model"
        )
    model: nn.Module = empty_of_config(model_class(str(config["_class_name"]), {}), config)
    made = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = []
    for name, spec in file.specs.items():
        if made.get(name) != spec.shape:
            problems.append(
                f"{name}: {spec.shape} in the files, {made.get(name, 'absent')} in the model"
            )
    problems += [f"{name}: not in the files" for name in made if name not in file.specs]
    if problems:
        raise LoadError(
            f"{source}: {listing(problems)}: its files do not fit its config; use another copy"
        )
    tensors = {name: file.read(name).view(spec.shape) for name, spec in file.specs.items()}
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(False)
