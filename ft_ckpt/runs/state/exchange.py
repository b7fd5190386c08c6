"""The facts of a rank's training state, and their exchange between ranks.

State that is equal on all ranks (optimizer moments, schedulers) is stored once, state of each rank
(random numbers, data position, an object that differs) once per rank.
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
    """This rank's state: facts that all ranks need to lay out files, and the tensors."""

    items: Document  # facts by item
    trees: Document  # facts of the trees that each rank stores for itself, by name
    leaves: Mapping[str, Sequence[Tensor]]  # by item or tree


def local_state(
    items: Sequence[Item],
    sources: Mapping[Key, Source],
    rank_trees: Mapping[str, Any],
    digest: bool = True,
) -> LocalState:
    """Return this rank's part of the state, without copying tensors.

    `rank_trees` are trees that each rank stores for itself. With `digest`, digests are added by
    which ranks compare their objects. Raises SelectionError naming state that cannot be saved.
    """
    facts: Document = {}
    trees: Document = {}
    leaves: dict[str, Sequence[Tensor]] = {}
    for item in items:
        if item.kind == "model":
            facts[item.name] = {"model": True}
        elif item.kind == "object":
            state = item.value.state_dict()
            facts[item.name], leaves[item.name] = flatten_tree(state, item.name, digest)
    labels = labelled_sources(sources)
    for optimizer in optimizers_among(items):
        description = optimizer.kind.describe(optimizer.optimizer, labels)
        facts[optimizer.name] = {"optimizer": description}
    for name, tree in rank_trees.items():
        trees[name], leaves[name] = flatten_tree(tree, name, False)
    return LocalState(facts, trees, leaves)


def exchange_facts(
    local: LocalState, items: Sequence[Item], ranks: Ranks, keys: Iterable[Key]
) -> tuple[Document, Sequence[Document]]:
    """Exchange the facts of all ranks, which have all the tensors `keys`.

    Collective: call it on every rank. Returns facts by item (of an optimizer merged from all ranks,
    of an object rank 0's) and each rank's own trees in rank order: the same on every rank, except
    that only rank 0 has the trees. Digests go first; facts are sent only if ranks differ, as under
    FSDP1, where a rank has no facts of parameters that it holds no part of. Of a rank's own trees,
    rank 0 gets all, other ranks only shapes and dtypes.
    """
    if ranks.size == 1:
        return local.items, [local.trees]
    digests = {name: _digest_of(facts) for name, facts in local.items.items()}
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
    facts = {name: local.items.get(name) for name in differing}
    agreed = ranks.agree("the state of save_state()", facts, decide=_merge_facts)
    # on rank 0; the others have the shapes alone
    further = [_unlike_first(value, agreed.values[0]) for value in agreed.values]
    further = further or values_of_runs(agreed.result["own"])
    all_trees = []
    for rank_trees, differing_objects in zip(trees, further, strict=True):
        all_trees.append({**rank_trees, **differing_objects})
    merged = {**local.items, **agreed.result["items"]}
    if ranks.is_main:
        for name, fact in agreed.result["items"].items():
            if "leaves" in fact:
                merged[name] = local.items[name]
    return merged, all_trees


def _digest_of(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr(value).encode())


def _compare_summaries(values: Values) -> Document:
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


def _merge_facts(values: Values) -> Document:
    """Merge the facts of items that differ between ranks.

    Descriptions of optimizers are merged. Other objects have rank 0's facts, and the shapes of the
    other ranks.
    """
    items: Document = {}
    for name, fact in values[0].items():
        if "optimizer" in fact:
            descriptions = [value[name]["optimizer"] for value in values]
            items[name] = {"optimizer": merge_descriptions(descriptions)}
        elif "leaves" in fact:
            items[name] = {"leaves": fact["leaves"]}
    return {
        "items": items,
        "own": _shapes_of_trees(_unlike_first(value, values[0]) for value in values),
    }


def _shapes_of_trees(trees_of_ranks: Iterable[Document]) -> Document:
    """Return shapes and dtypes of each rank's own tensors, for `values_of_runs`."""
    return runs_of([_shapes_of(trees) for trees in trees_of_ranks])


def _shapes_of(trees: Document) -> Document:
    return {name: {"leaves": fact["leaves"]} for name, fact in trees.items()}


def _unlike_first(facts: Mapping[str, Any], first: Mapping[str, Any]) -> Document:
    """Return the objects of a rank that differ from rank 0's."""
    return {
        name: fact
        for name, fact in facts.items()
        if "digest" in fact and fact["digest"] != first[name]["digest"]
    }


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
            facts = [
                f"{kind or 'absent'} on rank(s) {rank_numbers(ranks)}"
                for kind, ranks in ranks_by_kind.items()
            ]
            problems.append(f"{name}: {', '.join(facts)}")
    if problems:
        raise RanksDisagreeError(
            f"{listing(problems)}; register the same objects on every rank, not under `if "
            "is_main_process`"
        )
