"""What `save(merged=..., check=...)` asks for, made sense of."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ft_ckpt.distributed.ranks import try_action
from ft_ckpt.errors import ConfigError
from ft_ckpt.model.merge_layers import MergeChoice
from ft_ckpt.model.parts import Attribute
from ft_ckpt.saving.check_logits import live_logits

Merged = bool | str | Iterable[str] | Mapping[str, float]


def ask_merged(
    model: nn.Module,
    merged: Merged,
    check: str | Mapping[str, Any] | None,
    adapter_only: bool | None,
    attribute: Attribute,
    state_dict: Mapping[str, Tensor] | None,
) -> Callable[[], dict[str, Any]]:
    """Fields of a save's request: what to merge, and what to check it by, which `model` computes here and now.

    Call on every rank; what is wrong is raised by the function that comes back.
    """
    others = {"adapter_only": adapter_only, "attribute": attribute, "state_dict": state_dict}

    def made() -> dict[str, Any]:
        choice = merge_choice(merged)
        if choice is not None:
            _refuse_beside(merged, others)
        return {"merged": choice, "check": None if check is None else live_logits(model, check)}

    fields, error = try_action(made)

    def give() -> dict[str, Any]:
        if error is not None:
            raise error
        found: dict[str, Any] = fields
        return found

    return give


def merge_choice(merged: Merged) -> MergeChoice | None:
    """The adapters that `merged` names: True for those that are active, False for none, a mapping with weights.

    Raises ConfigError for names that come twice and weights that are no numbers.
    """
    if isinstance(merged, bool):
        return MergeChoice() if merged else None
    weights = tuple(float(one) for one in merged.values()) if isinstance(merged, Mapping) else ()
    names = (merged,) if isinstance(merged, str) else tuple(merged)
    if not names or len(set(names)) < len(names) or not all(map(math.isfinite, weights)):
        raise ConfigError(f"merged={merged!r}: expected True, names of adapters, each once, or a weight for each name")
    return MergeChoice(names, weights)


def _refuse_beside(merged: Merged, others: Mapping[str, Any]) -> None:
    if given := [name for name, value in others.items() if value is not None and value is not False]:
        raise ConfigError(
            f"merged={merged!r} and {', '.join(given)}: a merged model is the whole model without adapters; leave one "
            "of them out"
        )
