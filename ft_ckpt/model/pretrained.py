"""Builds an empty transformers model from its folder: known classes only, size bounded by the
stored tensors.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ft_ckpt.checkpoint import OpenCheckpoint, PartRecord
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.formats import dtype_of
from ft_ckpt.model.conversion import converted_entries, stored_as_in_memory
from ft_ckpt.model.load_weights import beside_weights, weight_names
from ft_ckpt.model.selection import is_pretrained, made_by_class
from ft_ckpt.model.settings import absurd_counts
from ft_ckpt.ranks import ModelTensors, Source, unwrap
from ft_ckpt.storage import LocalStore, Place, Store, local_folder, read_text

# a stored tensor may be split, and a parameter may be registered more than once
_PARAMETERS_A_TENSOR = 16
_MOST_ELEMENTS = 1 << 27  # of a buffer, such as a causal mask of 11,000 positions
_FACTORIES = frozenset((torch.ones, torch.zeros, torch.full, torch.arange, torch.rand, torch.randn))


def model_class(name: str) -> Any:
    """The model class `name` of transformers; None if there is none."""
    import transformers

    cls = getattr(transformers, name, None) if name.isidentifier() else None
    return cls if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) else None


def checked_config(store: Store, record: PartRecord) -> dict[str, Any]:
    """The contents of config.json. Raises LoadError for absurd counts, such as a billion layers."""
    config: dict[str, Any] = json.loads(read_text(store, beside_weights(record, "config.json")))
    if absurd := absurd_counts(config):
        raise LoadError(
            f"config.json: {listing(absurd)}: no model of the {len(record.tensors):,} tensors in "
            "the checkpoint; use another copy"
        )
    return config


def empty_model(cls: Any, held: OpenCheckpoint, record: PartRecord) -> Any:
    """The model without memory for its parameters; None if transformers must load it itself."""
    from transformers import AutoConfig

    weights = {name.rpartition("/")[2] for name in weight_names(record)}
    with companions_here(held, record, lambda name: name not in weights) as folder:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with without_memory():
            model = cls(config)
        names = ModelTensors(model).sources(allow_meta=True)
        if not made_by_class(model).isdisjoint(names):
            return None  # transformers computes their values when it loads
        if not stored_as_in_memory(model, names) or any(
            tensor.name not in names for tensor in record.tensors
        ):
            return None
        add_folder_settings(model, folder)
        name_origin(model, folder, held, record)
    return model


def is_converted(model: nn.Module) -> bool:
    """Whether transformers converts tensors of its `model`, wrapped or not, between memory and
    file.
    """
    user = unwrap(model)
    if not is_pretrained(user) or getattr(user, "is_quantized", False):
        return False
    return not stored_as_in_memory(user, ModelTensors(model).sources(allow_meta=True))


def companions_here(
    held: OpenCheckpoint, record: PartRecord, wanted: Callable[[str], bool] = lambda _: True
) -> AbstractContextManager[Path]:
    """In the block, a local path of a part's folder, also of a part in a bucket, for libraries.

    Subfolders are not copied, because they belong to other parts.
    """
    return local_folder(
        Place(held.store, record.path), lambda name: "/" not in name and wanted(name)
    )


def name_origin(
    model: nn.Module, read_from: Path, held: OpenCheckpoint, record: PartRecord
) -> None:
    """Set `name_or_path` of transformers models and their configs to the original folder."""
    for module in model.modules():
        owners: list[Any] = [module, getattr(module, "config", None)]
        for owner in owners:
            if getattr(owner, "name_or_path", None) == str(read_from):
                owner.name_or_path = held.place.folder.where(record.path)


def add_folder_settings(model: Any, folder: Path) -> None:
    """Set the generation config and `name_or_path` of a model that was built from the config in
    `folder`.
    """
    from transformers import GenerationConfig

    if model.can_generate() and LocalStore(folder).stat("generation_config.json") is not None:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = str(folder)


def most_parameters(record: PartRecord) -> int:
    """An upper bound on the parameters of any model with the stored tensors."""
    return _PARAMETERS_A_TENSOR * (len(record.tensors) + 256)


def class_of_own_code(config: Mapping[str, Any], record: PartRecord) -> Any:
    """The auto class for a model with custom code, which transformers runs only with
    `trust_remote_code`.
    """
    import transformers

    if not config.get("auto_map"):
        raise LoadError(
            f"{record.class_name!r}: no model class of transformers, and no code beside the "
            "weights; load them into a model of yours with into="
        )
    return (
        transformers.AutoModelForCausalLM
        if "AutoModelForCausalLM" in config["auto_map"]
        else transformers.AutoModel
    )


@contextmanager
def without_memory() -> Iterator[None]:
    """In the block, transformers models are made without memory for parameters; buffers get their
    values.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import guard_torch_init_functions

    with (
        init_empty_weights(include_buffers=False),
        leave_parameters_unfilled(),
        guard_torch_init_functions(),
    ):
        yield


