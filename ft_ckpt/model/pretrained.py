"""Builds an empty transformers model from its folder: of known classes only, no larger than its tensors allow."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.distributed.wrappers import unwrap
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.formats.dtypes import dtype_of
from ft_ckpt.model.conversion import converted_entries, stored_as_in_memory
from ft_ckpt.model.load_weights import beside_weights, weight_names
from ft_ckpt.model.selection import is_pretrained, made_by_class
from ft_ckpt.model.settings import absurd_counts
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.scratch import local_folder
from ft_ckpt.storage.store import Store, read_text

_PARAMETERS_A_TENSOR = 16  # a stored tensor may be cut into several, and each be made more than once
_MOST_ELEMENTS = 1 << 27  # of a buffer: a causal mask of 11,000 positions, a table of 100 million
_FACTORIES = frozenset((torch.ones, torch.zeros, torch.full, torch.arange, torch.rand, torch.randn))


def model_class(name: str) -> Any:
    """The model class of transformers of that name; None when it has none, whatever else is called so."""
    import transformers

    cls = getattr(transformers, name, None) if name.isidentifier() else None
    return cls if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) else None


def checked_config(store: Store, record: PartRecord) -> dict[str, Any]:
    """The contents of config.json, with counts checked first: a model of a billion layers would be built for ever."""
    config: dict[str, Any] = json.loads(read_text(store, beside_weights(record, "config.json")))
    if absurd := absurd_counts(config):
        raise LoadError(
            f"config.json: {listing(absurd)}: no model of the {len(record.tensors):,} tensors in the checkpoint; use "
            "another copy"
        )
    return config


def empty_model(cls: Any, held: OpenCheckpoint, record: PartRecord) -> Any:
    """The model without memory for its parameters; None when transformers has to convert it."""
    weights = {name.rpartition("/")[2] for name in weight_names(record)}
    with companions_here(held, record, lambda name: name not in weights) as folder:
        model = _empty_model_of(cls, folder, record)
        if model is not None:
            name_origin(model, folder, held, record)
    return model


def is_converted(model: nn.Module) -> bool:
    """Whether transformers writes tensors of its `model`, wrapped or not, otherwise than they are in memory."""
    user = unwrap(model)
    if not is_pretrained(user) or getattr(user, "is_quantized", False):
        return False
    return not stored_as_in_memory(user, ModelTensors(model).sources(allow_meta=True))


@contextmanager
def companions_here(
    held: OpenCheckpoint, record: PartRecord, wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[Path]:
    """The path of a part's folder for libraries, while the block runs; the part may lie in a bucket.

    Files in folders below it are other parts'.
    """
    with local_folder(Place(held.store, record.path), lambda name: "/" not in name and wanted(name)) as folder:
        yield folder


def name_origin(model: nn.Module, read_from: Path, held: OpenCheckpoint, record: PartRecord) -> None:
    """Let models of transformers and their configs say that they come from the folder they were found at."""
    for module in model.modules():
        owners: list[Any] = [module, getattr(module, "config", None)]
        for owner in owners:
            if getattr(owner, "name_or_path", None) == str(read_from):
                owner.name_or_path = held.origin.where(record.path)


def _empty_model_of(cls: Any, folder: Path, record: PartRecord) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with without_memory():
        model = cls(config)
    names = ModelTensors(model).sources(allow_meta=True)
    if not made_by_class(model).isdisjoint(names):
        return None  # transformers has their values
    if not stored_as_in_memory(model, names) or any(tensor.name not in names for tensor in record.tensors):
        return None
    if model.can_generate() and LocalStore(folder).stat("generation_config.json") is not None:
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.name_or_path = str(folder)
    return model


def most_parameters(record: PartRecord) -> int:
    """More parameters than any model of the stored tensors has."""
    return _PARAMETERS_A_TENSOR * (len(record.tensors) + 256)


def class_of_own_code(config: Mapping[str, Any], record: PartRecord) -> Any:
    """The auto class that finds the class of a model with code of its own; transformers runs that only if it may."""
    import transformers

    if not config.get("auto_map"):
        raise LoadError(
            f"{record.class_name!r}: no model class of transformers, and no code beside the weights; load them into a "
            "model of yours with into="
        )
    return transformers.AutoModelForCausalLM if "AutoModelForCausalLM" in config["auto_map"] else transformers.AutoModel


@contextmanager
def without_memory() -> Iterator[None]:
    """Models of transformers that are made while the block runs have no memory for parameters; buffers have values."""
    from accelerate import init_empty_weights
    from transformers.initialization import guard_torch_init_functions

    with init_empty_weights(include_buffers=False), leave_parameters_unfilled(), guard_torch_init_functions():
        yield


@contextmanager
def listing_own(record: PartRecord) -> Iterator[None]:
    """Let models of transformers list parameters and buffers alone while the block runs, in the types of the files.

    Its loader takes whatever a state dict lists for a tensor that it may put in place itself, a parameter as it goes,
    and leaves a tensor its type only where the model lists it so: else all are rounded to the type of the config.
    """
    whole = nn.Module.state_dict

    def list_own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_pretrained(module):
            return whole(module, *args, **kwargs)
        found = ModelTensors(module).sources(allow_meta=True)
        sources = {name: source for name, source in found.items() if not source.is_added}
        listed = {name: source.live.detach() for name, source in sources.items()}
        empty = any(tensor.is_meta for tensor in listed.values())  # what has values is as it was read
        types = _stored_types(module, sources, record) if empty else {}
        return {name: tensor.to(types.get(name)) if tensor.is_meta else tensor for name, tensor in listed.items()}

    nn.Module.state_dict = list_own  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.state_dict = whole  # type: ignore[method-assign]


def _stored_types(module: nn.Module, sources: Mapping[str, Source], record: PartRecord) -> dict[str, torch.dtype]:
    """The types that the model's tensors have in the files, by name; of those made from several, one that holds all."""
    stored, types = {tensor.name: dtype_of(tensor.dtype) for tensor in record.tensors}, dict[str, torch.dtype]()
    for entry in converted_entries(module, sources):
        for source in entry.sources if entry.name in stored else ():
            types[source.name] = torch.promote_types(types.get(source.name, stored[entry.name]), stored[entry.name])
    return types


