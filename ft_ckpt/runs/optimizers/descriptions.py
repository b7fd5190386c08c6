"""Merges the descriptions of one optimizer by all ranks of a run.

A description is the result of `OptimizerKind.describe`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ft_ckpt.errors import SelectionError
from ft_ckpt.runs.optimizers.kinds import Description
from ft_ckpt.saving.planning import Differences


def merge_descriptions(descriptions: Sequence[Description]) -> Description:
    """Merge the descriptions of one optimizer by all ranks, in rank order.

    A rank that holds no element of a parameter (FSDP1) may have no state for it. Its entry comes
    from the first rank that has one, and "rank" in the entry names that rank. Settings of groups
    and numbers are those of rank 0. "differing" has those that differ, with the ranks where they
    do. Raises SelectionError for differences that cannot be saved.
    """
    first = descriptions[0]
    if all(description is first for description in descriptions):
        return first
    _refuse_differing_state(descriptions)
    state: dict[str, dict[str, Any]] = {}
    for rank, description in enumerate(descriptions):
        for name, entries in description["state"].items():
            merged_entries = state.setdefault(name, {})
            _refuse_differing_containers(name, merged_entries, entries, rank)
            for key, entry in entries.items():
                if key not in merged_entries:
                    merged_entries[key] = {**entry, "rank": rank} if rank else entry

    merged = {**first, "state": state}
    ranks_by_setting: dict[str, list[int]] = {}
    for rank, description in enumerate(descriptions):
        for setting in _differing_settings(description, merged):
            ranks_by_setting.setdefault(setting, []).append(rank)

    if ranks_by_setting:
        merged["differing"] = ranks_by_setting
    return merged


def settings_by_rank(description: Description) -> Mapping[str, Sequence[int]]:
    """Return the settings and numbers that differ from those of rank 0, and on which ranks."""
    ranks_by_setting: Mapping[str, Sequence[int]] = description.get("differing", {})
    return ranks_by_setting


def differing_optimizer_settings(document: Mapping[str, Any]) -> Differences:
    """Return the settings and numbers of all optimizers that differ between the ranks of a run."""
    differing = {}
    for item, entry in document.get("items", {}).items():
        for setting, ranks in settings_by_rank(entry.get("optimizer", {})).items():
            differing[f"{item}: {setting}"] = dict.fromkeys(ranks, "")
    return differing


def _refuse_differing_state(descriptions: Sequence[Description]) -> None:
    """Raise SelectionError if state that belongs to no parameter differs between ranks."""
    first = descriptions[0]
    for rank, description in enumerate(descriptions):
        if description.get("beside") != first.get("beside"):
            raise SelectionError(
                f"{first['class']}: its state that belongs to no parameter differs on rank "
                f"{rank} from rank 0's: it cannot be saved; make it the same, or save without "
                "the optimizer's state"
            )


def _refuse_differing_containers(
    name: str, merged_entries: Description, entries: Description, rank: int
) -> None:
    """Raise SelectionError for a container with other tensors on `rank` than on earlier ranks."""
    for key, entry in entries.items():
        if key not in merged_entries:
            continue  # no earlier rank has it
        if entry.get("leaves") != merged_entries[key].get("leaves"):
            raise SelectionError(
                f"{name}: {key}: the container has other tensors on rank {rank} than on earlier "
                "ranks: it cannot be saved; make it the same, or save without the optimizer's state"
            )


def _differing_settings(description: Description, merged: Description) -> list[str]:
    """Return the settings and numbers of one rank that differ from the merged ones."""
    differing = []
    groups = zip(description["groups"], merged["groups"], strict=False)
    for number, (group, merged_group) in enumerate(groups):
        for key, value in group["values"].items():
            if value != merged_group["values"].get(key):
                differing.append(f"{key} of group {number}")
    for name, entries in description["state"].items():
        for key, entry in entries.items():
            merged_entry = merged["state"][name][key]
            has_same_value = entry.get("value") == merged_entry.get("value")
            if not has_same_value or entry.get("tree") != merged_entry.get("tree"):
                differing.append(f"{name}: {key}")
    return differing
