"""Small models of all model classes of transformers.

transformers does not ship the tiny configs of its own tests. So the numbers of each default config
are replaced by small ones, by the names of the fields. Several choices are tried, the smallest
first, until the class makes a model of few parameters.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

MAX_PARAMETERS = 3_000_000
# Numbers that several fields of most configs agree with: 4 heads of 8 make the width of 32.
_FIELDS: tuple[tuple[int, str], ...] = (
    (32, "hidden_size d_model n_embd embed_dim dim projection_dim hidden_dim embedding_size"),
    (32, "word_embed_proj_dim decoder_hidden_size output_size width mask_feature_size"),
    (32, "feature_size fpn_feature_size conv_dim out_hidden_size encoder_hidden_dim"),
    (32, "decoder_hidden_dim attention_hidden_size expert_hidden_size image_size"),
    (48, "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner"),
    (48, "dim_feedforward decoder_intermediate_size ffn_hidden_size intermediate_dim"),
    (16, "moe_intermediate_size shared_expert_intermediate_size q_lora_rank"),
    (4, "num_attention_heads num_heads n_head n_heads num_key_value_heads n_head_kv"),
    (4, "encoder_attention_heads decoder_attention_heads decoder_num_attention_heads"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (8, "head_dim d_kv attention_head_size kv_lora_rank qk_rope_head_dim qk_nope_head_dim"),
    (8, "v_head_dim qk_head_dim patch_size"),
    (2, "num_experts_per_tok n_group n_shared_experts"),
    (1, "topk_group first_k_dense_replace"),
    (2, "num_hidden_layers num_layers n_layer n_layers depth encoder_layers decoder_layers"),
    (2, "num_decoder_layers num_encoder_layers decoder_num_hidden_layers"),
    (2, "encoder_num_hidden_layers text_layers"),
    (101, "vocab_size text_vocab_size audio_vocab_size codebook_size"),
    (64, "max_position_embeddings n_positions max_source_positions max_target_positions"),
)
_SIZES: dict[str, int] = {}
for _size, _names in _FIELDS:
    _SIZES.update(dict.fromkeys(_names.split(), _size))
_LAYERS = ("layers", "layer", "depth")


def class_names() -> list[str]:
    """Return the names of the model classes in the tables of transformers' Auto classes.

    None of the classes is imported.
    """
    names: set[str] = set()
    for table_name, table in vars(modeling_auto).items():
        if table_name.startswith("MODEL_") and table_name.endswith("_MAPPING_NAMES"):
            for entry in table.values():
                names.update([entry] if isinstance(entry, str) else entry)
    return sorted(names)


@cache
def small_config(name: str) -> Any:
    """Return a config of which the class makes a model of at most MAX_PARAMETERS; None without.

    The choices of numbers are tried in order.
    """
    cls: Any = getattr(transformers, name, None)  # None: it needs a library that is not installed
    for sizes in _choices() if isinstance(cls, type) else ():
        try:
            config = _shrunk(cls.config_class, sizes)
            with torch.device("meta"):
                model = cls(config)
        except Exception:  # numbers that do not fit together raise anything
            continue
        if sum(parameter.numel() for parameter in model.parameters()) <= MAX_PARAMETERS:
            return config
    return None


def make_small(name: str) -> nn.Module | None:
    """Make a model of the class with random weights; None if no small config was found."""
    config = small_config(name)
    if config is None:
        return None
    torch.manual_seed(0)
    cls: Any = getattr(transformers, name)
    model: nn.Module = cls(cls.config_class.from_dict(config.to_dict()))
    return model.eval()


def _choices() -> Iterator[dict[str, int]]:
    """Yield the sizes to try, by field, from the smallest models on."""
    yield _SIZES
    yield {**_SIZES, "num_key_value_heads": 2}
    yield {name: value for name, value in _SIZES.items() if not name.startswith("head_dim")}
    yield {**_SIZES, "num_hidden_layers": 4, "num_layers": 4}
    layers = {}
    for name, size in _SIZES.items():
        if any(word in name for word in _LAYERS):
            layers[name] = size
    yield {**layers, "vocab_size": 101}
    yield layers
    yield {}


def _shrunk(config_class: Any, sizes: dict[str, int]) -> Any:
    """Make a config of the class with its numbers replaced, those of nested configs too."""
    config = config_class()
    return config_class(**_replaced(config, sizes))


def _replaced(config: Any, sizes: dict[str, int]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in getattr(config, "sub_configs", {}) and getattr(config, name, None) is not None:
            nested = getattr(config, name)
            settings[name] = {**_replaced(nested, sizes), "model_type": nested.model_type}
        elif type(value) is int and name in sizes:
            settings[name] = sizes[name]
        elif type(value) is int and name.endswith("token_id") and value > 90:
            settings[name] = 90
    return settings
