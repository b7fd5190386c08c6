"""What each rank of a run has of its own: random numbers, places in the data, gradients of an unfinished step."""

import random
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.errors import CheckpointError, CorruptError, SelectionError, listing
from ft_ckpt.training import gradients as accumulation
from ft_ckpt.training import rng
from ft_ckpt.training.data_position import check_position
from ft_ckpt.training.feeds import DataPositions
from ft_ckpt.training.gradients import StepWatch
from ft_ckpt.training.items import Item, optimizers_among
from ft_ckpt.training.resume import Restored, Unread
from ft_ckpt.training.state import Document
from ft_ckpt.training.state_files import StoredTensors, tree_of_rank

_GRADIENTS, _RANDOM, _FEED, _STEPS, _SYNC = "gradients", "rng", "loader", "accumulation", "sync"


@dataclass(frozen=True, eq=False)
class OnRank:
    """Where the state of this rank is: `models` and all `items` of the run."""

    accelerator: Any
    models: Mapping[str, nn.Module]
    feeds: DataPositions
    steps: StepWatch
    items: Sequence[Item]

    @property
    def is_synced(self) -> bool:
        """Whether Accelerate, if it counts, says that no step is under way."""
        return bool(getattr(self.accelerator, "sync_gradients", True))


def capture_rank_state(of: OnRank) -> dict[str, Any]:
    """The state of this rank, as trees by name. Raises SelectionError where gradients are kept out of reach."""
    own: dict[str, Any] = {_RANDOM: rng.capture_generators()}
    own |= {f"{_FEED}-{index}": state for index, state in enumerate(of.feeds.state_dicts())}
    if hasattr(of.accelerator, "step"):
        own[_STEPS], own[_SYNC] = int(of.accelerator.step), of.is_synced
    kinds = [] if of.is_synced else optimizers_among(of.items)
    if keeping := [kind.keeps_gradients for _, kind, optimizer in kinds if kind.is_accumulating(optimizer)]:
        raise SelectionError(f"gradients: {keeping[0]} keeps them to itself; save when the optimizer has stepped")
    if not of.is_synced or of.steps.is_pending(of.models.values):
        own[_GRADIENTS] = {name: accumulation.pending_gradients(model) for name, model in of.models.items()}
    return own


def read_rank_state(document: Document, stored: StoredTensors, ranks: Ranks) -> tuple[dict[str, Any], list[Restored]]:
    """What this rank goes on with, by name, without gradients; and what of it cannot be restored. Overwrites nothing.

    On another number of ranks the places in the data are those of rank 0, which tell what all ranks have seen.
    """
    saved, trees, odd = len(document["ranks"]), {}, []
    stand_in = min(ranks.rank, saved - 1)
    names = [*document["ranks"][stand_in]]
    feeds = [name for name in names if name.startswith(f"{_FEED}-")]
    for name in (*feeds, *({_RANDOM, _STEPS, _SYNC} & {*names})):
        item = "data" if name in feeds else _RANDOM if name == _RANDOM else _GRADIENTS
        try:
            tree = tree_of_rank(document, stored, 0 if name in feeds and saved != ranks.size else stand_in, name)
            if problems := _tree_problems(name, tree):
                odd.append(Restored(item, "failed", listing(problems)))
            trees[name] = tree
        except CorruptError as error:
            odd.append(Unread(item, "failed", str(error)))
    if {*feeds} != {f"{_FEED}-{number}" for number in range(len(feeds))}:
        odd.append(Restored("data", "failed", f"places of {listing(feeds, ', ')}"))
    if _RANDOM not in names:
        odd.append(Restored(_RANDOM, "failed", "not in the checkpoint"))
    if any(_GRADIENTS in there for there in document["ranks"]) and (saved != ranks.size or _GRADIENTS not in names):
        detail = f"saved in the middle of gradient accumulation by {saved} rank(s), resumed on {ranks.size}"
        odd.append(Restored(_GRADIENTS, "failed", detail))
    return trees, odd


def _tree_problems(name: str, tree: Any) -> list[str]:
    """What is wrong with an object of `capture_rank_state`. Raises CorruptError for a place in the data."""
    if name == _RANDOM:
        return rng.generator_problems(tree)
    if name == _SYNC:
        return [] if type(tree) is bool else [f"{_SYNC} is {reprlib.repr(tree)}"]
    if name == _STEPS:
        return [] if type(tree) is int and 0 <= tree < 1 << 63 else [f"{_STEPS} is {reprlib.repr(tree)}"]
    check_position(tree)
    return []


def restore_rank_state(
    to: OnRank, document: Document, stored: StoredTensors, ranks: Ranks, trees: Mapping[str, Any]
) -> tuple[DataPositions, tuple[str, ...], list[Restored]]:
    """Give this rank what `read_rank_state` has read: the feeds, notes, and what became of each.

    Random numbers come last, since anything before may draw some. Gradients that the checkpoint lacks are dropped.
    """
    saved, notes, outcomes = len(document["ranks"]), [], []
    own = document["ranks"][min(ranks.rank, saved - 1)]
    feeds = DataPositions([trees[name] for index in range(len(trees)) if (name := f"{_FEED}-{index}") in trees])
    if f"{_FEED}-0" in trees:
        outcomes.append(Restored("data", "restored"))
    if _STEPS in trees and to.accelerator is not None:
        to.accelerator.step = trees[_STEPS]
        to.accelerator.gradient_state._set_sync_gradients(trees.get(_SYNC, _GRADIENTS not in own))
    for model in to.models.values():
        accumulation.drop_gradients(model)
    if any(_GRADIENTS in names for names in document["ranks"]):
        outcomes.append(
            _put_back_gradients(to.models, tree_of_rank(document, stored, ranks.rank, _GRADIENTS), saved, ranks)
        )
    problems = rng.restore_generators(trees[_RANDOM])
    outcomes.append(Restored(_RANDOM, "failed" if problems else "restored", "; ".join(problems)))
    if saved != ranks.size:
        notes.append(
            f"saved by {saved} rank(s), resumed on {ranks.size}: weights and optimizer are the same; ranks 0 to "
            f"{min(saved, ranks.size) - 1} go on with their random numbers, further ones with new ones"
        )
    if ranks.rank >= saved:
        _reseed_new_rank(ranks.rank)
    return feeds, tuple(notes), outcomes


def _put_back_gradients(models: Mapping[str, nn.Module], gradients: Any, saved: int, ranks: Ranks) -> Restored:
    if saved != ranks.size or gradients is None:
        detail = f"saved in the middle of gradient accumulation by {saved} rank(s), resumed on {ranks.size}"
        return Restored(_GRADIENTS, "failed", detail)
    try:
        for name, model in models.items():
            accumulation.restore_gradients(model, gradients.get(name, {}))
    except (CheckpointError, RuntimeError) as error:
        return Restored(_GRADIENTS, "failed", str(error))
    return Restored(_GRADIENTS, "restored")


def _reseed_new_rank(rank: int) -> None:
    """New random numbers for a rank that was not there: from those it was lent, moved apart by its number."""
    import numpy as np
    import torch

    seed = (int(torch.randint(2**62, ()).item()) ^ (rank * 0x9E3779B97F4A7C15)) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
