"""Loads the base model of adapters from its weight files, so that adapters can be merged into it.

The weight files are memory-mapped where their format allows it, so a tensor is read from the disk
only when it is used. A large base can therefore be merged on a machine with little memory.

transformers stores some tensors in another form than the model has them. For example, a file has
the weights of each expert, and the model has one tensor for all experts. Such tensors have to be
converted. They are converted at each read, or once if the caller wants a model that can run.
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
    """A model in eval mode whose tensors come from files.

    Attributes:
        model: The model.
        unused_names: The names of stored tensors that the model does not have.
    """

    model: Any
    unused_names: tuple[str, ...]


def base_on_files(
    base_place: Place,
    place_in_messages: Place,
    adapters: Sequence[PartRecord],
    settings: Mapping[str, Any],
    *,
    in_memory: bool,
) -> FileModel:
    """Load the base model of `adapters` from the weight files in `base_place`.

    Args:
        base_place: The folder of the base, on a disk or in a bucket.
        place_in_messages: The same folder under the name that errors should show.
        adapters: The manifest's records of the adapters. Their stored tensors can replace tensors
            of the base, so the base need not have these.
        settings: The config of the first adapter.
        in_memory: True to convert tensors once and keep them in memory, so that the model can run.
            False to convert them at each read.

    Raises:
        LoadError: The folder has no model, its model is quantised, or its files do not fit.
    """
    store = base_place.folder
    file_names, _ = weight_files(store, "model")
    if not file_names or store.stat("config.json") is None:
        raise LoadError(
            f"{place_in_messages}: no model of transformers in it; name the folder of the "
            "adapter's base with base="
        )

    config = json.loads(read_text(store, "config.json"))
    if is_config_of_diffusers(config):
        file = _open_as_one_file(store, file_names, place_in_messages)
        return FileModel(model_on_file(config, file, str(place_in_messages)), unused_names=())

    def is_small_file(name: str) -> bool:
        return "/" not in name and name not in file_names

    # transformers reads the config and other small files from a disk.
    with local_folder(base_place, is_small_file) as local_path:
        base_class = find_base_class(
            str(local_path), adapters[0], settings, trust_remote_code=False
        )
        if _is_quantised_folder(local_path):
            raise LoadError(
                f"{place_in_messages}: its weights are quantised, expected those of the model that "
                "was quantised; name that model with base="
            )

        replaced_names: set[str] = set()
        for record in adapters:
            replaced_names |= stored_base_names(record)

        file = _open_as_one_file(store, file_names, place_in_messages)
        base = _model_on_file(local_path, base_class, file, replaced_names, in_memory=in_memory)
        base_class.complete(base.model)
        return base


def _open_as_one_file(
    store: Store, file_names: Sequence[str], place_in_messages: Place
) -> TensorFile:
    """Open all weight files as one file, memory-mapped if their format allows it."""
    files: list[tuple[str, TensorFile]] = []
    no_prefix = ""
    for name in file_names:
        file_format = checkpoint_format_of(name)
        if name.endswith(file_format.suffixes):
            file: TensorFile = file_format.open_file(store.open(name))
        else:
            file = open_tensor_file(store.open(name))
        files.append((no_prefix, file))

    return JoinedFile(files, str(place_in_messages))


def _is_quantised_folder(local_path: Path) -> bool:
    """Check whether the config in a folder has quantisation settings."""
    config = AutoConfig.from_pretrained(local_path, trust_remote_code=False)
    return getattr(config, "quantization_config", None) is not None


def _model_on_file(
    local_path: Path,
    base_class: BaseClass,
    file: TensorFile,
    replaced_names: Collection[str],
    *,
    in_memory: bool,
) -> FileModel:
    """Make a model without memory, and give it the tensors of a file.

    Args:
        local_path: The folder with the config of the model.
        base_class: The class and config of the model.
        file: The weights.
        replaced_names: The names of tensors that the caller fills later. They become zeros if the
            file lacks them or has them in another shape.
        in_memory: True to convert tensors once, False to convert them at each read.

    Raises:
        LoadError: The class is not in transformers, or tensors are missing or have another shape.
    """
    class_name = base_class.cls.__name__
    is_own_code = getattr(base_class.config, "auto_map", None)
    if transformers_class(class_name) is not base_class.cls or is_own_code:
        raise LoadError(
            f"{local_path}: its class is in no module of transformers; load it with its own code "
            "and PEFT, and save it with CheckpointSaver.save(merged=True)"
        )

    with damaged_input(f"{local_path}: its config"), without_memory():
        model = base_class.cls(base_class.config)

    # A conversion asks the model for shapes. It can run after PEFT has replaced layers of the
    # model, so it gets a copy that keeps the parameters of now.
    model_for_shapes = with_whole_parameters(model, model.state_dict())
    origins = find_origins(model, model.state_dict(), file)

    # transformers reverts these conversions when it saves the model.
    model._weight_conversions = list(origins.transforms)

    problems: dict[str, str] = {}
    for origin in origins.origins:
        problems |= _put_tensors(model, model_for_shapes, origin, file, in_memory=in_memory)

    _tie_missing_tensors(model)
    _finish_filling(model, local_path, problems, replaced_names)

    add_folder_settings(model, local_path)
    return FileModel(model.eval().requires_grad_(False), origins.unused_names)


def _put_tensors(
    model: Any, model_for_shapes: Any, origin: FileOrigin, file: TensorFile, *, in_memory: bool
) -> dict[str, str]:
    """Put the tensors that are made from one group of stored tensors into the model.

    Args:
        model: The model to fill.
        model_for_shapes: A copy of the model, from which conversions take shapes.
        origin: The group of stored tensors, and their conversion if there is one.
        file: The file with the stored tensors.
        in_memory: True to convert now. False to put a stand-in parameter into the model, which
            converts at each read.

    Returns a problem for each tensor that has another shape than in the model, by its name.
    """

    def read_stored(stored_name: str) -> Tensor:
        return file.read(stored_name).view(file.specs[stored_name].shape)

    def read_converted(name: str) -> Tensor:
        return origin.convert(model_for_shapes, read_stored)[name]

    problems = {}
    for name, placeholder in origin.convert_empty(model_for_shapes, file).items():
        model_tensor = tensor_at(model, name)
        shape = tuple(placeholder.shape)
        expected = None if model_tensor is None else tuple(model_tensor.shape)

        if shape != expected:
            problems[name] = f"{name}: {shape} in the files, expected {expected}"
        elif origin.converter is not None and not in_memory:
            read = partial(read_converted, name)
            put_at(model, name, stand_in_parameter(shape, placeholder.dtype, read))
        else:
            tensor = read_converted(name)
            if isinstance(model_tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            put_at(model, name, tensor)

    return problems


def _tie_missing_tensors(model: Any) -> None:
    """Tie the tensors that the class declares tied if the files have only one of them."""
    tied_names = getattr(model, "all_tied_weights_keys", None) or {}
    for first_name, second_name in tied_names.items():
        _tie_if_missing(model, first_name, second_name)
        _tie_if_missing(model, second_name, first_name)


def _tie_if_missing(model: Any, name: str, other_name: str) -> None:
    """If tensor `name` has no values and tensor `other_name` has some, make them one tensor."""
    tensor = tensor_at(model, name)
    other_tensor = tensor_at(model, other_name)
    if tensor is None or other_tensor is None:
        return

    if tensor.is_meta and not other_tensor.is_meta:
        put_at(model, name, other_tensor)


def _finish_filling(
    model: Any, local_path: Path, shape_problems: Mapping[str, str], replaced_names: Collection[str]
) -> None:
    """Put zeros into tensors that the caller replaces, and check that no other tensor is empty.

    `shape_problems` has a text for each tensor that has another shape in the files, by its name.
    Raises LoadError naming the tensors that are missing or have another shape.
    """
    missing_tensors = {
        name: tensor for name, tensor in model.state_dict().items() if tensor.is_meta
    }
    problems = {name: f"{name}: not in the files" for name in missing_tensors}
    problems |= shape_problems

    for name in problems.keys() & set(replaced_names):
        missing = missing_tensors[name]
        zeros = torch.zeros(missing.shape, dtype=missing.dtype, device="cpu")
        put_at(model, name, nn.Parameter(zeros, requires_grad=False))
        del problems[name]

    if problems:
        raise LoadError(
            f"{local_path}: {listing([*problems.values()])}: its files do not fit "
            f"{type(model).__name__}; use another copy"
        )
