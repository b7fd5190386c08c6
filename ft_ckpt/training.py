"""What a run needs beside its weights to go on as if it had not stopped: the state of its objects, gathered by name.

An **item** is one such object. What is alike on all ranks (optimizer moments, schedulers) is stored once; what each
rank has of its own (random numbers, place in the data, an object that differs) once for each rank. All tensors become
entries of one more part of the checkpoint, and go the way weights go; the rest is one JSON document.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ft_ckpt import optimizers, zero_optimizer
from ft_ckpt.engines import Source, sources
from ft_ckpt.errors import RanksDisagreeError, SelectionError, listing
from ft_ckpt.formats import safetensors
from ft_ckpt.holdings import Holding, dtensor_holding, elsewhere, held_by, is_dtensor
from ft_ckpt.ranks import Ranks
from ft_ckpt.select import Entry, Part
from ft_ckpt.tree import PLAIN, Leaf, flatten
from ft_ckpt.tree_json import encode
from ft_ckpt.values import dtype_name, dtype_of
from ft_ckpt.verdicts import numbers

FOLDER, FILE, DOCUMENT_NAME = "state", "training", "training.json"
DOCUMENT_VERSION = 1
ENGINE = "engine"  # the item of DeepSpeed's counters
Document = dict[str, Any]
_LEAVES = frozenset({*PLAIN, DTensor})


@dataclass(frozen=True, eq=False)
class Item:
    """One object whose state a run needs; `kind` says how it is asked: "optimizer", "model" or "object"."""

    name: str
    kind: str
    value: Any


@dataclass(frozen=True, eq=False)
class Local:
    """What this rank has: facts that every rank must know before anything is laid out, and the tensors behind them."""

    facts: Document
    leaves: Mapping[str, Sequence[Tensor]]  # by item: of the shared tree or of this rank's own


@dataclass(frozen=True, eq=False)
class State:
    """The training state of all ranks, ready to be stored."""

    entries: tuple[Entry, ...]
    document: Document


@dataclass(frozen=True, eq=False)
class _Counters:
    """DeepSpeed's own counts of steps, as an object with state."""

    engine: Any

    def state_dict(self) -> dict[str, int]:
        return zero_optimizer.engine_counters(self.engine)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        zero_optimizer.restore_engine_counters(self.engine, state)


def items_of(accelerator: Any, registered: Mapping[str, Any]) -> list[Item]:
    """The objects Accelerate prepared, and those registered by name (the model of that name is the weights').

    Raises SelectionError for a registered object that is neither a module, an optimizer nor has a state dict.
    """
    found = [(_numbered("model", i), m) for i, m in enumerate(getattr(accelerator, "_models", ())) if i]
    found += [(_numbered("optimizer", i), o) for i, o in enumerate(getattr(accelerator, "_optimizers", ()))]
    found += [(_numbered("scheduler", i), s) for i, s in enumerate(getattr(accelerator, "_schedulers", ()))]
    if getattr(accelerator, "deepspeed_engine_wrapped", None) is not None:
        found.append((ENGINE, _Counters(accelerator.deepspeed_engine_wrapped.engine)))
    if getattr(accelerator, "scaler", None) is not None:
        found.append(("scaler", accelerator.scaler))
    found += [(_numbered("custom", i), o) for i, o in enumerate(getattr(accelerator, "_custom_objects", ()))]
    prepared = {id(value) for _, value in found}
    found += [(n, v) for n, v in registered.items() if n != "model" and id(v) not in prepared]
    return [Item(name, _kind(name, value), value) for name, value in found]


def check_same(everyone: Sequence[Mapping[str, str]]) -> None:
    """Raise RanksDisagreeError naming objects that not all ranks have, or that are of another kind on some.

    `everyone`: each rank's items, their kinds by name.
    """
    problems = []
    for name in dict.fromkeys(name for one in everyone for name in one):
        kinds: dict[str | None, list[int]] = {}
        for rank, one in enumerate(everyone):
            kinds.setdefault(one.get(name), []).append(rank)
        if len(kinds) > 1:
            told = [f"{kind or 'absent'} on rank(s) {numbers(ranks)}" for kind, ranks in kinds.items()]
            problems.append(f"{name}: {', '.join(told)}")
    if problems:
        raise RanksDisagreeError(
            f"{listing(problems)}; register the same objects on every rank, not under `if is_main_process`"
        )


def manner(item: Item) -> Any:
    """The functions for the item's kind of optimizer: `optimizers`, or `zero_optimizer`, which has the same."""
    return zero_optimizer if zero_optimizer.is_zero(item.value) else optimizers


def known_sources(model: nn.Module, items: Sequence[Item]) -> dict[str, Source]:
    """The tensors of the run's models by name; those of a second model begin with its item's name and a colon."""
    found = sources(model)
    for item in items:
        if item.kind == "model":
            more = sources(item.value)
            found.update({f"{item.name}:{n}": replace(s, name=f"{item.name}:{n}") for n, s in more.items()})
    return found


