"""Adapters on a quantised base under DDP: trained for two steps on data that differs by rank, saved, and merged."""

from pathlib import Path

import harness  # first: it arms the stack dump
import models
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from architectures import ARCHITECTURES, make
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import SelectionError


@harness.named
def adapter_from_ddp(folder: Path) -> None:
    """A merge of the live model is refused on all ranks; its adapter is merged into the model that was quantised."""
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
    with CheckpointSaver(accelerator, enter_timeout_seconds=60) as saver:
        with pytest.raises(SelectionError, match="its weights are quantised"):
            saver.save(model, out, merged=True)
        assert not out.exists()
        saver.save(model, folder / "adapter", adapter_only=True)
    if harness.RANK == 0:
        ft_ckpt.merge(folder / "adapter", out, base=base)
        merged, original = (load_file(path / "model.safetensors") for path in (out, base))
        place = "model.layers.0.self_attn.q_proj.weight"
        assert not torch.equal(merged[place], original[place])
        del merged[place], original[place]
        assert merged.keys() == original.keys()


if __name__ == "__main__":
    harness.run(lambda name, folder: harness.NAMED[name](folder))
