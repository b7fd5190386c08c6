"""What decides how a run is laid out, as facts that compare equal or not; what is made of them is kept while they do.

A look at the live objects notes, in one order, facts (names, shapes, dtypes, ties, classes, the settings that
selection asks for) and the tensors themselves. Plans made once name tensors by their places in that order and hold
none: nothing is kept alive by them, and a tensor that was replaced is found in its place at the next look.
"""

import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ft_ckpt.distributed.added_state import is_plain
from ft_ckpt.distributed.tensor_info import Source
from ft_ckpt.distributed.wrappers import broadcast_buffers, hides_tensors, reshard_modules, walk_modules, wrapper_chain
from ft_ckpt.training.optimizers import unwrap_optimizer

T = TypeVar("T")
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_NUMBERS = (int, float, bool, str, type(None))
_ASKED = frozenset(
    (  # what the libraries look for on modules of anybody's, and on their classes
        *("config", "peft_config", "_active_adapter", "active_adapter", "_hf_peft_config_loaded", "vocab_size"),
        *("_tied_weights_keys", "all_tied_weights_keys", "_keys_to_ignore_on_save", "_weight_conversions"),
        *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    )
)
_LIBRARIES = ("transformers.", "peft.")  # that decide names, by whatever their own modules have
_ENGINES = "torch.distributed."  # its state on a module decides no name; how it cuts a tensor is a fact of that tensor
_IN_EVERY_MODULE = frozenset(vars(nn.Module()))
_IMMUTABLE = frozenset((*_NUMBERS, bytes, torch.dtype, torch.device, type))
_MAPPINGS = frozenset((dict, OrderedDict, defaultdict))
_DEEPEST = 8  # containers in containers


class Structure:
    """Facts, and what was made of them alone; `made` holds no tensor and no module."""

    def __init__(self, facts: list[Any]) -> None:
        self.facts = facts
        self.made: dict[Hashable, Any] = {}

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made the first time."""
        if what not in self.made:
            self.made[what] = make()
        return self.made[what]  # type: ignore[no-any-return]  # of the same `make`


class Kept:
    """The structures of the last saves, one for each model and kind of save."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[nn.Module, dict[str, Structure]] = WeakKeyDictionary()

    def of(self, kind: str, model: nn.Module, look: "Look") -> Structure | None:
        """The structure that `look` saw, the one of the last save if it is the same; None where facts do not tell."""
        last = self._last.setdefault(model, {})
        if look.is_opaque:
            last.pop(kind, None)
            return None
        if kind not in last or last[kind].facts != look.facts:
            last[kind] = Structure(look.facts)
        return last[kind]


