"""Writes the golden checkpoints of the installed version of ft_ckpt, to be read by every later version.

    torchrun --nproc-per-node 1 tests/golden/make_checkpoints.py OUT weights full sharded ...
    torchrun --nproc-per-node 2 tests/golden/make_checkpoints.py OUT runs ddp fsdp2 zero2 zero3

Everything is deterministic, so that `tests/checkpoint/test_goldens.py` makes the same model and run anew and compares.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ft_ckpt import CheckpointSaver

STEPS = 2
BATCH = 4


def llama() -> LlamaForCausalLM:
    """A tied llama whose weights depend on no library's initialisation."""
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return fill(LlamaForCausalLM(config))


def lora() -> nn.Module:
    """The same model with an adapter that changes what it computes."""
    return fill(get_peft_model(llama(), LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], use_rslora=True)))


def fill(model: Any) -> Any:
    """Give every parameter exact values of its own."""
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            values = torch.arange(parameter.numel(), dtype=torch.float32) * (number + 3) % 17
            parameter.copy_((values / 64 - 0.125).view(parameter.shape))
    return model


class Network(nn.Module):
    """A small network with odd sizes and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(5, 7)
        self.value = nn.Linear(7, 1)
        self.register_buffer("scale", torch.tensor([2.0]))
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(torch.tanh(self.policy(x) * self.scale))


def batches() -> list[torch.Tensor]:
    """The batches of a run, the same on every rank, so that the number of ranks does not matter."""
    return [torch.linspace(-1, 1, BATCH * 5).view(BATCH, 5) * (step + 1) for step in range(STEPS + 1)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, foreach=False)


def train(model: Any, optimizer: Any, given: list[torch.Tensor], backward: Any = None) -> None:
    for batch in given:
        loss = model(batch).square().mean()
        backward(loss) if backward is not None else loss.backward()
        optimizer.step()
        optimizer.zero_grad()


WEIGHTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": (llama, {}),
    "sharded": (llama, {"max_shard_size": 2000}),
    "dual": (llama, {"format": "dual"}),
    "h5": (llama, {"format": "h5"}),
    "zstd": (llama, {"format": "h5", "compression": "zstd"}),
    "gzip": (llama, {"format": "h5", "compression": "gzip"}),
    "lora": (lora, {"adapter_only": True}),
    "module": (Network, {}),
}


def save_weights(out: Path, name: str) -> None:
    build, options = WEIGHTS[name]
    calls = {key: options.pop(key) for key in ("adapter_only",) if key in options}
    CheckpointSaver(Accelerator(cpu=True), out, **options).save(build(), out / name, step=STEPS, **calls)


def save_run(out: Path, name: str) -> None:
    model: Any = Network()
    backward = None
    if name.startswith("zero"):
        plugin = DeepSpeedPlugin(zero_stage=int(name[-1]), gradient_clipping=0.0)
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = BATCH
        plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
        plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        backward = accelerator.backward
    elif name == "fsdp2":
        accelerator = Accelerator(cpu=True)
        fully_shard(model)
        optimizer = optimizer_of(model)
    else:
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        backward = accelerator.backward
    saver = CheckpointSaver(accelerator, out / name)
    if name == "fsdp2":
        saver.register(model=model, optimizer=optimizer)
    for step, batch in enumerate(batches()[:STEPS], 1):
        train(model, optimizer, [batch], backward)
        saver.step(step=step)
    saver.save_state(model)
    saver.close()


def main() -> None:
    out, kind, *names = Path(sys.argv[1]), sys.argv[2], *sys.argv[3:]
    for name in names:
        (save_weights if kind == "weights" else save_run)(out, name)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
