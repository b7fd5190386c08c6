"""Tiny dropout-free models whose every parameter is a function of its name and a seed.

So any process can rebuild the model that another one trained, and compare bit for bit. Sizes are
uneven on purpose: 101 rows of embeddings, 63 positions, 5 rows and 1 of the value head do not
divide by 2 or 4 ranks.
"""

import zlib
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

VOCABULARY = 101
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|> {{ m['content'] }} <|im_end|> {% endfor %}"


class Two(nn.Module):
    """Two parameters, all of whose elements are `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.full((300, 50), float(value)))
        self.two = nn.Parameter(torch.full((7,), float(value)))


class ValueHead(nn.Module):
    """A scalar per position, and a running mean in a persistent buffer."""

    def __init__(self, hidden_size: int = 24) -> None:
        super().__init__()
        self.hidden = nn.Linear(hidden_size, 5)
        self.score = nn.Linear(5, 1)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.score(torch.tanh(self.hidden(states))).squeeze(-1)


class PolicyAndValue(nn.Module):
    """A language model with a value head, as PPO trains them."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value_head = ValueHead()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        out = self.policy(input_ids=input_ids, labels=labels, output_hidden_states=True)
        value = self.value_head(out.hidden_states[-1])
        return CausalLMOutput(loss=out.loss + value.square().mean())


class ValueModel(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.score = nn.Linear(24, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.score(self.trunk(input_ids=input_ids).last_hidden_state).squeeze(-1)


class SharedTrunk(nn.Module):
    """Policy and value model on one trunk: the trunk's parameters have two names."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy
        self.value_model = ValueModel(policy.model)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        loss = self.policy(input_ids=input_ids, labels=labels).loss
        return CausalLMOutput(loss=loss + self.value_model(input_ids).square().mean())


def llama(**overrides: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": True, **overrides}))


def qwen3(**overrides: Any) -> nn.Module:
    return Qwen3ForCausalLM(
        Qwen3Config(**{**SIZES, "head_dim": 6, "tie_word_embeddings": False, **overrides})
    )


def olmo2(**overrides: Any) -> nn.Module:
    return Olmo2ForCausalLM(Olmo2Config(**{**SIZES, **overrides}))


def gpt2(**overrides: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 63}
    dropouts = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **dropouts, **overrides}))


def mixtral(**overrides: Any) -> nn.Module:
    """Make a Mixtral: its experts are fused in memory, and one tensor for each expert on disk."""
    return MixtralForCausalLM(
        MixtralConfig(**{**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2, **overrides})
    )


def experts() -> nn.Module:
    """Make a Mixtral whose experts divide by 2 and 4 ranks, in sizes for grouped products."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4}
    return mixtral(**sizes, num_local_experts=4)


def lora(base: nn.Module | None = None) -> PeftModel:
    """Put two adapters of different shape on `base`; the first trains its head, and is active."""
    first = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    second = LoraConfig(
        r=3, target_modules=["k_proj", "up_proj"], use_rslora=True, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base or qwen3(), first)
    model.add_adapter("second", second)
    model.set_adapter("default")
    return model


def lora_experts() -> PeftModel:
    """Make a Mixtral with an adapter on attention and on fused experts."""
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=experts, task_type="CAUSAL_LM"
    )
    return get_peft_model(mixtral(), config)


def wide() -> nn.Module:
    """Make a model of some 7 MB, which needs many small buckets."""
    return qwen3(vocab_size=3001, hidden_size=192, intermediate_size=257, head_dim=48)


def lora_wide() -> PeftModel:
    """Make an adapter of some 8 KB on a base of some 7 MB: bytes that are sent tell them apart."""
    return get_peft_model(wide(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def policy_and_value() -> nn.Module:
    return PolicyAndValue(llama())


def lora_policy_and_value() -> nn.Module:
    return PolicyAndValue(lora())


def shared_trunk() -> nn.Module:
    return SharedTrunk(qwen3())


def partly_frozen() -> nn.Module:
    """Make a tied model whose first layer is not trained."""
    model: Any = llama()
    model.model.layers[0].requires_grad_(False)
    return model


def big() -> nn.Module:
    """Make a model of some 120 MB in float32, without tensors above 4 MB."""
    sizes = {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
    }
    return qwen3(**sizes, head_dim=64)


def build(name: str, seed: int = 0) -> nn.Module:
    """Make the model of the function with that name in this module, filled, in training mode."""
    model = globals()[name]()
    fill(model, seed)
    return model.train()


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0, scale: float = 0.1) -> None:
    """Give every parameter and persistent buffer values that depend on its name and `seed` only."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)


def batch(seed: int, rows: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Make token ids of shape (rows, length); the labels are the same."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of the words w0 to w79 and the special tokens of a chat model.

    It has fewer tokens than the models have rows of embeddings.
    """
    special = ["<s>", "</s>", "<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokens = [*special, *(f"w{number}" for number in range(80))]
    words = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    extra = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **named, additional_special_tokens=extra, chat_template=CHAT_TEMPLATE
    )


def trained(model: Any, seed: int = 7) -> Any:
    """Change every trainable parameter, as training would; the model is then in eval mode."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for index, parameter in enumerate(trainable):
            generator = torch.Generator().manual_seed(seed * 1000 + index)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()
