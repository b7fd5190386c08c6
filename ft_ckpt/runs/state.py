"""The training state of a run as entries and a JSON document, and the checks of a document that is
read.

State that is equal on all ranks (optimizer moments, schedulers) is stored once, state of each rank
(random numbers, data position, an object that differs) once per rank. All tensors become entries of
one more part of the checkpoint and are written like weights; the rest is one JSON document.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from ft_ckpt.checkpoint import Manifest, OpenCheckpoint
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    LoadError,
    SelectionError,
    damaged_input,
    listing,
    shown,
)
from ft_ckpt.formats import (
    NAMES,
    Leaf,
    ListedFile,
    Spec,
    TensorFile,
    checked_sizes,
    decode_node,
    decode_value,
    dtype_name,
    dtype_of,
    encode_node,
    flatten,
    format_named,
    leaf_numbers,
    load_object,
    unflatten,
)
from ft_ckpt.model import Entry, Part, unchanged_entry
from ft_ckpt.ranks import (
    ModelTensors,
    OwnedSharding,
    Ranks,
    Source,
    Values,
    WantedTensor,
    fill_tensor,
    held_source,
    is_distributed,
    layouts_of,
    name_differing_tensors,
    runs_of,
    source_of_tensor,
    try_action,
    values_of_runs,
)
from ft_ckpt.runs.items import (
    Item,
    Key,
    check_same_items,
    labelled_sources,
    model_sources,
    optimizer_of,
    optimizers_among,
    tied_names,
    walk_run,
)
from ft_ckpt.runs.optimizer_values import LEAVES, decode_setting, is_dense, tensors_of_entry
from ft_ckpt.runs.optimizers import Description
from ft_ckpt.saving import STATE_DOCUMENT, Differences, ExtraState
from ft_ckpt.schedule import begin_history
from ft_ckpt.schema import Count, as_record
from ft_ckpt.storage import ListedStore, Store


def merge_descriptions(descriptions: Sequence[Description]) -> Description:
    """Merge the descriptions of all ranks: a rank without elements of a parameter (FSDP1) may have
    no state for it.

    Rank 0's group settings and numbers are kept. "differing" names those that differ, with the
    ranks.
    """
    if all(description is descriptions[0] for description in descriptions):
        return descriptions[0]
    differing = [
        rank
        for rank, description in enumerate(descriptions)
        if description.get("beside") != descriptions[0].get("beside")
    ]
    if differing:
        raise SelectionError(
            f"{descriptions[0]['class']}: its state beside that of the parameters differs on rank "
            f"{differing[0]} from rank 0's: it cannot be saved; make it the same, or save without "
            "the optimizer's state"
        )
    state: dict[str, dict[str, Any]] = {}
    for rank, description in enumerate(descriptions):
        for name, entries in description["state"].items():
            merged = state.setdefault(name, {})
            _refuse_differing_containers(name, merged, entries, rank)
            for key, entry in entries.items():
                if key not in merged:
                    merged[key] = {**entry, "rank": rank} if rank else entry
    together = {**descriptions[0], "state": state}
    by_setting: dict[str, list[int]] = {}
    for rank, description in enumerate(descriptions):
        for setting in _differing_settings(description, together):
            by_setting.setdefault(setting, []).append(rank)
    return {**together, "differing": by_setting} if by_setting else together


def _refuse_differing_containers(
    name: str, merged: Description, entries: Description, rank: int
) -> None:
    """Raise SelectionError for a container of the state that has other tensors on `rank` than on
    earlier ranks.
    """
    for key, entry in entries.items():
        first: Description = merged.get(key) or entry
        if entry.get("leaves") != first.get("leaves"):
            raise SelectionError(
                f"{name}: {key}: the container has other tensors on rank {rank} than on earlier "
                "ranks: it cannot be saved; make it the same, or save without the optimizer's state"
            )


def differing_settings(document: Mapping[str, Any]) -> Differences:
    """The settings and numbers of optimizers that differ between ranks in the state of a run."""
    differing = {}
    for item, described in document.get("items", {}).items():
        for setting, ranks in settings_by_rank(described.get("optimizer", {})).items():
            differing[f"{item}: {setting}"] = dict.fromkeys(ranks, "")
    return differing


def settings_by_rank(description: Description) -> Mapping[str, Sequence[int]]:
    """The settings and numbers that differ from rank 0's, by name, and the ranks that differ."""
    by_setting: Mapping[str, Sequence[int]] = description.get("differing", {})
    return by_setting


