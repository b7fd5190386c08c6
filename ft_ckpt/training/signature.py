"""What a plan is made of, as facts that compare equal or not; plans are kept under them, and hold no tensor or module.

A signature has all that decides names and layouts: names, shapes, dtypes, ties and what is trained; the class of every
module, what that class and the module itself have beside tensors, by content; settings of optimizers; conversions that
were registered; the base that an adapter's config names. Functions are told by their code. What cannot be described so
has no signature, and is planned anew. Classes of torch itself are taken to be as they are.
"""

import io
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache, partial
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ft_ckpt.distributed.added_state import are_plain
from ft_ckpt.distributed.inventory import Inventory
from ft_ckpt.distributed.tensor_info import TensorInfo
from ft_ckpt.distributed.wrappers import cut_facts, is_engine_name
from ft_ckpt.errors import CheckpointError, SelectionError
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.training.optimizer_kinds import kind_of_optimizer
from ft_ckpt.training.optimizers import unwrap_optimizer

T = TypeVar("T")
_MOST_PLANS = 32
_MOST_BYTES = 1 << 20  # of one object that is described by its pickle
_NUMBERS = frozenset((int, float, bool, str, type(None)))
_IMMUTABLE = frozenset((*_NUMBERS, bytes, torch.dtype, torch.device, type, torch.Size, range, complex))
_CODE = frozenset((FunctionType, BuiltinFunctionType, property, classmethod, staticmethod))
_MAPPINGS = frozenset((dict, OrderedDict, defaultdict, MappingProxyType))
_DEEPEST = 8  # containers in containers
_ENGINES = "torch.distributed."  # its state on a module decides no name; how it cuts a tensor is a fact of that tensor
_LAYOUT = attrgetter("layout")
_TENSOR_FACTS = attrgetter("shape", "dtype", "requires_grad", "device")  # of all tensors at once: a loop in C
_EVERYWHERE = frozenset(vars(nn.Module()))
_IN_EVERY_CLASS = frozenset(
    (
        *("__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__parameters__", "__qualname__"),
        *("__abstractmethods__", "_abc_impl", "__orig_bases__", "__firstlineno__", "__static_attributes__"),
        *("__dataclass_fields__", "__dataclass_params__", "__match_args__"),
    )
)


class Signature:
    """Facts that decide a plan. Equal ones have equal plans."""

    def __init__(self, facts: list[Any], tensors: int) -> None:
        self._facts, self.tensors = facts, tensors  # the keys of the tensors noted are 0 to `tensors`
        self._hash = hash((len(facts), tensors))

    def covers(self, inventory: Inventory, infos: Iterable[TensorInfo]) -> bool:
        """Whether the keys of `infos` in `inventory` are those of the same tensors wherever the facts are equal."""
        return all(inventory.noted_key(info.key) < self.tensors for info in infos)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Signature) or self._hash != other._hash:
            return False
        if self._facts is not other._facts:
            if self._facts != other._facts:
                return False
            self._facts = other._facts  # so that the next comparison is over at once
        return True


class ClassFacts(NamedTuple):
    """What a class had when it was last looked at."""

    held: dict[str, Any]  # all it has
    fixed: dict[str, Any]  # what is the same for as long as it is the same object
    changing: tuple[str, ...]  # what may be changed in place

    def are_those_of(self, now: Mapping[str, Any]) -> bool:
        """Whether a class that has `now` has the same objects under the same names as then."""
        held = self.held
        return len(held) == len(now) and all(map(is_, held, now)) and all(map(is_, held.values(), now.values()))


