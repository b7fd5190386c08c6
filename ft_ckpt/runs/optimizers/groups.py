"""The parameter groups of an optimizer: their settings, and which live one is which stored one."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.runs.optimizers.values import decode_setting, encode_setting, set_setting

# a live group, and the values described for it
GroupValues = tuple[dict[str, Any], Mapping[str, Any]]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group without its parameters, by key.

    Raises SelectionError for a setting that cannot be saved.
    """
    return {key: encode_setting(key, value) for key, value in group.items() if key != "params"}


def unsaveable_settings(number: int, group: Mapping[str, Any]) -> list[str]:
    """Return the reasons why settings of the group with this number cannot be saved."""
    problems: list[str] = []
    for key, value in group.items():
        if key == "params":
            continue
        try:
            encode_setting(key, value)
        except SelectionError as error:
            problems.append(f"group {number}: {error}")
    return problems


def match_groups(
    groups: Sequence[dict[str, Any]],
    names_of_groups: Sequence[Collection[str]],
    description: Mapping[str, Any],
    sources: Mapping[str, Source],
) -> tuple[list[GroupValues], list[str]]:
    """Pair live groups with described ones.

    Returns each group with its described values, and notes. `names_of_groups` has the parameter
    names of each live group. Groups are compared by position and by all names in them. ZeRO drops
    frozen parameters: those without state may be on one side only while they are frozen. Raises
    LoadError for any other difference.
    """
    canonical = _canonical_names(sources)

    def canonical_names(names: Iterable[str]) -> set[str]:
        return {canonical.get(name, name) for name in names}

    stored = [canonical_names(group["params"]) for group in description["groups"]]
    with_state = canonical_names(description["state"])
    live_names = set().union(*names_of_groups)
    stored_names = set().union(*stored)
    problems = _group_differences(live_names, stored_names, with_state, sources)
    shared_live = [live_names & stored_names & set(names) for names in names_of_groups]
    shared_stored = [names & live_names for names in stored]
    has_same_order = shared_live == shared_stored
    positions: dict[frozenset[str], int] = {}
    for index, names in enumerate(shared_stored):
        if names:
            positions[frozenset(names)] = index
    pairs: list[GroupValues] = []
    notes: list[str] = []
    for number, (group, names) in enumerate(zip(groups, shared_live, strict=True)):
        position = number if has_same_order else positions.get(frozenset(names))
        if position is not None:
            pairs.append((group, description["groups"][position]["values"]))
        elif not names:
            notes.append(
                f"parameter group {number} shares no parameter with the "
                "checkpoint: its settings stay"
            )
        elif not problems:
            problems.append(
                f"parameter group {number}: its {len(names)} parameters are not "
                "one group in the checkpoint"
            )
    if problems:
        raise LoadError(
            f"{listing(problems)}; resume with the model and parameter groups of the saved run"
        )
    return pairs, notes


def check_group_settings(groups: Iterable[GroupValues]) -> None:
    """Raise LoadError for described values whose type differs from the live group's."""
    problems: list[str] = []
    for group, values in groups:
        for key, stored in values.items():
            value = decode_setting(stored, "cpu")
            if key in group and not _can_replace(key, value, group[key]):
                problems.append(f"{key}: {value!r:.60} in the checkpoint, {group[key]!r:.60} here")
    if problems:
        raise LoadError(f"{listing(problems)}; resume with the optimizer of the saved run")


def set_groups(groups: Iterable[GroupValues]) -> None:
    """Set the described values of each group."""
    for group, values in groups:
        for key, value in values.items():
            set_setting(group, key, value)


def _canonical_names(sources: Mapping[str, Source]) -> dict[str, str]:
    """Map each name to the first name of the same parameter."""
    first_names: dict[int, str] = {}
    for name, source in sources.items():
        first_names.setdefault(source.key, name)
    return {name: first_names[source.key] for name, source in sources.items()}


def _can_replace(key: str, value: Any, live: Any) -> bool:
    """Check whether a stored setting may replace a live one.

    Values of one type may replace each other, and None and a value may, except for "lr".
    """
    if value is None or live is None:
        return value is live or key != "lr"
    if isinstance(live, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(live):
            return False
        return all(_can_replace(key, *pair) for pair in zip(value, live, strict=True))
    return _kind_of_setting(value) == _kind_of_setting(live)


def _kind_of_setting(value: Any) -> str:
    if isinstance(value, Tensor):
        return "bool" if value.dtype == torch.bool else "number"
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    if isinstance(value, (int, float, np.number)):
        return "number"
    return type(value).__name__


def _group_differences(
    live: set[str], stored: set[str], with_state: set[str], sources: Mapping[str, Source]
) -> list[str]:
    """Describe the parameters that only one side trains."""

    def is_trained(name: str) -> bool:
        return sources[name].trainable or name in with_state

    only_stored = {name for name in (stored | with_state) - live if name not in sources}
    only_stored |= {name for name in stored - live if name in sources and is_trained(name)}
    differences = []
    for name in sorted(live - stored):
        if is_trained(name):
            differences.append(f"{name}: trained here, not in the checkpoint's optimizer")
    for name in sorted(only_stored):
        differences.append(f"{name}: in the checkpoint's optimizer, not trained here")
    return differences
