"""Captures and restores the state of one rank.

It consists of random numbers, positions in data loaders, and the gradients of an unfinished step.
Each is stored as a tree (nested values with tensors in them) under a name:

    rng             the random number generators
    loader-0, ...   the positions in the data loaders
    accumulation    Accelerate's count of micro-batches
    sync            whether Accelerate was between two optimizer steps
    gradients       the pending gradients of each model, if there are any
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

_RANDOM = "rng"
_FEED = "loader"
_STEPS = "accumulation"
_SYNC = "sync"
_GRADIENTS = "gradients"


@dataclass(frozen=True, eq=False)
class RankState:
    """What was restored on this rank.

    Attributes:
        feeds: The positions in the data, with which the run continues.
        outcomes: The outcome of each tree, for the report.
        notes: Sentences for the report.
    """

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

    `models` and `items` are those of the run. Raises SelectionError if there are pending gradients
    that cannot be read.
    """
    is_between_steps = is_synced(accelerator)
    trees: dict[str, Any] = {_RANDOM: capture_generators()}
    for index, state in enumerate(feeds.state_dicts()):
        trees[f"{_FEED}-{index}"] = state
    if hasattr(accelerator, "step"):
        trees[_STEPS] = int(accelerator.step)
        trees[_SYNC] = is_between_steps

    if not is_between_steps:
        for item in optimizers_among(items):
            if item.kind.is_accumulating(item.optimizer):
                raise SelectionError(
                    "gradients: DeepSpeed does not expose them; save when the optimizer has stepped"
                )

    if not is_between_steps or steps.is_pending(models.values):
        trees[_GRADIENTS] = {name: pending_gradients(model) for name, model in models.items()}
    return trees


def is_synced(accelerator: Any) -> bool:
    """Check whether Accelerate is between two optimizer steps.

    The answer is True without Accelerate's count of micro-batches.
    """
    return bool(getattr(accelerator, "sync_gradients", True))


def read_rank_state(
    document: Document, stored: StoredTensors, ranks: Ranks
) -> tuple[dict[str, Any], list[Restored]]:
    """Read the trees of this rank, without gradients, and check them. Overwrites nothing.

    Returns the trees by name, and an outcome for each item that cannot be restored. If the number
    of ranks has changed, every rank gets the data positions of rank 0 and computes its own from
    them. A rank that the saved run did not have gets the other trees of the last rank.
    """
    saved_ranks = len(document["ranks"])
    source_rank = min(ranks.rank, saved_ranks - 1)
    names = [*document["ranks"][source_rank]]
    feed_names = [name for name in names if name.startswith(f"{_FEED}-")]
    other_names = [name for name in (_RANDOM, _STEPS, _SYNC) if name in names]
    trees: dict[str, Any] = {}
    failed: list[Restored] = []
    for name in (*feed_names, *other_names):
        is_feed = name in feed_names
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

    if {*feed_names} != {f"{_FEED}-{number}" for number in range(len(feed_names))}:
        failed.append(Restored("data", "failed", f"places of {listing(feed_names, ', ')}"))
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
    """Restore the `trees` that `read_rank_state` returned, and the gradients of `models`.

    Random number generators come last, because any step before may draw from them. If the
    checkpoint has no pending gradients, those of the models are dropped.
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
        # Earlier versions of ft_ckpt stored no _SYNC: there, gradients mean an unfinished step.
        is_between_steps = trees.get(_SYNC, _GRADIENTS not in names)
        accelerator.gradient_state._set_sync_gradients(is_between_steps)

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
    """Return the name under which the report lists the outcome of the tree `name`."""
    if is_feed:
        return "data"
    return _RANDOM if name == _RANDOM else _GRADIENTS


def _tree_problems(name: str, tree: Any) -> Sequence[str]:
    """Return the problems of a tree that was read. Raises CorruptError for a data position."""
    if name == _RANDOM:
        return generator_problems(tree)
    if name == _SYNC:
        is_valid = type(tree) is bool
    elif name == _STEPS:
        is_valid = type(tree) is int and 0 <= tree < 1 << 63
    else:
        check_position(tree)
        is_valid = True
    return [] if is_valid else [f"{name} is {short_repr(tree)}"]


def _has_gradients(document: Document) -> bool:
    return any(_GRADIENTS in trees for trees in document["ranks"])


def _lost_gradients(saved_ranks: int, ranks: Ranks) -> Restored:
    """Return the outcome for gradients that another number of ranks has accumulated."""
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
    # The odd constant (2^64 divided by the golden ratio) spreads neighbouring ranks over all bits.
    seed = (drawn ^ (rank * 0x9E3779B97F4A7C15)) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
