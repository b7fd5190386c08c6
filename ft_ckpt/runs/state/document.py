"""Reads the JSON document of a training state, and checks its fields.

The document has what is not a tensor: counters, settings, trees, and which tensors belong where. It
refers to tensors in the part "state" of the checkpoint by their names.
"""

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

FOLDER = "state"
FILE = "training"
DOCUMENT_VERSION = 1
Document = dict[str, Any]

_MASTER = "master"
# errors that reading an invalid value of the document raises
_INVALID = (
    CheckpointError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# The shape and the dtype that a tensor must have. None is not checked.
_StoredSpec = tuple[tuple[int, ...] | None, str | None]
_ANY_SPEC: _StoredSpec = (None, None)


@dataclass(frozen=True)
class _Progress:
    """The counters of the run when it was saved."""

    step: Count
    epoch: Count
    batch: Count
    samples: Count


@dataclass(frozen=True)
class _Fields:
    """The fields of the document. Documents of earlier versions lack those with a default.

    Attributes:
        weights: Where the exact values of each tensor of the model are: [folder, name].
        items: The state of each item by its name.
        ranks: The trees that each rank stored for itself, in rank order.
        keep: The setting `keep` of the run.
        ancestors: The ids of the runs that this one branched off.
        apart: Tensors that differed between ranks, as ft_ckpt 0.3 and earlier wrote them.
        differing: The names of tensors that differed between ranks.
        let_go: The names of items that a resume of this run left unrestored.
        watched: The digests of models that had not changed.
        unsaved: The names of changing state that is not in the checkpoint.
        published: The version that was published last.
    """

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
    apart: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    let_go: tuple[str, ...] = ()
    watched: Mapping[str, str] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()
    published: str | None = None


def read_document(store: Store, manifest: Manifest) -> Document:
    """Read the document of the training state in `store`.

    Fields that this version does not know are dropped. Raises CorruptError if the document cannot
    be read. The error names every invalid value, and every tensor of the state that the document
    does not refer to.
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
    """Return the trees that this rank stored for itself, by name.

    The result is {} for a rank that the saved run did not have.
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
    """Yield the error of `check(*arguments)` as text, if it raises one."""
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
    """State of an optimizer that belongs to no parameter, packed by `values.pack`."""

    device: str
    text: str


# the entries of an optimizer's state by the names of parameters, then by the keys of their state
_Entries = Mapping[str, Mapping[str, Mapping[str, Any]]]


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
    """Raise one of _INVALID for an invalid description of an optimizer."""
    optimizer = as_record(description, _Optimizer)

    # Not a field of _Optimizer, because "class" cannot be the name of a field in Python.
    as_record(description["class"], str)
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
        has_rank = rank.isdecimal() and int(rank) < rank_count
        has_device = type(leaf["host"]) is bool
        if not (has_rank and has_device and is_dense(leaf["shape"], leaf.get("stride"))):
            raise CorruptError(f"{label}: {leaf}")

    if "tree" in entry:
        numbers = {*leaf_numbers(decode_node(entry["tree"]))}
        if numbers != {*range(len(tensors))}:
            raise CorruptError(
                f"{key}: its tree does not refer to each of its {len(tensors)} tensors"
            )


def _check_tensors(record: _Fields, manifest: Manifest) -> None:
    """Raise CorruptError unless each reference has its tensor, and each tensor a reference."""
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

    # The tensors of further models need no reference: a resume finds them by their prefix.
    for name in stored:
        if name not in references and not name.startswith(prefixes_of_models):
            problems.append(f"{name}: nothing refers to it")

    if problems:
        raise CorruptError(listing(problems))


def _references(record: _Fields) -> Iterator[tuple[str, _StoredSpec]]:
    """Yield the name of each tensor that the document refers to, and its expected spec.

    Tensors of further models are left out, because the document does not list them.
    """
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
    """Yield the tensors of a stored tree. Their numbers must be 0, 1, 2, ...

    Raises CorruptError if the tree cannot be decoded or the number of tensors is wrong.
    """
    numbers = sorted({*leaf_numbers(decode_node(entry["tree"]))})
    count = entry["tensors"]
    is_complete = numbers == list(range(len(numbers)))
    if not is_complete or type(count) is not int or count != len(numbers):
        raise CorruptError(f"{name}: tensors {numbers}, expected {count!r:.40} from 0 on")
    for number in numbers:
        yield f"{name}/{number}", _ANY_SPEC
