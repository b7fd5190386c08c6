"""Merges the descriptions that the ranks of a run have of one optimizer.

A description is the JSON object of `OptimizerKind.describe`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ft_ckpt.errors import SelectionError
from ft_ckpt.runs.optimizers.kinds import Description
from ft_ckpt.saving.planning import Differences


def merge_descriptions(descriptions: Sequence[Description]) -> Description:
    """Merge the descriptions of one optimizer by all ranks.

    A rank without elements of a parameter (FSDP1) may have no state for it. Group settings and
    numbers are rank 0's; "differing" names those that differ, with the ranks.
    """
    first = descriptions[0]
    if all(description is first for description in descriptions):
        return first
    _refuse_differing_state(descriptions)
    state: dict[str, dict[str, Any]] = {}
    for rank, description in enumerate(descriptions):
        for name, entries in description["state"].items():
            merged = state.setdefault(name, {})
            _refuse_differing_containers(name, merged, entries, rank)
            for key, entry in entries.items():
                if key not in merged:
                    merged[key] = {**entry, "rank": rank} if rank else entry
    together = {**first, "state": state}
    by_setting: dict[str, list[int]] = {}
    for rank, description in enumerate(descriptions):
        for setting in _differing_settings(description, together):
            by_setting.setdefault(setting, []).append(rank)
    if by_setting:
        together["differing"] = by_setting
    return together


def settings_by_rank(description: Description) -> Mapping[str, Sequence[int]]:
    """Return the settings and numbers that differ from rank 0's by name, and on which ranks."""
    by_setting: Mapping[str, Sequence[int]] = description.get("differing", {})
    return by_setting


def differing_optimizer_settings(document: Mapping[str, Any]) -> Differences:
    """Return the settings and numbers of optimizers that differ between ranks of a run."""
    differing = {}
    for item, entry in document.get("items", {}).items():
        for setting, ranks in settings_by_rank(entry.get("optimizer", {})).items():
            differing[f"{item}: {setting}"] = dict.fromkeys(ranks, "")
    return differing


def _refuse_differing_state(descriptions: Sequence[Description]) -> None:
    first = descriptions[0]
    for rank, description in enumerate(descriptions):
        if description.get("beside") != first.get("beside"):
            raise SelectionError(
                f"{first['class']}: its state that belongs to no parameter differs on rank "
                f"{rank} from rank 0's: it cannot be saved; make it the same, or save without "
                "the optimizer's state"
            )


def _refuse_differing_containers(
    name: str, merged: Description, entries: Description, rank: int
) -> None:
    """Raise SelectionError for a container with other tensors on `rank` than on earlier ranks."""
    for key, entry in entries.items():
        first: Description = merged.get(key) or entry
        if entry.get("leaves") != first.get("leaves"):
            raise SelectionError(
                f"{name}: {key}: the container has other tensors on rank {rank} than on earlier "
                "ranks: it cannot be saved; make it the same, or save without the optimizer's state"
            )


def _differing_settings(description: Description, together: Description) -> list[str]:
    """Return the settings and numbers of one rank that differ from the merged ones."""
    differing = []
    groups = zip(description["groups"], together["groups"], strict=False)
    for number, (group, merged_group) in enumerate(groups):
        for key, value in group["values"].items():
            if value != merged_group["values"].get(key):
                differing.append(f"{key} of group {number}")
    for name, entries in description["state"].items():
        for key, entry in entries.items():
            merged_entry = together["state"][name][key]
            has_same_value = entry.get("value") == merged_entry.get("value")
            if not has_same_value or entry.get("tree") != merged_entry.get("tree"):
                differing.append(f"{name}: {key}")
    return differing
