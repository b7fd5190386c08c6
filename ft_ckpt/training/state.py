"""What a run needs beside its weights to go on as if it had not stopped: the state of its objects, gathered by name.

What is alike on all ranks (optimizer moments, schedulers) is stored once; what each
rank has of its own (random numbers, place in the data, an object that differs) once for each rank. All tensors become
entries of one more part of the checkpoint, and go the way weights go; the rest is one JSON document.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ft_ckpt.distributed.agreement import Values, runs_of, values_of_runs
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.sharding import OwnedSharding
from ft_ckpt.distributed.source import Source, held_source
from ft_ckpt.distributed.tensors import source_of_tensor
from ft_ckpt.distributed.wrappers import is_distributed
from ft_ckpt.formats import safetensors
from ft_ckpt.formats.dtypes import dtype_name, dtype_of
from ft_ckpt.formats.pytree import PLAIN, Leaf, flatten
from ft_ckpt.formats.pytree_json import encode_node
from ft_ckpt.model.entries import Entry, Part, unchanged_entry
from ft_ckpt.training.items import (
    Item,
    Key,
    check_same_items,
    labelled_sources,
    model_sources,
    name_differing_tensors,
    optimizers_among,
    tied_names,
)
from ft_ckpt.training.rank_descriptions import merge_descriptions

FOLDER, FILE, DOCUMENT_NAME = "state", "training", "training.json"
DOCUMENT_VERSION = 1
Document = dict[str, Any]
_LEAVES = frozenset({*PLAIN, DTensor})


@dataclass(frozen=True, eq=False)
class LocalState:
    """What this rank has: facts that every rank must know before anything is laid out, and the tensors behind them."""

    facts: Document
    leaves: Mapping[str, Sequence[Tensor]]  # by item: of the shared tree or of this rank's own


@dataclass(frozen=True, eq=False)
class TrainingState:
    """The training state of all ranks, ready to be stored."""

    entries: tuple[Entry, ...]
    document: Document


def local_state(
    items: Sequence[Item], found: Mapping[Key, Source], own: Mapping[str, Any], digest: bool = True
) -> LocalState:
    """This rank's part of the state; `own` are objects (trees) that each rank has for itself. Moves nothing.

    `digest`: with digests, by which several ranks compare their objects. Raises SelectionError naming state that
    cannot be kept.
    """
    facts: Document = {"items": {}, "own": {}}
    leaves: dict[str, Sequence[Tensor]] = {}
    for item in items:
        if item.kind == "model":
            facts["items"][item.name] = {"model": True}
        elif item.kind == "object":
            facts["items"][item.name], leaves[item.name] = flatten_tree(item.value.state_dict(), item.name, digest)
    known = labelled_sources(found)
    for item, kind, optimizer in optimizers_among(items):
        facts["items"][item.name] = {"optimizer": kind.describe(optimizer, known)}
    for name, value in own.items():
        facts["own"][name], leaves[name] = flatten_tree(value, name, False)
    return LocalState(facts, leaves)


@dataclass(frozen=True, eq=False)
class EveryState:
    """What a rank knows of the state of all: the same on every rank, but that rank 0 alone has the trees themselves."""

    items: Document  # the facts of each item: of an optimizer those of all ranks together, of an object rank 0's
    trees: Sequence[Document]  # what each rank has of its own, in rank order
    is_alike: bool = True  # whether all ranks said the same of their optimizers


def exchange_facts(local: LocalState, objects: Sequence[Item], ranks: Ranks, found: Iterable[Key]) -> EveryState:
    """What there is on all ranks, which have all the tensors `found`. Collective.

    Digests first: the facts themselves travel only where ranks differ, as under FSDP1, where a rank knows nothing of
    parameters it holds no part of. Of what a rank has of its own the others are told how its tensors look, and rank 0
    all.
    """
    items, own = local.facts["items"], local.facts["own"]
    if ranks.size == 1:
        return EveryState(items, [own])
    digests = {name: xxhash.xxh3_128_hexdigest(repr(fact).encode()) for name, fact in items.items()}
    labels = [f"{item}: {name}" if item else name for item, name in found]
    names = xxhash.xxh3_128_hexdigest(repr(labels).encode())
    mine = {"kinds": {item.name: item.kind for item in objects}, "digests": digests, "own": own, "names": names}
    agreed = ranks.agree("save_state()", mine, decide=_compare_facts)
    if not agreed.told["same_names"]:
        name_differing_tensors(ranks, "the tensors of save_state()", names, lambda: labels)
    trees = [value["own"] for value in agreed.values] or values_of_runs(agreed.told["own"])
    odd = agreed.told["odd"]
    if not odd:
        return EveryState(items, trees)
    facts = {name: items.get(name) for name in odd}
    agreed = ranks.agree("the state of save_state()", facts, decide=_merge_facts)
    further = [_unlike_leader(value, agreed.values[0]) for value in agreed.values]
    together = [{**one, **more} for one, more in zip(trees, further or values_of_runs(agreed.told["own"]), strict=True)]
    told = agreed.told["items"]
    is_alike = not any("optimizer" in fact for fact in told.values())
    own_trees = {name: items[name] for name, fact in told.items() if ranks.leads and "leaves" in fact}  # told by looks
    return EveryState({**items, **told, **own_trees}, together, is_alike)


def looks_of_trees(trees: Iterable[Document]) -> Document:
    """How the tensors look that each rank has of its own, for `values_of_runs`."""
    return runs_of([{name: {"leaves": fact["leaves"]} for name, fact in one.items()} for one in trees])


def _compare_facts(values: Values) -> Document:
    check_same_items([value["kinds"] for value in values])
    names = dict.fromkeys(name for value in values for name in value["digests"])
    odd = [name for name in sorted(names) if len({value["digests"].get(name) for value in values}) > 1]
    same_names = len({value["names"] for value in values}) == 1
    return {"odd": odd, "same_names": same_names, "own": looks_of_trees(value["own"] for value in values)}


def _merge_facts(values: Values) -> Document:
    """Of items that ranks have otherwise: those of optimizers together, of objects rank 0's and how others' look."""
    items: Document = {}
    for name, fact in values[0].items():
        if "optimizer" in fact:
            items[name] = {"optimizer": merge_descriptions([value[name]["optimizer"] for value in values])}
        elif "leaves" in fact:
            items[name] = {"leaves": fact["leaves"]}
    return {"items": items, "own": looks_of_trees(_unlike_leader(value, values[0]) for value in values)}


def _unlike_leader(facts: Mapping[str, Any], first: Mapping[str, Any]) -> Document:
    """The objects that a rank has otherwise than rank 0."""
    return {n: fact for n, fact in facts.items() if "digest" in fact and fact["digest"] != first[n]["digest"]}


def assemble_state(
    local: LocalState, every: EveryState, items: Sequence[Item], found: Mapping[Key, Source], rank: int
) -> TrainingState:
    """The whole state, from what there is on `every` rank; on all ranks the same entries, on rank 0 the document."""
    entries: list[Entry] = []
    for item in items:
        entries += _item_entries(item, local, every.items[item.name], found, rank)
    for number, trees in enumerate(every.trees):
        for name, fact in trees.items():
            mine = local.leaves[name] if number == rank else None
            entries += _own_entries(f"rank-{number}/{name}", number, fact["leaves"], mine)
    return TrainingState(tuple(entries), build_document(every, items))


def build_document(every: EveryState, items: Sequence[Item]) -> Document:
    """All of the state that is no tensor; trees on rank 0 alone."""
    about = {item.name: _describe_item(item, every.items[item.name]) for item in items}
    ranks = [{name: _summarize_tree(fact) for name, fact in trees.items()} for trees in every.trees]
    return {"version": DOCUMENT_VERSION, "items": about, "ranks": ranks}


def state_part(state: TrainingState, parts: Sequence[Part], found: Mapping[str, Source]) -> Part:
    """The part that holds `state`, and exact copies of live tensors that the other `parts` have changed or left out.

    The frozen parameters of an adapter's base are left out: they are no part of its run.
    """
    exact = {
        entry.source.key: [part.path, entry.name]
        for part in parts
        for entry in part.entries
        if entry.source is not None and entry.dtype == entry.source.dtype
    }
    left = [s for p in parts if p.kind == "adapter" for s in (*p.base.values(), *p.passed)]
    bases = {source.key for source in left if source.is_parameter}
    entries, weights = list(state.entries), {}
    for name, source in found.items():
        if source.is_added:
            continue  # kept with the extra state
        if source.key in exact:
            weights[name] = exact[source.key]
        elif source.key not in bases or source.trainable:
            exact[source.key] = weights[name] = [FOLDER, f"weights/{name}"]
            entries.append(_entry_of(replace(source, name=f"weights/{name}")))
    state.document["weights"] = weights
    return Part(FOLDER, FOLDER, "state", None, tuple(entries), FILE)


def source_of(name: str, tensor: Tensor) -> Source:
    """The source of a tensor that is alike on all ranks, or cut over them by torch itself."""
    made = replace(source_of_tensor(name, name, tensor), trainable=False)
    return made if is_distributed(tensor) else replace(made, sharding=OwnedSharding(made.shape, 0))


def tree_tensors(value: Any, name: str = "state") -> list[Tensor]:
    """The tensors in a tree of plain values, in the order in which they are stored."""
    return [_live_leaf(leaf) for leaf in flatten(value, safetensors.NAMES, name, _LEAVES)[1]]


def flatten_tree(value: Any, name: str, digest: bool) -> tuple[Document, list[Tensor]]:
    """The facts of a tree, and its tensors."""
    node, leaves = flatten(value, safetensors.NAMES, name, _LEAVES)
    tensors = [_live_leaf(leaf) for leaf in leaves]
    cut = [is_distributed(tensor) for tensor in tensors]
    facts: Document = {
        "tree": encode_node(node),
        "leaves": [
            {"shape": list(t.shape), "dtype": dtype_name(t.dtype), "cut": c} for t, c in zip(tensors, cut, strict=True)
        ],
    }
    if digest:
        state = xxhash.xxh3_128(repr(facts).encode())
        for tensor in (tensor for tensor, cut_up in zip(tensors, cut, strict=True) if not cut_up):
            state.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        facts["digest"] = state.hexdigest()
    return facts, tensors


def _live_leaf(leaf: Leaf) -> Tensor:
    return torch.from_numpy(leaf.data) if leaf.is_array else leaf.data.detach()


def _describe_item(item: Item, fact: Document) -> Document:
    """What the document says of one item."""
    if item.kind == "optimizer":
        return {"optimizer": fact["optimizer"]}
    return {"model": True} if item.kind == "model" else _summarize_tree(fact)


def _summarize_tree(fact: Document) -> Document:
    return {"tree": fact.get("tree"), "tensors": len(fact["leaves"])}


def _item_entries(item: Item, local: LocalState, fact: Document, found: Mapping[Key, Source], rank: int) -> list[Entry]:
    """The entries of the tensors that an item has once for all ranks."""
    if item.kind == "optimizer":
        ((_, kind, optimizer),) = optimizers_among([item])
        return _prefixed_entries(item.name, kind.tensors(optimizer, fact["optimizer"], labelled_sources(found)))
    if item.kind == "model":
        tensors = model_sources(found, item.name)
        return _prefixed_entries(item.name, {names[0]: tensors[names[0]] for names in tied_names(tensors)})
    entries = []
    for index, leaf in enumerate(fact["leaves"]):
        tensor = local.leaves[item.name][index] if leaf["cut"] or rank == 0 else None
        name = f"{item.name}/{index}"
        if tensor is not None and is_distributed(tensor):
            entries.append(_entry_of(source_of(name, tensor)))
        else:
            entries.append(_entry_of(_leaf_source(name, leaf, tensor, 0)))
    return entries


def _own_entries(prefix: str, owner: int, leaves: Sequence[Document], mine: Sequence[Tensor] | None) -> Iterator[Entry]:
    """Entries of tensors that only the rank `owner` has."""
    for index, leaf in enumerate(leaves):
        tensor = mine[index] if mine is not None else None
        yield _entry_of(_leaf_source(f"{prefix}/{index}", leaf, tensor, owner))


def _leaf_source(name: str, leaf: Document, tensor: Tensor | None, owner: int) -> Source:
    """The source of a tensor in a tree; `tensor` is what this rank has of it, which `owner` speaks for."""
    shape, dtype = tuple(leaf["shape"]), dtype_of(leaf["dtype"])
    return held_source(name, name, shape, "plain", OwnedSharding(shape, owner), dtype, tensor).holding(tensor)


def _prefixed_entries(prefix: str, tensors: Mapping[str, Source]) -> list[Entry]:
    return [_entry_of(replace(source, name=f"{prefix}/{name}")) for name, source in tensors.items()]


def _entry_of(source: Source) -> Entry:
    return unchanged_entry(source.name, source)