def _differing_settings(description: Description, together: Description) -> list[str]:
    """The settings and numbers of one rank that differ from the merged ones."""
    differing = []
    groups = zip(description["groups"], together["groups"], strict=False)
    for number, (group, merged) in enumerate(groups):
        for key, value in group["values"].items():
            if value != merged["values"].get(key):
                differing.append(f"{key} of group {number}")
    for name, entries in description["state"].items():
        for key, entry in entries.items():
            merged = together["state"][name][key]
            if any(entry.get(form) != merged.get(form) for form in ("value", "tree")):
                differing.append(f"{name}: {key}")
    return differing


FOLDER, FILE = "state", "training"
DOCUMENT_VERSION = 1
Document = dict[str, Any]


@dataclass(frozen=True, eq=False)
class LocalState:
    """This rank's state: facts that all ranks need to lay out files, and the tensors."""

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
    """This rank's part of the state; `own` are trees that each rank stores for itself. Moves
    nothing.

    `digest`: add the digests by which ranks compare their objects. Raises SelectionError naming
    state that cannot be saved.
    """
    facts: Document = {"items": {}, "own": {}}
    leaves: dict[str, Sequence[Tensor]] = {}
    for item in items:
        if item.kind == "model":
            facts["items"][item.name] = {"model": True}
        elif item.kind == "object":
            facts["items"][item.name], leaves[item.name] = flatten_tree(
                item.value.state_dict(), item.name, digest
            )
    known = labelled_sources(found)
    for item, module, optimizer in optimizers_among(items):
        facts["items"][item.name] = {"optimizer": module.describe(optimizer, known)}
    for name, value in own.items():
        facts["own"][name], leaves[name] = flatten_tree(value, name, False)
    return LocalState(facts, leaves)


def exchange_facts(
    local: LocalState, objects: Sequence[Item], ranks: Ranks, found: Iterable[Key]
) -> tuple[Document, Sequence[Document]]:
    """Exchange the facts of all ranks, which have all the tensors `found`. Collective.

    Returns facts by item (of an optimizer merged from all ranks, of an object rank 0's) and each
    rank's own trees in rank order: the same on every rank, except that only rank 0 has the trees.

    Digests go first; facts are sent only if ranks differ, as under FSDP1, where a rank has no facts
    of parameters that it holds no part of. Of a rank's own trees, rank 0 gets all, other ranks only
    shapes and dtypes.
    """
    items, own = local.facts["items"], local.facts["own"]
    if ranks.size == 1:
        return items, [own]
    digests = {name: xxhash.xxh3_128_hexdigest(repr(fact).encode()) for name, fact in items.items()}
    labels = [f"{item}: {name}" if item else name for item, name in found]
    names = xxhash.xxh3_128_hexdigest(repr(labels).encode())
    mine = {
        "kinds": {item.name: item.kind for item in objects},
        "digests": digests,
        "own": own,
        "names": names,
    }
    agreed = ranks.agree("save_state()", mine, decide=_compare_facts)
    if not agreed.result["same_names"]:
        name_differing_tensors(ranks, "the tensors of save_state()", names, lambda: labels)
    trees = [value["own"] for value in agreed.values] or values_of_runs(agreed.result["own"])
    differing = agreed.result["differing"]
    if not differing:
        return items, trees
    facts = {name: items.get(name) for name in differing}
    agreed = ranks.agree("the state of save_state()", facts, decide=_merge_facts)
    further = [_unlike_leader(value, agreed.values[0]) for value in agreed.values]
    together = [
        {**one, **more}
        for one, more in zip(trees, further or values_of_runs(agreed.result["own"]), strict=True)
    ]
    merged = agreed.result["items"]
    own_trees = {
        name: items[name] for name, fact in merged.items() if ranks.is_main and "leaves" in fact
    }
    return {**items, **merged, **own_trees}, together