@contextmanager
def listing_own(record: PartRecord) -> Iterator[None]:
    """In the block, state dicts of transformers models have parameters and buffers only, in the
    stored dtypes.

    transformers' loader assigns every entry of a state dict as a tensor, and rounds each tensor to
    the config's dtype unless the state dict has the stored dtype.
    """
    whole = nn.Module.state_dict

    def list_own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_pretrained(module):
            return whole(module, *args, **kwargs)
        found = ModelTensors(module).sources(allow_meta=True)
        sources = {name: source for name, source in found.items() if not source.is_added}
        listed = {name: source.live.detach() for name, source in sources.items()}
        # otherwise the tensors are already loaded
        empty = any(tensor.is_meta for tensor in listed.values())
        types = _stored_types(module, sources, record) if empty else {}
        return {
            name: tensor.to(types.get(name)) if tensor.is_meta else tensor
            for name, tensor in listed.items()
        }

    with _replacing("state_dict", list_own):
        yield


@contextmanager
def _replacing(method: str, function: Callable[..., Any]) -> Iterator[None]:
    """In the block, replace `method` of nn.Module, for all modules of the process, by
    `function`.
    """
    original = getattr(nn.Module, method)
    setattr(nn.Module, method, function)
    try:
        yield
    finally:
        setattr(nn.Module, method, original)


def _stored_types(
    module: nn.Module, sources: Mapping[str, Source], record: PartRecord
) -> dict[str, torch.dtype]:
    """The stored dtypes of the model's tensors by name; for a tensor stored as several, their
    promoted dtype.
    """
    stored, types = (
        {tensor.name: dtype_of(tensor.dtype) for tensor in record.tensors},
        dict[str, torch.dtype](),
    )
    for entry in converted_entries(module, sources):
        for source in entry.sources if entry.name in stored else ():
            types[source.name] = torch.promote_types(
                types.get(source.name, stored[entry.name]), stored[entry.name]
            )
    return types


@contextmanager
def leave_parameters_unfilled() -> Iterator[None]:
    """In the block, transformers initialises buffers but not parameters, which would cost more than
    mapping a model.
    """
    register = nn.Module.register_parameter

    def mark_filled(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            # already set if a tied parameter is registered again
            vars(param).pop("_is_hf_initialized", None)
        register(module, name, param)
        if param is not None:
            module._parameters[name]._is_hf_initialized = True  # type: ignore[union-attr]

    with _replacing("register_parameter", mark_filled):
        yield


class _Bounded(TorchFunctionMode):
    """Raises LoadError for factory calls of more than _MOST_ELEMENTS elements, before memory is
    allocated.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        asked = kwargs or {}
        if (
            func in _FACTORIES
            and (size := func(*args, **{**asked, "device": "meta"}).numel()) > _MOST_ELEMENTS
        ):
            raise LoadError(
                f"config.json: asks for a buffer of {size:,} numbers, expected at most "
                f"{_MOST_ELEMENTS:,}; use another copy"
            )
        return func(*args, **asked)


@contextmanager
def limit_parameters(parameters: int, source: str) -> Iterator[None]:
    """In the block, raise LoadError for a model of more than `parameters` parameters, or with a
    huge buffer.

    `source` is named in the error, which is raised before memory is allocated. Parameters have no
    memory, buffers do.
    """
    register, made = nn.Module.register_parameter, 0

    def count_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal made
        made += 1
        if made > parameters:
            raise LoadError(
                f"{source}: asks for a model of more than {parameters:,} parameters, far more than "
                "the tensors of the checkpoint; use another copy"
            )
        register(module, name, param)

    with _replacing("register_parameter", count_parameter), _Bounded():
        yield
