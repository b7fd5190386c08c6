"""Quantised bases of adapters: their dequantised weights, and models on mapped files to merge adapters into.

Supports the 4-bit and 8-bit layers of bitsandbytes. The live layers are never dequantised in place.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.distributed.wrapper import stand_in_parameter
from ft_ckpt.distributed.wrappers import unwrap, user_class, walk_modules
from ft_ckpt.errors import BaseMismatchError, LoadError, SelectionError, listing
from ft_ckpt.formats.layout import TensorFile
from ft_ckpt.model.adapters import base_view, has_adapters
from ft_ckpt.model.base_class import BaseClass
from ft_ckpt.model.base_files import FileOrigin, find_origins
from ft_ckpt.model.companions import is_quantised
from ft_ckpt.model.conversion import with_whole_parameters
from ft_ckpt.model.pretrained import add_folder_settings, model_class, without_memory
from ft_ckpt.model.selection import View, put_at, tensor_at

_KINDS = ("Params4bit", "Int8Params")
_COMPARED = 8  # layers to compare, spread over the model: at least this many, less than twice as many
_EQUAL_SHARE = 0.99  # of a layer's codes; kernels round a few differently, a fine-tuned model changes many


def has_quantised_base(model: nn.Module) -> bool:
    """Whether the model has adapters on a quantised base."""
    inside: Any = unwrap(model)
    if not has_adapters(inside):
        return False
    base = inside.get_base_model() if hasattr(inside, "get_base_model") else inside
    return getattr(base, "config", None) is not None and is_quantised(base, base.config)


class QuantisedBase:
    """The live base of a model's adapters; `layers`: its quantised layers by weight name in the base."""

    def __init__(self, model: nn.Module) -> None:
        """Raises SelectionError for a model that is sharded over ranks, or quantised by another library."""
        sources = ModelTensors(model).sources()
        shardings = {source.name: source.sharding for source in sources.values()}
        cut = [name for name, sharding in shardings.items() if sharding.is_sharded or not sharding.is_replicated]
        view = View(unwrap(model), sources)
        modules = {path: unwrap(module) for path, _, module in walk_modules(view.module)}
        base = base_view(view)
        self.module: Any = base.module
        known = {name: source for name, source in base.sources.items() if not source.is_added}
        self.tensors: dict[str, Tensor] = {name: source.live for name, source in known.items()}
        places = {name: modules[source.name.rpartition(".")[0]] for name, source in known.items()}
        self.layers = {n: places[n] for n, tensor in self.tensors.items() if type(tensor).__name__ in _KINDS}
        if cut or not self.layers:
            why = f"{listing(cut, ', ')}: cut over ranks" if cut else "quantised by another library than bitsandbytes"
            raise SelectionError(
                f"{type(self.module).__name__}: {why}, so its adapters are not merged here; save with "
                "adapter_only=True, then ft_ckpt.merge(adapter, out, base=...)"
            )

    def plain_config(self) -> Any:
        """The live model's config without its quantisation settings."""
        config = copy.deepcopy(self.module.config)
        vars(config).pop("quantization_config", None)
        return config

    def dequantised(self, *, in_memory: bool) -> nn.Module:
        """A new model with the dequantised weights, computed at each read, or now if `in_memory`."""
        with without_memory():
            made: Any = user_class(type(self.module))(self.plain_config())
        plain: dict[int, Any] = {}  # by id of the live tensor, to keep ties
        for name, tensor in self.tensors.items():
            empty = tensor_at(made, name)
            if empty is None:
                continue
            if id(tensor) not in plain:
                plain[id(tensor)] = self._plain_tensor(name, tuple(empty.shape), in_memory)
            put_at(made, name, plain[id(tensor)])
        return made.eval()  # type: ignore[no-any-return]  # a class of transformers

    def _plain_tensor(self, name: str, shape: tuple[int, ...], in_memory: bool) -> Tensor:
        live, dtype = self.tensors[name], self.module.dtype
        if name in self.layers and not in_memory:
            return stand_in_parameter(shape, dtype, partial(_dequantised_weight, self.layers[name], dtype))
        full = (
            _dequantised_weight(self.layers[name], dtype) if name in self.layers else live.detach().to("cpu", copy=True)
        )
        return nn.Parameter(full, requires_grad=False) if isinstance(live, nn.Parameter) else full

    def refuse_other(self, plain: nn.Module, place: str) -> None:
        """Raise BaseMismatchError naming layers that differ from the quantised layers of `plain`; a sample is compared.

        `place`: the origin of `plain`.
        """
        known = ModelTensors(plain).sources()
        names = list(self.layers)
        chosen = names[:: max(1, len(names) // _COMPARED)]
        wrong = []
        for name in chosen:
            full = known[name].local if name in known else None
            if full is None or not _is_quantised_from(self.layers[name], full):
                wrong.append(name)
        if wrong:
            raise BaseMismatchError(
                f"{listing(wrong, ', ')}: {len(wrong)} of {len(chosen)} layers that were compared are not those of "
                f"{place}, quantised; give the model that this one was quantised from with base=, or merge into what "
                "its weights stand for, with the errors of quantising, with dequantize=True"
            )


@torch.no_grad()
def _dequantised_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    from bitsandbytes import functional

    weight = layer.weight
    if type(weight).__name__ == "Params4bit":
        full = functional.dequantize_4bit(weight.data, weight.quant_state)
    else:
        scales = getattr(weight, "SCB", None)
        scales = layer.state.SCB if scales is None else scales
        full = functional.int8_vectorwise_dequant(weight.data, scales.to(weight.device))
    return full.to("cpu", dtype)


@torch.no_grad()
def _is_quantised_from(layer: Any, full: Tensor) -> bool:
    """Whether quantising `full` with the layer's settings gives nearly the same codes."""
    from bitsandbytes import functional

    weight = layer.weight
    if type(weight).__name__ == "Params4bit":
        state = weight.quant_state
        if tuple(full.shape) != tuple(state.shape):
            return False
        given = full.to(weight.device, state.dtype)
        codes = functional.quantize_4bit(given, blocksize=state.blocksize, quant_type=state.quant_type)[0]
        return _equal_share(_halves(weight.data), _halves(codes)) >= _EQUAL_SHARE
    if tuple(full.shape) != tuple(weight.shape):
        return False
    codes = functional.int8_vectorwise_quant(full.to(weight.device, torch.float16))[0]
    return _equal_share(weight.data, codes) >= _EQUAL_SHARE


def _halves(packed: Tensor) -> Tensor:
    """The 4-bit codes, unpacked from two per byte."""
    flat = packed.view(torch.uint8).flatten()
    return torch.cat([flat >> 4, flat & 15])


def _equal_share(one: Tensor, other: Tensor) -> float:
    return float((one == other).float().mean())


@dataclass(frozen=True, eq=False)
class FileModel:
    """A model in eval mode, and the names of stored tensors that it does not have."""

    model: Any
    left: tuple[str, ...]


def model_on_files(
    folder: Path, base: BaseClass, file: TensorFile, replaced: Collection[str], *, in_memory: bool = False
) -> FileModel:
    """The model `base` in `folder` with the tensors of `file`, under the names that transformers reads.

    Tensors in `replaced`, which the caller fills, are zeros if the file lacks them or has another shape. Tensors that
    transformers converts, such as fused experts, are computed at each read; with `in_memory` once, so that the model
    can run. Raises LoadError for a class that is not in transformers, or naming tensors that are missing or have
    another shape.
    """
    name = base.cls.__name__
    if model_class(name) is not base.cls or getattr(base.config, "auto_map", None):
        raise LoadError(
            f"{folder}: its class is in no module of transformers; load it with its own code and PEFT, and save it "
            "with CheckpointSaver.save(merged=True)"
        )
    with without_memory():
        model = base.cls(base.config)
    # Converted tensors are read when PEFT has replaced layers of the model.
    described = with_whole_parameters(model, model.state_dict())
    found = find_origins(model, model.state_dict(), file)
    model._weight_conversions = list(found.transforms)  # a save reverts the conversions that were used
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
        raise LoadError(f"{folder}: {listing([*problems.values()])}: its files do not fit {name}; use another copy")
    add_folder_settings(model, folder)
    return FileModel(model.eval().requires_grad_(False), found.left)


def dequantised_model(folder: Path, base: BaseClass) -> FileModel:
    """The quantised model `base` in `folder` with dequantised weights in memory. Raises LoadError if that fails."""
    options = {"dtype": "auto", "local_files_only": True}
    try:
        model = base.cls.from_pretrained(folder, config=base.config, **options).dequantize()
    except (ImportError, NotImplementedError, ValueError, RuntimeError) as error:
        raise LoadError(
            f"{folder}: cannot be dequantised: {error}; name the model it was made of with base="
        ) from error
    vars(model.config).pop("quantization_config", None)
    vars(model).pop("_weight_conversions", None)  # the quantiser's conversions cannot be reverted
    return FileModel(model.eval().requires_grad_(False), ())


def is_quantised_folder(folder: Path) -> bool:
    """Whether the config in `folder` has quantisation settings."""
    return getattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "quantization_config", None) is not None


def _fill_place(model: Any, described: Any, place: FileOrigin, file: TensorFile, in_memory: bool) -> dict[str, str]:
    """Put mapped tensors, or stand-ins for computed ones, into the model; a line by name for each misfit.

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
            put_at(model, target, stand_in_parameter(shape, empty.dtype, partial(read_target, target)))
        else:
            held = read_target(target)
            put_at(model, target, nn.Parameter(held, requires_grad=False) if isinstance(live, nn.Parameter) else held)
    return wrong


def _tie_missing(model: Any) -> None:
    """Tie tensors that the class declares tied and of which the files store only one."""
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        for name, stored in (pair, pair[::-1]):
            tensor, other = tensor_at(model, name), tensor_at(model, stored)
            if tensor is not None and tensor.is_meta and other is not None and not other.is_meta:
                put_at(model, name, other)
