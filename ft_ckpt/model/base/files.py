"""Finds the files of an adapter's base on this machine, and its tensors in them.

The source of a base is a folder or a repository of the Hub. Repositories are looked up in the Hub's
cache, without network access.

transformers renames some stored tensors when it loads a model, and converts others: for example, it
joins the experts of a layer to one tensor. `find_origins` finds out from which stored tensors each
tensor of a model comes.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn

from ft_ckpt.errors import CheckpointError
from ft_ckpt.formats import dtype_of
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.model.files import join_weight_files, weight_files
from ft_ckpt.model.tensors import is_pretrained, made_by_class, with_whole_parameters
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import unwrap
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place


def base_folder(source: str, revision: str | None) -> Place | None:
    """Find the folder of a base, or return None if it is not on this machine.

    `source` is a folder or a repository.
    """
    place = open_place(source)
    if place.is_folder:
        return place
    return cached_base(source, revision)


def cached_base(repo_id: str, revision: str | None) -> Place | None:
    """Find the folder of a repository in the Hub's cache. Return None if it is not there."""
    with suppress(LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, ValueError):
        folder = snapshot_download(repo_id, revision=revision, local_files_only=True)
        return Place(LocalStore(Path(folder)))
    return None


def config_in_files(source: str, revision: str | None = None) -> Any:
    """Read the config in the folder or repository `source`, without running code from it.

    Returns None if the config is not on this machine.
    """
    from transformers import AutoConfig

    options = {"revision": revision, "trust_remote_code": False}
    try:
        is_local = open_place(source).is_folder
        return AutoConfig.from_pretrained(source, local_files_only=not is_local, **options)
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, eq=False)
class FileOrigin:
    """Stored tensors from which transformers makes one or several tensors of a model.

    Attributes:
        target: the first of the names in the model.
        stored: the stored tensors, each as (pattern of the converter, name in the file).
        converter: transformers' WeightConverter. None: one stored tensor is loaded unchanged.
    """

    target: str
    stored: tuple[tuple[str, str], ...]
    converter: Any

    def convert(self, model: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Compute the tensors of the model, by name. `read` returns a stored tensor by its name."""
        if self.converter is None:
            return {self.target: read(self.stored[0][1])}
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.stored:
            converter.add_tensor(self.target, name, pattern, read(name))
        converted = converter.convert(self.target, model=model, config=model.config)
        tensors = {}
        for name, value in converted.items():
            tensors[name] = value[0] if isinstance(value, list) else value
        return tensors

    def convert_empty(self, model: Any, file: TensorFile) -> dict[str, Tensor]:
        """Compute the tensors of the model on the meta device, for their shapes and dtypes."""

        def empty_stored(name: str) -> Tensor:
            spec = file.specs[name]
            return torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device="meta")

        return self.convert(model, empty_stored)


@dataclass(frozen=True, eq=False)
class FileOrigins:
    """From which stored tensors of a file the tensors of a model come.

    Attributes:
        origins: the origins of all tensors of the model that the file has.
        unused_names: names of stored tensors that are not in the model.
        transforms: transformers' renamings and conversions that were used.
    """

    origins: tuple[FileOrigin, ...]
    unused_names: tuple[str, ...]
    transforms: tuple[Any, ...]


def find_origins(model: Any, names: Collection[str], file: TensorFile) -> FileOrigins:
    """Find the tensors `names` of `model` in `file`, as transformers renames and converts them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern: dict[str, Any] = {}
    for converter in converters:
        by_pattern |= dict.fromkeys(converter.source_patterns, converter)
    model_names = dict.fromkeys(names, True)
    prefix = model.base_model_prefix

    # By name in the model, the stored tensors that it is made from.
    stored: dict[str, list[tuple[str, str]]] = {}
    unused_names = []
    for name in sorted(file.specs, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, model_names)
        # As in transformers: a stored name that the model has is not renamed.
        if target not in model_names and name in model_names:
            target, pattern = rename_source_key(name, [], [], prefix, model_names)
        if target in model_names:
            stored.setdefault(target, []).append((pattern or "", name))
        else:
            unused_names.append(name)

    used_transforms = []
    for transform in transforms:
        # transformers 5.4 does not record which transforms it used, so all count as used.
        if not hasattr(transform, "was_used") or transform.was_used():
            used_transforms.append(transform)

    origins = []
    for target, pairs in stored.items():
        first_pattern = pairs[0][0]
        origins.append(FileOrigin(target, tuple(pairs), by_pattern.get(first_pattern)))

    return FileOrigins(tuple(origins), tuple(unused_names), tuple(used_transforms))


def current_names(model: Any, names: Iterable[str]) -> list[str]:
    """Return the names that the installed transformers gives to tensors of earlier versions."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    return [rename_source_key(name, renamings, [])[0] for name in names]


# The result of `absent_parameters` by live base, because each save asks for it.
_absent: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def absent_parameters(
    model: Any, sources: Mapping[str, Source], base_ids: Iterable[tuple[str, str | None]]
) -> frozenset[str]:
    """Find the parameters of the live base `model` that its files lack.

    transformers draws them at random at each load. `sources` are the tensors of the base by name.
    `base_ids` are possible sources of the base, each as (folder or repository, revision). The first
    one that is on this machine is compared. Returns an empty set if none is, or if it has no
    weights.
    """
    inner = unwrap(model)
    if not is_pretrained(inner):
        return frozenset()
    if inner not in _absent:
        _absent[inner] = frozenset()
        for base_id, revision in base_ids:
            folder = base_folder(base_id, revision)
            if folder is not None:
                _absent[inner] = _find_absent(inner, sources, folder)
                break
    return _absent[inner]


def _find_absent(model: Any, sources: Mapping[str, Source], folder: Place) -> frozenset[str]:
    try:
        names, _ = weight_files(folder.folder, "model")
        if not names:
            return frozenset()
        with closing(join_weight_files(folder.folder, names)) as file:
            shapes = _shapes_in(file, model, sources)
    except CheckpointError:  # no model can be read from the folder
        return frozenset()

    if getattr(model, "hf_quantizer", None) is None:
        filled = {name for name, shape in shapes.items() if shape in (None, sources[name].shape)}
    else:
        # A quantiser changes the shapes of a layer and adds scales. So all tensors of a layer count
        # as filled if one of them is in the files.
        layers = {name.rpartition(".")[0] for name in shapes}
        filled = {name for name in sources if name.rpartition(".")[0] in layers}

    filled |= made_by_class(model)
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if not filled.isdisjoint(pair):
            filled.update(pair)

    filled_keys = {sources[name].key for name in filled & sources.keys()}
    absent = set()
    for name, source in sources.items():
        if source.is_parameter and source.key not in filled_keys:
            absent.add(name)

    return frozenset(absent)


def _shapes_in(
    file: TensorFile, model: Any, sources: Mapping[str, Source]
) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes that the tensors of the model have in `file`, by name in the model.

    The shape is None for a tensor that transformers converts.
    """
    empty = {}
    for name, source in sources.items():
        empty[name] = torch.empty(source.shape, dtype=source.dtype, device="meta")
    described = with_whole_parameters(model, empty)
    shapes: dict[str, tuple[int, ...] | None] = {}
    for origin in find_origins(model, sources.keys(), file).origins:
        if origin.converter is None:
            shapes[origin.target] = tuple(file.specs[origin.stored[0][1]].shape)
        elif len(origin.converter.target_patterns) > 1:
            shapes |= dict.fromkeys(origin.convert_empty(described, file).keys() & sources.keys())
        else:
            shapes[origin.target] = None
    return shapes
