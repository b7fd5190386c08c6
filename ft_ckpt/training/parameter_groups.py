"""The groups of an optimizer: their settings as JSON, and which group of a checkpoint is which of a run."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.distributed.source import Source
from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.formats.dtypes import dtype_name, dtype_of
from ft_ckpt.formats.pytree import PLAIN
from ft_ckpt.model.json_values import decode_value, encode_value

_EXPERTS = ("moe", "name")  # with these DeepSpeed finds the ranks of a group in this run
GroupValues = tuple[dict[str, Any], Mapping[str, Any]]  # of an optimizer, and the values described for it


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says beside its parameters: {"value": JSON} by key, None for what cannot be kept."""
    return {key: _encode_hyperparameter(value) for key, value in group.items() if key != "params"}


def match_groups(
    groups: Sequence[dict[str, Any]],
    live: Sequence[Collection[str]],
    description: Mapping[str, Any],
    found: Mapping[str, Source],
) -> tuple[list[GroupValues], list[str]]:
    """Each live group, whose parameters have the names `live`, with the values described for the same ones; and notes.

    Groups are compared by position and by all names in them. ZeRO forgets frozen parameters: those without state may
    be in one of the two only, as long as they stay frozen. Raises LoadError for any other difference.
    """
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(source.key, name) for name, source in found.items()}
    stored = [{canonical.get(name, name) for name in group["params"]} for group in description["groups"]]
    with_state = {canonical.get(name, name) for name in description["state"]}
    here, there = {name for names in live for name in names}, {name for names in stored for name in names}
    problems = _group_differences(here, there, with_state, found)
    ours, theirs = [here & there & set(names) for names in live], [names & here for names in stored]
    places = {frozenset(names): place for place, names in enumerate(theirs) if names}
    pairs: list[GroupValues] = []
    notes: list[str] = []
    for number, (group, names) in enumerate(zip(groups, ours, strict=True)):
        place = number if ours == theirs else places.get(frozenset(names))
        if place is not None:
            pairs.append((group, description["groups"][place]["values"]))
        elif not names:
            notes.append(f"parameter group {number} trains nothing that the checkpoint's did: its settings stay")
        elif not problems:
            problems.append(f"parameter group {number}: its {len(names)} parameters are no group in the checkpoint")
    if problems:
        raise LoadError(f"{listing(problems)}; resume with the model and parameter groups of the saved run")
    return pairs, notes


def check_settings(groups: Iterable[GroupValues]) -> None:
    """Raise LoadError for described values that are of another kind than those that each group has."""
    problems = [
        f"{key}: {value!r:.60} in the checkpoint, {group[key]!r:.60} here"
        for group, values in groups
        for key, stored in values.items()
        if key in group and not _is_alike(key, value := decode_value(stored["value"]), group[key])
    ]
    if problems:
        raise LoadError(f"{listing(problems)}; resume with the optimizer of the saved run")


def _is_alike(key: str, value: Any, live: Any) -> bool:
    """Whether a setting may take the place of another; None may stand for any but the learning rate."""
    if value is None or live is None:
        return value is live or key != "lr"
    if isinstance(live, tuple):
        same = isinstance(value, (tuple, list)) and len(value) == len(live)
        return same and all(_is_alike(key, *pair) for pair in zip(value, live, strict=True))
    return _kind_of_setting(value) == _kind_of_setting(live)


def _kind_of_setting(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, (int, float, Tensor)) else type(value).__name__


def set_groups(groups: Iterable[GroupValues]) -> None:
    """Give each group the values that were described for it, all but which ranks share its experts."""
    for group, values in groups:
        kept = _EXPERTS if group.get("moe") else ()
        for key, value in values.items():
            if key not in kept:
                _set_hyperparameter(group, key, value)


def _group_differences(here: set[str], there: set[str], with_state: set[str], found: Mapping[str, Source]) -> list[str]:
    """What only one side trains."""
    only_here = [name for name in here - there if found[name].trainable or name in with_state]
    lost = [name for name in (there | with_state) - here if name not in found]
    only_there = [name for name in there - here if name in found and (found[name].trainable or name in with_state)]
    return [
        *(f"{name}: trained here, not in the checkpoint's optimizer" for name in sorted(only_here)),
        *(f"{name}: in the checkpoint's optimizer, not trained here" for name in sorted([*lost, *only_there])),
    ]


def _encode_hyperparameter(value: Any) -> Any:
    """{"tensor": dtype, "value": number} or {"value": JSON of a simple value}; None for what is neither."""
    if isinstance(value, Tensor) and type(value) in PLAIN and value.numel() == 1:
        return {"tensor": dtype_name(value.dtype), "value": encode_value(value.item())}
    try:
        return {"value": encode_value(value)}
    except SelectionError:
        return None


def _set_hyperparameter(group: dict[str, Any], key: str, stored: dict[str, Any]) -> None:
    value = decode_value(stored["value"])
    if "tensor" not in stored:
        group[key] = value
    elif isinstance(group.get(key), Tensor):
        group[key].fill_(value)  # in place: captured graphs hold on to it
    else:
        group[key] = torch.tensor(value, dtype=dtype_of(stored["tensor"]))
