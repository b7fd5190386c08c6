"""Changes how transformers makes models during a load.

`without_memory` makes parameters without memory, `limit_parameters` bounds the size of a model, and
`listing_own` loads tensors in their stored dtypes. Each replaces a method of nn.Module in its
`with` block, for all modules of the process.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import LoadError
from ft_ckpt.formats import dtype_of
from ft_ckpt.model.tensors import converted_entries, is_pretrained
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import ModelTensors

# The largest buffer that a model can make, for example a causal mask of 11,000 positions.
_MAX_ELEMENTS = 1 << 27
_FACTORIES = frozenset((torch.ones, torch.zeros, torch.full, torch.arange, torch.rand, torch.randn))


@contextmanager
def _replacing(method: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace `method` of nn.Module in the `with` block, for all modules of the process."""
    original = getattr(nn.Module, method)
    setattr(nn.Module, method, function)
    try:
        yield
    finally:
        setattr(nn.Module, method, original)


@contextmanager
def without_memory() -> Iterator[None]:
    """Make transformers models in the `with` block without memory for parameters.

    Buffers get their values.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import guard_torch_init_functions

    with (
        init_empty_weights(include_buffers=False),
        _leaving_parameters_unfilled(),
        guard_torch_init_functions(),
    ):
        yield


@contextmanager
def _leaving_parameters_unfilled() -> Iterator[None]:
    """Let transformers initialise only buffers in the `with` block.

    Initialising parameters would take longer than mapping a model.
    """
    register = nn.Module.register_parameter

    def mark_filled(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            # A tied parameter that is registered again has the mark already.
            vars(param).pop("_is_hf_initialized", None)
        register(module, name, param)
        if param is not None:
            module._parameters[name]._is_hf_initialized = True  # type: ignore[union-attr]  # not None

    with _replacing("register_parameter", mark_filled):
        yield


@contextmanager
def limit_parameters(parameters: int, source: str) -> Iterator[None]:
    """Raise LoadError in the `with` block for a model of more than `parameters` parameters.

    A buffer of more than _MAX_ELEMENTS elements is refused as well. The error is raised before
    memory is allocated. `source` is the name of the config in the error.
    """
    register = nn.Module.register_parameter
    count = 0

    def count_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal count
        count += 1
        if count > parameters:
            raise LoadError(
                f"{source}: asks for a model of more than {parameters:,} parameters, far more than "
                "the tensors of the checkpoint; use another copy"
            )
        register(module, name, param)

    with _replacing("register_parameter", count_parameter), _BoundedFactories():
        yield


class _BoundedFactories(TorchFunctionMode):
    """Raises LoadError for calls such as `torch.zeros` of more than _MAX_ELEMENTS elements.

    The error is raised before memory is allocated.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        arguments = kwargs or {}
        if func in _FACTORIES:
            elements = func(*args, **{**arguments, "device": "meta"}).numel()
            if elements > _MAX_ELEMENTS:
                raise LoadError(
                    f"config.json: asks for a buffer of {elements:,} numbers, expected at most "
                    f"{_MAX_ELEMENTS:,}; use another copy"
                )
        return func(*args, **arguments)


@contextmanager
def listing_own(record: PartRecord) -> Iterator[None]:
    """Change the state dicts of transformers models in the `with` block, for its loader.

    They have parameters and buffers only, because the loader assigns every entry as a tensor. Their
    tensors have the stored dtypes, because the loader rounds any other tensor to the dtype of the
    config.
    """
    whole_state_dict = nn.Module.state_dict

    def own_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_pretrained(module):
            return whole_state_dict(module, *args, **kwargs)
        all_sources = ModelTensors(module).sources(allow_meta=True)
        sources = {name: source for name, source in all_sources.items() if not source.is_added}
        tensors = {name: source.live.detach() for name, source in sources.items()}
        if not any(tensor.is_meta for tensor in tensors.values()):
            return tensors  # the model is loaded already
        dtypes = _stored_dtypes(module, sources, record)
        for name, tensor in tensors.items():
            if tensor.is_meta:
                tensors[name] = tensor.to(dtypes.get(name))
        return tensors

    with _replacing("state_dict", own_state_dict):
        yield


def _stored_dtypes(
    module: nn.Module, sources: Mapping[str, Source], record: PartRecord
) -> dict[str, torch.dtype]:
    """Return the stored dtype of each tensor of the model, by name.

    If a tensor is stored as several, it is the dtype to which theirs are promoted.
    """
    stored = {tensor.name: dtype_of(tensor.dtype) for tensor in record.tensors}
    dtypes: dict[str, torch.dtype] = {}
    for entry in converted_entries(module, sources):
        dtype = stored.get(entry.name)
        if dtype is None:
            continue
        for source in entry.sources:
            dtypes[source.name] = torch.promote_types(dtypes.get(source.name, dtype), dtype)
    return dtypes
