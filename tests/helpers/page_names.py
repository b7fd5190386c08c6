"""The types of the names that `tests/workers/given.py` gives to the blocks of pages.

Nothing runs this file.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

import ft_ckpt
from ft_ckpt import CheckpointSaver, Writer

__all__ = ["CheckpointSaver", "LoraConfig", "Writer", "ft_ckpt"]

SFTTrainer = Trainer
ValueHead: type[nn.Module]
Tuned: Callable[[nn.Module], Any]  # a module of lightning

model: PreTrainedModel
lora_model: PeftModel
ppo_model: nn.Module
average: nn.Module
optimizer: torch.optim.Optimizer
scheduler: torch.optim.lr_scheduler.LRScheduler
loader: DataLoader[dict[str, torch.Tensor]]
data: Dataset[dict[str, torch.Tensor]]
tokenizer: PreTrainedTokenizerFast
accelerator: Accelerator
args: TrainingArguments
saver: CheckpointSaver
early_stopping: Any  # an object with a state dict
train: Callable[[dict[str, torch.Tensor]], torch.Tensor]
evaluate: Callable[[nn.Module], float]
base: PreTrainedModel
make_base: Callable[[], PreTrainedModel]

writer: Writer
step: int
samples: list[int]
generator: torch.Generator

engine: Any  # of DeepSpeed
train_one_step: Callable[[Any], None]
unet: nn.Module
pipeline: Any  # of diffusers, which is in an environment of its own
ray: Any  # likewise
