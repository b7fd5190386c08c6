"""Stores LoRA adapters of diffusers' models in the layout that diffusers writes and reads.

The file is pytorch_lora_weights.safetensors. The names of its tensors begin with the component of a
pipeline, such as "unet." or "transformer.". Its metadata has the settings of the LoRA.
"""

import json
from dataclasses import replace
from typing import Any

from ft_ckpt.checkpoint.manifest import DIFFUSERS_LORA_FILE
from ft_ckpt.errors import listing
from ft_ckpt.model.empty import is_diffusers
from ft_ckpt.model.tensors import PREFIX, Entry, Part, keeps_base, model_below

_LORA_METADATA = "lora_adapter_metadata"
# These settings are about the initial values, which the stored tensors replace.
_INITIAL_SETTINGS = frozenset(
    ("init_lora_weights", "eva_config", "corda_config", "loftq_config", "lora_ga_config")
)
_ORIGIN_SETTINGS = frozenset(
    ("base_model_name_or_path", "revision", "auto_mapping", "peft_version")
)


def in_lora_layout(part: Part) -> Part:
    """Return the part in the layout that `load_lora_weights` reads, if it is LoRA of diffusers.

    Adapters of other models are returned unchanged. An adapter of a model of diffusers that
    diffusers cannot read keeps PEFT's layout, and gets a note that says why.
    """
    if not is_diffusers(part.module):
        return part
    config = part.module.peft_config[part.adapter]
    reason = _why_not_loaded(part, config)
    if reason:
        note = (
            f"adapter {part.adapter!r}: in PEFT's layout, which PeftModel reads; "
            f"load_lora_weights cannot read {reason}"
        )
        return replace(part, notes=(*part.notes, note))

    component = component_of(part.module)
    entries = tuple(_with_component(entry, component) for entry in part.entries)
    settings = {f"{component}.{name}": value for name, value in _lora_settings(config).items()}
    text = json.dumps(settings, indent=2, sort_keys=True)
    return replace(part, entries=entries, file=DIFFUSERS_LORA_FILE, metadata={_LORA_METADATA: text})


def component_of(module: Any) -> str:
    """Return the name of the component that a model with adapters is in a pipeline.

    It is "unet" or, as diffusers' own default, "transformer".
    """
    for cls in type(model_below(module)).__mro__:
        if cls.__module__.startswith("diffusers.") and "UNet" in cls.__name__:
            return "unet"
    return "transformer"


def _why_not_loaded(part: Part, config: Any) -> str:
    """Return what in the adapter diffusers cannot read, or "" if it can read the adapter."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if method != "LORA":
        return f"adapters of the method {method}"
    if not keeps_base(config):
        return f"init_lora_weights={config.init_lora_weights!r}, which changes the base"
    not_lora = []
    for entry in part.entries:
        if "lora" not in entry.name or entry.group is not None:
            not_lora.append(entry.name)
    return f"{listing(not_lora, ', ')}: no matrices of LoRA" if not_lora else ""


def _with_component(entry: Entry, component: str) -> Entry:
    return entry._replace(name=f"{component}.{entry.name.removeprefix(PREFIX)}")


def _lora_settings(config: Any) -> dict[str, Any]:
    """Return the arguments of LoraConfig that make the adapter, as JSON values."""
    left_out = _INITIAL_SETTINGS | _ORIGIN_SETTINGS
    settings = {name: value for name, value in config.to_dict().items() if name not in left_out}
    for name, value in settings.items():
        if isinstance(value, (set, frozenset)):
            settings[name] = sorted(value)
    return settings