def looks_of_trees(trees: Iterable[Document]) -> Document:
    """Shapes and dtypes of each rank's own tensors, for `values_of_runs`."""
    return runs_of(
        [{name: {"leaves": fact["leaves"]} for name, fact in one.items()} for one in trees]
    )


def _compare_facts(values: Values) -> Document:
    check_same_items([value["kinds"] for value in values])
    names = dict.fromkeys(name for value in values for name in value["digests"])
    differing = [
        name for name in sorted(names) if len({value["digests"].get(name) for value in values}) > 1
    ]
    same_names = len({value["names"] for value in values}) == 1
    return {
        "differing": differing,
        "same_names": same_names,
        "own": looks_of_trees(value["own"] for value in values),
    }


def _merge_facts(values: Values) -> Document:
    """The facts of items that differ: merged for optimizers, for objects rank 0's and the shapes of
    the others'.
    """
    items: Document = {}
    for name, fact in values[0].items():
        if "optimizer" in fact:
            items[name] = {
                "optimizer": merge_descriptions([value[name]["optimizer"] for value in values])
            }
        elif "leaves" in fact:
            items[name] = {"leaves": fact["leaves"]}
    return {
        "items": items,
        "own": looks_of_trees(_unlike_leader(value, values[0]) for value in values),
    }


def _unlike_leader(facts: Mapping[str, Any], first: Mapping[str, Any]) -> Document:
    """The objects of a rank that differ from rank 0's."""
    return {
        n: fact
        for n, fact in facts.items()
        if "digest" in fact and fact["digest"] != first[n]["digest"]
    }


def assemble_state(
    local: LocalState,
    facts: Document,
    trees: Sequence[Document],
    items: Sequence[Item],
    found: Mapping[Key, Source],
    rank: int,
) -> TrainingState:
    """The state of all ranks from their exchanged facts: the same entries on all ranks, the
    document on rank 0.
    """
    entries: list[Entry] = []
    for item in items:
        entries += _item_entries(item, local, facts[item.name], found, rank)
    for owner, own in enumerate(trees):
        for name, fact in own.items():
            for index, leaf in enumerate(fact["leaves"]):
                tensor = local.leaves[name][index] if owner == rank else None
                entries.append(
                    _entry_of(_leaf_source(f"rank-{owner}/{name}/{index}", leaf, tensor, owner))
                )
    document = {
        "version": DOCUMENT_VERSION,
        "items": {
            item.name: _summarize_tree(facts[item.name])
            if item.kind == "object"
            else facts[item.name]
            for item in items
        },
        "ranks": [{name: _summarize_tree(fact) for name, fact in own.items()} for own in trees],
    }
    return TrainingState(tuple(entries), document)


def state_part(state: TrainingState, parts: Sequence[Part], found: Mapping[str, Source]) -> Part:
    """The part with `state`, and exact copies of live tensors that the other `parts` convert or
    leave out.

    The frozen parameters of an adapter's base are not copied: they do not belong to its run. Frozen
    parameters of the adapter itself are, which PEFT omits or stores in another form: another
    process may initialize them differently.
    """
    exact = {
        entry.source.key: [part.path, entry.name]
        for part in parts
        for entry in part.entries
        if entry.source is not None and entry.dtype == entry.source.dtype
    }
    left = [source for part in parts if part.kind == "adapter" for source in part.base.values()]
    bases = {source.key for source in left if source.is_parameter}
    entries, weights = list(state.entries), {}
    for name, source in found.items():
        if source.is_added:
            continue  # stored with the extra state
        if source.key in exact:
            weights[name] = exact[source.key]
        elif source.key not in bases or source.trainable:
            exact[source.key] = weights[name] = [FOLDER, f"weights/{name}"]
            entries.append(_entry_of(replace(source, name=f"weights/{name}")))
    state.document["weights"] = weights
    return Part(FOLDER, FOLDER, "state", None, tuple(entries), FILE)


