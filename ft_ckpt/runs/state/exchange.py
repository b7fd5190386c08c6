"""Describes the training state of each rank, and exchanges the descriptions between ranks.

A description is a JSON object without tensors: the shapes and dtypes of the tensors, and the
numbers around them. A tree is the nested state of an object; its leaves are the tensors in it.

State that is equal on all ranks is stored once, for example optimizer moments and schedulers. State
of one rank is stored once per rank: random numbers, the position in the data, and objects that
differ between ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import Tensor

from ft_ckpt.errors import RanksDisagreeError, listing
from ft_ckpt.ranks import (
    Ranks,
    Values,
    name_differing_tensors,
    rank_numbers,
    runs_of,
    values_of_runs,
)
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.runs.items import Item, Key, labelled_sources, optimizers_among
from ft_ckpt.runs.optimizers import merge_descriptions
from ft_ckpt.runs.state.document import Document
from ft_ckpt.runs.state.trees import flatten_tree


@dataclass(frozen=True, eq=False)
class LocalState:
    """This rank's state: descriptions, from which all ranks lay out the files, and the tensors.

    Attributes:
        items: The description of each item, by its name.
        trees: The description of each tree that this rank stores for itself, by its name.
        leaves: The tensors of each item or tree, by its name.
    """

    items: Document
    trees: Document
    leaves: Mapping[str, Sequence[Tensor]]


def local_state(
    items: Sequence[Item],
    sources: Mapping[Key, Source],
    rank_trees: Mapping[str, Any],
    digest: bool = True,
) -> LocalState:
    """Describe the state on this rank, without copying tensors.

    `rank_trees` are trees that each rank stores for itself. With `digest` the descriptions of
    objects get a digest, by which ranks compare them. Raises SelectionError naming state that
    cannot be saved.
    """
    descriptions: Document = {}
    trees: Document = {}
    leaves: dict[str, Sequence[Tensor]] = {}
    for item in items:
        if item.kind == "model":
            descriptions[item.name] = {"model": True}
        elif item.kind == "object":
            state = item.value.state_dict()
            description, tensors = flatten_tree(state, item.name, digest)
            descriptions[item.name] = description
            leaves[item.name] = tensors

    labels = labelled_sources(sources)
    for optimizer in optimizers_among(items):
        description = optimizer.kind.describe(optimizer.optimizer, labels)
        descriptions[optimizer.name] = {"optimizer": description}

    for name, tree in rank_trees.items():
        trees[name], leaves[name] = flatten_tree(tree, name, False)
    return LocalState(descriptions, trees, leaves)


def exchange_descriptions(
    local: LocalState, items: Sequence[Item], ranks: Ranks, keys: Iterable[Key]
) -> tuple[Document, Sequence[Document]]:
    """Exchange the descriptions of all ranks.

    Collective: call it on every rank. All ranks must have the tensors `keys` of the models.

    Returns the description of each item, and the trees of each rank in rank order. The description
    of an optimizer is merged from all ranks. That of another object is rank 0's; an object that
    differs is also among the trees of the other ranks. The result is the same on every rank, except
    that rank 0 alone gets whole trees: the other ranks get the shapes and dtypes of the tensors.

    Ranks exchange digests first, and the descriptions only if the digests differ. They differ under
    FSDP1, because a rank does not describe parameters of which it holds no element.

    Raises RanksDisagreeError naming objects and tensors that some ranks lack.
    """
    if ranks.size == 1:
        return local.items, [local.trees]
    digests = {name: _digest_of(description) for name, description in local.items.items()}
    labels = [f"{item}: {name}" if item else name for item, name in keys]
    names_digest = _digest_of(labels)
    summary = {
        "kinds": {item.name: item.kind for item in items},
        "digests": digests,
        "own": local.trees,
        "names": names_digest,
    }
    agreed = ranks.agree("save_state()", summary, decide=_compare_summaries)
    if not agreed.result["same_names"]:
        name_differing_tensors(ranks, "the tensors of save_state()", names_digest, lambda: labels)
    trees = [value["own"] for value in agreed.values] or values_of_runs(agreed.result["own"])
    differing = agreed.result["differing"]
    if not differing:
        return local.items, trees
    descriptions = {name: local.items.get(name) for name in differing}
    agreed = ranks.agree("the state of save_state()", descriptions, decide=_merge_descriptions)

    # Rank 0 gets the values of all ranks. The others get no values, and take the shapes from "own".
    objects_of_ranks = [_unlike_first(value, agreed.values[0]) for value in agreed.values]
    if not objects_of_ranks:
        objects_of_ranks = values_of_runs(agreed.result["own"])
    all_trees = []
    for rank_trees, differing_objects in zip(trees, objects_of_ranks, strict=True):
        all_trees.append({**rank_trees, **differing_objects})
    merged_items = {**local.items, **agreed.result["items"]}
    if ranks.is_main:
        # The result has the shapes of rank 0's objects. Rank 0 itself stores the whole description.
        for name, description in agreed.result["items"].items():
            if "leaves" in description:
                merged_items[name] = local.items[name]

    return merged_items, all_trees


def _digest_of(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr(value).encode())


def _compare_summaries(values: Values) -> Document:
    """Return the names of the items whose descriptions differ, and the shapes of all own trees."""
    check_same_items([value["kinds"] for value in values])
    names: set[str] = set()
    for value in values:
        names.update(value["digests"])
    differing = []
    for name in sorted(names):
        digests = {value["digests"].get(name) for value in values}
        if len(digests) > 1:
            differing.append(name)

    return {
        "differing": differing,
        "same_names": len({value["names"] for value in values}) == 1,
        "own": _shapes_of_trees(value["own"] for value in values),
    }


def _merge_descriptions(values: Values) -> Document:
    """Merge the descriptions of items that differ between ranks.

    Returns under "items" the merged descriptions of optimizers, and for other objects the shapes of
    rank 0's tensors. Returns under "own" the shapes of the objects that differ from rank 0's.
    """
    items: Document = {}
    for name, description in values[0].items():
        if "optimizer" in description:
            descriptions = [value[name]["optimizer"] for value in values]
            items[name] = {"optimizer": merge_descriptions(descriptions)}
        elif "leaves" in description:
            items[name] = {"leaves": description["leaves"]}
    return {
        "items": items,
        "own": _shapes_of_trees(_unlike_first(value, values[0]) for value in values),
    }


def _shapes_of_trees(trees_of_ranks: Iterable[Document]) -> Document:
    """Return the shapes and dtypes in the trees of each rank, as `values_of_runs` reads them.

    Consecutive ranks with the same shapes take one entry.
    """
    shapes = []
    for trees in trees_of_ranks:
        shapes.append({name: {"leaves": tree["leaves"]} for name, tree in trees.items()})
    return runs_of(shapes)


def _unlike_first(descriptions: Mapping[str, Any], first: Mapping[str, Any]) -> Document:
    """Return the descriptions of the objects of a rank that differ from those of rank 0."""
    differing = {}
    for name, description in descriptions.items():
        if "digest" in description and description["digest"] != first[name]["digest"]:
            differing[name] = description
    return differing


def check_same_items(kinds_of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise RanksDisagreeError for objects that some ranks lack, or that differ in kind.

    `kinds_of_ranks` has for each rank the kinds of its items by name.
    """
    names: dict[str, None] = {}
    for kinds in kinds_of_ranks:
        names.update(dict.fromkeys(kinds))
    problems = []
    for name in names:
        ranks_by_kind: dict[str | None, list[int]] = {}
        for rank, kinds in enumerate(kinds_of_ranks):
            ranks_by_kind.setdefault(kinds.get(name), []).append(rank)
        if len(ranks_by_kind) > 1:
            kinds_in_words = [
                f"{kind or 'absent'} on rank(s) {rank_numbers(ranks)}"
                for kind, ranks in ranks_by_kind.items()
            ]
            problems.append(f"{name}: {', '.join(kinds_in_words)}")

    if problems:
        raise RanksDisagreeError(
            f"{listing(problems)}; register the same objects on every rank, not under `if "
            "is_main_process`"
        )
