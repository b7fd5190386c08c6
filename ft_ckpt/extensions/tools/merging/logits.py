"""Compares the output of a merged model on disk with that of the live model.

`ft_ckpt` does so if `check="logits"`, or if `check` is a batch.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.errors import ConfigError, IncompleteError
from ft_ckpt.ranks.wrappers import unwrap, user_class

# The batch of random token ids for check="logits".
_BATCH_ROWS = 2
_BATCH_LENGTH = 16
_BATCH_SEED = 0
# The largest relative difference of the outputs (by Euclidean norm) that passes, by dtype. The
# outputs differ because merged weights are rounded once to their dtype, but the live model rounds
# the product with the base and the product with the adapter separately.
_BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, eq=False)
class LogitsCheck:
    """The output of the live model for a batch.

    All ranks compute the output. Rank 0 compares it.

    Attributes:
        batch: The keyword arguments of the model, on the host.
        logits: The output, on the host, in float32.
        model_class: The class that loads the merged model.
        dtype: The dtype in which the live model computes.
    """

    batch: Mapping[str, Any]
    logits: Tensor
    model_class: type
    dtype: torch.dtype

    def compare(self, folder: Path) -> str:
        """Load the merged model in `folder` with transformers, and compare its output.

        Returns a sentence with the relative difference. Raises IncompleteError if the difference
        exceeds the bound of the dtype.
        """
        cls: Any = self.model_class
        loaded = cls.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
        logits = _logits_of(loaded, self.batch)
        bound = max(_BOUNDS.get(self.dtype, 1e-1), _BOUNDS.get(loaded.dtype, 1e-1))
        difference = float((logits - self.logits).norm() / self.logits.norm().clamp_min(1e-30))
        rows, length = logits.shape[:2]
        text = (
            f"logits of {rows} x {length} tokens differ by {difference:.2g} of their size, "
            f"bound {bound:g}"
        )
        if not difference <= bound:  # NaN is a difference too
            raise IncompleteError(
                f"{text}: the merged model is not the live one; nothing is committed"
            )

        return text


def live_logits(model: nn.Module, check: str | Mapping[str, Any]) -> LogitsCheck:
    """Compute the output of `model` for the batch `check`, or for random token ids if "logits".

    All ranks must call this function. The model is in eval mode during the call. Raises ConfigError
    if `check` is neither "logits" nor a mapping, and for "logits" if the model does not take token
    ids.
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
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab_size = getattr(text_config, "vocab_size", None)
    if not isinstance(vocab_size, int) or getattr(model, "main_input_name", "") != "input_ids":
        raise ConfigError(
            f'check="logits": no batch can be made for {type(model).__name__}; give one, '
            f"check={{...}}"
        )

    generator = torch.Generator("cpu").manual_seed(_BATCH_SEED)
    ids = torch.randint(vocab_size, (_BATCH_ROWS, _BATCH_LENGTH), generator=generator, device="cpu")
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
