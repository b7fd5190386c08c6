"""Compares what the live model computes with what the folder computes that is about to be committed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.distributed.wrappers import unwrap, user_class
from ft_ckpt.errors import ConfigError, IncompleteError

_ROWS, _LENGTH, _SEED = 2, 16, 0  # of a batch that is made here
# By how much outputs may differ, as a fraction of their size (Euclidean norms): merged weights are rounded once to
# their type, and the live model rounds the base's product and the adapter's apart.
_BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, eq=False)
class LogitsCheck:
    """What the live model gives for a batch: on rank 0; the others take part in computing it."""

    batch: Mapping[str, Any]
    logits: Tensor  # on the host, in float32
    kind: type  # the class to load with
    dtype: torch.dtype  # in which the live model computes

    def compare(self, folder: Path) -> str:
        """Load `folder` with transformers and compare; a note that says how near it came.

        Raises IncompleteError when it is further off than the bound of its type.
        """
        cls: Any = self.kind
        loaded = cls.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
        found = _logits_of(loaded, self.batch)
        bound = max(_BOUNDS.get(self.dtype, 1e-1), _BOUNDS.get(loaded.dtype, 1e-1))
        off = float((found - self.logits).norm() / self.logits.norm().clamp_min(1e-30))
        note = (
            f"logits of {found.shape[0]} x {found.shape[1]} tokens differ by {off:.2g} of their size, bound {bound:g}"
        )
        if not off <= bound:
            raise IncompleteError(f"{note}: the merged model is not the live one; nothing is committed")
        return note


def live_logits(model: nn.Module, check: str | Mapping[str, Any]) -> LogitsCheck:
    """What `model` gives now for a batch: a given one, or token ids made here for "logits". Call on every rank.

    The model is in eval mode meanwhile. Raises ConfigError for another `check`, and where no batch can be made.
    """
    inside: Any = unwrap(model)
    base = inside.get_base_model() if hasattr(inside, "get_base_model") else inside
    batch = _made_batch(base) if check == "logits" else check
    if not isinstance(batch, Mapping):
        raise ConfigError(f'check={check!r}: expected "logits", or a batch as a mapping, such as a tokenizer gives')
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    held = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    with _in_eval_mode(model):
        logits = _logits_of(model, held)
    host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in held.items()}
    return LogitsCheck(host, logits, user_class(type(base)), base.dtype)


@torch.no_grad()
def _logits_of(model: Any, batch: Mapping[str, Any]) -> Tensor:
    found = model(**batch)
    logits: Tensor = found["logits"] if "logits" in found else found[0]
    return logits.detach().float().cpu()


def _made_batch(model: Any) -> dict[str, Tensor]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(text, "vocab_size", None)
    if not isinstance(words, int) or getattr(model, "main_input_name", "") != "input_ids":
        raise ConfigError(f'check="logits": no batch can be made for {type(model).__name__}; give one, check={{...}}')
    ids = torch.randint(words, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(_SEED))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**batch, "decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else batch


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