def look(items: Sequence[Item], found: Mapping[str, Source], own: Mapping[str, Any]) -> Local:
    """This rank's part of the state; `own` are objects (trees) that each rank has for itself. Moves nothing.

    Raises SelectionError naming what cannot be kept.
    """
    return with_optimizers(look_beside(items, own), descriptions(items, found))


def look_beside(items: Sequence[Item], own: Mapping[str, Any], digest: bool = True) -> Local:
    """As `look`, without optimizers; `digest` where several ranks have to compare what they have."""
    facts: Document = {"items": {}, "own": {}}
    leaves: dict[str, Sequence[Tensor]] = {}
    for item in items:
        if item.kind == "model":
            facts["items"][item.name] = {"model": True}
        elif item.kind == "object":
            facts["items"][item.name], leaves[item.name] = _tree(item.value.state_dict(), item.name, digest)
    for name, value in own.items():
        facts["own"][name], leaves[name] = _tree(value, name, False)
    return Local(facts, leaves)


def descriptions(items: Sequence[Item], found: Mapping[str, Source]) -> dict[str, optimizers.Description]:
    """What there is of each optimizer, by item. Raises SelectionError naming what cannot be kept."""
    chosen = [item for item in items if item.kind == "optimizer"]
    return {item.name: manner(item).describe(optimizers.inner(item.value), found) for item in chosen}


def with_optimizers(local: Local, described: Mapping[str, optimizers.Description]) -> Local:
    """`local` with the facts of the optimizers, by item."""
    facts = {name: {"optimizer": description} for name, description in described.items()}
    return replace(local, facts={**local.facts, "items": {**local.facts["items"], **facts}})


def exchange(local: Local, ranks: Ranks, error: BaseException | None = None) -> list[Document]:
    """The facts of every rank, in rank order, on every rank. Collective.

    Digests first: the facts themselves travel only where ranks differ, as under FSDP1, where a rank knows nothing of
    parameters it holds no part of.
    """
    if ranks.size == 1:
        ranks.agree("save_state()", error=error)
        return [local.facts]
    digests = {name: xxhash.xxh3_128_hexdigest(repr(fact).encode()) for name, fact in local.facts["items"].items()}
    answers = ranks.agree("save_state()", {"digests": digests, "own": local.facts["own"]}, error)
    names = {name for answer in answers for name in answer["digests"]}
    odd = [n for n in sorted(names) if len({answer["digests"].get(n) for answer in answers}) > 1]
    if odd:
        full = {name: local.facts["items"].get(name) for name in odd}
        more = ranks.agree("the state of save_state()", full)
    else:
        more = [{} for _ in answers]
    return [
        {"own": answer["own"], "items": {**local.facts["items"], **facts}}
        for answer, facts in zip(answers, more, strict=True)
    ]


def assemble(
    local: Local, everyone: Sequence[Document], items: Sequence[Item], found: Mapping[str, Source], rank: int
) -> State:
    """The whole state, the same on every rank, from the facts of `everyone` in rank order."""
    entries: list[Entry] = []
    for item in items:
        entries += _of_item(item, local, [facts["items"].get(item.name) for facts in everyone], found, rank)
    for number, trees in enumerate(_owned(everyone)):
        for name, fact in trees.items():
            mine = local.leaves[name] if number == rank else None
            entries += _own_entries(f"rank-{number}/{name}", number, fact["leaves"], mine)
    return State(tuple(entries), documented(everyone, items))


def documented(everyone: Sequence[Document], items: Sequence[Item]) -> Document:
    """All of the state that is no tensor, from the facts of `everyone` in rank order."""
    about = {item.name: _about(item, [facts["items"].get(item.name) for facts in everyone]) for item in items}
    ranks = [{name: _placed(fact) for name, fact in trees.items()} for trees in _owned(everyone)]
    return {"version": DOCUMENT_VERSION, "items": about, "ranks": ranks}


def state_part(state: State, parts: Sequence[Part], found: Mapping[str, Source], frozen: bool) -> Part:
    """The part that holds `state`, and exact copies of live tensors that the other `parts` have changed or left out.

    Frozen parameters are left out with them unless `frozen`: an adapter's base is no part of its run.
    """
    exact = {
        entry.source.identity: [part.path, entry.name]
        for part in parts
        for entry in part.entries
        if entry.source is not None and entry.dtype == entry.source.dtype
    }
    entries, weights = list(state.entries), {}
    for name, source in found.items():
        if ":" in name:
            continue
        if source.identity in exact:
            weights[name] = exact[source.identity]
        elif frozen or source.trainable or not isinstance(source.live, nn.Parameter):
            exact[source.identity] = weights[name] = [FOLDER, f"weights/{name}"]
            entries.append(_entry(replace(source, name=f"weights/{name}")))
    state.document["weights"] = weights
    return Part(FOLDER, FOLDER, "state", None, tuple(entries), FILE)