class PlanCache:
    """What was made for each signature and question: pure data, the newest few; and facts of classes."""

    def __init__(self) -> None:
        self.classes: dict[type, ClassFacts] = {}
        self.exchanges = 0  # in which ranks have told each other their facts: counted alike on all
        self._made: OrderedDict[tuple[Signature, Hashable], Any] = OrderedDict()
        self.kept: Counter[Any] = Counter()  # how often something was kept, by question or by its first word

    def find(self, signature: Signature | None, question: Hashable) -> Any:
        """What was kept, None for nothing."""
        if signature is None:
            return None
        made = self._made.pop((signature, question), None)
        if made is not None:
            self._made[signature, question] = made  # the newest again, for one comparison
        return made

    def keep(self, signature: Signature | None, question: Hashable, answer: T) -> T:
        """`answer`, kept if there is a signature to find it by."""
        if signature is not None:
            self._made[signature, question] = answer
            self.kept[question[0] if isinstance(question, tuple) else question] += 1
            if len(self._made) > _MOST_PLANS:
                self._made.popitem(last=False)
        return answer

    def once(self, signature: Signature | None, question: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made when it is not known for this signature."""
        known: T | None = self.find(signature, question)
        return self.keep(signature, question, make()) if known is None else known


class Signer:
    """Notes models, optimizers and other tensors in one order, into an inventory, and the facts that decide plans."""

    def __init__(self, cache: PlanCache) -> None:
        self.inventory = Inventory()
        self._cache = cache
        self.is_opaque = False  # something decides that facts do not tell
        self._facts: list[Any] = [_registered_conversions()]
        self._contents: dict[int, bytes] = {}  # by id: many modules share a config
        self._classes: set[type] = set()  # of modules and others, and what they inherit from
        self._kept: list[Any] = []  # so that ids stay their own

    def signature(self) -> Signature | None:
        """All that was noted; None where something cannot be described."""
        tensors = self.inventory.noted
        cut = None if self.is_opaque else cut_facts(tensors)
        if cut is None or {*map(_LAYOUT, tensors)} - {torch.strided}:
            return None
        return Signature([*self._facts, cut, [*map(type, tensors)], [*map(_TENSOR_FACTS, tensors)]], len(tensors))

    def note_fact(self, fact: Any) -> None:
        """Note something that compares by content."""
        self._facts.append(fact)

    def note_model(self, model: nn.Module, item: str = "") -> None:
        """Note a model, whatever wraps it."""
        noted = self.inventory.note_model(model, item)
        self._facts += [*map(type, noted.chain)], sorted(noted.broadcast), noted.children
        self._facts += noted.tensors, noted.keys, noted.stand_ins
        self._note_modules(noted.modules)

    def note_optimizer(self, optimizer: Any, with_state: bool = True) -> None:
        """Note an optimizer: what it trains, and unless told otherwise the state of that."""
        one: Any = unwrap_optimizer(optimizer)
        kind = kind_of_optimizer(one)
        told = None if kind is None else kind.plan_facts(one)
        self._facts.append(type(one))
        if told is None:
            self.is_opaque = True
            return
        self._facts += told.facts, self.inventory.keys_of(told.buffers)
        self._facts += map(self.inventory.known_keys, told.parameters)
        for group in told.inner.param_groups:
            self._facts += [*group], self.inventory.known_keys(group["params"])
        if with_state:
            self._note_state(told.inner.state)

    def note_others(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """Note further tensors by the names of what they are of."""
        for name, some in tensors.items():
            self._facts += name, self.inventory.keys_of(some)

    def _note_state(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """What an optimizer has of each parameter."""
        if not all(isinstance(parameter, Tensor) for parameter in state):  # of no parameter: any tree
            self.is_opaque = True
            return
        values = [value for one in state.values() for value in one.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        numbers = {place: value for place, value in enumerate(values) if not isinstance(value, Tensor)}
        self.is_opaque |= not _NUMBERS.issuperset(map(type, numbers.values()))
        names = [(*one,) for one in state.values()]
        self._facts += self.inventory.known_keys(state), names, numbers, self.inventory.keys_of(tensors)

    def _note_modules(self, modules: Sequence[nn.Module]) -> None:
        """What modules and their classes have beside tensors: all are asked one thing, then the next."""
        own, kinds = [*map(vars, modules)], [*map(type, modules)]
        names = [*map(_further_names, map(tuple, own))]
        values = [(*map(one.__getitem__, further),) for one, further in zip(own, names, strict=True)]
        described = [
            some if _IMMUTABLE.issuperset(map(type, some)) else (*map(self._describe, some),) for some in values
        ]
        self._facts += kinds, names, described
        self.is_opaque |= not are_plain(modules)
        for kind in dict.fromkeys(kinds):
            self._note_classes(kind)
        for module, one in zip(modules, own, strict=True):
            self.is_opaque |= one.get("hf_quantizer") is not None
            if "peft_config" in one:
                self._note_bases(module, one["peft_config"])

    def _note_classes(self, kind: type) -> None:
        """What a class says, and those it inherits from: everybody may ask it of its objects."""
        for base in kind.__mro__:
            if base not in self._classes:
                self._classes.add(base)
                self._note_class(base)

    def _note_class(self, base: type) -> None:
        if base.__module__.split(".")[0] in ("torch", "builtins", "abc", "typing"):
            return
        now, known = vars(base), self._cache.classes.get(base)
        if known is None or not known.are_those_of(now):
            fixed = {name: value for name, value in now.items() if type(value) in _IMMUTABLE or type(value) in _CODE}
            changing = tuple(name for name in now if name not in fixed and name not in _IN_EVERY_CLASS)
            known = self._cache.classes[base] = ClassFacts(dict(now), fixed, changing)
        self._facts += base, known.fixed, {name: self._describe(now[name]) for name in known.changing}

    def _note_bases(self, module: Any, configs: Any) -> None:
        """The files that say what an adapter's base was made with, which decides whether its embeddings have grown."""
        known = configs.values() if isinstance(configs, dict) else ()
        names = [getattr(one, "base_model_name_or_path", None) for one in known]
        names.append(getattr(getattr(module, "config", None), "_name_or_path", None))
        self._facts += map(_base_config_facts, names)

    def _describe(self, value: Any, depth: int = 0) -> Any:
        """A copy of `value` that compares by content: it may be changed in place.

        Modules and tensors are facts of their own. What cannot be described makes everything opaque.
        """
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if kind is FunctionType:
            return kind, value.__code__
        if id(value) in self._contents:  # first: configs answer questions for attributes slowly
            return self._contents[id(value)]
        if depth < _DEEPEST and kind in _MAPPINGS:
            return kind, [
                (k if type(k) in _IMMUTABLE else self._describe(k), self._describe(v, depth + 1))
                for k, v in value.items()
            ]
        if depth < _DEEPEST and kind in (list, tuple):
            return kind, [self._describe(one, depth + 1) for one in value]
        if kind in (set, frozenset):
            return kind, frozenset(map(self._describe, value))
        if isinstance(value, (Enum, type, property)):
            return value
        if isinstance(value, (Tensor, nn.Module)) or kind.__module__.startswith(_ENGINES):
            return kind
        if kind is partial:
            return kind, [self._describe(one, depth + 1) for one in (value.func, value.args, value.keywords)]
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        return (kind, code) if code is not None else self._content_of(value)

    def _content_of(self, value: Any) -> bytes:
        self._note_classes(type(value))
        self._kept.append(value)
        try:
            content = _pickled(value)
        except Exception:  # noqa: BLE001 - anybody's object
            content, self.is_opaque = b"", True
        return self._contents.setdefault(id(value), content)


@lru_cache(maxsize=4096)
def _further_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of the names of a module's attributes those that not all modules have, and no engine has put there."""
    return tuple(name for name in names if name not in _EVERYWHERE and not is_engine_name(name))


class _Limited(io.BytesIO):
    """A file that takes no more than what a setting may have."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST_BYTES:
            raise SelectionError("too large to compare at every save")
        return super().write(data)


class _Describer(pickle.Pickler):
    """Describes an object that is no model's: what has models or large tensors in it is too large to compare."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.untyped_storage().size() > _MOST_BYTES):
            raise SelectionError("too large to compare at every save")
        return NotImplemented


def _pickled(value: Any) -> bytes:
    file = _Limited()
    _Describer(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _registered_conversions() -> Any:
    """Conversions of names that a script has registered with transformers: they count for models of any time."""
    mapping: Any = sys.modules.get("transformers.conversion_mapping")
    names = sorted(getattr(mapping, "USER_REGISTERED_MAPPINGS", ()))
    known = getattr(mapping, "_checkpoint_conversion_mapping_cache", None) or {}
    return [(name, list(known.get(name, ()))) for name in names]


def _base_config_facts(place: Any) -> Any:
    """What tells whether the config at `place`, a folder or a name on the Hub, is still the same on this disk."""
    if not isinstance(place, str) or not place:
        return None
    try:
        folder = open_place(place)
        file: Any = Place(folder.folder, "config.json") if folder.is_folder else None
        if file is None:
            from huggingface_hub import try_to_load_from_cache

            file = open_place(try_to_load_from_cache(place, "config.json"))  # type: ignore[arg-type]  # or the errors below
        return place, str(file), file.store.stat(file.name)
    except (OSError, TypeError, ValueError):
        return place, _is_here(place)


def _is_here(place: str) -> bool:
    with suppress(CheckpointError):
        return open_place(place).exists
    return False
