"""A transformers model on the files of its folder: mapped, or computed when asked for if memory has them otherwise."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from ft_ckpt.distributed.stand_ins import stand_in_parameter
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.formats.dtypes import dtype_of
from ft_ckpt.formats.layout import Spec, TensorFile
from ft_ckpt.model.plain_module import put_at, tensor_at
from ft_ckpt.model.pretrained import model_class, without_memory
from ft_ckpt.storage.local_store import LocalStore


@dataclass(frozen=True, eq=False)
class FileModel:
    """A model in eval mode, and what of its files it has no place for."""

    model: Any
    left: tuple[str, ...]


def model_on_files(folder: Path, file: TensorFile, *, in_memory: bool = False) -> FileModel:
    """The model of the config in `folder` on the tensors of `file`, under the names that transformers reads them by.

    What transformers keeps otherwise in memory, as experts that are fused, is computed whenever it is read; with
    `in_memory` once, so that the model can run. Raises LoadError for a class that transformers does not have, and
    naming tensors that are missing or of another shape.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    name = str((getattr(config, "architectures", None) or [""])[0])
    cls = model_class(name)
    if cls is None or getattr(config, "auto_map", None):
        raise LoadError(
            f"{folder}: {name!r} is no model class of transformers; load it with its own code and PEFT, and save it "
            "with CheckpointSaver.save(merged=True)"
        )
    with without_memory():
        model = cls(config)
    places, left = _find_places(model, file)
    problems = [wrong for place in places for wrong in _fill_place(model, place, file, in_memory)]
    _tie_missing(model)
    lost = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    problems += [f"{name}: not in the files" for name in lost]
    if problems:
        raise LoadError(f"{folder}: {listing(problems)}: its files do not fit {name}; use another copy")
    if model.can_generate() and LocalStore(folder).stat("generation_config.json") is not None:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = str(folder)
    return FileModel(model.eval().requires_grad_(False), tuple(left))


def dequantised_model(folder: Path) -> FileModel:
    """The quantised model in `folder` with ordinary weights, in memory. Raises LoadError where it cannot be had."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    cls = model_class(str((getattr(config, "architectures", None) or [""])[0])) or AutoModel
    try:
        model = cls.from_pretrained(folder, dtype="auto", local_files_only=True).dequantize()
    except (ImportError, NotImplementedError, ValueError, RuntimeError) as error:
        raise LoadError(
            f"{folder}: cannot be dequantised: {error}; name the model it was made of with base="
        ) from error
    vars(model.config).pop("quantization_config", None)
    vars(model).pop("_weight_conversions", None)  # those of the quantiser, which cannot be reverted
    return FileModel(model.eval().requires_grad_(False), ())


def is_quantised_folder(folder: Path) -> bool:
    """Whether its config says that its weights are quantised."""
    return getattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "quantization_config", None) is not None


@dataclass(frozen=True, eq=False)
class _FileOrigin:
    """Stored tensors that become a tensor of the model, or several together."""

    target: str  # the first of the model's names
    stored: tuple[tuple[str, str], ...]  # (pattern of the converter, name in the file)
    converter: WeightConverter | None  # None: it is the one stored tensor as it is

    def convert(self, model: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name, from what `read` gives for the stored ones."""
        if self.converter is None:
            return {self.target: read(self.stored[0][1])}
        one = copy.deepcopy(self.converter)
        for pattern, name in self.stored:
            one.add_tensor(self.target, name, pattern, read(name))
        found = one.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def _find_places(model: Any, file: TensorFile) -> tuple[list[_FileOrigin], list[str]]:
    """Where the tensors of `file` go in the model, as transformers renames and converts them; and the rest's names."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    own, prefix = model.state_dict(), model.base_model_prefix
    places: dict[str, list[tuple[str, str]]] = {}
    left = []
    for name in sorted(file.specs, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:  # as transformers does: it should not have been renamed
            target, pattern = rename_source_key(name, [], [], prefix, own)
        if target in own:
            places.setdefault(target, []).append((pattern or "", name))
        else:
            left.append(name)
    model._weight_conversions = [one for one in transforms if one.was_used()]  # what saving reverts
    found = [_FileOrigin(target, tuple(some), by_pattern.get(some[0][0])) for target, some in places.items()]
    return found, left


def _fill_place(model: Any, place: _FileOrigin, file: TensorFile, in_memory: bool) -> list[str]:
    """Put mapped tensors, or stand-ins for computed ones, into the model; what does not fit."""

    def read_target(target: str) -> Tensor:
        return place.convert(model, lambda name: file.read(name).view(file.specs[name].shape))[target]

    wrong = []
    for target, empty in place.convert(model, lambda name: _empty_like(file.specs[name])).items():
        live, shape = tensor_at(model, target), tuple(empty.shape)
        if live is None or tuple(live.shape) != shape:
            wrong.append(f"{target}: {shape} in the files, expected {None if live is None else tuple(live.shape)}")
        elif place.converter is not None and not in_memory:
            put_at(model, target, stand_in_parameter(shape, empty.dtype, partial(read_target, target)))
        else:
            held = read_target(target)
            put_at(model, target, nn.Parameter(held, requires_grad=False) if isinstance(live, nn.Parameter) else held)
    return wrong


def _empty_like(spec: Spec) -> Tensor:
    return torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device="meta")


def _tie_missing(model: Any) -> None:
    """Tie what the class declares tied and the files hold once."""
    for alias, main in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        here, there = tensor_at(model, alias), tensor_at(model, main)
        for name, tensor, other in ((alias, here, there), (main, there, here)):
            if tensor is not None and tensor.is_meta and other is not None and not other.is_meta:
                put_at(model, name, other)
