"""What a Trainer and its callbacks hold besides the trained model: models, optimizers, buffers.

Models that the optimizer trains are registered with the run, others are watched
(`runs.items.watched_models`). State that cannot be restored, such as tensors in lists or models
that callbacks make after the resume, is named in the reports.
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

# Attributes of every Trainer: saved in another way, or no state of the training.
_OF_TRAINER = frozenset(
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
_OF_CHECKPOINTED = "_Checkpointed__"
# of TRL's trainers that generate once for several steps
_GENERATION = ("_step", "_buffered_inputs")
GENERATION = "trainer.generation"
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
_DEPTH = 3  # of lists, mappings and objects inside an attribute
_OPTIMIZING = (torch.optim.Optimizer, LRScheduler)


@dataclass(frozen=True, eq=False)
class HeldState:
    """The state besides the trained model when training begins, by the names of items."""

    # models with parameters of the optimizer
    trained: Mapping[str, nn.Module] = field(default_factory=dict)
    models: Mapping[str, nn.Module] = field(default_factory=dict)  # all others
    # optimizers, schedulers, and others with a state dict
    objects: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)  # digests of single tensors


@dataclass(frozen=True, eq=False)
class BufferedGeneration:
    """The generated samples that a trainer of TRL has not used, and its count of micro-batches."""

    trainer: Any

    def state_dict(self) -> dict[str, Any]:
        inputs = self.trainer._buffered_inputs
        return {"step": self.trainer._step, "inputs": inputs if self.is_storable else None}

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
    leaves = dict(_leaves_of(trainer))
    optimizers = [leaf for leaf in leaves.values() if isinstance(leaf, torch.optim.Optimizer)]
    optimized: set[int] = set()
    for optimizer in (trainer.optimizer, *optimizers):
        for group in optimizer.param_groups:
            optimized.update(id(parameter) for parameter in group["params"])
    for name, value in leaves.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif not isinstance(value, nn.Module):
            objects[name] = value
        elif any(id(parameter) in optimized for parameter in value.parameters()):
            trained[name] = value
        else:
            models[name] = value
    if _generates(trainer):
        objects[GENERATION] = BufferedGeneration(trainer)
    return HeldState(trained, models, objects, digests_of(tensors))


def unsaved_state(trainer: Trainer, before: HeldState, registered: Collection[str]) -> list[str]:
    """Name state that has appeared or moved since `before` and is in no checkpoint.

    `registered` are the names of items that are registered or watched.
    """
    names: dict[str, None] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in _leaves_of(trainer):
        if isinstance(value, Tensor):
            tensors[name] = value
        elif name not in registered:
            names[_attribute_of(name)] = None
    for name, digest in digests_of(tensors).items():
        if before.tensors.get(name) != digest:
            names[_attribute_of(name)] = None
    generation = before.objects.get(GENERATION)
    if generation is not None and not generation.is_storable:
        names["trainer._buffered_inputs"] = None
    return list(names)


def _attribute_of(name: str) -> str:
    """Return the object and its attribute, of the name of something inside the attribute."""
    return ".".join(name.split(".")[:2])


def _generates(trainer: Trainer) -> bool:
    return all(name in vars(trainer) for name in _GENERATION)


def _leaves_of(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the modules outside of the trained model, tensors, and objects with a state.

    Each comes once, with a name.
    """
    main = _MainModel(trainer)
    attributes_of_trainer = dict(vars(trainer))
    saved_otherwise = [*_OF_TRAINER]
    if _generates(trainer):
        saved_otherwise += _GENERATION
    for name in saved_otherwise:
        attributes_of_trainer.pop(name, None)
    roots = [("trainer", attributes_of_trainer)]
    for callback in trainer.callback_handler.callbacks:
        roots.append((type(callback).__name__, vars(callback)))
    seen: set[int] = set()
    names: set[str] = set()
    for owner, attributes in roots:
        for attribute, value in list(attributes.items()):
            if attribute.startswith(_OF_CHECKPOINTED):
                continue
            for path, leaf in _leaves(value, f"{owner}.{attribute}", _DEPTH):
                name = path.replace("/", ".").replace(":", ".")
                part = main.without(leaf)
                if part is None or id(leaf) in seen or name in names:
                    continue
                seen.add(id(leaf))
                names.add(name)
                yield name, part


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
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
        yield from _leaves(child, f"{path}.{key}", depth - 1)


def _has_state(value: Any) -> bool:
    if isinstance(value, _OPTIMIZING):
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


class _MainModel:
    """Modules, tensors and optimizers that are saved as the run's model and optimizer."""

    def __init__(self, trainer: Any) -> None:
        self.modules: set[int] = set()
        self.tensors: set[int] = set()
        self.memory: set[int] = set()  # addresses
        for root in (trainer.model, trainer.model_wrapped):
            self.modules.update(id(module) for module in root.modules())
            for tensor in (*root.parameters(), *root.buffers()):
                self.tensors.add(id(tensor))
                if tensor.numel() and not tensor.is_meta:
                    self.memory.add(tensor.data_ptr())
        objects = [trainer.optimizer, trainer.lr_scheduler]
        self.objects = {bare_identity(value) for value in objects if value is not None}

    def without(self, value: Any) -> Any:
        """Return the value without the trained model; None if nothing remains."""
        if isinstance(value, nn.Module):
            return self._outside(value)
        if isinstance(value, Tensor):
            shares = value.numel() and not value.is_meta and value.data_ptr() in self.memory
            return None if id(value) in self.tensors or shares else value
        return None if bare_identity(value) in self.objects else value

    def _outside(self, module: nn.Module) -> nn.Module | None:
        if id(module) in self.modules:
            return None
        tensors = [*module.parameters(), *module.buffers()]
        if not tensors:
            return None
        if not any(id(tensor) in self.tensors for tensor in tensors):
            return module
        part = nn.Module()  # such as the head of a loss that contains the trained model
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self.tensors:
                part.register_parameter(name, parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self.tensors:
                part.register_buffer(name, buffer, name not in module._non_persistent_buffers_set)
        for name, child in module.named_children():
            outside = self._outside(child)
            if outside is not None:
                part.add_module(name, outside)
        return part if any(True for _ in part.state_dict()) else None
