"""Captures the state of a run for a save: tensors as entries, all else as one JSON document.

An entry is one tensor to be stored: its name, its dtype in the file, and its source, which says
which elements of it this rank holds. A part is a folder of the checkpoint. The entries of the state
form a part of their own, and are written like weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ft_ckpt.formats import dtype_of
from ft_ckpt.model.tensors import Entry, Part, unchanged_entry
from ft_ckpt.ranks import Ranks, try_action
from ft_ckpt.ranks.sharding import OwnedSharding, Source, held_source
from ft_ckpt.ranks.wrappers import ModelTensors, is_distributed
from ft_ckpt.runs.items import (
    FLAGS,
    Item,
    Key,
    gradient_flags,
    labelled_sources,
    model_sources,
    optimizer_of,
    tied_names,
    walk_run,
)
from ft_ckpt.runs.state.document import DOCUMENT_VERSION, FILE, FOLDER, Document
from ft_ckpt.runs.state.exchange import LocalState, exchange_descriptions, local_state
from ft_ckpt.runs.state.trees import source_of_leaf
from ft_ckpt.saving.planning import StateToSave


@dataclass(frozen=True, eq=False)
class TrainingState:
    """The training state of all ranks, ready to be stored. Only rank 0 has the whole document."""

    entries: tuple[Entry, ...]
    document: Document


@dataclass(frozen=True, eq=False)
class Captured:
    """What a save has captured.

    Attributes:
        tensors: The tensors of the model that is saved.
        sources: The tensors of all models of the run; {} for a save of weights alone.
        state: The training state; None for a save of weights alone, or after an error.
        error: Why there is no state. It is raised on all ranks when the save is planned.
    """

    tensors: ModelTensors
    sources: Mapping[Key, Source] = field(default_factory=dict)
    state: TrainingState | None = None
    error: BaseException | None = None

    @property
    def document(self) -> Document:
        return {} if self.state is None else self.state.document

    def state_to_save(self) -> StateToSave:
        """Return the state as a save stores it. Raises `error` if there is one."""
        if self.error is not None:
            raise self.error
        assert self.state is not None, "without an error there is a state"
        return StateToSave(
            tensors=self.tensors,
            sources=model_sources(self.sources) or self.tensors.sources(),
            all_sources=tuple(self.sources.values()),
            make_part=partial(state_part, self.state),
            document=self.state.document,
        )


def capture_run(
    objects: Callable[[], tuple[nn.Module, Sequence[Item], Mapping[str, Any]]], ranks: Ranks
) -> Captured:
    """Capture the state of a run, without copying tensors.

    Collective: call it on every rank. `objects` returns three values: the model that is saved, the
    items with a state, and the trees that this rank stores for itself.

    Raises SelectionError naming state that cannot be saved, and RanksDisagreeError naming objects
    that differ between ranks. If this rank fails after that, `error` of the result has the error.
    """
    walked, error = try_action(partial(_walk_objects, objects, digest=ranks.size > 1))
    if walked is None:
        ranks.agree("save_state()", error=error)
    assert walked is not None, "the agreement has raised the error"
    items, models, sources, local = walked
    descriptions, trees = exchange_descriptions(local, items, ranks, sources)
    assemble = partial(assemble_state, local, descriptions, trees, items, sources, ranks.rank)
    state, error = try_action(assemble)
    if state is not None:
        state.document[FLAGS] = gradient_flags(sources)
    return Captured(models[""], sources, state, error)


def _walk_objects(
    objects: Callable[[], tuple[nn.Module, Sequence[Item], Mapping[str, Any]]], digest: bool
) -> tuple[Sequence[Item], dict[str, ModelTensors], dict[Key, Source], LocalState]:
    model, items, rank_trees = objects()
    items, models, sources = walk_run(model, items)
    return items, models, sources, local_state(items, sources, rank_trees, digest)


def assemble_state(
    local: LocalState,
    descriptions: Document,
    trees: Sequence[Document],
    items: Sequence[Item],
    sources: Mapping[Key, Source],
    rank: int,
) -> TrainingState:
    """Make the state of the run from what the ranks have exchanged.

    `descriptions` and `trees` are the results of `exchange_descriptions`. All ranks get the same
    entries. Only rank 0 gets a whole document.
    """
    entries: list[Entry] = []
    stored_items: Document = {}
    for item in items:
        description = descriptions[item.name]
        entries += _item_entries(item, local, description, sources, rank)
        if item.kind == "object":
            description = _stored_tree(description)
        stored_items[item.name] = description

    stored_trees = []
    for owner, rank_trees in enumerate(trees):
        for name, tree in rank_trees.items():
            for index, leaf in enumerate(tree["leaves"]):
                tensor = local.leaves[name][index] if owner == rank else None
                source = _leaf_source(f"rank-{owner}/{name}/{index}", leaf, tensor, owner)
                entries.append(_entry_of(source))
        stored_trees.append({name: _stored_tree(tree) for name, tree in rank_trees.items()})

    document = {"version": DOCUMENT_VERSION, "items": stored_items, "ranks": stored_trees}
    return TrainingState(tuple(entries), document)


def state_part(state: TrainingState, parts: Sequence[Part], sources: Mapping[str, Source]) -> Part:
    """Return the part of the checkpoint that holds the training state.

    It has the entries of `state`. It also has an exact copy of each tensor of the model (`sources`)
    that the other `parts` store in another dtype or not at all. The document gets "weights": where
    the exact values of each tensor are, as [folder of the part, name].

    The frozen parameters of an adapter's base are not copied, because they do not belong to the
    run. Frozen parameters of the adapter itself are copied, because PEFT omits them or stores them
    in another form, and another process may initialize them differently.
    """
    exact: dict[int, list[str]] = {}  # where the exact values of a tensor are, by its key
    frozen_bases: set[int] = set()
    for part in parts:
        for entry in part.entries:
            if entry.source is not None and entry.dtype == entry.source.dtype:
                exact[entry.source.key] = [part.path, entry.name]
        if part.kind == "adapter":
            base_parameters = [source for source in part.base.values() if source.is_parameter]
            frozen_bases.update(source.key for source in base_parameters)

    entries = list(state.entries)
    weights: dict[str, list[str]] = {}
    for name, source in sources.items():
        if source.is_added:
            continue  # it is stored with the extra state of its module
        if source.key in exact:
            weights[name] = exact[source.key]
        elif source.key not in frozen_bases or source.trainable:
            exact[source.key] = weights[name] = [FOLDER, f"weights/{name}"]
            entries.append(_entry_of(replace(source, name=f"weights/{name}")))

    state.document["weights"] = weights
    return Part(FOLDER, FOLDER, "state", None, tuple(entries), FILE)


def _item_entries(
    item: Item, local: LocalState, description: Document, sources: Mapping[Key, Source], rank: int
) -> list[Entry]:
    """Return the entries of those tensors of an item that are stored once for all ranks."""
    if item.kind == "optimizer":
        optimizer = optimizer_of(item)
        labels = labelled_sources(sources)
        tensors = optimizer.kind.state_tensors(
            optimizer.optimizer, description["optimizer"], labels
        )
        return _prefixed_entries(item.name, tensors)

    if item.kind == "model":
        model_tensors = model_sources(sources, item.name)
        first_names = [names[0] for names in tied_names(model_tensors)]
        return _prefixed_entries(item.name, {name: model_tensors[name] for name in first_names})

    entries = []
    for index, leaf in enumerate(description["leaves"]):
        # Every rank stores its elements of a sharded tensor. Rank 0 stores other tensors.
        has_elements = leaf["cut"] or rank == 0
        tensor = local.leaves[item.name][index] if has_elements else None
        name = f"{item.name}/{index}"
        if tensor is not None and is_distributed(tensor):
            entries.append(_entry_of(source_of_leaf(name, tensor)))
        else:
            entries.append(_entry_of(_leaf_source(name, leaf, tensor, 0)))

    return entries


def _stored_tree(description: Document) -> Document:
    """Return what the document stores of a described tree: its nodes, and how many tensors."""
    return {"tree": description.get("tree"), "tensors": len(description["leaves"])}


def _leaf_source(name: str, leaf: Document, tensor: Tensor | None, owner: int) -> Source:
    """Return the source of a tensor in a tree that the rank `owner` stores.

    `leaf` describes it. `tensor` is the tensor on this rank, or None on the other ranks.
    """
    shape = tuple(leaf["shape"])
    sharding = OwnedSharding(shape, owner)
    source = held_source(name, name, shape, "plain", sharding, dtype_of(leaf["dtype"]), tensor)
    return source.holding(tensor)


def _prefixed_entries(prefix: str, tensors: Mapping[str, Source]) -> list[Entry]:
    return [_entry_of(replace(source, name=f"{prefix}/{name}")) for name, source in tensors.items()]


def _entry_of(source: Source) -> Entry:
    return unchanged_entry(source.name, source)
