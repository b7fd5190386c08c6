"""Reads `training.json` and checks all of it against the manifest, before anything of a run is overwritten.

What a field says is for those who restore it; that it is of the right type and range, and that document and tensor
files refer to each other, is checked here.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.checkpoint.typed_json import reader_of
from ft_ckpt.distributed.replicas import own_name
from ft_ckpt.errors import CheckpointError, CorruptError, damaged_input, listing, shown
from ft_ckpt.formats.dtypes import dtype_of
from ft_ckpt.formats.layout import checked_sizes
from ft_ckpt.formats.pytree import leaf_numbers
from ft_ckpt.formats.pytree_json import decode_node, load_object
from ft_ckpt.model.json_values import decode_value
from ft_ckpt.schedule import begin_history
from ft_ckpt.storage.store import Store
from ft_ckpt.training.gradient_flags import FLAGS, check_flags
from ft_ckpt.training.state import DOCUMENT_NAME, DOCUMENT_VERSION, FOLDER, Document

_MASTER = "master"
_BAD = (CheckpointError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_Stored = tuple[tuple[int, ...] | None, str | None]  # shape and dtype of a tensor; None: as the model's


@dataclass(frozen=True)
class _KnownDocument:
    """The fields of the document. Those with a default are not in the documents of all versions."""

    version: int
    weights: Mapping[str, tuple[str, ...]]
    items: Mapping[str, Mapping[str, Any]]
    ranks: tuple[Mapping[str, Mapping[str, Any]], ...]
    progress: Mapping[str, int]
    history: Mapping[str, Any]
    run_id: str
    fingerprint: Mapping[str, Any]
    keep: Mapping[str, Any] | None = None
    ancestors: tuple[str, ...] = ()
    signatures: Mapping[str, str] = field(default_factory=dict)
    requires_grad: Mapping[str, tuple[str, ...]] | None = None
    apart: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    let_go: tuple[str, ...] = ()


def read_document(store: Store, manifest: Manifest) -> Document:
    """The JSON half of the training state of the checkpoint in `store`: the fields that are known.

    Raises CorruptError when it cannot be read, naming every value that is of another type or out of range, and every
    tensor of the state that it does not refer to.
    """
    file = store.where(f"{FOLDER}/{DOCUMENT_NAME}")
    with damaged_input(f"{file}; resume from another checkpoint"):
        document: Document = json.loads(store.read(f"{FOLDER}/{DOCUMENT_NAME}"), parse_constant=_refuse_constant)
        version = document["version"]
        if type(version) is int and version > DOCUMENT_VERSION:
            raise CorruptError(
                f"{file}: training state version {version}, this ft_ckpt reads up to {DOCUMENT_VERSION}; upgrade"
            )
        known: _KnownDocument = reader_of(_KnownDocument)(document)
        if problems := list(_problems(known, manifest)):
            raise CorruptError(f"{file}: {listing(problems)}; resume from another checkpoint")
    return {one.name: document[one.name] for one in fields(known) if one.name in document}


def _refuse_constant(name: str) -> Any:
    raise CorruptError(f"{name} is no JSON")


def _problems(known: _KnownDocument, manifest: Manifest) -> Iterator[str]:
    """What is wrong with values whose type is right."""
    if known.version < 1:
        yield f"version: {known.version}"
    if not known.ranks:
        yield "ranks: none"
    counts = {name: known.progress.get(name) for name in ("step", "epoch", "batch", "samples")}
    yield from (f"progress.{name}: {count}" for name, count in counts.items() if count is None or count < 0)
    for name, value, told in (
        ("progress.step", counts["step"], manifest.step),
        ("run_id", known.run_id, manifest.run_id),
    ):
        if told not in (None, value):
            yield f"{name}: {value!r}, expected {told!r} as in the manifest"
    yield from _tried("history", lambda: begin_history(0, 0, 0.0, known.history))
    yield from _tried(FLAGS, lambda: check_flags(known.requires_grad))
    described = {name: entry["optimizer"] for name, entry in known.items.items() if "optimizer" in entry}
    for name, one in described.items():
        yield from _tried(f"items.{name}", lambda: _check_optimizer(one, len(known.ranks)))  # noqa: B023 - called at once
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


_read_settings = reader_of(Mapping[str, Mapping[str, Any]])
_read_entries = reader_of(Mapping[str, Mapping[str, Mapping[str, Any]]])
_read_names = reader_of(Mapping[str, str])


def _check_optimizer(described: Any, ranks: int) -> None:
    """Raise what a description raises that is none."""
    if type(described) is not dict or type(described["class"]) is not str or type(described["groups"]) is not list:
        raise CorruptError("no optimizer's state")
    for group in described["groups"]:
        found = reader_of(_Group)(group if type(group) is dict else {})
        _check_settings(found.values)
    _check_entries(described["state"], ranks)
    for dtype in _read_names(described.get("masters", {})).values():
        dtype_of(dtype)
    for value in reader_of(Mapping[str, Any])(described.get("scaler", {})).values():
        decode_value(value)
    if "beside" in described:
        beside = _read_names(described["beside"])
        torch.device(beside["device"])
        load_object(beside["text"])
    own = reader_of(Mapping[str, Mapping[str, Mapping[str, Any]]])(described.get("own", {}))
    for rank, values in own.items():
        groups = values["groups"]
        if not _is_below(rank, ranks) or not all(_is_below(number, len(described["groups"])) for number in groups):
            raise CorruptError(f"own: rank {rank}")
        for settings in groups.values():
            _check_settings(_read_settings(settings))
        _check_entries(values["state"], ranks)


def _is_below(number: str, most: int) -> bool:
    return number.isdecimal() and int(number) < most


def _check_settings(settings: Mapping[str, Mapping[str, Any]]) -> None:
    for setting in settings.values():
        decode_value(setting["value"])
        if "tensor" in setting:
            torch.tensor(decode_value(setting["value"]), dtype=dtype_of(setting["tensor"]))


def _check_entries(state: Any, ranks: int) -> None:
    for entries in _read_entries(state).values():
        for key, entry in entries.items():
            if "dtype" not in entry:
                decode_value(entry["value"])
                continue
            dtype_of(entry["dtype"])
            checked_sizes(entry["shape"])
            if type(entry["host"]) is not bool or not _is_below(str(entry.get("rank", 0)), ranks):
                raise CorruptError(f"{key}: {dict(entry)}")


def _check_tensors(known: _KnownDocument, manifest: Manifest) -> None:
    """Raise CorruptError where the document refers to no tensor, or to another one than there is; or none to one."""
    specs = {(part.path, one.name): (one.shape, one.dtype) for part in manifest.parts for one in part.tensors}
    problems = [
        f"weights.{name}: {list(place)} is no tensor" for name, place in known.weights.items() if place not in specs
    ]
    wanted = dict(_referred_tensors(known))
    stored = {name: spec for (part, name), spec in specs.items() if part == FOLDER}
    models = tuple(f"{name}/" for name, entry in known.items.items() if entry.get("model") is True)
    for name, (shape, dtype) in wanted.items():
        found = stored.get(name)
        if found is None or shape not in (None, found[0]) or dtype not in (None, found[1]):
            told = "not there" if found is None else f"{found[1]} {list(found[0])}"
            problems.append(f"{name}: {told}, expected {dtype or 'a tensor'} {list(shape or ())}")
    problems += [
        f"{name}: nothing refers to it" for name in stored if name not in wanted and not name.startswith(models)
    ]
    if problems:
        raise CorruptError(listing(problems))


def _referred_tensors(known: _KnownDocument) -> Iterator[tuple[str, _Stored]]:
    """The tensors of the state's part that the document refers to, by name; those of models are not listed."""
    yield from ((place[-1], (None, None)) for place in known.weights.values() if place[:1] == (FOLDER,))
    for name, odd in known.apart.items():
        yield from ((own_name(name, int(rank)), (None, None)) for rank in odd)
    for item, entry in known.items.items():
        if "optimizer" in entry:
            described = entry["optimizer"]
            for name, entries in described["state"].items():
                tensors = ((key, one) for key, one in entries.items() if "dtype" in one)
                yield from ((f"{item}/{name}/{key}", (tuple(one["shape"]), one["dtype"])) for key, one in tensors)
            for name, dtype in described.get("masters", {}).items():
                yield f"{item}/{name}/{_MASTER}", (None, dtype)
        elif entry.get("model") is not True:
            yield from _tensors_of_tree(item, entry)
    for rank, trees in enumerate(known.ranks):
        for name, entry in trees.items():
            yield from _tensors_of_tree(f"rank-{rank}/{name}", entry)


def _tensors_of_tree(name: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, _Stored]]:
    """Raises CorruptError for a tree that no object could have been, or that has not as many tensors as it says."""
    numbers = sorted({*leaf_numbers(decode_node(entry["tree"]))})
    if numbers != list(range(len(numbers))) or (type(entry["tensors"]), entry["tensors"]) != (int, len(numbers)):
        raise CorruptError(f"{name}: tensors {numbers}, expected {entry['tensors']!r:.40} from 0 on")
    yield from ((f"{name}/{number}", (None, None)) for number in numbers)
