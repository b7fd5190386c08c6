"""Tiny models of many architectures, filled with distinct values, and inputs for them."""

from dataclasses import dataclass, field
from typing import Any

import models
import torch
import transformers
from torch import nn

TEXT: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MOE = {**TEXT, "num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


@dataclass(frozen=True)
class Architecture:
    """A model class, its config class, and the settings of a tiny model."""

    model: str
    config: str
    settings: dict[str, Any] = field(default_factory=lambda: TEXT)
    inputs: str = "text"


def causal(name: str, **settings: Any) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", {**TEXT, **settings})


ARCHITECTURES = {
    "llama-tied": causal("Llama", tie_word_embeddings=True),
    "llama": causal("Llama", tie_word_embeddings=False),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3", head_dim=8),
    "gemma2": causal("Gemma2", head_dim=8, sliding_window=8),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    ),
    "phi3": causal("Phi3"),
    "olmo2": causal("Olmo2"),
    "mistral": causal("Mistral", head_dim=8),
    "cohere": causal("Cohere"),
    "stablelm": causal("StableLm"),
    "falcon": causal("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "neox": causal("GPTNeoX", tie_word_embeddings=False),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
    "opt": causal("OPT", ffn_dim=48, word_embed_proj_dim=16),
    "mixtral": causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "olmoe": causal("Olmoe", num_experts=4, num_experts_per_tok=2),
    "qwen3-moe": causal("Qwen3Moe", **{**MOE, "num_experts": 4, "head_dim": 8}),
    "deepseek-v3": causal(
        "DeepseekV3",
        **{
            **MOE,
            **LATENT,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "mamba": causal("Mamba", state_size=4, conv_kernel=4),
    "mamba2": causal(
        "Mamba2", state_size=4, num_heads=8, head_dim=8, n_groups=2, expand=2, chunk_size=4
    ),
    "bert": Architecture("BertForMaskedLM", "BertConfig"),
    "roberta": Architecture("RobertaForSequenceClassification", "RobertaConfig"),
    "modernbert": Architecture(
        "ModernBertForMaskedLM", "ModernBertConfig", {**TEXT, "cls_token_id": 0, "sep_token_id": 1}
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
        "seq2seq",
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {"vocab_size": 101, **SEQ2SEQ, **HEADS},
        "seq2seq",
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 101,
            **SEQ2SEQ,
            **HEADS,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "pad_token_id": 2,
        },
        "speech",
    ),
    "vit": Architecture("ViTForImageClassification", "ViTConfig", VISION, "image"),
    "clip": Architecture(
        "CLIPModel", "CLIPConfig", {"text_config": TEXT, "vision_config": VISION}, "image_text"
    ),
    "llava": Architecture(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": 100,
        },
    ),
    "qwen2-vl": Architecture(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "patch_size": 8,
            },
        },
    ),
}


def make(architecture: Architecture) -> nn.Module:
    """Make a model in evaluation mode whose elements are distinct."""
    config = getattr(transformers, architecture.config)(**architecture.settings)
    model = getattr(transformers, architecture.model)(config)
    models.fill(model)
    tiny: nn.Module = model.eval()
    return tiny


def inputs(kind: str) -> dict[str, torch.Tensor]:
    """Return a fixed batch of two samples for models with this kind of inputs."""
    ids = models.batch(3)["input_ids"] % 90
    image = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    return {
        "text": {"input_ids": ids},
        "seq2seq": {"input_ids": ids, "decoder_input_ids": ids},
        "speech": {
            "input_features": torch.linspace(-1, 1, 2 * 8 * 20).view(2, 8, 20),
            "decoder_input_ids": ids,
        },
        "image": {"pixel_values": image},
        "image_text": {"pixel_values": image, "input_ids": ids},
    }[kind]
