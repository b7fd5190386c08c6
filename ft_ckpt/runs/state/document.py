"""The JSON document of a training state: its fields, and the checks of one that is read."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.errors import CheckpointError, CorruptError, damaged_input, listing, shown
from ft_ckpt.formats import checked_sizes, dtype_of
from ft_ckpt.formats.trees import decode_node, decode_value, leaf_numbers, load_object
from ft_ckpt.runs.items import FLAGS, flags_problem
from ft_ckpt.runs.optimizers import decode_setting, is_dense, tensors_of_entry
from ft_ckpt.saving.planning import STATE_DOCUMENT
from ft_ckpt.schedule import begin_history
from ft_ckpt.schema import Count, as_record
from ft_ckpt.storage import Store

FOLDER, FILE = "state", "training"
DOCUMENT_VERSION = 1
Document = dict[str, Any]

_MASTER = "master"
# what reading a value of the document raises if the value is invalid
_INVALID = (
    CheckpointError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# shape and dtype of a tensor; None: not checked
_StoredSpec = tuple[tuple[int, ...] | None, str | None]
_ANY_SPEC: _StoredSpec = (None, None)


@dataclass(frozen=True)
class _Progress:
    """Where the run was."""

    step: Count
    epoch: Count
    batch: Count
    samples: Count


@dataclass(frozen=True)
class _Fields:
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
    """Read the document of the training state in `store`: the fields of this version.

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
        record = as_record(document, _Fields)
        problems = list(_problems(record, manifest))
        if problems:
            raise CorruptError(f"{file}: {listing(problems)}; resume from another checkpoint")
    names = [declared.name for declared in fields(_Fields)]
    return {name: document[name] for name in names if name in document}


def entries_of_rank(document: Document, rank: int) -> Document:
    """Return the document's entries of this rank alone.

    A rank that the saved run did not have gets no entries.
    """
    ranks: list[Document] = document["ranks"]
    return ranks[rank] if rank < len(ranks) else {}


def _refuse_constant(name: str) -> Any:
    raise CorruptError(f"{name} is not JSON")


def _problems(record: _Fields, manifest: Manifest) -> Iterator[str]:
    """Yield the problems of a document whose fields have the right types."""
    if record.version < 1:
        yield f"version: {record.version}"
    if not record.ranks:
        yield "ranks: none"
    for name, value, expected in (
        ("progress.step", record.progress.step, manifest.step),
        ("run_id", record.run_id, manifest.run_id),
    ):
        if expected != value:
            yield f"{name}: {value!r}, expected {expected!r} as in the manifest"
    yield from _problem_of("history", begin_history, 0, 0, 0.0, record.history)
    if record.requires_grad is not None:  # absent in earlier versions
        problem = flags_problem(record.requires_grad)
        if problem is not None:
            yield f"{FLAGS}: {problem}"
    for name, entry in record.items.items():
        if "optimizer" in entry:
            description = entry["optimizer"]
            yield from _problem_of(
                f"items.{name}", _check_optimizer, description, len(record.ranks)
            )
    yield from _problem_of("tensors", _check_tensors, record, manifest)


def _problem_of(where: str, check: Callable[..., object], *arguments: Any) -> Iterator[str]:
    try:
        check(*arguments)
    except _INVALID as error:
        yield f"{where}: {error if isinstance(error, CheckpointError) else shown(error)}"


@dataclass(frozen=True)
class _Group:
    params: tuple[str, ...]
    values: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Beside:
    """State of an optimizer that belongs to no parameter."""

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


def _check_optimizer(description: Any, rank_count: int) -> None:
    """Raise one of _INVALID for an invalid description."""
    optimizer = as_record(description, _Optimizer)
    as_record(description["class"], str)  # no name of a field
    for group in optimizer.groups:
        for setting in group.values.values():
            decode_setting(setting, "cpu")
    for entries in optimizer.state.values():
        for key, entry in entries.items():
            _check_entry(key, dict(entry), rank_count)
    for dtype in optimizer.masters.values():
        dtype_of(dtype)
    for value in optimizer.scaler.values():
        decode_value(value)
    if optimizer.beside is not None:
        torch.device(optimizer.beside.device)
        load_object(optimizer.beside.text)


