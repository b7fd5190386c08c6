"""Trainers of TRL on a tiny model, with the options that have a second model, buffer or state."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import models
import torch
import trainers
from datasets import Dataset

WORDS = [f"w{number} w{number + 1} w{(3 * number) % 40}" for number in range(12)]
PAIRS = [{"prompt": text, "chosen": f"{text} w5", "rejected": f"{text} w9 w3"} for text in WORDS]
PROMPTS = [{"prompt": text} for text in WORDS]
TEXTS = [{"text": text} for text in WORDS]
LABELLED = [{"prompt": text, "completion": " w5 w7", "label": True} for text in WORDS]
for _row in LABELLED[1::2]:
    _row["label"] = False
_ANSWER = {"role": "assistant", "content": "w5 w7"}
CHATS = [{"messages": [{"role": "user", "content": text}, _ANSWER]} for text in WORDS]
PRIVILEGED = [{"prompt": text, "privileged_context": "w8 w9"} for text in WORDS]
GENERATES: dict[str, Any] = {"num_generations": 2, "max_completion_length": 4, "temperature": 1.0}


def letters(completions: Any, **_: Any) -> list[float]:
    """Return a reward for each completion, which depends on its letters."""
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


@dataclass(frozen=True)
class TrlCase:
    """One trainer with some options; names of classes are looked up in `module`."""

    trainer: str
    config: str
    rows: Any
    settings: dict[str, Any] = field(default_factory=dict)
    module: str = "trl"
    arguments: Callable[[str], dict[str, Any]] = lambda _: {}
    callbacks: Callable[[], list[Any]] = list
    is_lora: bool = False
    is_classifier: bool = False


def _model(path: str, **_: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def _averaged(**settings: Any) -> list[Any]:
    from trl import BEMACallback

    return [BEMACallback(update_freq=1, **settings)]


def _averaged_reference() -> list[Any]:
    from trl.experimental.bema_for_ref_model import BEMACallback

    return [BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)]


_SYNC: dict[str, Any] = {
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "ref_model_mixup_alpha": 0.5,
}
_GRPO: dict[str, Any] = {"arguments": lambda _: {"reward_funcs": letters}}
CASES = {
    "sft": TrlCase("SFTTrainer", "SFTConfig", TEXTS),
    "sft packed": TrlCase("SFTTrainer", "SFTConfig", TEXTS, {"packing": True, "max_length": 8}),
    "sft averaged": TrlCase("SFTTrainer", "SFTConfig", TEXTS, callbacks=_averaged),
    "dpo": TrlCase("DPOTrainer", "DPOConfig", PAIRS),
    "dpo lora": TrlCase("DPOTrainer", "DPOConfig", PAIRS, is_lora=True),
    "dpo synced": TrlCase("DPOTrainer", "DPOConfig", PAIRS, _SYNC),
    "dpo synced late": TrlCase(
        "DPOTrainer", "DPOConfig", PAIRS, {**_SYNC, "ref_model_sync_steps": 4}
    ),
    "dpo given reference": TrlCase(
        "DPOTrainer", "DPOConfig", PAIRS, _SYNC, arguments=lambda path: {"ref_model": _model(path)}
    ),
    "dpo precomputed": TrlCase(
        "DPOTrainer", "DPOConfig", PAIRS, {"precompute_ref_log_probs": True}
    ),
    "dpo averaged reference": TrlCase(
        "DPOTrainer",
        "DPOConfig",
        PAIRS,
        module="trl.experimental.bema_for_ref_model",
        callbacks=_averaged_reference,
    ),
    "kto": TrlCase("KTOTrainer", "KTOConfig", LABELLED, {"per_device_train_batch_size": 4}),
    "reward": TrlCase("RewardTrainer", "RewardConfig", PAIRS, is_classifier=True),
    "grpo": TrlCase("GRPOTrainer", "GRPOConfig", PROMPTS, GENERATES, **_GRPO),
    "grpo reference": TrlCase(
        "GRPOTrainer", "GRPOConfig", PROMPTS, {**GENERATES, "beta": 0.1}, **_GRPO
    ),
    "grpo synced": TrlCase(
        "GRPOTrainer", "GRPOConfig", PROMPTS, {**GENERATES, "beta": 0.1, **_SYNC}, **_GRPO
    ),
    "grpo iterations": TrlCase(
        "GRPOTrainer", "GRPOConfig", PROMPTS, {**GENERATES, "num_iterations": 2}, **_GRPO
    ),
    "grpo generates ahead": TrlCase(
        "GRPOTrainer", "GRPOConfig", PROMPTS, {**GENERATES, "steps_per_generation": 4}, **_GRPO
    ),
    "rloo": TrlCase("RLOOTrainer", "RLOOConfig", PROMPTS, GENERATES, **_GRPO),
    "rloo synced": TrlCase("RLOOTrainer", "RLOOConfig", PROMPTS, {**GENERATES, **_SYNC}, **_GRPO),
    "rloo iterations": TrlCase(
        "RLOOTrainer", "RLOOConfig", PROMPTS, {**GENERATES, "num_iterations": 2}, **_GRPO
    ),
    "distillation": TrlCase(
        "DistillationTrainer",
        "DistillationConfig",
        PROMPTS,
        {"max_completion_length": 4},
        arguments=lambda path: {"teacher_model": _model(path)},
    ),
    "sdpo teacher": TrlCase(
        "SDPOTrainer",
        "SDPOConfig",
        PRIVILEGED,
        {**GENERATES, "teacher_model_kind": "ema"},
        module="trl.experimental.sdpo",
        **_GRPO,
    ),
    "sdft teacher": TrlCase(
        "SDFTTrainer",
        "SDFTConfig",
        PRIVILEGED,
        {**GENERATES, "teacher_model_kind": "ema"},
        module="trl.experimental.sdft",
    ),
    "cpo": TrlCase("CPOTrainer", "CPOConfig", PAIRS, module="trl.experimental.cpo"),
    "orpo": TrlCase("ORPOTrainer", "ORPOConfig", PAIRS, module="trl.experimental.orpo"),
    "gkd": TrlCase(
        "GKDTrainer",
        "GKDConfig",
        CHATS,
        {"max_new_tokens": 4},
        module="trl.experimental.gkd",
        arguments=lambda path: {"teacher_model": _model(path)},
    ),
    "online dpo": TrlCase(
        "OnlineDPOTrainer",
        "OnlineDPOConfig",
        PROMPTS,
        {"max_new_tokens": 4},
        module="trl.experimental.online_dpo",
        **_GRPO,
    ),
}


def make_base(folder: Path) -> None:
    """Save a tiny model with its tokenizer, which trainers load again for their references."""
    torch.manual_seed(0)
    model: Any = models.llama()
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)


def make_trl(case: TrlCase, base: Path, folder: Path, callbacks: list[Any], **settings: Any) -> Any:
    """Make the trainer of `case`, on the model in `base`."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    library = import_module(case.module)
    trl = import_module("trl")
    config = getattr(library, case.config, None) or getattr(trl, case.config)
    defaults = {
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "save_steps": 1,
        "bf16": False,
        "learning_rate": 0.01,
    }
    args = config(str(folder), **{**trainers.SILENT, **defaults, **case.settings, **settings})
    torch.manual_seed(0)
    model = _model(str(base))
    if case.is_classifier:
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    if case.is_lora:
        model = models.lora(model)
    rows = Dataset.from_list(case.rows)
    tokenizer = AutoTokenizer.from_pretrained(base)
    return getattr(library, case.trainer)(
        model=model,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[*case.callbacks(), *callbacks],
        **case.arguments(str(base)),
    )
