"""Compares a run with the checkpoint that it resumes from, before anything is overwritten.

`match_items` finds the objects of the run by the names in the checkpoint. `compare_state` finds the
items that do not fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ft_ckpt.errors import LoadError, listing
from ft_ckpt.model.base import differences_of_base
from ft_ckpt.model.files import adapter_settings, differences_of_live
from ft_ckpt.model.tensors import module_at
from ft_ckpt.ranks import Ranks
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.runs.items import (
    ENGINE,
    Item,
    Key,
    ModuleExtraState,
    labelled_sources,
    optimizer_of,
    walk_run,
)
from ft_ckpt.runs.loop import TrainingRun
from ft_ckpt.runs.resume.allowed import AllowedItems
from ft_ckpt.runs.resume.opening import ResumePoint
from ft_ckpt.runs.resume.restore_items import (
    StoredItem,
    check_only,
    restore_item,
    restore_weights,
    try_restore,
)
from ft_ckpt.runs.state import Document, Restored, agree_on_outcomes, not_restored, read_rank_state
from ft_ckpt.storage.places import Place


@dataclass(frozen=True, eq=False)
class MatchedRun:
    """The objects of the run on this rank, under the names that they have in the checkpoint.

    Attributes:
        model: The model whose weights are saved.
        items: The other objects.
        sources: The tensors of all models of the run.
    """

    model: nn.Module
    items: Sequence[Item]
    sources: Mapping[Key, Source]
    ranks: Ranks


@dataclass(frozen=True, eq=False)
class RunComparison:
    """The result of a comparison of the run with the checkpoint.

    Attributes:
        rank_trees: This rank's own state, as read from the checkpoint, by name. See
            `read_rank_state`.
        outcomes: The items that do not fit on this rank, and the settings that fit.
        misfits: The items that do not fit on at least one rank.
    """

    rank_trees: Mapping[str, Any]
    outcomes: tuple[Restored, ...]
    misfits: tuple[Restored, ...]


def match_items(run: TrainingRun, resume_point: ResumePoint, ranks: Ranks) -> MatchedRun:
    """Give the items of the run their names in the checkpoint, and find the tensors of its models.

    Collective: call it on every rank. Objects that were prepared in another order are recognized if
    possible. Raises LoadError if the order decides which model is saved.
    """
    with ranks.deferring_error() as matching:
        signatures = resume_point.document.get("signatures", {})
        items = run.objects.items_in_saved_order(signatures)
        items, _, sources = walk_run(run.model, items)
    ranks.agree("matching the items of resume()", error=matching.error)
    return MatchedRun(run.model, items, sources, ranks)


def compare_state(
    run: TrainingRun, matched: MatchedRun, resume_point: ResumePoint, allowed: AllowedItems
) -> RunComparison:
    """Compare the run with the checkpoint before anything is restored.

    Collective: call it on every rank. Tensors, items, the settings of adapters and their base are
    compared. The state that each rank has for itself is read. Raises LoadError for items that do
    not fit and are not in `allowed`. Raises ConfigError if `allowed` names no item.
    """
    attribute = run.config.attribute
    document = resume_point.document
    ranks = matched.ranks
    rank_trees: dict[str, Any] = {}
    outcomes: list[Restored] = []
    with ranks.deferring_error() as comparing:
        rank_trees, outcomes = read_rank_state(document, resume_point.tensors, ranks)
        outcomes += _find_misfits(matched, resume_point)
        outcomes += _compare_adapters(matched, attribute, resume_point)
        outcomes += _compare_base(matched, attribute, resume_point)

    what = "checking the state of resume()"
    misfits, _ = agree_on_outcomes(ranks, what, not_restored(outcomes), error=comparing.error)
    items = {item.name for item in matched.items}
    names = {*document["items"], *document.get("let_go", ()), *items}
    allowed.refuse_unknown(names, misfits)
    location = resume_point.checkpoint.location
    allowed.refuse_unrestored(location, misfits, "nothing was overwritten")
    return RunComparison(rank_trees, tuple(outcomes), misfits)


def _find_misfits(matched: MatchedRun, resume_point: ResumePoint) -> list[Restored]:
    """Return the items that cannot be restored. No `load_state_dict` is called."""
    document = resume_point.document
    stored_items = document["items"]
    outcomes = [restore_weights(matched.sources, resume_point, check_only)]
    for item in matched.items:
        if item.name in stored_items:
            stored = StoredItem(item.name, resume_point.tensors, check_only)
            check = partial(_check_item, item, stored_items[item.name], matched, stored)
            outcomes.append(try_restore(item.name, check))
        elif not _is_dispensable(item, document):
            outcomes.append(Restored(item.name, "absent", "not in the checkpoint"))

    names = {ENGINE, *(item.name for item in matched.items)}
    for name in stored_items:
        if name not in names:
            outcomes.append(Restored(name, "absent", "in the checkpoint, not in this run"))

    return list(not_restored(outcomes))


def _check_item(item: Item, entry: Document, matched: MatchedRun, stored: StoredItem) -> None:
    """Raise LoadError if the stored state is of another kind of object, or does not fit."""
    key = item.kind if item.kind in ("optimizer", "model") else "tree"
    if key not in entry:
        raise LoadError(
            f"another kind of object in the checkpoint, expected the state of this {item.kind}"
        )
    if item.kind == "optimizer":
        optimizer = optimizer_of(item)
        labels = labelled_sources(matched.sources)
        optimizer.kind.check(optimizer.optimizer, entry["optimizer"], labels)
    elif item.kind == "model":
        restore_item(item, entry, matched.sources, stored)


def _is_dispensable(item: Item, document: Document) -> bool:
    """Check whether the run can resume although the checkpoint lacks `item`."""
    if item.name == ENGINE:
        return True  # a run that another engine saved has no counters of DeepSpeed: they start at 0
    if not isinstance(item.value, ModuleExtraState):
        return False
    # An earlier version of ft_ckpt stored the extra state with the weights.
    return set(item.value.state_dict()) <= set(document["weights"])


def _compare_base(
    matched: MatchedRun, attribute: str | None, resume_point: ResumePoint
) -> list[Restored]:
    """Compare the base of the run's adapters with the base that they were trained on.

    Returns one outcome, or [] if the checkpoint has the base itself.
    """
    parts = resume_point.checkpoint.manifest.parts
    weights = resume_point.document["weights"]
    compared, problems = differences_of_base(
        matched.model, parts, weights, matched.ranks.rank, attribute
    )
    if problems:
        detail = f"not the base that the adapters were trained on ({listing(problems)})"
        return [Restored("base", "failed", detail)]
    if compared:
        detail = f"not in the checkpoint; {compared} tensors compared"
        return [Restored("base", "restored", detail)]
    return []


def _compare_adapters(
    matched: MatchedRun, attribute: str | None, resume_point: ResumePoint
) -> list[Restored]:
    """Return a failed outcome if the run's adapter settings would change the adapter's output."""
    outcome = try_restore(
        "adapter settings", partial(_refuse_other_settings, matched, attribute, resume_point)
    )
    return [outcome] if outcome.status == "failed" else []


def _refuse_other_settings(
    matched: MatchedRun, attribute: str | None, resume_point: ResumePoint
) -> None:
    """Raise LoadError naming the settings of adapters that differ from those in the checkpoint."""
    model = module_at(matched.model, attribute or "")
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    checkpoint = resume_point.checkpoint
    problems = []
    for part in checkpoint.manifest.parts:
        if part.adapter is None or part.adapter not in configs:
            continue
        stored_settings = adapter_settings(Place(checkpoint.store, part.path).folder)
        for field, expected, value in differences_of_live(stored_settings, configs[part.adapter]):
            problems.append(f"{part.adapter}: {field} is {value}, {expected} in the checkpoint")
    if problems:
        raise LoadError(f"{listing(problems)}; make the adapter with the settings of the saved run")
