"""PEFT's methods: a function from target modules to a config for each."""

from collections.abc import Callable
from typing import Any

import peft
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def low_rank(targets: Any, **settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": targets, **settings})


def of_class(name: str, **settings: Any) -> Callable[[Any], Any]:
    return lambda targets: getattr(peft, name)(target_modules=targets, **settings)


def tuners_config(name: str) -> Any:
    return getattr(peft.tuners.lora.config, f"{name}Config")


METHODS: dict[str, Callable[[Any], Any]] = {
    "lora": low_rank,
    "rslora": lambda targets: low_rank(targets, use_rslora=True),
    "dora": lambda targets: low_rank(targets, use_dora=True),
    "bias": lambda targets: low_rank(targets, bias="all"),
    "ranks": lambda targets: low_rank(
        targets, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 5}
    ),
    "loha": of_class("LoHaConfig", r=3),
    "lokr": of_class("LoKrConfig", r=3),
    "adalora": of_class("AdaLoraConfig", init_r=5, target_r=3, total_step=10),
    "ia3": of_class("IA3Config", feedforward_modules=[]),
    "oft": of_class("OFTConfig", r=0, oft_block_size=4),
    "oft-exact": of_class("OFTConfig", r=0, oft_block_size=4, use_cayley_neumann=False),
    "boft": of_class("BOFTConfig", boft_block_size=4),
    "vera": of_class("VeraConfig", r=4),
    "vera-seed": of_class("VeraConfig", r=4, save_projection=False),
    "pvera": of_class("PveraConfig", r=4),
    "hra": of_class("HRAConfig", r=4),
    "fourierft": of_class("FourierFTConfig", n_frequency=20),
    "waveft": of_class("WaveFTConfig", n_frequency=20),
    "randlora": of_class("RandLoraConfig", r=4),
    "miss": of_class("MissConfig", r=4),
    "miss-bat": of_class("MissConfig", r=4, init_weights="bat"),
    "road": of_class("RoadConfig", group_size=4),
    "shira": of_class("ShiraConfig", r=4),
    "c3a": of_class("C3AConfig", block_size=4),
    "delora": of_class("DeloraConfig", r=4),
    "gralora": of_class("GraloraConfig", r=4, gralora_k=2),
    "vblora": of_class("VBLoRAConfig", r=4, num_vectors=8, vector_length=4),
    "adamss": of_class("AdamssConfig"),
    "deft": of_class("DeftConfig"),
    "glora": of_class("GloraConfig"),
    "hira": of_class("HiraConfig"),
    "osf": of_class("OSFConfig"),
    "supertuning": of_class("SupertuningConfig"),
    "tinylora": of_class("TinyLoraConfig"),
    "unilora": of_class("UniLoraConfig"),
    "pissa": lambda targets: low_rank(targets, init_lora_weights="pissa"),
    "olora": lambda targets: low_rank(targets, init_lora_weights="olora"),
    "kasa": lambda targets: low_rank(targets, kasa_config=tuners_config("Kasa")()),
    "mica": lambda targets: low_rank(targets, init_lora_weights="mica"),
    "orthogonal": lambda targets: low_rank(targets, r=4, init_lora_weights="orthogonal"),
    "velora": lambda targets: low_rank(targets, velora_config=tuners_config("Velora")()),
    "monteclora": lambda targets: low_rank(
        targets, monteclora_config=tuners_config("Monteclora")()
    ),
    "peanut": of_class("PeanutConfig"),
    "psoft": of_class("PsoftConfig", r=4),
    "frod": of_class("FrodConfig"),
    "norms": lambda _: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "tokens": lambda _: peft.TrainableTokensConfig(token_indices=[3, 5]),
}


def of_task(name: str, **settings: Any) -> Callable[[Any], Any]:
    return lambda _: getattr(peft, name)(task_type="CAUSAL_LM", **settings)


UNMERGEABLE: dict[str, Callable[[Any], Any]] = {
    "beft": of_class("BeftConfig"),
    "lily": of_class("LilyConfig"),
    "poly": of_class("PolyConfig"),
    "shadow": lambda _: peft.ShadowConfig(),
    "adaption-prompt": of_task("AdaptionPromptConfig", adapter_len=3, adapter_layers=2),
    "prompt": of_task("PromptTuningConfig", num_virtual_tokens=3),
    "prefix": of_task("PrefixTuningConfig", num_virtual_tokens=3),
    "p-tuning": of_task("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=7),
    "multitask": of_task("MultitaskPromptTuningConfig", num_virtual_tokens=3, num_tasks=2),
    "cpt": of_task(
        "CPTConfig", cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3]
    ),
    "cartridge": of_task("CartridgeConfig", num_virtual_tokens=3),
}


def with_adapter(base: nn.Module, config: Any, seed: int = 3) -> Any:
    """Put an adapter on the base, with values as after a training, in eval mode."""
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                change = torch.randn(parameter.shape, generator=generator)
                parameter.add_(change.to(parameter) * 0.05)
    return model.eval()
