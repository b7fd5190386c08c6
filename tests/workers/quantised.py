"""Adapters on a quantised base under DDP: trained for a step on data that differs by rank, and saved merged."""

from pathlib import Path

import harness  # first: it arms the stack dump
import models
import torch
import torch.distributed as dist
from accelerate import Accelerator
from architectures import ARCHITECTURES, make
from compare import assert_same_tensors
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ft_ckpt
from ft_ckpt import CheckpointSaver


@harness.named
def merged_from_ddp(folder: Path) -> None:
    """A merged save equals a merge of the adapter's files, and does not change the live model."""
    accelerator = Accelerator(cpu=True)
    base, out = folder / "base", folder / "out"
    if harness.RANK == 0:
        make(ARCHITECTURES["llama"]).bfloat16().save_pretrained(base)
    dist.barrier()
    settings = BitsAndBytesConfig(load_in_8bit=True)
    live = AutoModelForCausalLM.from_pretrained(base, quantization_config=settings, device_map="cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(get_peft_model(live, LoraConfig(r=4, target_modules=["q_proj", "up_proj"])))
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)
    for seed in (harness.RANK, harness.RANK + 2):
        model(**models.batch(seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with CheckpointSaver(accelerator, enter_timeout_seconds=60) as saver:
        saver.save(model, out, merged=True)
        saver.save(model, folder / "adapter", adapter_only=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    if harness.RANK == 0:
        ft_ckpt.merge(folder / "adapter", folder / "from files", base=base)
        merged, changed = (load_file(path / "model.safetensors") for path in (out, base))
        assert_same_tensors(merged, load_file(folder / "from files" / "model.safetensors"))
        place = "model.layers.0.self_attn.q_proj.weight"
        assert not torch.equal(merged[place], changed[place])


if __name__ == "__main__":
    harness.run(lambda name, folder: harness.NAMED[name](folder))
