"""Writes the golden checkpoints of the installed version of ft_ckpt, to be read by every later
version.

    python tests/golden/make_checkpoints.py OUT weights full sharded ...
    python tests/golden/make_checkpoints.py OUT runs writers deltas signed
    torchrun --nproc-per-node 2 tests/golden/make_checkpoints.py OUT ranked ddp fsdp2 zero2 zero3

Without names, all of them. Everything is deterministic, so that `tests/checkpoint/test_goldens.py`
makes the same models and runs and compares.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from ft_ckpt import CheckpointSaver, Writer, publish, sign

STEPS = 2
BATCH = 4


def llama_config(**options: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **options,
    )


def llama() -> LlamaForCausalLM:
    """A tied llama whose weights depend on no library's initialisation."""
    return fill(LlamaForCausalLM(llama_config()))


def lora() -> nn.Module:
    """The same model with an adapter that changes what it computes."""
    return fill(
        get_peft_model(
            llama(), LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], use_rslora=True)
        )
    )


def classifier_base() -> nn.Module:
    return fill(LlamaForSequenceClassification(llama_config(num_labels=3)))


def classifier() -> nn.Module:
    """LoRA on a classifier of three labels: the trained head is stored with the adapter."""
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], task_type=TaskType.SEQ_CLS)
    model = get_peft_model(classifier_base(), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for number, parameter in enumerate(trained):
            values = torch.arange(parameter.numel(), dtype=torch.float32) * (number + 5) % 13
            parameter.copy_((values / 32 - 0.125).view(parameter.shape))
    return model


class PolicyAndValue(nn.Module):
    """A composite as PPO trains it: a language model and a value head."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = llama()
        self.value_head = nn.Linear(16, 1)
        fill(self)


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
    return [
        torch.linspace(-1, 1, BATCH * 5).view(BATCH, 5) * (step + 1) for step in range(STEPS + 1)
    ]


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
    "classifier": (classifier, {"adapter_only": True}),
    "composite": (PolicyAndValue, {"attribute": ["policy", "value_head"]}),
}
LAST_WRITTEN = {"zstd": "0.3.0"}  # kinds that later versions only read


def save_weights(out: Path, name: str) -> None:
    build, options = WEIGHTS[name]
    CheckpointSaver(Accelerator(cpu=True), out).save(build(), out / name, step=STEPS, **options)


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


def replay_state() -> dict[str, Any]:
    """What the writer of the run `writers` hands in."""
    return {"cursor": 7, "rewards": torch.arange(6.0).view(2, 3)}


def save_writers(out: Path) -> None:
    """A run whose one checkpoint has the parts of its trainer and of a replay buffer."""
    model = Network()
    optimizer = optimizer_of(model)
    with CheckpointSaver(None, out / "writers") as saver:
        saver.register(model=model, optimizer=optimizer)
        session = saver.invite("replay")
        with Writer(out / "writers", "replay", session=session) as writer:
            writer.provide(replay_state)
            for step, batch in enumerate(batches()[:STEPS], 1):
                train(model, optimizer, [batch])
                saver.step(step=step)
            saver.save_state()


def changed_llama(step: int) -> LlamaForCausalLM:
    """The llama as it is at a step of the run behind `deltas`: single elements differ from the step
    before.
    """
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[:step] += 0.5
    return model


def save_deltas(out: Path) -> None:
    """A chain of an anchor and a delta."""
    for step in range(1, STEPS + 1):
        checkpoint = out / "deltas-run" / f"checkpoint-{step}"
        CheckpointSaver(None, out).save(changed_llama(step), checkpoint, step=step)
        publish(checkpoint, str(out / "deltas"), delta=True)
    shutil.rmtree(out / "deltas-run")


def save_signed(out: Path) -> None:
    """A signed checkpoint with its public key beside it; the private key is thrown away."""
    key = ec.generate_private_key(ec.SECP256R1())
    private_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public_pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    checkpoint = out / "signed" / "checkpoint-2"
    CheckpointSaver(None, out, digest="sha256").save(llama(), checkpoint, step=STEPS)
    private = out / "private.pem"
    private.write_bytes(private_pem)
    sign(checkpoint, private)
    private.unlink()
    (out / "signed" / "public.pem").write_bytes(public_pem)


RANKED = ["ddp", "fsdp2", "zero2", "zero3"]
SINGLE: dict[str, Callable[[Path], None]] = {
    "writers": save_writers,
    "deltas": save_deltas,
    "signed": save_signed,
}


def main() -> None:
    out, kind, *names = Path(sys.argv[1]), sys.argv[2], *sys.argv[3:]
    written = [name for name in WEIGHTS if name not in LAST_WRITTEN]
    all_names = {"weights": written, "runs": [*SINGLE], "ranked": RANKED}
    for name in names or all_names[kind]:
        if kind == "weights":
            save_weights(out, name)
        elif kind == "runs":
            SINGLE[name](out)
        else:
            save_run(out, name)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