@contextmanager
def leave_parameters_unfilled() -> Iterator[None]:
    """Transformers leaves parameters that are made while the block runs as they are: drawing numbers for nothing costs
    more than mapping a model. Buffers get their values.
    """
    register = nn.Module.register_parameter

    def mark_filled(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            vars(param).pop("_is_hf_initialized", None)  # a tied one comes again, and Accelerate makes it anew
        register(module, name, param)
        if param is not None:
            module._parameters[name]._is_hf_initialized = True  # type: ignore[union-attr]

    nn.Module.register_parameter = mark_filled  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Bounded(TorchFunctionMode):
    """Refuses to make a tensor of values that has more than _MOST_ELEMENTS, before there is memory for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        asked = kwargs or {}
        if func in _FACTORIES and (size := func(*args, **{**asked, "device": "meta"}).numel()) > _MOST_ELEMENTS:
            raise LoadError(
                f"config.json: asks for a buffer of {size:,} numbers, expected at most {_MOST_ELEMENTS:,}; use another "
                "copy"
            )
        return func(*args, **asked)


@contextmanager
def limit_parameters(parameters: int, source: str) -> Iterator[None]:
    """Stop the making of a model of more than so many parameters, or of a huge buffer, which `source` asked for.

    Raises a LoadError before the memory is taken. Parameters are made without memory, buffers with it.
    """
    register, made = nn.Module.register_parameter, 0

    def count_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal made
        made += 1
        if made > parameters:
            raise LoadError(
                f"{source}: asks for a model of more than {parameters:,} parameters, far more than the tensors of the "
                "checkpoint; use another copy"
            )
        register(module, name, param)

    nn.Module.register_parameter = count_parameter  # type: ignore[assignment, method-assign]
    try:
        with _Bounded():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