def source_of(name: str, tensor: Tensor) -> Source:
    """The source of a tensor that is alike on all ranks, or cut over them by torch itself."""
    engine, holding = _held(tensor)
    return Source(name, name, tuple(tensor.shape), tensor.dtype, False, tensor, id(tensor), engine, holding)


def tensors_of(value: Any, name: str = "state") -> list[Tensor]:
    """The tensors in a tree of plain values, in the order in which they are stored."""
    return [_tensor(leaf) for leaf in flatten(value, safetensors.NAMES, name, _LEAVES)[1]]


def _numbered(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index}"


def _kind(name: str, value: Any) -> str:
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(optimizers.inner(value), torch.optim.Optimizer) or zero_optimizer.is_zero(value):
        return "optimizer"
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "object"
    raise SelectionError(
        f"{name}: a {type(value).__name__} has no state_dict() and load_state_dict(); give it both, or leave it out"
    )


def _tree(value: Any, name: str, digest: bool) -> tuple[Document, list[Tensor]]:
    """The facts of a tree, and its tensors."""
    node, leaves = flatten(value, safetensors.NAMES, name, _LEAVES)
    tensors = [_tensor(leaf) for leaf in leaves]
    cut = [is_dtensor(tensor) for tensor in tensors]
    facts: Document = {
        "tree": encode(node),
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


def _tensor(leaf: Leaf) -> Tensor:
    return torch.from_numpy(leaf.data) if leaf.is_array else leaf.data.detach()


def _about(item: Item, facts: Sequence[Any]) -> Document:
    """What the document says of one item."""
    if item.kind == "optimizer":
        return {"optimizer": optimizers.merged([fact["optimizer"] for fact in facts])}
    return {"model": True} if item.kind == "model" else _placed(facts[0])


def _placed(fact: Document) -> Document:
    return {"tree": fact["tree"], "tensors": len(fact["leaves"])}


def _owned(everyone: Sequence[Document]) -> list[Document]:
    """The trees that each rank has of its own: those that are, and items that differ from rank 0's."""
    first = everyone[0]["items"]
    return [
        facts["own"]
        | {
            name: fact
            for name, fact in facts["items"].items()
            if number and "digest" in fact and fact["digest"] != first[name]["digest"]
        }
        for number, facts in enumerate(everyone)
    ]


def _of_item(item: Item, local: Local, facts: Sequence[Any], found: Mapping[str, Source], rank: int) -> list[Entry]:
    """The entries of the tensors that an item has once for all ranks."""
    if item.kind == "optimizer":
        description = optimizers.merged([fact["optimizer"] for fact in facts])
        return _entries(item.name, manner(item).captured(optimizers.inner(item.value), description, found))
    if item.kind == "model":
        prefix = f"{item.name}:"
        tensors = {n[len(prefix) :]: found[n] for n in found if n.startswith(prefix)}
        kept = {source.identity: name for name, source in tensors.items()}  # tied names once
        return _entries(item.name, {name: tensors[name] for name in kept.values()})
    entries = []
    for index, leaf in enumerate(facts[0]["leaves"]):
        tensor = local.leaves[item.name][index] if leaf["cut"] or rank == 0 else None
        engine, holding = ("plain", elsewhere(tuple(leaf["shape"]))) if tensor is None else _held(tensor)
        entries.append(_entry(_made(f"{item.name}/{index}", leaf, holding, tensor, engine)))
    return entries


def _own_entries(prefix: str, owner: int, leaves: Sequence[Document], mine: Sequence[Tensor] | None) -> Iterator[Entry]:
    """Entries of tensors that only the rank `owner` has."""
    for index, leaf in enumerate(leaves):
        tensor = mine[index] if mine is not None else None
        yield _entry(_made(f"{prefix}/{index}", leaf, held_by(owner, tuple(leaf["shape"]), tensor), tensor, "plain"))


def _held(tensor: Tensor) -> tuple[str, Holding]:
    return dtensor_holding(tensor) if is_dtensor(tensor) else ("plain", held_by(0, tuple(tensor.shape), tensor))


def _made(name: str, leaf: Document, holding: Holding, live: Any, engine: str) -> Source:
    return Source(name, name, tuple(leaf["shape"]), dtype_of(leaf["dtype"]), False, live, id(live), engine, holding)


def _entries(prefix: str, tensors: Mapping[str, Source]) -> list[Entry]:
    return [_entry(replace(source, name=f"{prefix}/{name}")) for name, source in tensors.items()]


def _entry(source: Source) -> Entry:
    return Entry(source.name, source.shape, source.dtype, source.dtype, source)