def _check_entry(key: str, entry: Document, rank_count: int) -> None:
    """Raise one of _INVALID for an invalid entry of a parameter's state."""
    if "value" in entry:
        decode_value(entry["value"])
        return
    tensors = tensors_of_entry(key, entry)
    for label, leaf in tensors:
        dtype_of(leaf["dtype"])
        checked_sizes(leaf["shape"])
        rank = str(leaf.get("rank", 0))
        is_placed = type(leaf["host"]) is bool and rank.isdecimal() and int(rank) < rank_count
        if not is_placed or not is_dense(leaf["shape"], leaf.get("stride")):
            raise CorruptError(f"{label}: {leaf}")
    if "tree" in entry:
        numbers = {*leaf_numbers(decode_node(entry["tree"]))}
        if numbers != {*range(len(tensors))}:
            raise CorruptError(
                f"{key}: its tree does not refer to each of its {len(tensors)} tensors"
            )


def _check_tensors(record: _Fields, manifest: Manifest) -> None:
    """Raise CorruptError unless the references and the tensors match one to one."""
    specs: dict[tuple[str, ...], tuple[tuple[int, ...], str]] = {}
    for part in manifest.parts:
        for tensor in part.tensors:
            specs[part.path, tensor.name] = (tensor.shape, tensor.dtype)
    problems = [
        f"weights.{name}: {list(path)} is not a tensor"
        for name, path in record.weights.items()
        if path not in specs
    ]
    references = dict(_references(record))
    stored = {name: spec for (part, name), spec in specs.items() if part == FOLDER}
    for name, (shape, dtype) in references.items():
        spec = stored.get(name)
        expected = f"expected {dtype or 'a tensor'} {list(shape or ())}"
        if spec is None:
            problems.append(f"{name}: missing, {expected}")
        elif shape not in (None, spec[0]) or dtype not in (None, spec[1]):
            problems.append(f"{name}: {spec[1]} {list(spec[0])}, {expected}")
    models = [name for name, entry in record.items.items() if entry.get("model") is True]
    prefixes_of_models = tuple(f"{name}/" for name in models)
    further = [name for name in stored if not name.startswith(prefixes_of_models)]
    problems += [f"{name}: nothing refers to it" for name in further if name not in references]
    if problems:
        raise CorruptError(listing(problems))


def _references(record: _Fields) -> Iterator[tuple[str, _StoredSpec]]:
    """Yield the tensors that the document refers to, by name, without those of models."""
    for path in record.weights.values():
        if path[:1] == (FOLDER,):
            yield path[-1], _ANY_SPEC
    for name, values in record.apart.items():
        for rank_number in values:
            yield f"rank-{rank_number}/{name}", _ANY_SPEC
    for item, entry in record.items.items():
        if "optimizer" in entry:
            yield from _references_of_optimizer(item, entry["optimizer"])
        elif entry.get("model") is not True:
            yield from _references_of_tree(item, entry)
    for rank, trees in enumerate(record.ranks):
        for name, entry in trees.items():
            yield from _references_of_tree(f"rank-{rank}/{name}", entry)


def _references_of_optimizer(
    item: str, description: Mapping[str, Any]
) -> Iterator[tuple[str, _StoredSpec]]:
    for name, entries in description["state"].items():
        for key, entry in entries.items():
            for label, leaf in tensors_of_entry(key, entry):
                yield f"{item}/{name}/{label}", (tuple(leaf["shape"]), leaf["dtype"])
    for name, dtype in description.get("masters", {}).items():
        yield f"{item}/{name}/{_MASTER}", (None, dtype)


def _references_of_tree(name: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, _StoredSpec]]:
    """Yield the tensors of a stored tree.

    Raises CorruptError if the tree cannot be decoded or the number of tensors is wrong.
    """
    numbers = sorted({*leaf_numbers(decode_node(entry["tree"]))})
    count = entry["tensors"]
    is_complete = numbers == list(range(len(numbers)))
    if not is_complete or type(count) is not int or count != len(numbers):
        raise CorruptError(f"{name}: tensors {numbers}, expected {count!r:.40} from 0 on")
    for number in numbers:
        yield f"{name}/{number}", _ANY_SPEC
