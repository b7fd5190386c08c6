"""Models of a given size, with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.bench.common import DEVICE, size_of

# below: width, vocabulary
_SIZES = ((2_000_000, 128, 512), (25_000_000, 256, 4096), (900_000_000, 1024, 4096))


@dataclass(frozen=True, eq=False)
class Subject:
    """The model that is saved and loaded, and its state dict with each tied tensor once."""

    model: nn.Module

    @cached_property
    def state(self) -> Mapping[str, Tensor]:
        """The tensors by name."""
        state = dict(self.model.state_dict())
        state.pop("lm_head.weight", None)  # tied to the embeddings
        return state

    @property
    def size_bytes(self) -> int:
        """Bytes of the state dict."""
        return size_of(self.state)


def make_subject(size_bytes: int) -> Subject:
    """Make a model with about `size_bytes` of bf16 weights, on the GPU if there is one."""
    return Subject(make_model(size_bytes // 2).to(DEVICE))


def config_of(parameters: int) -> LlamaConfig:
    """Make a Llama config for about that many parameters.

    From 900 M on its layers have the shapes of Llama-3.2-1B.
    """
    width, vocabulary = _width_and_vocabulary(parameters)
    heads = 8
    layer_parameters = 16 * width * width
    if width == 2048:
        heads = 32
        layer_parameters = 60_821_504
    layers = round((parameters - vocabulary * width) / layer_parameters)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=max(1, layers),
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )


def _width_and_vocabulary(parameters: int) -> tuple[int, int]:
    for max_parameters, width, vocabulary in _SIZES:
        if parameters < max_parameters:
            return width, vocabulary
    return 2048, 128256


def make_model(parameters: int, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """Make a Llama with about that many parameters, normally distributed."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(parameters)).to(dtype)
    model = model.to_empty(device=DEVICE)
    # not in the state dict: to_empty left it uninitialised
    rotary = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rotary.to(DEVICE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.tie_weights()
    return model