def source_of(name: str, tensor: Tensor) -> Source:
    """The source of a tensor that is equal on all ranks, or a DTensor."""
    made = replace(source_of_tensor(name, name, tensor), trainable=False)
    return made if is_distributed(tensor) else replace(made, sharding=OwnedSharding(made.shape, 0))


def flatten_tree(value: Any, name: str, digest: bool) -> tuple[Document, list[Tensor]]:
    """The facts of a tree, and its tensors."""
    node, leaves = flatten(value, NAMES, name, LEAVES)
    tensors = [_live_leaf(leaf) for leaf in leaves]
    cut = [is_distributed(tensor) for tensor in tensors]
    facts: Document = {
        "tree": encode_node(node),
        "leaves": [
            {"shape": list(t.shape), "dtype": dtype_name(t.dtype), "cut": c}
            for t, c in zip(tensors, cut, strict=True)
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


def _summarize_tree(fact: Document) -> Document:
    return {"tree": fact.get("tree"), "tensors": len(fact["leaves"])}


def _item_entries(
    item: Item, local: LocalState, fact: Document, found: Mapping[Key, Source], rank: int
) -> list[Entry]:
    """The entries of an item's tensors that are stored once for all ranks."""
    if item.kind == "optimizer":
        module, optimizer = optimizer_of(item)
        return _prefixed_entries(
            item.name, module.state_tensors(optimizer, fact["optimizer"], labelled_sources(found))
        )
    if item.kind == "model":
        tensors = model_sources(found, item.name)
        return _prefixed_entries(
            item.name, {names[0]: tensors[names[0]] for names in tied_names(tensors)}
        )
    entries = []
    for index, leaf in enumerate(fact["leaves"]):
        tensor = local.leaves[item.name][index] if leaf["cut"] or rank == 0 else None
        name = f"{item.name}/{index}"
        if tensor is not None and is_distributed(tensor):
            entries.append(_entry_of(source_of(name, tensor)))
        else:
            entries.append(_entry_of(_leaf_source(name, leaf, tensor, 0)))
    return entries


def _leaf_source(name: str, leaf: Document, tensor: Tensor | None, owner: int) -> Source:
    """The source of a tensor in a tree, stored by the rank `owner`; `tensor` is this rank's, or
    None.
    """
    shape, dtype = tuple(leaf["shape"]), dtype_of(leaf["dtype"])
    return held_source(
        name, name, shape, "plain", OwnedSharding(shape, owner), dtype, tensor
    ).holding(tensor)


def _prefixed_entries(prefix: str, tensors: Mapping[str, Source]) -> list[Entry]:
    return [_entry_of(replace(source, name=f"{prefix}/{name}")) for name, source in tensors.items()]


def _entry_of(source: Source) -> Entry:
    return unchanged_entry(source.name, source)


FLAGS = "requires_grad"  # key in the document
_TRAINED, _FROZEN = "trained", "frozen"


def gradient_flags(found: Mapping[Key, Source]) -> Document:
    """The labels of parameters that require a gradient, or of those that do not, whichever are
    fewer.
    """
    flags = _flags_by_label(found)
    trained, frozen = [
        [label for label, requires_grad in flags.items() if requires_grad is flag]
        for flag in (True, False)
    ]
    return {_TRAINED: trained} if len(trained) < len(frozen) else {_FROZEN: frozen}


def changed_flags(document: Document, found: Mapping[Key, Source]) -> list[str]:
    """A sentence on parameters whose `requires_grad` has changed since `document` was saved, for
    each direction.

    Empty for documents of earlier versions without the flags.
    """
    flags: Document | None = document.get(FLAGS)
    if flags is None:
        return []
    listed = frozenset(flags[_TRAINED] if _TRAINED in flags else flags[_FROZEN])
    changed: dict[bool, list[str]] = {True: [], False: []}
    for label, flag in _flags_by_label(found).items():
        if ((label in listed) is (_TRAINED in flags)) is not flag:
            changed[flag].append(label)
    words = {
        False: f"{_TRAINED} when it was saved, {_FROZEN} now",
        True: f"{_FROZEN} when it was saved, {_TRAINED} now",
    }
    return [
        f"{listing(labels, ', ')}: {words[flag]} (requires_grad)"
        for flag, labels in changed.items()
        if labels
    ]


def _flags_by_label(found: Mapping[Key, Source]) -> dict[str, bool]:
    """`requires_grad` of the parameters themselves, whether an optimizer has trained them or
    not.
    """
    parameters = {
        f"{item}: {name}" if item else name: source
        for (item, name), source in found.items()
        if source.is_parameter
    }
    layouts = layouts_of(source.live for source in parameters.values())
    return {label: layout.trainable for label, layout in zip(parameters, layouts, strict=True)}


_MASTER = "master"
_BAD = (
    CheckpointError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# shape and dtype of a tensor; None: not checked
_Stored = tuple[tuple[int, ...] | None, str | None]


@dataclass(frozen=True)
class _Progress:
    """Where the run was."""

    step: Count
    epoch: Count
    batch: Count
    samples: Count


@dataclass(frozen=True)
class _KnownDocument:
    """The fields of the document. Earlier versions lack those with a default."""

    version: int
    weights: Mapping[str, tuple[str, ...]]
    items: Mapping[str, Mapping[str, Any]]
    ranks: tuple[Mapping[str, Mapping[str, Any]], ...]
    progress: _Progress
    history: Mapping[str, Any]
    run_id: str
    fingerprint: Mapping[str, Any]
    keep: Mapping[str, Any] | None = None
    ancestors: tuple[str, ...] = ()
    signatures: Mapping[str, str] = field(default_factory=dict)
    requires_grad: Mapping[str, tuple[str, ...]] | None = None
    # of 0.3 and earlier
    apart: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    let_go: tuple[str, ...] = ()
    # digests of models that had not changed
    watched: Mapping[str, str] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()  # names of moving state that is not in the checkpoint
    published: str | None = None


def read_document(store: Store, manifest: Manifest) -> Document:
    """The training state's document of the checkpoint in `store`: its known fields.

    Raises CorruptError when it cannot be read, naming every value that is of another type or out of
    range, and every tensor of the state that it does not refer to.
    """
    file = store.where(STATE_DOCUMENT)
    with damaged_input(f"{file}; resume from another checkpoint"):
        document: Document = json.loads(store.read(STATE_DOCUMENT), parse_constant=_refuse_constant)
        version = document["version"]
        if type(version) is int and version > DOCUMENT_VERSION:
            raise CorruptError(
                f"{file}: training state version {version}, this ft_ckpt reads up to "
                f"{DOCUMENT_VERSION}; upgrade"
            )
        known = as_record(document, _KnownDocument)
        if problems := list(_problems(known, manifest)):
            raise CorruptError(f"{file}: {listing(problems)}; resume from another checkpoint")
    return {
        known_field.name: document[known_field.name]
        for known_field in fields(known)
        if known_field.name in document
    }


def _refuse_constant(name: str) -> Any:
    raise CorruptError(f"{name} is not JSON")


def _problems(known: _KnownDocument, manifest: Manifest) -> Iterator[str]:
    """The problems of a document whose fields have the right types."""
    if known.version < 1:
        yield f"version: {known.version}"
    if not known.ranks:
        yield "ranks: none"
    for name, value, expected in (
        ("progress.step", known.progress.step, manifest.step),
        ("run_id", known.run_id, manifest.run_id),
    ):
        if expected != value:
            yield f"{name}: {value!r}, expected {expected!r} as in the manifest"
    yield from _tried("history", lambda: begin_history(0, 0, 0.0, known.history))
    flags = known.requires_grad  # absent in earlier versions
    if flags is not None and [*flags] not in ([_TRAINED], [_FROZEN]):
        yield (
            f"{FLAGS}: {listing(sorted(flags), ', ') or 'nothing'}, expected {_TRAINED!r} or "
            f"{_FROZEN!r}"
        )
    described = {
        name: entry["optimizer"] for name, entry in known.items.items() if "optimizer" in entry
    }
    for name, description in described.items():
        yield from _tried(f"items.{name}", lambda: _check_optimizer(description, len(known.ranks)))  # noqa: B023 - called at once
    yield from _tried("tensors", lambda: _check_tensors(known, manifest))


def _tried(where: str, check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except _BAD as error:
        yield f"{where}: {error if isinstance(error, CheckpointError) else shown(error)}"


@dataclass(frozen=True)
class _Group:
    params: tuple[str, ...]
    values: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Beside:
    """State of an optimizer beside that of its parameters."""

    device: str
    text: str


_Entries = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by parameter and key


@dataclass(frozen=True)
class _Optimizer:
    """The fields of an optimizer's description."""

    groups: tuple[_Group, ...]
    state: _Entries
    masters: Mapping[str, str] = field(default_factory=dict)
    scaler: Mapping[str, Any] = field(default_factory=dict)
    beside: _Beside | None = None
    differing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def _check_optimizer(described: Any, ranks: int) -> None:
    """Raise one of _BAD for an invalid description."""
    optimizer = as_record(described, _Optimizer)
    as_record(described["class"], str)  # no name of a field
    for group in optimizer.groups:
        for setting in group.values.values():
            decode_setting(setting, "cpu")
    _check_entries(optimizer.state, ranks)
    for dtype in optimizer.masters.values():
        dtype_of(dtype)
    for value in optimizer.scaler.values():
        decode_value(value)
    if optimizer.beside is not None:
        torch.device(optimizer.beside.device)
        load_object(optimizer.beside.text)


def _is_below(number: str, most: int) -> bool:
    return number.isdecimal() and int(number) < most


def _check_entries(state: _Entries, ranks: int) -> None:
    for entries in state.values():
        for key, entry in entries.items():
            if "value" in entry:
                decode_value(entry["value"])
                continue
            tensors = tensors_of_entry(key, dict(entry))
            for label, leaf in tensors:
                dtype_of(leaf["dtype"])
                checked_sizes(leaf["shape"])
                is_placed = type(leaf["host"]) is bool and _is_below(
                    str(leaf.get("rank", 0)), ranks
                )
                if not is_placed or not is_dense(leaf["shape"], leaf.get("stride")):
                    raise CorruptError(f"{label}: {leaf}")
            if "tree" in entry and {*leaf_numbers(decode_node(entry["tree"]))} != {
                *range(len(tensors))
            }:
                raise CorruptError(
                    f"{key}: its tree does not refer to each of its {len(tensors)} tensors"
                )


def _check_tensors(known: _KnownDocument, manifest: Manifest) -> None:
    """Raise CorruptError for references to missing or other tensors, and for tensors without a
    reference.
    """
    specs = {
        (part.path, tensor.name): (tensor.shape, tensor.dtype)
        for part in manifest.parts
        for tensor in part.tensors
    }
    problems = [
        f"weights.{name}: {list(place)} is not a tensor"
        for name, place in known.weights.items()
        if place not in specs
    ]
    wanted = dict(_referred_tensors(known))
    stored = {name: spec for (part, name), spec in specs.items() if part == FOLDER}
    models = tuple(f"{name}/" for name, entry in known.items.items() if entry.get("model") is True)
    for name, (shape, dtype) in wanted.items():
        found = stored.get(name)
        if found is None or shape not in (None, found[0]) or dtype not in (None, found[1]):
            actual = "missing" if found is None else f"{found[1]} {list(found[0])}"
            problems.append(f"{name}: {actual}, expected {dtype or 'a tensor'} {list(shape or ())}")
    problems += [
        f"{name}: nothing refers to it"
        for name in stored
        if name not in wanted and not name.startswith(models)
    ]
    if problems:
        raise CorruptError(listing(problems))


def _referred_tensors(known: _KnownDocument) -> Iterator[tuple[str, _Stored]]:
    """The tensors of the state part that the document refers to, by name, without those of
    models.
    """
    yield from (
        (place[-1], (None, None)) for place in known.weights.values() if place[:1] == (FOLDER,)
    )
    for name, places in known.apart.items():
        yield from ((f"rank-{rank}/{name}", (None, None)) for rank in places)
    for item, entry in known.items.items():
        if "optimizer" in entry:
            described = entry["optimizer"]
            for name, entries in described["state"].items():
                for key, entry in entries.items():
                    for label, leaf in tensors_of_entry(key, entry):
                        yield f"{item}/{name}/{label}", (tuple(leaf["shape"]), leaf["dtype"])
            for name, dtype in described.get("masters", {}).items():
                yield f"{item}/{name}/{_MASTER}", (None, dtype)
        elif entry.get("model") is not True:
            yield from _tensors_of_tree(item, entry)
    for rank, trees in enumerate(known.ranks):
        for name, entry in trees.items():
            yield from _tensors_of_tree(f"rank-{rank}/{name}", entry)


def _tensors_of_tree(name: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, _Stored]]:
    """The tensors of a stored tree.

    Raises CorruptError if it cannot be decoded or their number is wrong.
    """
    numbers = sorted({*leaf_numbers(decode_node(entry["tree"]))})
    if numbers != list(range(len(numbers))) or (type(entry["tensors"]), entry["tensors"]) != (
        int,
        len(numbers),
    ):
        raise CorruptError(
            f"{name}: tensors {numbers}, expected {entry['tensors']!r:.40} from 0 on"
        )
    yield from ((f"{name}/{number}", (None, None)) for number in numbers)


class StoredTensors:
    """The tensor files of one checkpoint, opened when first needed; tensors are found by part
    folder and name.
    """

    def __init__(self, held: OpenCheckpoint) -> None:
        self._held, parts = held, held.manifest.parts
        kinds = {part.kind for part in parts}
        self.is_adapter = "adapter" in kinds and "model" not in kinds  # the base is elsewhere
        self._formats = {part.path: part.format for part in parts}
        self._files = {
            (part.path, tensor.name): tensor.file for part in parts for tensor in part.tensors
        }
        self._open: dict[str, TensorFile] = {}

    def file_of(self, part: str, name: str) -> TensorFile:
        """The file that holds the tensor `name` of the part in folder `part`.

        Raises LoadError when none does.
        """
        place = self._files.get((part, name))
        if place is None:
            raise LoadError(
                f"{name}: not among the tensors of the checkpoint {self._held.location}"
            )
        if place not in self._open:
            store, reader = self._held.store, format_named(self._formats[part])
            open_file = lambda: reader.open_file(store.open(place))  # noqa: E731
            self._open[place] = ListedFile(store.where(place), self._specs[place], open_file)
        return self._open[place]

    @cached_property
    def _specs(self) -> dict[str, dict[str, Spec]]:
        """The specs of the tensors in each file, in the order of the manifest."""
        specs: dict[str, dict[str, Spec]] = {}
        for tensor in (tensor for part in self._held.manifest.parts for tensor in part.tensors):
            specs.setdefault(tensor.file, {})[tensor.name] = Spec(
                tensor.name, tensor.shape, tensor.dtype
            )
        return specs

    def state_names(self, prefix: str) -> frozenset[str]:
        """Names of the training state's tensors that begin with `prefix`, without it."""
        return frozenset(
            n[len(prefix) :] for part, n in self._files if part == FOLDER and n.startswith(prefix)
        )

    def state_tensor(self, name: str) -> Tensor:
        """The tensor `name` of the training state, whole, on the host."""
        file = self.file_of(FOLDER, name)
        return file.read(name).view(file.specs[name].shape)

    def close(self) -> None:
        for file in self._open.values():
            file.close()


@dataclass(frozen=True, eq=False)
class ResumePoint:
    """An open checkpoint to resume from: manifest, document, tensors; each is read once."""

    checkpoint: OpenCheckpoint
    document: Document
    tensors: StoredTensors
    far_ranks: str = ""  # that do not see the checkpoint and read a copy, as text

    def way_to_read(self, fan_out: str) -> str:
        """The way for `choose_filler`, from SaverConfig.fan_out and the store of the checkpoint;
        the same on all ranks.

        Ranks that read a copy on their disk do not ask rank 0 for small ranges of the bucket.
        """
        is_in_bucket = isinstance(self.checkpoint.store, ListedStore) and not self.far_ranks
        return "small" if fan_out == "auto" and is_in_bucket else fan_out


def open_resume_point(held: OpenCheckpoint, stack: ExitStack) -> ResumePoint:
    """Open the state of an open checkpoint until the stack closes. Raises CorruptError."""
    tensors = StoredTensors(held)
    stack.callback(tensors.close)
    return ResumePoint(held, read_document(held.store, held.manifest), tensors)


def entries_of_rank(document: Document, rank: int) -> Document:
    """The document's entries of this rank alone; empty for a rank that the saved run did not
    have.
    """
    ranks: list[Document] = document["ranks"]
    return ranks[rank] if rank < len(ranks) else {}


def tree_of_rank(document: Document, stored: StoredTensors, rank: int, name: str) -> Any:
    """The tree `name` that the rank stored for itself, or None."""
    entry = entries_of_rank(document, rank).get(name)
    return None if entry is None else tree_of(entry, f"rank-{rank}/{name}", stored)


def tree_of(entry: Document, prefix: str, stored: StoredTensors, like: Any = None) -> Any:
    """The tree that `entry` describes.

    Tensors that are sharded in `like` are sharded in the same way.
    """
    cut = _cut_tensors(like)

    def make_tensor(index: int) -> Any:
        name = f"{prefix}/{index}"
        if index not in cut:
            return stored.state_tensor(name)
        fresh = torch.empty_like(cut[index])
        made = source_of(name, fresh)
        fill_tensor(WantedTensor(made, made.local, stored.file_of(FOLDER, name), name))
        return fresh

    return unflatten(
        decode_node(entry["tree"]),
        make_tensor,
        lambda index: stored.state_tensor(f"{prefix}/{index}").numpy(),
    )


def _cut_tensors(like: Any) -> dict[int, Tensor]:
    """The distributed tensors in the current state of an object, by their index in its tree."""
    if like is None:
        return {}
    with suppress(SelectionError):  # its state before loading may be of any type
        leaves = flatten(like.state_dict(), NAMES, "state", LEAVES)[1]
        tensors = map(_live_leaf, leaves)
        return {index: tensor for index, tensor in enumerate(tensors) if is_distributed(tensor)}
    return {}


@dataclass(frozen=True, eq=False)
class Captured:
    """The captured tensors of the saved model and, for a run, those of all its models and its
    state.
    """

    tensors: ModelTensors
    found: Mapping[Key, Source] = field(default_factory=dict)  # of the models of a run
    state: TrainingState | None = None
    # why there is no state; raised when the save is planned, on all ranks
    error: BaseException | None = None

    @property
    def document(self) -> Document:
        return {} if self.state is None else self.state.document

    def as_extra_state(self) -> ExtraState:
        """The state as a save stores it. Raises the error that prevented it."""
        if self.error is not None:
            raise self.error
        assert self.state is not None, "without an error there is a state"
        return ExtraState(
            tensors=self.tensors,
            sources=model_sources(self.found) or self.tensors.sources(),
            all_sources=tuple(self.found.values()),
            make_part=partial(state_part, self.state),
            document=self.state.document,
        )


def capture_run(
    objects: Callable[[], tuple[nn.Module, Sequence[Item], Mapping[str, Any]]], ranks: Ranks
) -> Captured:
    """Capture the state of a run. Collective. Moves nothing.

    `objects` returns the model that is saved, the items with a state, and this rank's own trees.
    Raises SelectionError naming state that cannot be saved, RanksDisagreeError naming objects that
    differ. A later error of one rank is returned in the result.
    """

    def capture_local() -> tuple[
        Sequence[Item], dict[str, ModelTensors], dict[Key, Source], LocalState
    ]:
        model, items, own = objects()
        items, models, found = walk_run(model, items)
        return items, models, found, local_state(items, found, own, digest=ranks.size > 1)

    captured, error = try_action(capture_local)
    if captured is None:
        ranks.agree("save_state()", error=error)
    assert captured is not None, "the agreement has raised the error"
    items, models, found, local = captured
    facts, trees = exchange_facts(local, items, ranks, found)
    state, error = try_action(
        partial(assemble_state, local, facts, trees, items, found, ranks.rank)
    )
    if state is not None:
        state.document[FLAGS] = gradient_flags(found)
    return Captured(models[""], found, state, error)
