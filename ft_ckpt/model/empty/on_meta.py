"""Finds the names and shapes of the tensors of the model that transformers makes from a config.

The model is made on the meta device. A background save does this during the training, so nothing
here changes the state of the process. torch's default dtype, its random numbers and the methods of
its classes stay as they are.
"""

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ft_ckpt.ranks.wrappers import ModelTensors
from ft_ckpt.storage.local import temporary_store

Shapes = dict[str, tuple[int, ...]]


def read_config(config_class: Any, text: str) -> Any:
    """Read a config from its text, as `from_pretrained` reads it from a folder."""
    settings = _without_dtypes(json.loads(text))
    with temporary_store() as store:
        store.write("config.json", json.dumps(settings).encode())
        return config_class.from_pretrained(str(store.folder), local_files_only=True)


def _without_dtypes(settings: Any) -> Any:
    """Return the settings without dtypes.

    With a dtype, transformers would change torch's default dtype while it makes parts of the model.
    """
    if not isinstance(settings, dict):
        return settings
    kept = {}
    for key, value in settings.items():
        if key not in ("dtype", "torch_dtype"):
            kept[key] = _without_dtypes(value)
    return kept


def shapes_of_new(
    cls: Any, config: Any, arguments: Mapping[str, Any]
) -> tuple[Shapes, re.Pattern[str] | None]:
    """Return the shapes of the tensors of a new model, by name.

    Also returns a pattern of the names that the files of the model need not have, or None.
    `arguments` are keyword arguments of the class.
    """
    # Both modes apply to this thread only.
    with torch.device("meta"), _AsFromPretrained(), _without_partitions():
        model = cls(config, **arguments)
    sources = ModelTensors(model).sources(allow_meta=True)
    shapes = {name: source.shape for name, source in sources.items() if not source.is_added}
    optional = model._keys_to_ignore_on_load_missing
    if not optional:
        return shapes, None
    return shapes, re.compile("|".join(f"({pattern})" for pattern in optional))


# These draw random numbers. Not all of them follow `torch.device("meta")`.
_DRAWING_METHODS = frozenset(
    (
        torch.Tensor.uniform_,
        torch.Tensor.normal_,
        torch.Tensor.bernoulli_,
        torch.Tensor.random_,
        torch.Tensor.exponential_,
        torch.Tensor.cauchy_,
        torch.Tensor.log_normal_,
        torch.Tensor.geometric_,
    )
)
_DRAWING_FACTORIES = frozenset(
    (torch.normal, torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli)
)


class _AsFromPretrained(TorchFunctionMode):
    """Draws random numbers in this thread from a generator of its own.

    Otherwise the random numbers of the training, which uses the same generators of the process,
    would change. `torch.linspace` makes a tensor on the CPU, because models read its values when
    they are made. `from_pretrained` makes the same exception.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator("cpu")

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        arguments = dict(kwargs or {})
        if func is torch.linspace:
            arguments.setdefault("device", "cpu")
        is_on_host = func in _DRAWING_METHODS and args[0].device.type == "cpu"
        if func in _DRAWING_FACTORIES:
            is_on_host = self._draws_on_host(func, args, arguments)
        if is_on_host:
            arguments["generator"] = arguments.get("generator") or self._generator
        return func(*args, **arguments)

    @staticmethod
    def _draws_on_host(func: Any, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> bool:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if tensors:
            return all(tensor.device.type == "cpu" for tensor in tensors)
        device = arguments.get("device")
        if device is None:
            return func is torch.normal  # `torch.device("meta")` does not apply to it
        return torch.device(device).type == "cpu"


def _without_partitions() -> Any:
    """Keep transformers from partitioning a new model over the ranks in the `with` block.

    It would do so under DeepSpeed's ZeRO-3. Its flag applies to the whole process, so a model that
    the script makes at the same moment is not partitioned either.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.modeling_utils import set_zero3_state

    return set_zero3_state() if is_deepspeed_zero3_enabled() else nullcontext()
