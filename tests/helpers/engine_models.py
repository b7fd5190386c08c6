"""Small models for inference servers: a Llama, and a Qwen with grouped heads and a tied head."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 1024
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_model(kind: str, seed: int = 0, **settings: Any) -> Any:
    """Make a random model in bfloat16, "llama" or "qwen"; `settings` are of its config."""
    torch.manual_seed(seed)
    model: nn.Module
    if kind == "llama":
        llama = {**_SIZES, "num_key_value_heads": 4, "tie_word_embeddings": False, **settings}
        model = LlamaForCausalLM(LlamaConfig(**llama))
    else:
        qwen = {**_SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True, **settings}
        model = Qwen2ForCausalLM(Qwen2Config(**qwen))
    return model.to(torch.bfloat16).eval()


def with_adapter(base: Any, seed: int, **settings: Any) -> Any:
    """Put a LoRA adapter on all linear layers of `base`, with values as after a training."""
    torch.manual_seed(seed)
    defaults = {"r": 8, "lora_alpha": 16, "target_modules": LAYERS, "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**{**defaults, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer of VOCABULARY tokens on sources of the standard library."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<unk>", "<s>", "</s>"])
    sources = sorted(Path(json.__file__).parent.glob("*.py"))
    bpe.train([str(path) for path in sources], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
