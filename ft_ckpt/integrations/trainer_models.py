"""Finds the models, optimizers and tensors that a Trainer holds besides its own model.

They are searched in the attributes of the trainer and of its callbacks. Models that the optimizer
trains are registered with the run, and others are watched (`runs.items.watched_models`). Some state
cannot be restored, such as tensors in lists, or models that callbacks make after the resume.
Reports name it.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from ft_ckpt.errors import SelectionError
from ft_ckpt.formats.safetensors import NAMES
from ft_ckpt.formats.trees import PLAIN, flatten
from ft_ckpt.ranks.moving import digests_of
from ft_ckpt.runs.items import bare_identity

# Attributes that every Trainer has. They are saved in another way, or are no state of the training.
_KNOWN_ATTRIBUTES = frozenset(
    {
        "model",
        "model_wrapped",
        "deepspeed",
        "optimizer",
        "lr_scheduler",
        "accelerator",
        "args",
        "state",
        "control",
        "callback_handler",
        "train_dataset",
        "eval_dataset",
        "data_collator",
        "processing_class",
        "_eval_dataloaders",
        "_tr_loss",
        "label_smoother",
        "_memory_tracker",
        "push_in_progress",
        "neftune_hook_handle",
        "ft_ckpt",
    }
)
# The attributes of `Checkpointed` begin with this, because Python mangles their names.
_CHECKPOINTED_PREFIX = "_Checkpointed__"
# The attributes of those trainers of TRL that generate samples once for several steps.
_GENERATION_ATTRIBUTES = ("_step", "_buffered_inputs")
_GENERATION_ITEM = "trainer.generation"
# Objects of these packages are not searched, and are not saved by their state dicts. Models,
# tensors, optimizers and schedulers are exceptions, and so are lists and mappings.
_LIBRARIES = frozenset(
    {
        "accelerate",
        "builtins",
        "datasets",
        "deepspeed",
        "ft_ckpt",
        "peft",
        "torch",
        "transformers",
        "vllm",
    }
)
# How many levels of lists, mappings and objects inside an attribute are searched.
_MAX_DEPTH = 3
_OPTIMIZERS_AND_SCHEDULERS = (torch.optim.Optimizer, LRScheduler)


@dataclass(frozen=True, eq=False)
class HeldState:
    """What a trainer holds besides its model and optimizer when training begins.

    All are mappings by name, such as "trainer.ref_model".

    Attributes:
        trained: The models with parameters that an optimizer trains.
        models: All other models.
        objects: Optimizers, schedulers, and other objects with a state dict.
        tensors: The digests of single tensors.
    """

    trained: Mapping[str, nn.Module] = field(default_factory=dict)
    models: Mapping[str, nn.Module] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class BufferedGeneration:
    """The samples that a trainer of TRL has generated but not used, as an object with a state dict.

    The state also has the trainer's count of micro-batches.
    """

    trainer: Any

    def state_dict(self) -> dict[str, Any]:
        inputs = self.trainer._buffered_inputs if self.is_storable else None
        return {"step": self.trainer._step, "inputs": inputs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.trainer._step = state["step"]
        self.trainer._buffered_inputs = send_to_device(
            state["inputs"], self.trainer.accelerator.device
        )

    @property
    def is_storable(self) -> bool:
        """Whether the samples consist of tensors and plain values."""
        try:
            flatten(self.trainer._buffered_inputs, NAMES, "inputs", PLAIN)
        except SelectionError:
            return False
        return True


def held_state(trainer: Trainer) -> HeldState:
    """Return the state that a prepared `trainer` holds besides its model and optimizer."""
    trained: dict[str, nn.Module] = {}
    models: dict[str, nn.Module] = {}
    objects: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    held = dict(_held_by(trainer))
    optimizers = [value for value in held.values() if isinstance(value, torch.optim.Optimizer)]
    optimized: set[int] = set()
    for optimizer in (trainer.optimizer, *optimizers):
        for group in optimizer.param_groups:
            optimized.update(id(parameter) for parameter in group["params"])

    for name, value in held.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif not isinstance(value, nn.Module):
            objects[name] = value
        elif any(id(parameter) in optimized for parameter in value.parameters()):
            trained[name] = value
        else:
            models[name] = value

    if _generates(trainer):
        objects[_GENERATION_ITEM] = BufferedGeneration(trainer)
    return HeldState(trained, models, objects, digests_of(tensors))


def unsaved_state(trainer: Trainer, before: HeldState, registered: Collection[str]) -> list[str]:
    """Return the names of state that is new or has changed since `before` and is in no checkpoint.

    `registered` has the names of what is registered or watched.
    """
    names: dict[str, None] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in _held_by(trainer):
        if isinstance(value, Tensor):
            tensors[name] = value
        elif name not in registered:
            names[_attribute_of(name)] = None

    for name, digest in digests_of(tensors).items():
        if before.tensors.get(name) != digest:
            names[_attribute_of(name)] = None

    generation = before.objects.get(_GENERATION_ITEM)
    if generation is not None and not generation.is_storable:
        names["trainer._buffered_inputs"] = None
    return list(names)


def _attribute_of(name: str) -> str:
    """Return the first two words of a name: "trainer.models.0" becomes "trainer.models"."""
    return ".".join(name.split(".")[:2])


def _generates(trainer: Trainer) -> bool:
    """Check whether it is a trainer of TRL that generates samples once for several steps."""
    return all(name in vars(trainer) for name in _GENERATION_ATTRIBUTES)


def _held_by(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the models, tensors and objects with a state that the trainer and its callbacks hold.

    The trained model and its optimizer are left out. Each object comes once, with its name.
    """
    saved_as_model = _SavedAsModel(trainer)
    attributes_of_trainer = dict(vars(trainer))
    saved_otherwise = [*_KNOWN_ATTRIBUTES]
    if _generates(trainer):
        saved_otherwise += _GENERATION_ATTRIBUTES
    for name in saved_otherwise:
        attributes_of_trainer.pop(name, None)
    roots = [("trainer", attributes_of_trainer)]
    for callback in trainer.callback_handler.callbacks:
        roots.append((type(callback).__name__, vars(callback)))
    seen: set[int] = set()
    names: set[str] = set()
    for owner, attributes in roots:
        for attribute, value in list(attributes.items()):
            if attribute.startswith(_CHECKPOINTED_PREFIX):
                continue
            for path, found in _found_in(value, f"{owner}.{attribute}", _MAX_DEPTH):
                name = path.replace("/", ".").replace(":", ".")
                remainder = saved_as_model.remove_from(found)
                if remainder is None or id(found) in seen or name in names:
                    continue
                seen.add(id(found))
                names.add(name)
                yield name, remainder


