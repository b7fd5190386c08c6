"""Reads, compares and restores the parameter groups of an optimizer.

A live group is one of the optimizer of this run. A description has the stored groups.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.runs.optimizers.values import decode_setting, encode_setting, set_setting

# a live group, and the stored values of its settings
GroupValues = tuple[dict[str, Any], Mapping[str, Any]]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group by key, without its parameters.

    Raises SelectionError for a setting that cannot be saved.
    """
    return {key: encode_setting(key, value) for key, value in group.items() if key != "params"}


def unsaveable_settings(number: int, group: Mapping[str, Any]) -> list[str]:
    """Return why settings of the group `number` cannot be saved; [] if all can."""
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
    """Find the stored group of each live group.

    `names_of_groups` has the names of the parameters in each live group. Groups match by position
    if all of them have the same parameters as the stored ones, or else by their parameters. Only
    parameters that both sides have are compared, because ZeRO drops frozen parameters.

    Returns each live group with its stored values, and notes for the report. Raises LoadError if a
    trained parameter is on one side only, or if the groups divide the parameters otherwise.
    """
    first_names = _first_names(sources)

    def untie(names: Iterable[str]) -> set[str]:
        return {first_names.get(name, name) for name in names}

    stored_groups = [untie(group["params"]) for group in description["groups"]]
    names_with_state = untie(description["state"])
    live_names = set().union(*names_of_groups)
    stored_names = set().union(*stored_groups)
    problems = _group_differences(live_names, stored_names, names_with_state, sources)

    # the parameters that both sides have, in each live group and in each stored group
    common_live = [live_names & stored_names & set(names) for names in names_of_groups]
    common_stored = [names & live_names for names in stored_groups]
    has_same_order = common_live == common_stored
    positions: dict[frozenset[str], int] = {}
    for index, names in enumerate(common_stored):
        if names:
            positions[frozenset(names)] = index

    pairs: list[GroupValues] = []
    notes: list[str] = []
    for number, (group, names) in enumerate(zip(groups, common_live, strict=True)):
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
    """Raise LoadError for stored values of another type than those of the live group."""
    problems: list[str] = []
    for group, values in groups:
        for key, stored in values.items():
            value = decode_setting(stored, "cpu")
            if key in group and not _can_replace(key, value, group[key]):
                problems.append(f"{key}: {value!r:.60} in the checkpoint, {group[key]!r:.60} here")
    if problems:
        raise LoadError(f"{listing(problems)}; resume with the optimizer of the saved run")


def set_groups(groups: Iterable[GroupValues]) -> None:
    """Set each live group to its stored values."""
    for group, values in groups:
        for key, value in values.items():
            set_setting(group, key, value)


def _first_names(sources: Mapping[str, Source]) -> dict[str, str]:
    """Return for each name the first name of the same parameter: tied ones have several."""
    first_names: dict[int, str] = {}
    for name, source in sources.items():
        first_names.setdefault(source.key, name)
    return {name: first_names[source.key] for name, source in sources.items()}


def _can_replace(key: str, value: Any, live: Any) -> bool:
    """Check whether a stored setting may replace a live one.

    Both must be of the same kind: numbers, truth values, or one other type. One of the two may be
    None, except for "lr".
    """
    if value is None or live is None:
        return value is live or key != "lr"
    if isinstance(live, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(live):
            return False
        return all(_can_replace(key, *pair) for pair in zip(value, live, strict=True))
    return _kind_of_setting(value) == _kind_of_setting(live)


def _kind_of_setting(value: Any) -> str:
    """Return "number", "bool" or the name of another type: 0.1 and a tensor of it are numbers."""
    if isinstance(value, Tensor):
        return "bool" if value.dtype == torch.bool else "number"
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    if isinstance(value, (int, float, np.number)):
        return "number"
    return type(value).__name__


def _group_differences(
    live_names: set[str],
    stored_names: set[str],
    names_with_state: set[str],
    sources: Mapping[str, Source],
) -> list[str]:
    """Return a sentence for each parameter that only one side trains.

    A parameter that is frozen here and has no stored state may be on one side only.
    """

    def is_trained(name: str) -> bool:
        return sources[name].trainable or name in names_with_state

    only_stored: set[str] = set()
    for name in (stored_names | names_with_state) - live_names:
        if name not in sources or (name in stored_names and is_trained(name)):
            only_stored.add(name)

    differences = []
    for name in sorted(live_names - stored_names):
        if is_trained(name):
            differences.append(f"{name}: trained here, not in the checkpoint's optimizer")

    for name in sorted(only_stored):
        differences.append(f"{name}: in the checkpoint's optimizer, not trained here")
    return differences
