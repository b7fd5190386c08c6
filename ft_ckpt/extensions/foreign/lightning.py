"""Reads checkpoints of Lightning (`.ckpt`): the weights of a module and the state of its training.

torch saved them. The tensors are those of its `state_dict`, under their names there. Other values
(`hyper_parameters`) may be objects of any class: no class is imported, each object becomes a
`SkippedValue`. Unknown classes among the weights are refused, as in any file of torch.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ft_ckpt.errors import LoadError, listing
from ft_ckpt.extensions.foreign.dcp import METADATA, open_dcp
from ft_ckpt.extensions.foreign.torch_files import (
    TorchFile,
    check_sums,
    identity_of,
    is_harmless,
    is_stand_in,
    kind_of_leaf,
    load_torch_value,
    local_copy,
    named_leaves,
    split_tensors,
)
from ft_ckpt.formats.files import ZIP_MAGIC, RawFile, TensorFile, TensorView
from ft_ckpt.storage.local import check_files_inside
from ft_ckpt.storage.places import Place

_VERSION = "pytorch-lightning_version"  # the key by which Lightning recognises its files
_WEIGHTS = "state_dict"
_SHARDED_WEIGHTS = (_WEIGHTS, "model")  # keys of the weights under model parallelism and FSDP
_META = "meta.pt"  # in a folder of sharded weights: all other values
_HEAD_BYTES = 64 << 10  # the version is one of the first keys of the first record


@dataclass(frozen=True)
class SkippedValue:
    """An object of an unknown class in a checkpoint of Lightning; it is not created."""

    name: str  # its path: keys joined by dots
    kind: str  # full name of its class


def is_lightning(file: RawFile) -> bool:
    """Check whether a file is a torch zip file whose first keys include Lightning's version."""
    head = file.bytes(0, min(_HEAD_BYTES, file.size_bytes))
    return head.startswith(ZIP_MAGIC) and _VERSION.encode() in head


def open_lightning(file: RawFile) -> TorchFile:
    """Open the tensors of the `state_dict` in a checkpoint of Lightning, under its names.

    Nothing in the file is run. `skipped` summarises the other values, with a line for each object
    of an unknown class. Raises LoadError for weights of unknown classes; CorruptError when the file
    is damaged.
    """
    local = local_copy(file)
    contents = _lightning_contents(local)
    tensors, skipped = split_tensors(contents[_WEIGHTS], file.name)
    return TorchFile(local, tensors, [*skipped, *_describe_rest(contents)])


def load_lightning(raw: RawFile, map_location: Any, mapped: bool, verify: bool) -> Any:
    """Load the object in an open file, with its tensors on `map_location`.

    If `map_location` is None and `mapped`, tensors are mapped from the file. `verify` compares
    checksums. Objects of unknown classes are `SkippedValue`. Raises as `open_lightning` does.
    """
    if verify:
        check_sums(raw)
    contents = _lightning_contents(raw, mapped and map_location is None)
    split_tensors(contents[_WEIGHTS], raw.name)  # refuses tensors that are not plain
    return _ValueBuilder(map_location).build(contents, "")


def _lightning_contents(file: RawFile, mapped: bool = True) -> dict[str, Any]:
    """Load the value in the file, with stand-ins of any class outside of the weights."""
    value = load_torch_value(file, lambda _full_name: True, mapped=mapped)
    weights = value.get(_WEIGHTS) if isinstance(value, dict) and _VERSION in value else None
    if not isinstance(weights, dict):
        raise LoadError(
            f"{file.name}: no {_WEIGHTS!r} in it, expected a checkpoint of "
            "Lightning; use torch.load"
        )

    kinds = {leaf.kind for _, leaf in named_leaves(weights) if is_stand_in(leaf)}
    refused = sorted(kind for kind in kinds if not is_harmless(kind))
    if refused:
        raise LoadError(
            f"{file.name}: {_WEIGHTS} refers to {listing(refused, ', ')}; expected tensors and "
            "plain data. Nothing of it was run"
        )

    whole: dict[str, Any] = value
    return whole


def _describe_rest(contents: Mapping[str, Any]) -> list[str]:
    """Write a line for each object of an unknown class, then a summary of each key but weights."""
    objects, summaries = [], []
    for key, content in contents.items():
        if key == _WEIGHTS:
            continue
        tensor_count = value_count = 0
        for name, leaf in named_leaves({key: content}):
            if is_stand_in(leaf):
                objects.append(f"{name}: {kind_of_leaf(leaf)}")
            if isinstance(leaf, torch.Tensor):
                tensor_count += 1
            else:
                value_count += 1

        counts = []
        if tensor_count:
            counts.append(f"{tensor_count} tensors")
        if value_count:
            counts.append(f"{value_count} values")
        summaries.append(f"{key}: {' and '.join(counts) or 'nothing'}")

    return objects + summaries


def open_lightning_folder(place: Place) -> TensorView | None:
    """Open the weights in a sharded checkpoint of Lightning; None for any other folder.

    Such a checkpoint is a folder of torch.distributed.checkpoint with `meta.pt` in it. Raises as
    `open_dcp` does; LoadError if there are no weights.
    """
    store = place.folder
    if store.stat(METADATA) is None:
        return None
    check_files_inside(store, [_META])
    return _module_weights(open_dcp(place)) if store.stat(_META) is not None else None


def _module_weights(folder: TensorFile) -> TensorView:
    """Return the weights in a sharded checkpoint under the names of the module."""
    names: dict[str, str] = {}
    skipped_counts = Counter[str]()
    for stored_name in folder.specs:
        key, _, name = stored_name.partition(".")
        if key in _SHARDED_WEIGHTS and name:
            names[name] = stored_name
        else:
            skipped_counts[key] += 1

    if not names:
        raise LoadError(
            f"{_META}: no weights of Lightning in its folder, expected "
            f"{' or '.join(_SHARDED_WEIGHTS)}.* tensors"
        )

    skipped = [f"{key}: {count} tensors" for key, count in skipped_counts.items()]
    skipped += [*folder.skipped, f"{_META}: the state of the training"]
    return TensorView.of_file(folder, names, skipped=skipped)


class _ValueBuilder:
    """Creates values from what torch has read; equal tensors become one."""

    def __init__(self, map_location: Any) -> None:
        self.device = None if map_location is None else torch.device(map_location)
        self.tensors: dict[tuple[Any, ...], torch.Tensor] = {}

    def build(self, value: Any, path: str) -> Any:
        """Build the value that `value` stands for, at `path`."""
        if isinstance(value, torch.Tensor):
            return self._tensor_on_device(value)
        if is_stand_in(value):
            return SkippedValue(path, value.kind)
        if isinstance(value, dict):
            items = {}
            for key, item in value.items():
                items[self.build(key, path)] = self.build(item, f"{path}.{key}".lstrip("."))
            return OrderedDict(items) if isinstance(value, OrderedDict) else items

        if type(value) in (list, tuple):
            built = []
            for number, item in enumerate(value):
                built.append(self.build(item, f"{path}.{number}".lstrip(".")))
            return type(value)(built)

        return value

    def _tensor_on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        key = identity_of(tensor)
        if key not in self.tensors:
            self.tensors[key] = tensor if self.device is None else tensor.to(self.device)
        return self.tensors[key]
