"""Engines of DeepSpeed by name: a stage and options, as in "zero2_bf16"."""

from typing import Any

import torch
from torch import nn

SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2}
    },
    "gradients32": {"data_types": {"grad_accum_dtype": "fp32"}},
    "robin": {"zero_optimization": {"round_robin_gradients": True}},
    "aligned": {"zero_optimization": {"parameter_alignment": True}},
    "offload": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "zero_force_ds_cpu_optimizer": False,
    },
    "subgroups": {"zero_optimization": {"sub_group_size": 20}},
    "persistent": {"zero_optimization": {"stage3_param_persistence_threshold": 40}},
}


class Model(nn.Module):
    """A model of odd sizes, so that shards are uneven, padded or empty.

    It has a tied pair, a frozen layer and a vector of one element.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.inner = nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 5, bias=False)
        )
        self.inner[2].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 13)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.inner(self.embed(tokens)) * self.scale)
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def adam(model: nn.Module, lr: float = 0.02, frozen: bool = True) -> torch.optim.Optimizer:
    """Make an AdamW with two groups: matrices, and vectors, with other settings."""
    parameters = [p for p in model.parameters() if frozen or p.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": lr / 2}]
    return torch.optim.AdamW(groups, lr=lr, eps=1e-3, foreach=False)


def engine(name: str, lr: float = 0.02, accumulation: int = 1, optimizer: Any = None) -> Any:
    """Make the engine of that name; `optimizer` is a function, as in `optimizers.KINDS`."""
    import deepspeed

    stage, *options = name.removeprefix("zero").split("_")
    zero: dict[str, Any] = {"stage": int(stage), "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
    }
    for option in options:
        setting = dict(SETTINGS[option])
        zero |= setting.pop("zero_optimization", {})
        config |= setting
    config["zero_optimization"] = zero
    model = build()
    optimizer = adam(model, lr) if optimizer is None else optimizer(model.parameters(), {"lr": lr})
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
