"""Models on mapped files, to merge adapters into: no tensor is read before it is used."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from ft_ckpt.errors import LoadError, damaged_input, listing
from ft_ckpt.formats import TensorFile
from ft_ckpt.model.base_class import BaseClass
from ft_ckpt.model.base_files import FileOrigin, find_origins
from ft_ckpt.model.conversion import with_whole_parameters
from ft_ckpt.model.making import without_memory
from ft_ckpt.model.pretrained import add_folder_settings, model_class
from ft_ckpt.model.selection import put_at, tensor_at
from ft_ckpt.ranks import stand_in_parameter


@dataclass(frozen=True, eq=False)
class FileModel:
    """A model in eval mode, and the names of stored tensors that it does not have."""

    model: Any
    left: tuple[str, ...]


def model_on_files(
    folder: Path,
    base: BaseClass,
    file: TensorFile,
    replaced: Collection[str],
    *,
    in_memory: bool = False,
) -> FileModel:
    """The model `base` in `folder` with the tensors of `file`, under the names that transformers
    reads.

    Tensors in `replaced`, which the caller fills, are zeros if the file lacks them or has another
    shape. Tensors that transformers converts, such as fused experts, are computed at each read;
    with `in_memory` once, so that the model can run. Raises LoadError for a class that is not in
    transformers, or naming tensors that are missing or have another shape.
    """
    name = base.cls.__name__
    if model_class(name) is not base.cls or getattr(base.config, "auto_map", None):
        raise LoadError(
            f"{folder}: its class is in no module of transformers; load it with its own code and "
            "PEFT, and save it with CheckpointSaver.save(merged=True)"
        )
    with damaged_input(f"{folder}: its config"), without_memory():
        model = base.cls(base.config)
    # Converted tensors are read when PEFT has replaced layers of the model.
    described = with_whole_parameters(model, model.state_dict())
    found = find_origins(model, model.state_dict(), file)
    # a save reverts the conversions that were used
    model._weight_conversions = list(found.transforms)
    wrong: dict[str, str] = {}
    for origin in found.origins:
        wrong |= _fill_place(model, described, origin, file, in_memory)
    _tie_missing(model)
    empty = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_meta}
    problems = {name: f"{name}: not in the files" for name in empty} | wrong
    for name in replaced & problems.keys():
        zeros = torch.zeros(empty[name].shape, dtype=empty[name].dtype, device="cpu")
        put_at(model, name, nn.Parameter(zeros, requires_grad=False))
        del problems[name]
    if problems:
        raise LoadError(
            f"{folder}: {listing([*problems.values()])}: its files do not fit "
            f"{name}; use another copy"
        )
    add_folder_settings(model, folder)
    return FileModel(model.eval().requires_grad_(False), found.left)


def is_quantised_folder(folder: Path) -> bool:
    """Whether the config in `folder` has quantisation settings."""
    return (
        getattr(
            AutoConfig.from_pretrained(folder, trust_remote_code=False), "quantization_config", None
        )
        is not None
    )


def _fill_place(
    model: Any, described: Any, place: FileOrigin, file: TensorFile, in_memory: bool
) -> dict[str, str]:
    """Put mapped tensors, or stand-ins for computed ones, into the model; a line by name for each
    misfit.

    `described`: the model as `with_whole_parameters` gives it.
    """

    def read_stored(name: str) -> Tensor:
        return file.read(name).view(file.specs[name].shape)

    def read_target(target: str) -> Tensor:
        return place.convert(described, read_stored)[target]

    wrong = {}
    for target, empty in place.convert_empty(described, file).items():
        live, shape = tensor_at(model, target), tuple(empty.shape)
        if live is None or tuple(live.shape) != shape:
            expected = None if live is None else tuple(live.shape)
            wrong[target] = f"{target}: {shape} in the files, expected {expected}"
        elif place.converter is not None and not in_memory:
            put_at(
                model, target, stand_in_parameter(shape, empty.dtype, partial(read_target, target))
            )
        else:
            held = read_target(target)
            put_at(
                model,
                target,
                nn.Parameter(held, requires_grad=False) if isinstance(live, nn.Parameter) else held,
            )
    return wrong


def _tie_missing(model: Any) -> None:
    """Tie tensors that the class declares tied and of which the files store only one."""
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        for name, stored in (pair, pair[::-1]):
            tensor, other = tensor_at(model, name), tensor_at(model, stored)
            if tensor is not None and tensor.is_meta and other is not None and not other.is_meta:
                put_at(model, name, other)
