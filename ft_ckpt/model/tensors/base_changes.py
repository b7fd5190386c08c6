"""Finds adapters that change their base: by their initialisation, or because they are merged."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.ranks.wrappers import walk_modules

# These initialisations of LoRA leave the base unchanged.
_KEEPS_BASE = frozenset({"true", "false", "none", "gaussian", "orthogonal", "eva", "mica"})
# These change the base by a deterministic decomposition, so they can be repeated at a load. All
# others cannot be repeated, because they are random or computed from training data.
_REPEATS = frozenset({"pissa", "olora", "kasa", "loftq"})


def keeps_base(config: Any) -> bool:
    """Check whether the initialisation of an adapter with this config leaves the base unchanged."""
    return not _changes_of_base(config)


def start_keeps_base(init_lora_weights: Any) -> bool:
    """Check whether this value of `init_lora_weights` leaves the base unchanged.

    Returns False for an unknown value.
    """
    return str(init_lora_weights).lower() in _KEEPS_BASE


def _changes_of_base(config: Any) -> list[str]:
    """Return the initialisations in the config that change the base, in PEFT's order."""
    changes = []
    init = getattr(config, "init_lora_weights", True)
    if not start_keeps_base(init):
        changes.append(str(init))
    if getattr(config, "kasa_config", None):
        changes.append("kasa")
    return changes


def irreproducible(configs: Mapping[str, Any]) -> str:
    """Return why the base of adapters with these configs cannot be recreated, or "" if it can.

    Only the first iteration of LoftQ can be repeated. Later ones quantise the residual of a
    decomposition, whose last digits differ between machines.
    """
    reasons = []
    for adapter, config in configs.items():
        loftq = getattr(config, "loftq_config", None)
        is_iterated = isinstance(loftq, dict) and loftq.get("loftq_iter", 1) != 1
        for init in _changes_of_base(config):
            if init.lower() not in _REPEATS or (init == "loftq" and is_iterated):
                reasons.append(f"{adapter} ({init})")
    if not reasons:
        return ""
    adapters = ", ".join(reasons)
    return f"adapter {adapters}: its initialisation changed the base and cannot be repeated"


def refuse_merged(module: nn.Module) -> None:
    """Raise SelectionError naming the layers that have an adapter merged into them.

    Their base weights contain the adapter. They would be stored as the weights of the base.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    merged = []
    for path, _, layer in walk_modules(module):
        if isinstance(layer, BaseTunerLayer) and layer.merged:
            merged.append(path)
    if merged:
        raise SelectionError(
            f"{listing(merged, ', ')}: an adapter is merged into {len(merged)} layer(s); call "
            "unmerge_adapter() before a save, or merge_and_unload() to save the merged model as one"
        )
