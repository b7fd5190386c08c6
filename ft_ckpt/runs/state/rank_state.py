"""The state of one rank: random numbers, data positions, gradients of an unfinished step.

The state is stored as trees by name.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ft_ckpt.errors import CheckpointError, CorruptError, SelectionError, listing
from ft_ckpt.messages import short_repr
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.data import (
    DataPositions,
    capture_generators,
    check_position,
    generator_problems,
    restore_generators,
)
from ft_ckpt.runs.items import Item, optimizers_among
from ft_ckpt.runs.state.document import Document
from ft_ckpt.runs.state.gradients import StepWatch, pending_gradients, restore_gradients
from ft_ckpt.runs.state.outcomes import Restored
from ft_ckpt.runs.state.stored_tensors import StoredTensors, tree_of_rank

_GRADIENTS, _RANDOM, _FEED, _STEPS, _SYNC = "gradients", "rng", "loader", "accumulation", "sync"


@dataclass(frozen=True, eq=False)
class RankState:
    """The restored state of this rank that a run takes over, and what happened."""

    feeds: DataPositions
    outcomes: list[Restored]
    notes: list[str]


def capture_rank_state(
    accelerator: Any,
    models: Mapping[str, nn.Module],
    items: Iterable[Item],
    feeds: DataPositions,
    steps: StepWatch,
) -> dict[str, Any]:
    """Capture the state of this rank, as trees by name.

    `models` and `items` are those of the run. Raises SelectionError if pending gradients cannot be
    read.
    """
    synced = is_synced(accelerator)
    trees: dict[str, Any] = {_RANDOM: capture_generators()}
    for index, state in enumerate(feeds.state_dicts()):
        trees[f"{_FEED}-{index}"] = state
    if hasattr(accelerator, "step"):
        trees[_STEPS] = int(accelerator.step)
        trees[_SYNC] = synced
    if not synced:
        for item in optimizers_among(items):
            if item.kind.is_accumulating(item.optimizer):
                raise SelectionError(
                    "gradients: DeepSpeed does not expose them; save when the optimizer has stepped"
                )
    if not synced or steps.is_pending(models.values):
        trees[_GRADIENTS] = {name: pending_gradients(model) for name, model in models.items()}
    return trees


def is_synced(accelerator: Any) -> bool:
    """Check whether Accelerate, if it counts micro-batches, is between steps."""
    return bool(getattr(accelerator, "sync_gradients", True))


def read_rank_state(
    document: Document, stored: StoredTensors, ranks: Ranks
) -> tuple[dict[str, Any], list[Restored]]:
    """Read this rank's own state without gradients, by name, and the items that cannot be restored.

    Overwrites nothing.

    On another number of ranks the data positions are those of rank 0, from which all ranks compute
    theirs.
    """
    saved_ranks = len(document["ranks"])
    source_rank = min(ranks.rank, saved_ranks - 1)
    names = [*document["ranks"][source_rank]]
    feeds = [name for name in names if name.startswith(f"{_FEED}-")]
    further_names = [name for name in (_RANDOM, _STEPS, _SYNC) if name in names]
    trees: dict[str, Any] = {}
    failed: list[Restored] = []
    for name in (*feeds, *further_names):
        is_feed = name in feeds
        owner = 0 if is_feed and saved_ranks != ranks.size else source_rank
        try:
            tree = tree_of_rank(document, stored, owner, name)
            problems = _tree_problems(name, tree)
        except CorruptError as error:
            failed.append(Restored(_item_of_tree(name, is_feed), "failed", str(error)))
            continue
        trees[name] = tree
        if problems:
            failed.append(Restored(_item_of_tree(name, is_feed), "failed", listing(problems)))
    if {*feeds} != {f"{_FEED}-{number}" for number in range(len(feeds))}:
        failed.append(Restored("data", "failed", f"places of {listing(feeds, ', ')}"))
    if _RANDOM not in names:
        failed.append(Restored(_RANDOM, "failed", "not in the checkpoint"))
    if _has_gradients(document) and (saved_ranks != ranks.size or _GRADIENTS not in names):
        failed.append(_lost_gradients(saved_ranks, ranks))
    return trees, failed


def restore_rank_state(
    accelerator: Any,
    models: Mapping[str, nn.Module],
    document: Document,
    stored: StoredTensors,
    ranks: Ranks,
    trees: Mapping[str, Any],
) -> RankState:
    """Restore the trees of `read_rank_state` and the pending gradients of the run's `models`.

    Random numbers come last, because anything before may draw some. Gradients that the checkpoint
    lacks are dropped.
    """
    saved_ranks = len(document["ranks"])
    names = document["ranks"][min(ranks.rank, saved_ranks - 1)]
    outcomes: list[Restored] = []
    notes: list[str] = []
    feed_names = [f"{_FEED}-{index}" for index in range(len(trees))]
    feeds = DataPositions([trees[name] for name in feed_names if name in trees])
    if f"{_FEED}-0" in trees:
        outcomes.append(Restored("data", "restored"))
    if _STEPS in trees and accelerator is not None:
        accelerator.step = trees[_STEPS]
        synced = trees.get(_SYNC, _GRADIENTS not in names)
        accelerator.gradient_state._set_sync_gradients(synced)
    for model in models.values():
        restore_gradients(model, {})
    if _has_gradients(document):
        gradients = tree_of_rank(document, stored, ranks.rank, _GRADIENTS)
        outcomes.append(_restore_gradients(models, gradients, saved_ranks, ranks))
    problems = restore_generators(trees[_RANDOM])
    outcomes.append(Restored(_RANDOM, "failed" if problems else "restored", "; ".join(problems)))
    if saved_ranks != ranks.size:
        notes.append(
            f"saved by {saved_ranks} rank(s), resumed on {ranks.size}: weights and optimizer are "
            f"the same; ranks 0 to {min(saved_ranks, ranks.size) - 1} go on with their random "
            "numbers, further ones with new ones"
        )
    if ranks.rank >= saved_ranks:
        _reseed_new_rank(ranks.rank)
    return RankState(feeds, outcomes, notes)


def _item_of_tree(name: str, is_feed: bool) -> str:
    if is_feed:
        return "data"
    return _RANDOM if name == _RANDOM else _GRADIENTS


def _tree_problems(name: str, tree: Any) -> Sequence[str]:
    """Return the problems of a captured tree. Raises CorruptError for a data position."""
    if name == _RANDOM:
        return generator_problems(tree)
    if name == _SYNC:
        return [] if type(tree) is bool else [f"{_SYNC} is {short_repr(tree)}"]
    if name == _STEPS:
        return (
            [] if type(tree) is int and 0 <= tree < 1 << 63 else [f"{_STEPS} is {short_repr(tree)}"]
        )
    check_position(tree)
    return []


def _has_gradients(document: Document) -> bool:
    return any(_GRADIENTS in trees for trees in document["ranks"])


def _lost_gradients(saved_ranks: int, ranks: Ranks) -> Restored:
    detail = (
        f"saved in the middle of gradient accumulation by {saved_ranks} rank(s), resumed on "
        f"{ranks.size}"
    )
    return Restored(_GRADIENTS, "failed", detail)


def _restore_gradients(
    models: Mapping[str, nn.Module], gradients: Any, saved_ranks: int, ranks: Ranks
) -> Restored:
    if saved_ranks != ranks.size or gradients is None:
        return _lost_gradients(saved_ranks, ranks)
    try:
        for name, model in models.items():
            restore_gradients(model, gradients.get(name, {}))
    except (CheckpointError, RuntimeError) as error:
        return Restored(_GRADIENTS, "failed", str(error))
    return Restored(_GRADIENTS, "restored")


def _reseed_new_rank(rank: int) -> None:
    """Seed a rank that the saved run did not have.

    The seed comes from another rank's restored state and from the number of this rank.
    """
    drawn = int(torch.randint(2**62, (), device="cpu").item())
    seed = (drawn ^ (rank * 0x9E3779B97F4A7C15)) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
