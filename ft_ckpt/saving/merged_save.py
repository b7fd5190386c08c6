"""What `save(merged=..., check=...)` asks for, made sense of."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ft_ckpt.distributed.ranks import try_action
from ft_ckpt.errors import ConfigError
from ft_ckpt.model.merge_choice import Merged, merge_choice
from ft_ckpt.model.quantised_base import has_quantised_base
from ft_ckpt.saving.check_logits import live_logits


@dataclass(frozen=True)
class MergeRequest:
    """What a save was asked to merge, into what, and what to check it by."""

    merged: Merged = False
    base: str | Path | None = None
    dequantize: bool = False
    check: str | Mapping[str, Any] | None = None


def ask_merged(
    model: nn.Module, asked: MergeRequest, others: Mapping[str, Any], stack: ExitStack
) -> Callable[[], dict[str, Any]]:
    """Fields of a save's request: the model, what to merge, and what to check it by, computed here and now.

    What is made for it lasts until the stack ends. Call on every rank; what is wrong is raised by the function that
    comes back. `others` are what else the save was told, by name.
    """

    def made() -> dict[str, Any]:
        choice, merges = merge_choice(asked.merged), model
        if choice is not None:
            _refuse_beside(asked.merged, others)
        if is_plain_merge(model, asked):
            from ft_ckpt.saving.merge_live import onto_plain_base  # here: it needs PEFT, which is slow to import

            runs = asked.check is not None
            merges = onto_plain_base(model, asked.base, dequantize=asked.dequantize, in_memory=runs, stack=stack)
        elif asked.base is not None or asked.dequantize:
            raise ConfigError("base= and dequantize= are for merging adapters on a quantised base; leave them out")
        check = None if asked.check is None else live_logits(merges, asked.check)
        return {"model": merges, "merged": choice, "check": check}

    fields, error = try_action(made)

    def give() -> dict[str, Any]:
        if error is not None:
            raise error
        found: dict[str, Any] = fields
        return found

    return give


def is_plain_merge(model: nn.Module, asked: MergeRequest) -> bool:
    """Whether adapters on a quantised base are to be merged, into ordinary weights that are not the live ones."""
    return asked.merged is not False and has_quantised_base(model)


def _refuse_beside(merged: Merged, others: Mapping[str, Any]) -> None:
    if given := [name for name, value in others.items() if value is not None and value is not False]:
        raise ConfigError(
            f"merged={merged!r} and {', '.join(given)}: a merged model is the whole model without adapters; leave one "
            "of them out"
        )
