"""The captured state of a run: entries and a document, ready to be stored.

All tensors become entries of one more part of the checkpoint and are written like weights; the rest
is one JSON document.
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
from ft_ckpt.runs.state.exchange import LocalState, exchange_facts, local_state
from ft_ckpt.runs.state.trees import source_of_leaf
from ft_ckpt.saving.planning import StateToSave


@dataclass(frozen=True, eq=False)
class TrainingState:
    """The training state of all ranks, ready to be stored."""

    entries: tuple[Entry, ...]
    document: Document


@dataclass(frozen=True, eq=False)
class Captured:
    """The captured tensors of a save: of the model and, for a run, of all models and the state."""

    tensors: ModelTensors
    sources: Mapping[Key, Source] = field(default_factory=dict)  # of the models of a run
    state: TrainingState | None = None
    # why there is no state; raised when the save is planned, on all ranks
    error: BaseException | None = None

    @property
    def document(self) -> Document:
        return {} if self.state is None else self.state.document

    def state_to_save(self) -> StateToSave:
        """Return the state as a save stores it. Raises the error that prevented it."""
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

    Collective: call it on every rank. `objects` returns the model that is saved, the items with a
    state, and this rank's own trees. Raises SelectionError naming state that cannot be saved,
    RanksDisagreeError naming objects that differ. A later error of one rank is returned in the
    result.
    """
    walked, error = try_action(partial(_walk_objects, objects, digest=ranks.size > 1))
    if walked is None:
        ranks.agree("save_state()", error=error)
    assert walked is not None, "the agreement has raised the error"
    items, models, sources, local = walked
    facts, trees = exchange_facts(local, items, ranks, sources)
    assemble = partial(assemble_state, local, facts, trees, items, sources, ranks.rank)
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
    facts: Document,
    trees: Sequence[Document],
    items: Sequence[Item],
    sources: Mapping[Key, Source],
    rank: int,
) -> TrainingState:
    """Combine the facts that all ranks exchanged into the state of the run.

    All ranks have the same entries. Only rank 0 has the document.
    """
    entries: list[Entry] = []
    stored_items: Document = {}
    for item in items:
        fact = facts[item.name]
        entries += _item_entries(item, local, fact, sources, rank)
        stored_items[item.name] = _summarize_tree(fact) if item.kind == "object" else fact
    stored_trees = []
    for owner, rank_trees in enumerate(trees):
        for name, fact in rank_trees.items():
            for index, leaf in enumerate(fact["leaves"]):
                tensor = local.leaves[name][index] if owner == rank else None
                source = _leaf_source(f"rank-{owner}/{name}/{index}", leaf, tensor, owner)
                entries.append(_entry_of(source))
        stored_trees.append({name: _summarize_tree(fact) for name, fact in rank_trees.items()})
    document = {"version": DOCUMENT_VERSION, "items": stored_items, "ranks": stored_trees}
    return TrainingState(tuple(entries), document)


def state_part(state: TrainingState, parts: Sequence[Part], sources: Mapping[str, Source]) -> Part:
    """Return the part with `state`, and exact copies of tensors that other `parts` convert or omit.

    The frozen parameters of an adapter's base are not copied, because they do not belong to the
    run. Frozen parameters of the adapter itself are copied: PEFT omits them or stores them in
    another form, and another process may initialize them differently.
    """
    exact: dict[int, list[str]] = {}  # part and name, by tensor
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
            continue  # stored with the extra state
        if source.key in exact:
            weights[name] = exact[source.key]
        elif source.key not in frozen_bases or source.trainable:
            exact[source.key] = weights[name] = [FOLDER, f"weights/{name}"]
            entries.append(_entry_of(replace(source, name=f"weights/{name}")))
    state.document["weights"] = weights
    return Part(FOLDER, FOLDER, "state", None, tuple(entries), FILE)


def _item_entries(
    item: Item, local: LocalState, fact: Document, sources: Mapping[Key, Source], rank: int
) -> list[Entry]:
    """Return the entries of an item's tensors that are stored once for all ranks."""
    if item.kind == "optimizer":
        optimizer = optimizer_of(item)
        labels = labelled_sources(sources)
        tensors = optimizer.kind.state_tensors(optimizer.optimizer, fact["optimizer"], labels)
        return _prefixed_entries(item.name, tensors)
    if item.kind == "model":
        model_tensors = model_sources(sources, item.name)
        first_names = [names[0] for names in tied_names(model_tensors)]
        return _prefixed_entries(item.name, {name: model_tensors[name] for name in first_names})
    entries = []
    for index, leaf in enumerate(fact["leaves"]):
        tensor = local.leaves[item.name][index] if leaf["cut"] or rank == 0 else None
        name = f"{item.name}/{index}"
        if tensor is not None and is_distributed(tensor):
            entries.append(_entry_of(source_of_leaf(name, tensor)))
        else:
            entries.append(_entry_of(_leaf_source(name, leaf, tensor, 0)))
    return entries


def _summarize_tree(fact: Document) -> Document:
    return {"tree": fact.get("tree"), "tensors": len(fact["leaves"])}


def _leaf_source(name: str, leaf: Document, tensor: Tensor | None, owner: int) -> Source:
    """Return the source of a tensor in a tree, stored by the rank `owner`.

    `tensor` is this rank's, or None.
    """
    shape = tuple(leaf["shape"])
    sharding = OwnedSharding(shape, owner)
    source = held_source(name, name, shape, "plain", sharding, dtype_of(leaf["dtype"]), tensor)
    return source.holding(tensor)


def _prefixed_entries(prefix: str, tensors: Mapping[str, Source]) -> list[Entry]:
    return [_entry_of(replace(source, name=f"{prefix}/{name}")) for name, source in tensors.items()]


def _entry_of(source: Source) -> Entry:
    return unchanged_entry(source.name, source)
