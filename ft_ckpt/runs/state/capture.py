"""Collects the training state of a run for a save: optimizers, schedulers, random states and so on.

The tensors of the state are stored in a folder of their own, in the same file format as weights.
Everything else, such as step counts and learning rates, becomes one JSON document. No tensor is
copied here.

The words of this module:

- An item is one object with a state, such as an optimizer, under its name in the checkpoint.
- A tree is a state dict or another nesting of dicts and lists. Its leaves are its tensors. Items
  that are neither models nor optimizers are stored as trees. Each rank also stores trees for
  itself, such as its random states.
- A source is a tensor of this run, and says which of its elements this rank holds.
- An entry is a tensor to be stored: its name and dtype in the file, and its source.
- A part is a folder of the checkpoint with its entries. The training state is one part.
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
    """The training state of all ranks, ready to be stored.

    Attributes:
        entries: The tensors. They are the same on all ranks.
        document: Everything else. It is complete on rank 0 only.
    """

    entries: tuple[Entry, ...]
    document: Document


@dataclass(frozen=True, eq=False)
class Captured:
    """What a save has captured.

    Attributes:
        tensors: The tensors of the model that is saved.
        sources: The tensors of all models of the run. It is empty for a save of weights alone.
        state: The training state. None for a save of weights alone, or after an error.
        error: Why there is no state. `state_to_save` raises it when the save is planned, and the
            other ranks raise it then too.
    """

    tensors: ModelTensors
    sources: Mapping[Key, Source] = field(default_factory=dict)
    state: TrainingState | None = None
    error: BaseException | None = None

    @property
    def document(self) -> Document:
        """The document of the state. A new empty dict if there is no state."""
        return {} if self.state is None else self.state.document

    def state_to_save(self) -> StateToSave:
        """Return the state in the form in which a save takes it. Raises `error` if there is one."""
        if self.error is not None:
            raise self.error
        assert self.state is not None, "without an error there is a state"

        return StateToSave(
            tensors=self.tensors,
            sources=model_sources(self.sources) or self.tensors.sources(),
            all_sources=tuple(self.sources.values()),
            make_part=partial(_complete_state_part, self.state),
            document=self.state.document,
        )


def capture_run(
    objects: Callable[[], tuple[nn.Module, Sequence[Item], Mapping[str, Any]]], ranks: Ranks
) -> Captured:
    """Capture the state of a run, without copying tensors.

    Collective: call it on every rank.

    Args:
        objects: Returns the model that is saved, the items, and the trees that this rank stores for
            itself.
        ranks: The ranks of the run.

    Raises:
        SelectionError: Some state cannot be saved. It is raised on all ranks.
        RanksDisagreeError: Objects differ between ranks.

    If this rank fails once the ranks have compared their objects, nothing is raised yet. The result
    has the error.
    """
    compare_ranks = ranks.size > 1
    walk, error = try_action(partial(_walk_objects, objects, digest=compare_ranks))
    if walk is None:
        # The other ranks exchange descriptions now. They get this error instead, and all raise it.
        ranks.agree("save_state()", error=error)
    assert walk is not None, "the agreement has raised the error"

    items, models, sources, local = walk
    descriptions, trees = exchange_descriptions(local, items, ranks, sources)

    assemble = partial(assemble_state, local, descriptions, trees, items, sources, ranks.rank)
    state, error = try_action(assemble)
    if state is not None:
        state.document[FLAGS] = gradient_flags(sources)

    saved_model = models[""]  # the main model is under the empty name
    return Captured(saved_model, sources, state, error)


def _walk_objects(
    objects: Callable[[], tuple[nn.Module, Sequence[Item], Mapping[str, Any]]], digest: bool
) -> tuple[Sequence[Item], dict[str, ModelTensors], dict[Key, Source], LocalState]:
    """Find the state on this rank, and describe it for the other ranks.

    With `digest` the descriptions get a digest, by which ranks compare them. Returns the items, the
    tensors of each model by the name of its item, the same tensors as sources, and the state.
    """
    model, run_items, rank_trees = objects()
    items, models, sources = walk_run(model, run_items)
    return items, models, sources, local_state(items, sources, rank_trees, digest)


def assemble_state(
    local: LocalState,
    descriptions: Document,
    trees: Sequence[Document],
    items: Sequence[Item],
    sources: Mapping[Key, Source],
    rank: int,
) -> TrainingState:
    """Make the training state from what the ranks have exchanged.

    All ranks get the same entries. Only rank 0 gets a complete document.

    Args:
        local: The state on this rank.
        descriptions: The description of each item, from `exchange_descriptions`.
        trees: The trees that each rank stores for itself, by rank, from `exchange_descriptions`.
        items: The items of the run.
        sources: The tensors of all models.
        rank: This rank.
    """
    entries: list[Entry] = []

    stored_items: Document = {}
    for item in items:
        description = descriptions[item.name]
        entries += _item_entries(item, local, description, sources, rank)
        if item.kind == "object":
            stored_items[item.name] = _stored_tree(description)
        else:
            stored_items[item.name] = description

    stored_trees = []
    for owner, owner_trees in enumerate(trees):
        for name, tree in owner_trees.items():
            for index, leaf in enumerate(tree["leaves"]):
                tensor = local.leaves[name][index] if owner == rank else None
                source = _leaf_source(f"rank-{owner}/{name}/{index}", leaf, tensor, owner)
                entries.append(_entry_of(source))
        stored_trees.append({name: _stored_tree(tree) for name, tree in owner_trees.items()})

    document = {"version": DOCUMENT_VERSION, "items": stored_items, "ranks": stored_trees}
    return TrainingState(tuple(entries), document)


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
        # A tied tensor has several names. It is stored under the first.
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
            entries.append(_entry_of(_leaf_source(name, leaf, tensor, owner=0)))

    return entries


def _prefixed_entries(prefix: str, tensors: Mapping[str, Source]) -> list[Entry]:
    return [_entry_of(replace(source, name=f"{prefix}/{name}")) for name, source in tensors.items()]


def _entry_of(source: Source) -> Entry:
    return unchanged_entry(source.name, source)


def _leaf_source(name: str, leaf: Document, tensor: Tensor | None, owner: int) -> Source:
    """Return the source of a leaf that one rank stores.

    Args:
        name: The name under which it is stored.
        leaf: Its description, with its shape and dtype.
        tensor: The tensor on the rank that stores it. None on other ranks.
        owner: The rank that stores it.
    """
    shape = tuple(leaf["shape"])
    source = held_source(
        name=name,
        raw_name=name,
        shape=shape,
        engine="plain",
        sharding=OwnedSharding(shape, owner),
        dtype=dtype_of(leaf["dtype"]),
        live=tensor,
    )
    return source.holding(tensor)


def _stored_tree(description: Document) -> Document:
    """Return what the document stores of a tree: its nesting, and how many tensors it has."""
    return {"tree": description.get("tree"), "tensors": len(description["leaves"])}


def _complete_state_part(
    state: TrainingState, parts: Sequence[Part], sources: Mapping[str, Source]
) -> Part:
    """Make the part with the training state, and complete the document of `state`.

    The other parts may store a tensor of the model in another dtype, or not at all. A resume needs
    the exact values, so this part gets a copy of each such tensor. The document gets "weights",
    which says where the exact values of each tensor are. For example:

        {"lm_head.weight": [folder of the part, name in that part]}

    The frozen parameters of an adapter's base are not copied, because they do not belong to the
    run. Frozen parameters of the adapter itself are copied, because PEFT omits them or stores them
    in another form, and another process may initialize them differently.

    Args:
        state: The training state.
        parts: The other parts of the checkpoint.
        sources: The tensors of the model that is saved, by name.
    """
    # A tensor can have several names, but it has one key.
    locations: dict[int, list[str]] = {}
    base_keys: set[int] = set()
    for part in parts:
        for entry in part.entries:
            if entry.source is not None and entry.dtype == entry.source.dtype:
                locations[entry.source.key] = [part.path, entry.name]
        if part.kind == "adapter":
            base_keys.update(source.key for source in part.base.values() if source.is_parameter)

    entries = list(state.entries)
    weights: dict[str, list[str]] = {}
    for name, source in sources.items():
        # Such a tensor is stored with the extra state of its module.
        if source.is_added:
            continue

        is_frozen_base = source.key in base_keys and not source.trainable
        if source.key not in locations and not is_frozen_base:
            copy_name = f"weights/{name}"
            entries.append(_entry_of(replace(source, name=copy_name)))
            locations[source.key] = [FOLDER, copy_name]

        if source.key in locations:
            weights[name] = locations[source.key]

    state.document["weights"] = weights
    return Part(
        name=FOLDER, path=FOLDER, kind="state", module=None, entries=tuple(entries), file=FILE
    )
