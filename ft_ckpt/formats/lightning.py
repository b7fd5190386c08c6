"""Reads checkpoints of Lightning (`.ckpt`): the weights of a module beside the state of its training, saved by torch.

The tensors are those of its `state_dict`, under their names there. Other values (`hyper_parameters`) may be objects of
any class: no class is imported, each object becomes a `SkippedValue`. Unknown classes among the weights are refused, as
in any file of torch.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ft_ckpt.errors import LoadError
from ft_ckpt.formats.layout import TensorFile
from ft_ckpt.formats.pickles import Call, Passive
from ft_ckpt.formats.tensor_file import ZIP_MAGIC, RawFile, RenamedFile
from ft_ckpt.formats.torch_file import (
    PickleRules,
    TensorPlace,
    TorchFile,
    UnreadableTensor,
    check_sums,
    find_plain_value,
    join_places,
    kind_of_leaf,
    load_torch_zip,
    named_leaves,
    split_tensors,
    strided_tensor,
)

_VERSION = "pytorch-lightning_version"  # the key by which Lightning recognises its files
_WEIGHTS = "state_dict"
_SHARDED_WEIGHTS = (_WEIGHTS, "model")  # keys of the weights under model parallelism and FSDP
META = "meta.pt"  # beside sharded weights: all other values
_HEAD_BYTES = 64 << 10  # the version is one of the first keys of the first record


@dataclass(frozen=True)
class SkippedValue:
    """An object of an unknown class in a checkpoint of Lightning; it is not created."""

    name: str  # its path: keys joined by dots
    kind: str  # full name of its class


def is_lightning(file: RawFile) -> bool:
    """True when an open file is a torch zip file whose first keys include Lightning's version."""
    head = file.bytes(0, min(_HEAD_BYTES, file.size_bytes))
    return head.startswith(ZIP_MAGIC) and _VERSION.encode() in head


def open_lightning(file: RawFile) -> TorchFile:
    """The tensors of the `state_dict` in a checkpoint of Lightning, under its names; nothing in it is run.

    `skipped` summarises the other values, with a line for each object of an unknown class. Raises LoadError for weights
    of unknown classes; CorruptError when the file is damaged.
    """
    contents = _lightning_contents(file)
    tensors, skipped = split_tensors(contents[_WEIGHTS], file.name)
    return join_places(file, tensors, [*skipped, *_describe_rest(contents)])


def load_lightning(raw: RawFile, map_location: Any, mapped: bool, verify: bool) -> Any:
    """The object in an open file, its tensors on `map_location`; if that is None and `mapped`, mapped from the file.

    `verify` compares checksums. Objects of unknown classes are `SkippedValue`. Raises as `open_lightning` does.
    """
    if verify:
        check_sums(raw)
    file = RawFile(raw.file, mapped and map_location is None)
    contents = _lightning_contents(file)
    split_tensors(contents[_WEIGHTS], file.name)  # refuses tensors that cannot be created
    return _ValueMaker(file, map_location).make(contents, "")


def _lightning_contents(file: RawFile) -> dict[str, Any]:
    found = load_torch_zip(file, rules=_RULES)
    if _weights_of(found) is None:
        raise LoadError(f"{file.name}: no {_WEIGHTS!r} in it, expected a checkpoint of Lightning; use torch.load")
    whole: dict[str, Any] = found
    return whole


def _weights_of(value: Any) -> dict[str, Any] | None:
    found = value.get(_WEIGHTS) if isinstance(value, dict) and _VERSION in value else None
    return found if isinstance(found, dict) else None


def _admit_settings(value: Any, unknown: frozenset[str]) -> bool:
    """Whether the weights in `value` contain no unknown classes."""
    weights = _weights_of(value)
    return weights is not None and all(kind_of_leaf(leaf) not in unknown for _, leaf in named_leaves(weights))


_RULES = PickleRules(find_plain_value, _admit_settings)


def _describe_rest(contents: Mapping[str, Any]) -> list[str]:
    """A line for each object of an unknown class beside the weights, then a summary of each key."""
    classes, sums = [], []
    for key in (key for key in contents if key != _WEIGHTS):
        leaves = list(named_leaves({key: contents[key]}))
        classes += [f"{name}: {kind_of_leaf(leaf)}" for name, leaf in leaves if _is_opaque(leaf)]
        tensors = sum(isinstance(leaf, TensorPlace) for _, leaf in leaves)
        counts = [
            f"{count} {what}" for count, what in ((tensors, "tensors"), (len(leaves) - tensors, "values")) if count
        ]
        sums.append(f"{key}: {' and '.join(counts) or 'nothing'}")
    return classes + sums


def module_weights(folder: TensorFile) -> RenamedFile:
    """The weights in a sharded checkpoint, a folder of torch.distributed.checkpoint with `META` in it.

    Their names are those of the module. Raises LoadError if there are no weights.
    """
    names: dict[str, str] = {}
    others = Counter[str]()
    for old in folder.specs:
        key, _, name = old.partition(".")
        if key in _SHARDED_WEIGHTS and name:
            names[name] = old
        else:
            others[key] += 1
    if not names:
        raise LoadError(
            f"{META}: no weights of Lightning beside it, expected {' or '.join(_SHARDED_WEIGHTS)}.* tensors"
        )
    skipped = [f"{key}: {count} tensors" for key, count in others.items()]
    return RenamedFile(folder, names, [*skipped, *getattr(folder, "skipped", ()), f"{META}: the state of the training"])


def _is_opaque(leaf: Any) -> bool:
    """Whether a leaf is a stand-in for an object, class, function, or a tensor that cannot be read as bytes."""
    is_class = isinstance(leaf, type) and issubclass(leaf, Passive)
    return is_class or isinstance(leaf, (Passive, Call, UnreadableTensor))


class _ValueMaker:
    """Creates values from their descriptions; equal locations become one tensor."""

    def __init__(self, file: RawFile, map_location: Any) -> None:
        self.file, self.device = file, None if map_location is None else torch.device(map_location)
        self.tensors: dict[TensorPlace, torch.Tensor] = {}

    def make(self, value: Any, name: str) -> Any:
        """The value described by `value`, at the path `name`."""
        if isinstance(value, TensorPlace):
            if value not in self.tensors:
                self.file.promise(value.repeated_bytes, name)
                tensor = strided_tensor(value)
                self.tensors[value] = tensor if self.device is None else tensor.to(self.device)
            return self.tensors[value]
        if _is_opaque(value):
            kind = value.kind if isinstance(value, UnreadableTensor) else kind_of_leaf(value)
            return SkippedValue(name, kind)
        if isinstance(value, dict):
            items = ((self.make(key, name), self.make(one, f"{name}.{key}".lstrip("."))) for key, one in value.items())
            return (OrderedDict if isinstance(value, OrderedDict) else dict)(items)
        if type(value) in (list, tuple):
            return type(value)(self.make(one, f"{name}.{place}".lstrip(".")) for place, one in enumerate(value))
        return value
