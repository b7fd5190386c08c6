"""The tensors and the state of a run at one moment, found anew for each save."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from ft_ckpt.distributed.ranks import Ranks, try_action
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.training import state as training
from ft_ckpt.training.extra_state import with_extra_state
from ft_ckpt.training.gradient_flags import FLAGS, gradient_flags
from ft_ckpt.training.items import Item, Key, known_sources, walk_models
from ft_ckpt.training.state import Document, LocalState, TrainingState


@dataclass(frozen=True, eq=False)
class Objects:
    """What a run consists of: the model that is saved, the items with a state, and this rank's own trees."""

    model: nn.Module
    items: Sequence[Item]
    own: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Captured:
    """What a save has found: the tensors of the saved model and, for a run, those of all its models and its state."""

    tensors: ModelTensors
    found: Mapping[Key, Source] = field(default_factory=dict)  # of the models of a run
    state: TrainingState | None = None
    error: BaseException | None = None  # why there is no state; raised when the save is planned, so that all ranks meet

    @property
    def document(self) -> Document:
        """All of the state that is no tensor."""
        return {} if self.state is None else self.state.document


def capture_run(objects: Callable[[], Objects], ranks: Ranks) -> Captured:
    """The state of the run that consists of `objects`. Collective. Moves nothing.

    Raises SelectionError naming state that cannot be saved, RanksDisagreeError naming objects that differ. An error
    that one rank alone may meet afterwards is kept in the result.
    """

    def look() -> tuple[Sequence[Item], dict[str, ModelTensors], dict[Key, Source], LocalState]:
        run = objects()
        models = walk_models(run.model, run.items)
        items = with_extra_state(run.model, run.items, models)
        found = known_sources(models, items)
        return items, models, found, training.local_state(items, found, run.own, digest=ranks.size > 1)

    looked, error = try_action(look)
    if looked is None:
        ranks.agree("save_state()", error=error)
    assert looked is not None, "the agreement has raised the error"
    items, models, found, local = looked
    every = training.exchange_facts(local, items, ranks, found)
    state, error = try_action(partial(training.assemble_state, local, every, items, found, ranks.rank))
    if state is not None:
        state.document[FLAGS] = gradient_flags(found)
    return Captured(models[""], found, state, error)
