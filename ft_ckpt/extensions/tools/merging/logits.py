"""Compares the output of a merged model on disk with that of the live model: check="logits"."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.errors import ConfigError, IncompleteError
from ft_ckpt.ranks.wrappers import unwrap, user_class

_ROWS, _LENGTH, _SEED = 2, 16, 0  # of the batch for check="logits"
# Bound on the relative difference of outputs (Euclidean norms): merged weights are rounded once to
# their type; the live model rounds the product of the base and that of the adapter separately.
_BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, eq=False)
class LogitsCheck:
    """The output of the live model for a batch. All ranks compute it; rank 0 compares it."""

    batch: Mapping[str, Any]
    logits: Tensor  # on the host, in float32
    model_class: type  # to load with
    dtype: torch.dtype  # of the live model's computation

    def compare(self, folder: Path) -> str:
        """Load `folder` with transformers and compare; return a note with the relative difference.

        Raises IncompleteError when the difference exceeds the bound of its type.
        """
        cls: Any = self.model_class
        loaded = cls.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
        logits = _logits_of(loaded, self.batch)
        bound = max(_BOUNDS.get(self.dtype, 1e-1), _BOUNDS.get(loaded.dtype, 1e-1))
        difference = float((logits - self.logits).norm() / self.logits.norm().clamp_min(1e-30))
        rows, length = logits.shape[:2]
        note = (
            f"logits of {rows} x {length} tokens differ by {difference:.2g} of their size, "
            f"bound {bound:g}"
        )
        if not difference <= bound:  # NaN is a difference too
            raise IncompleteError(
                f"{note}: the merged model is not the live one; nothing is committed"
            )
        return note


def live_logits(model: nn.Module, check: str | Mapping[str, Any]) -> LogitsCheck:
    """Compute the output of `model` for the batch `check`, or for random token ids if "logits".

    Call on every rank. The model is in eval mode meanwhile. Raises ConfigError for another `check`,
    and for "logits" if the model does not take token ids.
    """
    base: Any = unwrap(model)
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    batch = _random_batch(base) if check == "logits" else check
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f'check={check!r}: expected "logits", or a batch as a mapping, such '
            "as a tokenizer gives"
        )
    host = torch.device("cpu")
    parameter = next(model.parameters(), None)
    device = host if parameter is None else parameter.device
    with _in_eval_mode(model):
        logits = _logits_of(model, _batch_on(device, batch))
    return LogitsCheck(_batch_on(host, batch), logits, user_class(type(base)), base.dtype)


def _batch_on(device: torch.device, batch: Mapping[str, Any]) -> dict[str, Any]:
    moved = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor):
            moved[name] = value.to(device)
    return moved


@torch.no_grad()
def _logits_of(model: Any, batch: Mapping[str, Any]) -> Tensor:
    output = model(**batch)
    logits: Tensor = output["logits"] if "logits" in output else output[0]
    return logits.detach().float().cpu()


def _random_batch(model: Any) -> dict[str, Tensor]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab_size = getattr(text, "vocab_size", None)
    if not isinstance(vocab_size, int) or getattr(model, "main_input_name", "") != "input_ids":
        raise ConfigError(
            f'check="logits": no batch can be made for {type(model).__name__}; give one, '
            f"check={{...}}"
        )
    generator = torch.Generator("cpu").manual_seed(_SEED)
    ids = torch.randint(vocab_size, (_ROWS, _LENGTH), generator=generator, device="cpu")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids
    return batch


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