class Look:
    """Facts, tensors and modules of one moment."""

    def __init__(self) -> None:
        self.facts: list[Any] = []
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.places: dict[int, int] = {}  # id of a tensor -> its index in `tensors`
        self.is_opaque = False  # something decides that facts do not tell
        self._settings: dict[int, bytes] = {}  # by id: many modules share a config
        self._classes: set[type] = set()
        self._of_libraries: set[type] = set()  # classes of modules that a library asks for whatever they have

    def model(self, model: nn.Module) -> None:
        """Note a model, whatever wraps it."""
        *outer, root = wrapper_chain(model)
        modules = list(walk_modules(root))
        reshard_modules(module for _, _, module in modules)
        self.facts.append([(type(one), len(broadcast_buffers(one))) for one in outer])
        self.is_opaque |= any(map(hides_tensors, outer))
        for _, raw, module in modules:
            self._module(raw, module)

    def optimizer(self, optimizer: Any, with_state: bool = True) -> None:
        """Note an optimizer: what it trains, and unless told otherwise the state of that."""
        one: Any = unwrap_optimizer(optimizer)
        self.facts.append(type(one))
        if type(one).state_dict is not torch.optim.Optimizer.state_dict:
            self.is_opaque = True
            return
        for group in one.param_groups:
            self.facts += [list(group), [self.places.get(id(parameter)) for parameter in group["params"]]]
        for parameter, state in one.state.items() if with_state else ():
            if not isinstance(parameter, Tensor):  # state of no parameter: any tree
                self.is_opaque = True
                continue
            self.facts.append(self.places.get(id(parameter)))
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self._tensor(key, value)
                else:
                    self.is_opaque |= type(value) not in _NUMBERS
                    self.facts += key, value

    def others(self, tensors: Mapping[str, Iterable[Tensor]], facts: Any) -> None:
        """Note further tensors by the names of what they are of, and `facts` that tell how they are kept."""
        self.facts.append(facts)
        for name, some in tensors.items():
            for tensor in some:
                self._tensor(name, tensor)

    def _module(self, path: str, module: nn.Module) -> None:
        own, kind = vars(module), type(module)
        self.modules.append(module)
        self.facts += path, kind
        self.is_opaque |= not is_plain(module) or own.get("hf_quantizer") is not None
        if kind not in self._classes:
            self._classes.add(kind)
            self.is_opaque |= hides_tensors(module)
            if any(base.__module__.startswith(_LIBRARIES) for base in kind.__mro__):
                self._of_libraries.add(kind)
            self.facts.append([self._described(_of_class(kind, name)) for name in _ASKED])
        names = own.keys() - _IN_EVERY_MODULE if kind in self._of_libraries else _ASKED & own.keys()
        if names:
            self.facts.append(
                {n: v if type(v := own[n]) in _IMMUTABLE else self._described(v) for n in names}  # in any order
            )
        for key, tensor in module._parameters.items():
            if tensor is not None:
                self._tensor(key, tensor)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                self._tensor(key, buffer)

    def _described(self, value: Any, depth: int = 0) -> Any:
        """A copy of `value` that compares by content: it may be changed in place.

        Modules and tensors are facts of their own. What cannot be described makes the look opaque.
        """
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if depth < _DEEPEST and kind in _MAPPINGS:
            return kind, [
                (k if type(k) in _IMMUTABLE else self._described(k), self._described(v, depth + 1))
                for k, v in value.items()
            ]
        if depth < _DEEPEST and kind in (list, tuple):
            return kind, [self._described(one, depth + 1) for one in value]
        if kind in (set, frozenset):
            return kind, frozenset(map(self._described, value))
        if isinstance(value, Enum):
            return value
        if isinstance(value, (Tensor, nn.Module)) or kind.__module__.startswith(_ENGINES):
            return kind
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        return (kind, code) if code is not None else self._content(value)

    def _content(self, value: Any) -> bytes:
        if id(value) not in self._settings:
            try:
                self._settings[id(value)] = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            except Exception:  # noqa: BLE001 - anybody's object
                self._settings[id(value)], self.is_opaque = b"", True
        return self._settings[id(value)]

    def _tensor(self, key: str, tensor: Any) -> None:
        if is_lazy(tensor):
            self.is_opaque = True
            return
        place = self.places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        kind, cut = type(tensor), None
        if kind is DTensor:
            cut = tensor.device_mesh, tensor.placements, isinstance(tensor, nn.Parameter)
        elif kind is not Tensor:
            self.is_opaque |= kind not in _PLAIN or hasattr(tensor, "ds_shape")
        self.is_opaque |= tensor.layout is not torch.strided
        where = None if tensor.is_cpu else tensor.device
        self.facts += key, place, kind, cut, where, tensor.shape, tensor.dtype, tensor.requires_grad


def _of_class(kind: type, name: str) -> Any:
    """What the class says under a name; a property is told by its instances."""
    value = getattr(kind, name, None)
    return None if isinstance(value, property) else value


def is_placed(source: Source, look: Look) -> bool:
    """Whether the look has the source's tensor, if it has one here, and nothing else is needed to read it."""
    return not source.sharding.is_opaque and (source.live is None or id(source.live) in look.places)


def emptied(source: Source, look: Look) -> Source:
    """The source, placed in the look, without its tensor: `live` is its place."""
    place = None if source.live is None else look.places[id(source.live)]
    return replace(source, live=place, local=None)


def filled(source: Source, look: Look, local: Callable[[int], Tensor | None] | None = None) -> Source:
    """An emptied source with the tensor of `look`, and what this rank has of it; `local` says what by its place."""
    if not isinstance(source.live, int):
        return source
    live: Any = look.tensors[source.live]
    mine = local_of(live).detach() if local is None else local(source.live)
    return replace(source, key=id(live), live=live, local=mine)


def local_of(tensor: Any) -> Tensor:
    """What this rank has of a tensor; it may want a gradient."""
    return tensor._local_tensor if type(tensor) is DTensor else tensor  # type: ignore[no-any-return]  # as torch says
