"""Descriptions of one optimizer by several ranks: together as one, and back as each rank had it."""

from collections.abc import Sequence
from typing import Any

from ft_ckpt.errors import SelectionError
from ft_ckpt.training.optimizer_protocol import Description


def merge_descriptions(descriptions: Sequence[Description]) -> Description:
    """One description: a rank that holds nothing of a parameter (FSDP1) may have no state for it.

    Settings of groups and numbers that a rank has otherwise than rank 0 are under "own", by the rank.
    """
    if all(one is descriptions[0] for one in descriptions):
        return descriptions[0]
    apart = [rank for rank, one in enumerate(descriptions) if one.get("beside") != descriptions[0].get("beside")]
    if apart:
        raise SelectionError(
            f"{descriptions[0]['class']}: its state beside that of the parameters differs on rank {apart[0]} from rank "
            "0's: it cannot be kept; make it the same, or save without the optimizer's state"
        )
    state: dict[str, dict[str, Any]] = {}
    for rank, one in enumerate(descriptions):
        for name, entries in one["state"].items():
            known = state.setdefault(name, {})
            known.update({k: {**v, "rank": rank} if rank else v for k, v in entries.items() if k not in known})
    together = {**descriptions[0], "state": state}
    own = {str(rank): values for rank, one in enumerate(descriptions) if (values := _values_of_rank(one, together))}
    return {**together, **({"own": own} if own else {})}


def description_of_rank(description: Description, rank: int) -> Description:
    """The merged description, with the settings and numbers that `rank` had of its own."""
    own = description.get("own", {}).get(str(rank))
    if own is None:
        return description
    groups = [
        {**group, "values": {**group["values"], **own["groups"].get(str(number), {})}}
        for number, group in enumerate(description["groups"])
    ]
    state = {name: {**entries, **own["state"].get(name, {})} for name, entries in description["state"].items()}
    return {**description, "groups": groups, "state": state}


def settings_by_rank(description: Description) -> dict[str, list[int]]:
    """What of a merged description some ranks have of their own, in words, and these ranks."""
    found: dict[str, list[int]] = {}
    for rank, own in description.get("own", {}).items():
        names = [f"{key} of group {number}" for number, values in own["groups"].items() for key in values]
        names += [f"{name}: {key}" for name, entries in own["state"].items() for key in entries]
        for name in names:
            found.setdefault(name, []).append(int(rank))
    return found


def _values_of_rank(one: Description, together: Description) -> Description:
    """The settings and numbers of one rank that are not those of the ranks `together`; {} for none."""
    groups, state = {}, {}
    for number, (group, known) in enumerate(zip(one["groups"], together["groups"], strict=False)):
        odd = {key: value for key, value in group["values"].items() if value != known["values"].get(key)}
        groups.update({str(number): odd} if odd else {})
    for name, entries in one["state"].items():
        plain = {key: entry for key, entry in entries.items() if "dtype" not in entry}
        odd = {k: entry for k, entry in plain.items() if entry["value"] != together["state"][name][k].get("value")}
        state.update({name: odd} if odd else {})
    return {"groups": groups, "state": state} if groups or state else {}
