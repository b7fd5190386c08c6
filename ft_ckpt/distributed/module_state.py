"""Extra state: entries of torch's `state_dict()` beside parameters and buffers.

Most modules list their parameters and persistent buffers, and nothing else. Some have extra state, a way of saving of
their own, or hooks that add to what is listed: that is found by asking them, and given back through their own loading.
Wrappers are recognised by type, since a module of the user may have the same name.
"""

import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import contains, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from ft_ckpt.distributed.wrappers import (
    hides_tensors,
    is_engine_code,
    list_modules,
    local_part,
    walk_modules,
    wrapped_key,
)
from ft_ckpt.errors import LoadError, SelectionError, listing

EXTRA_STATE = "_extra_state"  # torch's name for it


@dataclass(frozen=True, eq=False)
class AddedValue:
    """One value that a module lists beside parameters and buffers."""

    raw: str  # with the wrapper parts of the module's path
    value: Any  # of this moment: a tensor or anything else
    owner: nn.Module  # that lists it
    prefix: str  # canonical, of the owner's names


def wrapper_steps(pairs: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The steps that wrappers put into the raw names of (name, raw name) `pairs`.

    Raises SelectionError where a module of the user's has the name of such a step: the two cannot be told apart.
    """
    named = [(name.split("."), raw.split(".")) for name, raw in pairs if name != raw]
    steps = frozenset(step for name, raw in named for step in _steps_put_in(name, raw))
    clash = [".".join(name) for name, _ in named if not steps.isdisjoint(name)]
    if clash:
        raise SelectionError(f"{listing(clash, ', ')}: a module has the name of a wrapper that is around it; rename it")
    return steps


def _steps_put_in(name: list[str], raw: list[str]) -> list[str]:
    """The steps of `raw` that `name` is without."""
    left = list(name)
    return [step for step in raw if not (left and left[0] == step and left.pop(0))]


def _is_plain(module: nn.Module) -> bool:
    """Whether `module` lists its parameters and persistent buffers and nothing else."""
    own = vars(module)
    if not _is_plain_class(type(module)) or "state_dict" in own or "_save_to_state_dict" in own:
        return wrapped_key(module) is not None
    if not own["_state_dict_hooks"] and not own["_state_dict_pre_hooks"]:
        return True
    hooks = (*own["_state_dict_hooks"].values(), *own["_state_dict_pre_hooks"].values())
    return wrapped_key(module) is not None or not any(map(_is_users, hooks))


def are_plain(modules: Sequence[nn.Module]) -> bool:
    """Whether all of them are: all are asked one thing, then the next, since training waits for it."""
    own = [*map(vars, modules)]
    is_odd = any(any(map(contains, own, repeat(name))) for name in ("state_dict", "_save_to_state_dict"))
    is_odd = is_odd or any(any(map(itemgetter(name), own)) for name in ("_state_dict_hooks", "_state_dict_pre_hooks"))
    if not is_odd and all(map(_is_plain_class, {*map(type, modules)})):
        return True
    return all(map(_is_plain, modules))


def added_state(root: nn.Module, live: Mapping[str, Any]) -> dict[str, AddedValue]:
    """The state of `root` beside its `live` tensors, by canonical name, without further entries for these.

    Moves nothing, and calls no collective: FSDP1's own listing is passed by. Raises SelectionError naming a module that
    fails to list its state.
    """
    if are_plain(list_modules(root)[0]):
        return {}
    known = {id(tensor) for tensor in live.values()} | {_memory_key(tensor) for tensor in live.values()} - {None}
    lister = _StateLister()
    lister.list_module(root, "", "")
    return {
        name: one
        for name, one in lister.found.items()
        if not is_lazy(one.value)
        and name not in live
        and id(one.value) not in known
        and (_memory_key(one.value) or one) not in known
    }


def load_added_state(root: nn.Module, live: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Give `values`, which `added_state` listed when they were saved, to their modules, the way each loads them.

    Raises LoadError naming what is not listed here, or not among `values`, or still differs when all is loaded.
    """
    here = added_state(root, live)
    problems = [f"{name}: in the checkpoint, not listed by this model" for name in values if name not in here]
    problems += [f"{name}: listed by this model, not in the checkpoint" for name in here if name not in values]
    owners = {id(one.owner): one for one in here.values()}
    for owner in owners.values() if not problems else ():
        problems += _load_added(owner, live, {n: values[n] for n, one in here.items() if one.owner is owner.owner})
    for name, one in added_state(root, live).items() if not problems else ():
        if not _same_values(one.value, values[name]):
            _overwrite_live(one.value, values[name])  # what is listed as it is, though no loading knows of it
    problems += [
        f"{name}: listed by {type(one.owner).__name__}, which does not take it back when it is loaded"
        for name, one in (added_state(root, live).items() if not problems else ())
        if not name.endswith(EXTRA_STATE) and not _same_values(one.value, values[name])
    ]
    if problems:
        raise LoadError(listing(problems))


def refuse_one_way_state(found: Mapping[str, AddedValue]) -> None:
    """Raise SelectionError naming extra state that its module can tell and not take back."""
    setters = {name: getattr(type(one.owner), "set_extra_state", None) for name, one in found.items()}
    lost = [n for n, put in setters.items() if n.endswith(EXTRA_STATE) and put is nn.Module.set_extra_state]
    if lost:
        raise SelectionError(
            f"{listing(lost, ', ')}: the module has get_extra_state() and no set_extra_state(), so a run could not be "
            "resumed with it; give it both"
        )


def takes_extra_state(root: nn.Module, name: str) -> bool:
    """Whether `name` is the extra state of a module below `root` that can be given some."""
    owners = {f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: module for path, _, module in walk_modules(root)}
    return name in owners and _has_own_method(owners[name], "set_extra_state")


@dataclass
class _StateLister:
    """Lists the state of modules as torch does, and notes which module listed a value first."""

    listed: "OrderedDict[str, Any]" = field(default_factory=OrderedDict)
    found: dict[str, AddedValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.listed._metadata = OrderedDict()  # type: ignore[attr-defined]  # as torch's has it, for hooks

    def list_module(self, module: nn.Module, prefix: str, raw: str) -> None:
        """List the state of `module` and its submodules. Raises SelectionError for one that fails."""
        try:
            self._list_unguarded(module, prefix, raw)
        except SelectionError:
            raise
        except Exception as error:
            name = prefix.removesuffix(".") or "the model"
            raise SelectionError(
                f"{name}: {type(module).__name__} fails to list its state ({type(error).__name__}: {error})"
            ) from error

    def _list_unguarded(self, module: nn.Module, prefix: str, raw: str) -> None:
        inner = wrapped_key(module)
        if inner is not None:
            self.list_module(module._modules[inner], prefix, f"{raw}{inner}.")  # type: ignore[arg-type]  # there is one
        elif _has_own_method(module, "state_dict") and not _hides_own_tensors(module):  # which gathers when it is asked
            whole = module.state_dict() if not prefix else module.state_dict(prefix=prefix, keep_vars=True)
            self._note_listed(module, prefix, raw, whole)
        else:
            self._as_torch_does(module, prefix, raw)

    def _as_torch_does(self, module: nn.Module, prefix: str, raw: str) -> None:
        metadata = {"version": module._version}
        self.listed._metadata[prefix[:-1]] = metadata  # type: ignore[attr-defined]
        for before in filter(_is_users, module._state_dict_pre_hooks.values()):
            before(module, prefix, True)
        own: dict[str, Any] = {}
        module._save_to_state_dict(own, prefix, True)
        self._note_listed(module, prefix, raw, own)
        for name, child in module._modules.items():
            if child is not None:
                self.list_module(child, f"{prefix}{name}.", f"{raw}{name}.")
        for hook in filter(_is_users, module._state_dict_hooks.values()):
            returned = hook(module, self.listed, prefix, metadata)
            self._note_listed(module, prefix, raw, dict(self.listed if returned is None else returned))

    def _note_listed(self, module: nn.Module, prefix: str, raw: str, now: Mapping[str, Any]) -> None:
        for name, value in now.items():
            known = self.found.get(name)
            if known is None:
                self.found[name] = AddedValue(raw + name.removeprefix(prefix), value, module, prefix)
            elif known.value is not value:
                self.found[name] = replace(known, value=value)
        self.listed.update(now)


def _load_added(one: AddedValue, live: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Let the owner of `one` load its `values`, beside its own tensors as they are; returns its complaints."""
    owner, prefix = one.owner, one.prefix
    below = {name: t.detach() for name, t in live.items() if isinstance(t, Tensor) and name.startswith(prefix)}
    state = OrderedDict({**below, **values})
    errors: list[str] = []
    try:
        if _has_own_method(owner, "state_dict") or _has_own_method(owner, "load_state_dict"):
            owner.load_state_dict({name.removeprefix(prefix): value for name, value in state.items()}, strict=False)
            return []
        owner._load_from_state_dict(state, prefix, {"version": owner._version}, True, [], [], errors)
        for hook in owner._load_state_dict_post_hooks.values():
            hook(owner, _IncompatibleKeys([], []))
    except Exception as error:  # noqa: BLE001 - anybody's module
        errors.append(f"{type(error).__name__}: {error}")
    return [f"{next(iter(values))}: {type(owner).__name__} cannot load it: {error}" for error in errors]


def _has_own_method(module: nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(type(module), method) is not getattr(nn.Module, method)


def _is_plain_class(kind: type) -> bool:
    """Whether the class keeps torch's default methods for module state."""
    return all(
        getattr(kind, method) is getattr(nn.Module, method)
        for method in ("state_dict", "_save_to_state_dict", "get_extra_state")
    )


def _is_users(hook: Any) -> bool:
    """Whether a hook is not an engine's own, which brings tensors in order and adds none."""
    return not is_engine_code(str(getattr(getattr(hook, "func", hook), "__module__", "")))


def _hides_own_tensors(module: nn.Module) -> bool:
    return any(hides_tensors(one) for one in module.modules())


def _memory_key(value: Any) -> Any:
    """A key that is equal for tensors of the same memory; None for a value without memory."""
    local = local_part(value) if isinstance(value, Tensor) else None
    if not isinstance(local, Tensor) or local.layout is not torch.strided or not local.numel() or local.is_meta:
        return None
    flags = (local.is_conj(), local.is_neg())
    return (local.device, local.data_ptr(), tuple(value.shape), local.stride(), local.dtype, flags)


def _overwrite_live(live: Any, stored: Any) -> None:
    if isinstance(live, Tensor) and isinstance(stored, Tensor) and live.shape == stored.shape:
        with torch.no_grad():
            live.copy_(stored)


def _same_values(one: Any, other: Any) -> bool:
    """Whether two values are the same, bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and torch.equal(_tensor_bits(one), _tensor_bits(other))
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same_values(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same_values, one, other))
    return type(one) is type(other) and pickle.dumps(one) == pickle.dumps(other)


def _tensor_bits(tensor: Any) -> Tensor:
    local = local_part(tensor)
    held = torch.empty(0) if local is None else local
    return held.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
