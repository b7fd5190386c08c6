"""Small models of every class of transformers whose tensors are renamed or converted between memory and file."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto

# Numbers of layers and of experts: the names of the tensors need two of each.
DEPTHS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "num_layers_text"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
}
WIDTHS = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "width", "out_hidden_size", "projection_dim"), 32
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
MOST_ELEMENTS = 4_000_000


def classes_with_tables() -> list[str]:
    """Names of the model classes that have a conversion table, or contain a model of a class that has one."""
    table = set(_build_checkpoint_conversion_mapping()) - {"legacy"}
    names = {name for name in table if hasattr(transformers, name)}
    for mapping, models in vars(modeling_auto).items():
        if mapping.endswith("_MAPPING_NAMES"):
            for classes in models.values():
                names |= {classes} if isinstance(classes, str) else {name for name in classes if name}
    return sorted(name for name in names if _has_table(name, table))


def _has_table(name: str, table: set[str]) -> bool:
    try:
        config = getattr(transformers, name).config_class()
    except Exception:  # a class of a library that is not installed, a config without defaults
        return False
    kinds = {str(each.model_type) for each in nested_configs(config)}
    return name in table or not kinds.isdisjoint(table)


def nested_configs(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from nested_configs(value)


def shrink(config: Any) -> None:
    """Make a config small, and shorten its lists that have an item for each layer."""
    depths = {value for name, value in vars(config).items() if name in DEPTHS and type(value) is int}
    sizes = DEPTHS | WIDTHS
    for name, value in list(vars(config).items()):
        with contextlib.suppress(Exception):  # an attribute that the config computes
            if isinstance(value, list) and len(value) in depths and len(value) > 2:
                setattr(config, name, [value[0], value[-1]])
            elif type(value) is int and value > 0 and name in sizes:
                setattr(config, name, min(value, sizes[name]))


def small(name: str) -> PreTrainedModel | None:
    """A model of the class with distinct values; None if these sizes do not fit together in it."""
    cls = getattr(transformers, name)
    try:
        config = cls.config_class()
        for inner in nested_configs(config):
            shrink(inner)
        cls.config_class.from_dict(config.to_dict())  # refuses what a save would refuse
        with torch.device("meta"):
            elements = cls(config).num_parameters()
        if elements > MOST_ELEMENTS:
            return None
        torch.manual_seed(0)
        model: PreTrainedModel = cls(config)
    except Exception:  # each class has checks of its own
        return None
    return model.eval()


def adapter_config(model: PreTrainedModel, kind: str) -> LoraConfig:
    """LoRA on all linear layers and fused experts; or on some layers, with all biases, a norm and a router."""
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    layers = {path for path, module in modules.items() if type(module) is nn.Linear}
    if any(path.endswith(".conv1d") for path in modules):  # PEFT refuses these of Mamba's layers
        layers -= {path for path in layers if path.endswith(".out_proj")}
    linear = sorted(path for path in layers if modules[path] is not head)
    experts = [name for name, parameter in model.named_parameters() if parameter.ndim == 3 and "expert" in name]
    if kind == "layers":
        return LoraConfig(r=2, target_modules=linear, target_parameters=experts or None)
    ends = [path for path in modules if path.rpartition(".")[2] in ("gate", "router", "norm")]
    saved = sorted(set(ends) - set(linear[:4]))[:3]
    return LoraConfig(r=2, target_modules=linear[:4], bias="all", modules_to_save=saved or None)