def _found_in(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the models, tensors and objects with a state in `value`, with their paths.

    `depth` is the number of levels of lists, mappings and objects that are searched.
    """
    if isinstance(value, (nn.Module, Tensor)) or _has_state(value):
        yield path, value
        return

    if not depth:
        return
    children: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, (list, tuple, deque)):
        children = list(enumerate(value))
    elif _is_plain_object(value):
        children = list(vars(value).items())

    for key, child in children:
        yield from _found_in(child, f"{path}.{key}", depth - 1)


def _has_state(value: Any) -> bool:
    """Check whether a value is to be saved by its state dict."""
    if isinstance(value, _OPTIMIZERS_AND_SCHEDULERS):
        return True
    if isinstance(value, (DataLoader, Trainer, type)) or _library_of(value) in _LIBRARIES:
        return False
    has_getter = callable(getattr(value, "state_dict", None))
    return has_getter and callable(getattr(value, "load_state_dict", None))


def _is_plain_object(value: Any) -> bool:
    """Check whether the value is an instance of a program's own class.

    Such an object may hold tensors in its attributes.
    """
    if isinstance(value, (Trainer, TrainingArguments, type)) or callable(value):
        return False
    return hasattr(value, "__dict__") and _library_of(value) not in _LIBRARIES


def _library_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


class _SavedAsModel:
    """The modules, tensors and optimizers that are saved as the model and optimizer of the run."""

    def __init__(self, trainer: Any) -> None:
        self.modules: set[int] = set()
        self.tensors: set[int] = set()
        self.addresses: set[int] = set()  # where the elements of the tensors begin
        for root in (trainer.model, trainer.model_wrapped):
            self.modules.update(id(module) for module in root.modules())
            for tensor in (*root.parameters(), *root.buffers()):
                self.tensors.add(id(tensor))
                if tensor.numel() and not tensor.is_meta:
                    self.addresses.add(tensor.data_ptr())
        objects = [trainer.optimizer, trainer.lr_scheduler]
        self.objects = {bare_identity(value) for value in objects if value is not None}

    def remove_from(self, value: Any) -> Any:
        """Return what of a value is not saved as the model; None if nothing remains."""
        if isinstance(value, nn.Module):
            return self._other_modules(value)
        if isinstance(value, Tensor):
            has_memory = value.numel() and not value.is_meta
            shares_memory = has_memory and value.data_ptr() in self.addresses
            return None if id(value) in self.tensors or shares_memory else value
        return None if bare_identity(value) in self.objects else value

    def _other_modules(self, module: nn.Module) -> nn.Module | None:
        """Return `module`, or a copy of its tree without the modules and tensors of the model."""
        if id(module) in self.modules:
            return None
        tensors = [*module.parameters(), *module.buffers()]
        if not tensors:
            return None
        if not any(id(tensor) in self.tensors for tensor in tensors):
            return module

        # for example, the head of a loss that contains the trained model
        remainder = nn.Module()
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self.tensors:
                remainder.register_parameter(name, parameter)

        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self.tensors:
                is_persistent = name not in module._non_persistent_buffers_set
                remainder.register_buffer(name, buffer, is_persistent)

        for name, child in module.named_children():
            child_remainder = self._other_modules(child)
            if child_remainder is not None:
                remainder.add_module(name, child_remainder)

        return remainder if remainder.state_dict() else None
