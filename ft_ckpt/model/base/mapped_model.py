"""Makes the base of adapters on its mapped files, to merge the adapters into it.

No tensor is read before it is used.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import LoadError, damaged_input, listing
from ft_ckpt.formats import checkpoint_format_of, open_tensor_file
from ft_ckpt.formats.files import JoinedFile, TensorFile
from ft_ckpt.model.base.files import FileOrigin, find_origins
from ft_ckpt.model.base.model_class import BaseClass, find_base_class
from ft_ckpt.model.empty import (
    add_folder_settings,
    model_on_file,
    transformers_class,
    without_memory,
)
from ft_ckpt.model.files import weight_files
from ft_ckpt.model.tensors import (
    is_config_of_diffusers,
    put_at,
    stored_base_names,
    tensor_at,
    with_whole_parameters,
)
from ft_ckpt.ranks.sharding import stand_in_parameter
from ft_ckpt.storage import Store, read_text
from ft_ckpt.storage.places import Place, local_folder


@dataclass(frozen=True, eq=False)
class FileModel:
    """Model in eval mode, and the names of stored tensors that it does not have."""

    model: Any
    unused_names: tuple[str, ...]


def base_on_files(
    folder: Place,
    shown: Place,
    adapters: Sequence[PartRecord],
    settings: Mapping[str, Any],
    *,
    in_memory: bool,
) -> FileModel:
    """Make the base of `adapters` on its mapped files in `folder`.

    `shown` is the name of `folder` in messages. `settings` is the config of the first adapter. If
    `in_memory`, tensors that transformers converts are computed once, and the model can run.
    Otherwise they are computed at each read. Raises LoadError if there is no model, and for a
    quantised one.
    """
    names, _ = weight_files(folder.folder, "model")
    if not names or folder.folder.stat("config.json") is None:
        raise LoadError(
            f"{shown}: no model of transformers in it; name the folder of the "
            "adapter's base with base="
        )

    config = json.loads(read_text(folder.folder, "config.json"))
    if is_config_of_diffusers(config):
        file = _join_mapped(folder.folder, names, shown)
        return FileModel(model_on_file(config, file, str(shown)), ())

    with local_folder(folder, lambda name: "/" not in name and name not in names) as local:
        base = find_base_class(str(local), adapters[0], settings, trust_remote_code=False)
        if _is_quantised_folder(local):
            raise LoadError(
                f"{shown}: its weights are quantised, expected those of the model that was "
                "quantised; name that model with base="
            )
        replaced: set[str] = set()
        for record in adapters:
            replaced |= stored_base_names(record)
        file = _join_mapped(folder.folder, names, shown)
        model = _model_on_files(local, base, file, replaced, in_memory=in_memory)
        base.complete(model.model)
        return model


def _join_mapped(store: Store, names: Sequence[str], shown: Place) -> TensorFile:
    """Open weight files as one file, whose tensors are mapped if their format allows it."""
    files: list[tuple[str, TensorFile]] = []
    for name in names:
        file_format = checkpoint_format_of(name)
        if name.endswith(file_format.suffixes):
            files.append(("", file_format.open_file(store.open(name))))
        else:
            files.append(("", open_tensor_file(store.open(name))))
    return JoinedFile(files, str(shown))


def _model_on_files(
    folder: Path,
    base: BaseClass,
    file: TensorFile,
    replaced: Collection[str],
    *,
    in_memory: bool,
) -> FileModel:
    """Make the model `base` in `folder` on the tensors of `file`.

    The caller fills the tensors in `replaced`. They are zeros if the file lacks them or has them in
    another shape. Tensors that transformers converts, such as fused experts, are computed at each
    read, or once if `in_memory`. Raises LoadError for a class that is not in transformers, and
    naming tensors that are missing or have another shape.
    """
    name = base.cls.__name__
    if transformers_class(name) is not base.cls or getattr(base.config, "auto_map", None):
        raise LoadError(
            f"{folder}: its class is in no module of transformers; load it with its own code and "
            "PEFT, and save it with CheckpointSaver.save(merged=True)"
        )

    with damaged_input(f"{folder}: its config"), without_memory():
        model = base.cls(base.config)

    # Converted tensors are read later, after PEFT has replaced layers of the model.
    described = with_whole_parameters(model, model.state_dict())
    stored = find_origins(model, model.state_dict(), file)

    # A save reverts the conversions that were used.
    model._weight_conversions = list(stored.transforms)
    misfits: dict[str, str] = {}
    for origin in stored.origins:
        misfits |= _put_tensors(model, described, origin, file, in_memory)
    _tie_missing(model)
    empty = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_meta}
    problems = {name: f"{name}: not in the files" for name in empty} | misfits
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
    return FileModel(model.eval().requires_grad_(False), stored.unused_names)


def _is_quantised_folder(folder: Path) -> bool:
    """Check whether the config in `folder` has quantisation settings."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return getattr(config, "quantization_config", None) is not None


def _put_tensors(
    model: Any, described: Any, origin: FileOrigin, file: TensorFile, in_memory: bool
) -> dict[str, str]:
    """Put the tensors of one origin into the model.

    A converted tensor gets a stand-in, which computes it at each read, unless `in_memory`.
    `described` is the model as `with_whole_parameters` returns it. Returns a text for each tensor
    of another shape, by name.
    """

    def read_stored(name: str) -> Tensor:
        return file.read(name).view(file.specs[name].shape)

    def read_target(target: str) -> Tensor:
        return origin.convert(described, read_stored)[target]

    misfits = {}
    for target, empty in origin.convert_empty(described, file).items():
        live = tensor_at(model, target)
        shape = tuple(empty.shape)
        expected = None if live is None else tuple(live.shape)
        if shape != expected:
            misfits[target] = f"{target}: {shape} in the files, expected {expected}"
        elif origin.converter is not None and not in_memory:
            stand_in = stand_in_parameter(shape, empty.dtype, partial(read_target, target))
            put_at(model, target, stand_in)
        else:
            tensor = read_target(target)
            if isinstance(live, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            put_at(model, target, tensor)

    return misfits


def _tie_missing(model: Any) -> None:
    """Tie the tensors that the class declares tied if the files have only one of them."""
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        for name, stored in (pair, pair[::-1]):
            tensor = tensor_at(model, name)
            tied = tensor_at(model, stored)
            if tensor is None or tied is None:
                continue
            if tensor.is_meta and not tied.is_meta:
                put_at(model, name, tied)
