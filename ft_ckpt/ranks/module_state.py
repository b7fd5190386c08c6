"""Extra state: entries of torch's `state_dict()` beside parameters and buffers.

Most modules list their parameters and persistent buffers only. Some have extra state or override
the listing. Their entries are collected as torch does, and restored by the loading methods of the
modules. Entries that hooks add are refused: nothing says how they come back. Wrappers are
recognised by type, because a module of the user may have the same name.
"""

import pickle
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.ranks.wrappers import (
    hides_tensors,
    is_engine_code,
    local_part,
    walk_modules,
    wrapped_key,
)

EXTRA_STATE = "_extra_state"  # torch's name for it


@dataclass(frozen=True, eq=False)
class AddedValue:
    """One value that a module lists beside parameters and buffers."""

    raw: str  # name with the wrapper steps of the module's path
    value: Any  # current value: a tensor or any object
    owner: nn.Module  # the module that lists it
    prefix: str  # canonical prefix of the owner's names


def wrapper_steps(pairs: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The steps of wrappers in the raw names of (name, raw name) `pairs`.

    Raises SelectionError if a module of the user has the name of such a step, because the two
    cannot be distinguished.
    """
    named = [(name.split("."), raw.split(".")) for name, raw in pairs if name != raw]
    steps = frozenset(step for name, raw in named for step in _steps_put_in(name, raw))
    clash = [".".join(name) for name, _ in named if not steps.isdisjoint(name)]
    if clash:
        raise SelectionError(
            f"{listing(clash, ', ')}: a module has the name of a wrapper that is "
            "around it; rename it"
        )
    return steps


def _steps_put_in(name: list[str], raw: list[str]) -> list[str]:
    """The steps of `raw` that are not in `name`."""
    left = list(name)
    return [step for step in raw if not (left and left[0] == step and left.pop(0))]


def are_plain(modules: Sequence[nn.Module]) -> bool:
    """Whether all `modules` list their parameters and persistent buffers and nothing else."""
    changed = {cls for cls in {*map(type, modules)} if _has_own_listing(cls)}
    return all(map(partial(_is_plain, changed), modules))


def _is_plain(changed: Container[type], module: nn.Module) -> bool:
    """Whether a module is a wrapper, or has torch's listing; `changed`: classes that override
    it.
    """
    own = vars(module)
    overrides = type(module) in changed or "state_dict" in own or "_save_to_state_dict" in own
    hooks = own["_state_dict_hooks"], own["_state_dict_pre_hooks"]
    if not overrides and not any(hooks):
        return True
    users = overrides or any(map(_is_users, chain.from_iterable(each.values() for each in hooks)))
    return not users or wrapped_key(module) is not None


def added_state(root: nn.Module, live: Mapping[str, Any]) -> dict[str, AddedValue]:
    """The state of `root` beside its `live` tensors, by canonical name; aliases of `live` tensors
    are left out.

    Moves no data and calls no collective: FSDP1's own listing is not used. Raises SelectionError
    naming a module that fails to list its state, and entries that hooks add.
    """
    known = {id(tensor) for tensor in live.values()} | {
        _memory_key(tensor) for tensor in live.values()
    } - {None}
    lister = _StateLister()
    lister.list_module(root, "", "")
    added = {
        name: entry
        for name, entry in lister.found.items()
        if not is_lazy(entry.value)
        and name not in live
        and id(entry.value) not in known
        and (_memory_key(entry.value) or entry) not in known
    }
    by_hooks = [
        f"{name} ({type(added[name].owner).__name__})" for name in lister.by_hooks if name in added
    ]
    if by_hooks:
        raise SelectionError(
            f"{listing(by_hooks, ', ')}: added by a hook of state_dict(), which is not saved; make "
            "it a persistent buffer, or return it from get_extra_state() and take it in "
            "set_extra_state()"
        )
    return added


def load_added_state(root: nn.Module, live: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Restore `values`, which `added_state` listed at the save, by the loading methods of their
    modules.

    Raises LoadError naming values that this model does not list, that are missing, or that a module
    did not load.
    """
    listed = added_state(root, live)
    problems = [
        f"{name}: in the checkpoint, not listed by this model"
        for name in values
        if name not in listed
    ]
    problems += [
        f"{name}: listed by this model, not in the checkpoint"
        for name in listed
        if name not in values
    ]
    if not problems:
        for first in {id(entry.owner): entry for entry in listed.values()}.values():
            own = {
                name: values[name] for name, entry in listed.items() if entry.owner is first.owner
            }
            problems += _load_added(first, live, own)
    if not problems:
        for name, entry in added_state(root, live).items():
            stored, live_value = values[name], entry.value
            is_ignored = not _same_values(live_value, stored)  # by the module's loading method
            if (
                is_ignored
                and isinstance(live_value, Tensor)
                and live_value.shape == getattr(stored, "shape", None)
            ):
                live_value.detach().copy_(stored)
        problems = [
            (
                f"{name}: listed by {type(entry.owner).__name__}, which does not take it back "
                "when it is loaded"
            )
            for name, entry in added_state(root, live).items()
            if not name.endswith(EXTRA_STATE) and not _same_values(entry.value, values[name])
        ]
    if problems:
        raise LoadError(listing(problems))


def refuse_one_way_state(found: Mapping[str, AddedValue]) -> None:
    """Raise SelectionError naming extra state of modules that cannot restore it."""
    setters = {
        name: getattr(type(entry.owner), "set_extra_state", None) for name, entry in found.items()
    }
    lost = [
        n
        for n, put in setters.items()
        if n.endswith(EXTRA_STATE) and put is nn.Module.set_extra_state
    ]
    if lost:
        raise SelectionError(
            f"{listing(lost, ', ')}: the module has get_extra_state() and no set_extra_state(), so "
            "a run could not be resumed with it; define set_extra_state() as well"
        )


def takes_extra_state(root: nn.Module, name: str) -> bool:
    """Whether `name` is the extra state of `root` or a submodule that defines set_extra_state()."""
    owners = {
        f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: module
        for path, _, module in walk_modules(root)
    }
    return name in owners and _has_own_method(owners[name], "set_extra_state")


@dataclass
class _StateLister:
    """Lists the state of modules as torch does, and records which module listed a value first."""

    listed: "OrderedDict[str, Any]" = field(default_factory=OrderedDict)
    found: dict[str, AddedValue] = field(default_factory=dict)
    by_hooks: list[str] = field(default_factory=list)  # names of entries

    def __post_init__(self) -> None:
        self.listed._metadata = OrderedDict()  # type: ignore[attr-defined]  # as in torch, for hooks

    def list_module(self, module: nn.Module, prefix: str, raw: str) -> None:
        """List the state of `module` and its submodules.

        Raises SelectionError naming one that fails.
        """
        try:
            self._list_unguarded(module, prefix, raw)
        except SelectionError:
            raise
        except Exception as error:
            name = prefix.removesuffix(".") or "the model"
            raise SelectionError(
                f"{name}: {type(module).__name__} fails to list its state "
                f"({type(error).__name__}: {error})"
            ) from error

    def _list_unguarded(self, module: nn.Module, prefix: str, raw: str) -> None:
        inner = wrapped_key(module)
        if inner is not None:
            self.list_module(module._modules[inner], prefix, f"{raw}{inner}.")  # type: ignore[arg-type]  # there is one
        elif _has_own_method(module, "state_dict") and not any(
            map(hides_tensors, module.modules())
        ):
            # or it gathers
            whole = (
                module.state_dict()
                if not prefix
                else module.state_dict(prefix=prefix, keep_vars=True)
            )
            self._note_listed(module, prefix, raw, whole)
        else:
            self._as_torch_does(module, prefix, raw)

    def _as_torch_does(self, module: nn.Module, prefix: str, raw: str) -> None:
        metadata = {"version": module._version}
        self.listed._metadata[prefix[:-1]] = metadata  # type: ignore[attr-defined]
        for pre_hook in filter(_is_users, module._state_dict_pre_hooks.values()):
            pre_hook(module, prefix, True)
        own: dict[str, Any] = {}
        module._save_to_state_dict(own, prefix, True)
        self._note_listed(module, prefix, raw, own)
        for name, child in module._modules.items():
            if child is not None:
                self.list_module(child, f"{prefix}{name}.", f"{raw}{name}.")
        for hook in filter(_is_users, module._state_dict_hooks.values()):
            before = self.listed.keys() | self.found.keys()
            returned = hook(module, self.listed, prefix, metadata)
            after = dict(self.listed if returned is None else returned)
            self.by_hooks += [name for name in after if name not in before]
            self._note_listed(module, prefix, raw, after)

    def _note_listed(
        self, module: nn.Module, prefix: str, raw: str, now: Mapping[str, Any]
    ) -> None:
        for name, value in now.items():
            known = self.found.get(name)
            if known is None:
                self.found[name] = AddedValue(
                    raw + name.removeprefix(prefix), value, module, prefix
                )
            elif known.value is not value:
                self.found[name] = replace(known, value=value)
        self.listed.update(now)


def _load_added(first: AddedValue, live: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Let the owner of `first` load its `values` together with its current tensors.

    Returns its errors.
    """
    owner, prefix = first.owner, first.prefix
    below = {
        name: t.detach()
        for name, t in live.items()
        if isinstance(t, Tensor) and name.startswith(prefix)
    }
    state = OrderedDict({**below, **values})
    errors: list[str] = []
    try:
        if _has_own_method(owner, "state_dict") or _has_own_method(owner, "load_state_dict"):
            owner.load_state_dict(
                {name.removeprefix(prefix): value for name, value in state.items()}, strict=False
            )
            return []
        owner._load_from_state_dict(
            state, prefix, {"version": owner._version}, True, [], [], errors
        )
    except Exception as error:  # noqa: BLE001 - code of the user's module
        errors.append(f"{type(error).__name__}: {error}")
    return [
        f"{next(iter(values))}: {type(owner).__name__} cannot load it: {error}" for error in errors
    ]


def _has_own_method(module: nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(type(module), method) is not getattr(nn.Module, method)


def _has_own_listing(cls: type) -> bool:
    """Whether the class overrides torch's methods that list the state of a module."""
    methods = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return any(getattr(cls, method) is not getattr(nn.Module, method) for method in methods)


def _is_users(hook: Any) -> bool:
    """Whether a hook is the user's: hooks of engines gather or reorder tensors and add none."""
    return not is_engine_code(str(getattr(getattr(hook, "func", hook), "__module__", "")))


def _memory_key(value: Any) -> Any:
    """A key that is equal for tensors that view the same memory; None for a value without
    memory.
    """
    local = local_part(value) if isinstance(value, Tensor) else None
    if (
        not isinstance(local, Tensor)
        or local.layout is not torch.strided
        or not local.numel()
        or local.is_meta
    ):
        return None
    flags = (local.is_conj(), local.is_neg())
    return (local.device, local.data_ptr(), tuple(value.shape), local.stride(), local.dtype, flags)


def _same_values(one: Any, other: Any) -> bool:
    """Whether two values are equal, bit for bit."""
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
    return (
        (torch.empty(0, device="cpu") if local is None else local)
        .cpu()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
    )
