"""Collects extra state: entries of `state_dict()` that are neither parameters nor buffers.

Most modules list their parameters and persistent buffers only. Some have extra state or override
the listing. The entries of these modules are collected as torch does, and restored by the loading
methods of the modules. Entries that hooks add are refused, because no method restores them.
Wrappers are recognised by type, because a module of the user may have the name of a wrapper step.
"""

import pickle
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.ranks.wrappers.tensor_kinds import local_part
from ft_ckpt.ranks.wrappers.wrappers import (
    hides_tensors,
    is_engine_code,
    walk_modules,
    wrapped_key,
)

EXTRA_STATE = "_extra_state"  # torch's name for it


@dataclass(frozen=True, eq=False)
class AddedValue:
    """One value that a module lists in addition to parameters and buffers.

    Attributes:
        raw: The name, including the names that wrappers add to the path of the module.
        value: The current value, a tensor or any object.
        owner: The module that lists the value.
        prefix: The canonical prefix of the names of this module.
    """

    raw: str
    value: Any
    owner: nn.Module
    prefix: str


def wrapper_steps(pairs: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the names of wrapped children that are in raw names and not in canonical names.

    `pairs` are (name, raw name). For example, ("a.weight", "module.a.weight") gives "module".
    Raises SelectionError if a module of the user has such a name too, because the two cannot be
    distinguished.
    """
    paths = [(name.split("."), raw.split(".")) for name, raw in pairs if name != raw]
    steps: set[str] = set()
    for path, raw_path in paths:
        steps.update(_steps_put_in(path, raw_path))
    clash = [".".join(path) for path, _ in paths if not steps.isdisjoint(path)]
    if clash:
        raise SelectionError(
            f"{listing(clash, ', ')}: a module has the name of a wrapper that is "
            "around it; rename it"
        )
    return frozenset(steps)


def _steps_put_in(path: list[str], raw_path: list[str]) -> list[str]:
    """Return the steps of `raw_path` that are not in `path`."""
    steps = []
    position = 0  # in `path`
    for step in raw_path:
        if position < len(path) and path[position] == step:
            position += 1
        else:
            steps.append(step)
    return steps


def are_plain(modules: Sequence[nn.Module]) -> bool:
    """Check whether all `modules` list their parameters and persistent buffers and nothing else."""
    changed = {cls for cls in {*map(type, modules)} if _has_own_listing(cls)}
    return all(map(partial(_is_plain, changed), modules))


def _is_plain(changed: Container[type], module: nn.Module) -> bool:
    """Check whether a module is a wrapper, or lists its state as torch does.

    `changed` has the classes that override the listing.
    """
    fields = vars(module)
    overrides = type(module) in changed or "state_dict" in fields
    overrides = overrides or "_save_to_state_dict" in fields
    hooks, pre_hooks = fields["_state_dict_hooks"], fields["_state_dict_pre_hooks"]
    if not (overrides or hooks or pre_hooks):  # most modules: this runs for all of a model
        return True
    is_changed = overrides or any(map(_is_users, [*hooks.values(), *pre_hooks.values()]))
    return not is_changed or wrapped_key(module) is not None


def added_state(root: nn.Module, live: Mapping[str, Any]) -> dict[str, AddedValue]:
    """Return the state of `root` other than its `live` tensors, by canonical name.

    Aliases of `live` tensors are left out. Moves no data and calls no collective, because FSDP1's
    own listing is not used. Raises SelectionError naming a module that fails to list its state, or
    entries that hooks add.
    """
    live_ids = {id(tensor) for tensor in live.values()}
    live_memory = {_memory_key(tensor) for tensor in live.values()} - {None}
    lister = _StateLister()
    lister.list_module(root, "", "")
    added = {}
    for name, entry in lister.entries.items():
        if name in live or id(entry.value) in live_ids or is_lazy(entry.value):
            continue
        if _memory_key(entry.value) not in live_memory:
            added[name] = entry

    by_hooks = []
    for name in lister.by_hooks:
        if name in added:
            by_hooks.append(f"{name} ({type(added[name].owner).__name__})")

    if by_hooks:
        raise SelectionError(
            f"{listing(by_hooks, ', ')}: added by a hook of state_dict(), which is not saved; make "
            "it a persistent buffer, or return it from get_extra_state() and take it in "
            "set_extra_state()"
        )

    return added


def load_added_state(root: nn.Module, live: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Restore `values`, which `added_state` has listed, by the loading methods of the modules.

    Raises LoadError naming values that this model does not list, values that are missing, and
    values that a module did not load.
    """
    listed = added_state(root, live)
    problems = []
    for name in values:
        if name not in listed:
            problems.append(f"{name}: in the checkpoint, not listed by this model")

    for name in listed:
        if name not in values:
            problems.append(f"{name}: listed by this model, not in the checkpoint")

    if not problems:
        names_by_owner: dict[int, list[str]] = {}
        for name, entry in listed.items():
            names_by_owner.setdefault(id(entry.owner), []).append(name)
        for names in names_by_owner.values():
            stored = {name: values[name] for name in names}
            problems += _load_added(listed[names[0]], live, stored)

    if not problems:
        _copy_ignored(added_state(root, live), values)
        for name, entry in added_state(root, live).items():
            if not name.endswith(EXTRA_STATE) and not _same_values(entry.value, values[name]):
                problems.append(
                    f"{name}: listed by {type(entry.owner).__name__}, which does not take it back "
                    "when it is loaded"
                )

    if problems:
        raise LoadError(listing(problems))


def _copy_ignored(listed: Mapping[str, AddedValue], values: Mapping[str, Any]) -> None:
    """Copy the values of tensors that the loading methods of their modules have ignored."""
    for name, entry in listed.items():
        stored, live_value = values[name], entry.value
        if not isinstance(live_value, Tensor) or _same_values(live_value, stored):
            continue
        if live_value.shape == getattr(stored, "shape", None):
            live_value.detach().copy_(stored)


def refuse_one_way_state(added: Mapping[str, AddedValue]) -> None:
    """Raise SelectionError naming extra state of modules that cannot restore it."""
    lost = []
    for name, entry in added.items():
        setter = getattr(type(entry.owner), "set_extra_state", None)
        if name.endswith(EXTRA_STATE) and setter is nn.Module.set_extra_state:
            lost.append(name)
    if lost:
        raise SelectionError(
            f"{listing(lost, ', ')}: the module has get_extra_state() and no set_extra_state(), so "
            "a run could not be resumed with it; define set_extra_state() as well"
        )


def takes_extra_state(root: nn.Module, name: str) -> bool:
    """Check whether `name` is the extra state of a module in `root` with set_extra_state()."""
    for path, _, module in walk_modules(root):
        if name == (f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE):
            return _has_own_method(module, "set_extra_state")
    return False


@dataclass
class _StateLister:
    """Lists the state of modules as torch does, and records which module listed a value first.

    Attributes:
        listed: The state dict so far.
        entries: The values of the state dict by name, with the modules that list them.
        by_hooks: The names that hooks have added.
    """

    listed: "OrderedDict[str, Any]" = field(default_factory=OrderedDict)
    entries: dict[str, AddedValue] = field(default_factory=dict)
    by_hooks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listed._metadata = OrderedDict()  # type: ignore[attr-defined]  # as in torch, for hooks

    def list_module(self, module: nn.Module, prefix: str, raw: str) -> None:
        """List the state of `module` and its submodules.

        Raises SelectionError naming a module that fails.
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
            return

        # A user's state_dict() is not called if an engine has tensors below the module, because it
        # would gather them.
        is_called = _has_own_method(module, "state_dict") and not _hides_tensors(module)
        if not is_called:
            self._list_as_torch_does(module, prefix, raw)
        elif prefix:
            whole = module.state_dict(prefix=prefix, keep_vars=True)
            self._record_listed(module, prefix, raw, whole)
        else:  # no arguments are passed, because the user's method might not take them
            self._record_listed(module, prefix, raw, module.state_dict())

    def _list_as_torch_does(self, module: nn.Module, prefix: str, raw: str) -> None:
        metadata = {"version": module._version}
        self.listed._metadata[prefix[:-1]] = metadata  # type: ignore[attr-defined]
        for pre_hook in filter(_is_users, module._state_dict_pre_hooks.values()):
            pre_hook(module, prefix, True)
        direct: dict[str, Any] = {}
        module._save_to_state_dict(direct, prefix, True)
        self._record_listed(module, prefix, raw, direct)
        for name, child in module._modules.items():
            if child is not None:
                self.list_module(child, f"{prefix}{name}.", f"{raw}{name}.")

        for hook in filter(_is_users, module._state_dict_hooks.values()):
            before = self.listed.keys() | self.entries.keys()
            returned = hook(module, self.listed, prefix, metadata)
            after = dict(self.listed if returned is None else returned)
            self.by_hooks += [name for name in after if name not in before]
            self._record_listed(module, prefix, raw, after)

    def _record_listed(
        self, module: nn.Module, prefix: str, raw: str, now: Mapping[str, Any]
    ) -> None:
        for name, value in now.items():
            entry = self.entries.get(name)
            if entry is None:
                raw_name = raw + name.removeprefix(prefix)
                self.entries[name] = AddedValue(raw_name, value, module, prefix)
            elif entry.value is not value:
                self.entries[name] = replace(entry, value=value)
        self.listed.update(now)


def _load_added(first: AddedValue, live: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Let the owner of `first` load `values` together with its current tensors.

    Returns the errors of the owner.
    """
    owner, prefix = first.owner, first.prefix
    state: OrderedDict[str, Any] = OrderedDict()
    for name, tensor in live.items():
        if isinstance(tensor, Tensor) and name.startswith(prefix):
            state[name] = tensor.detach()

    state.update(values)
    errors: list[str] = []
    try:
        if _has_own_method(owner, "state_dict") or _has_own_method(owner, "load_state_dict"):
            relative = {name.removeprefix(prefix): value for name, value in state.items()}
            owner.load_state_dict(relative, strict=False)
            return []
        metadata = {"version": owner._version}
        owner._load_from_state_dict(state, prefix, metadata, True, [], [], errors)
    except Exception as error:  # noqa: BLE001 - code of the user's module
        errors.append(f"{type(error).__name__}: {error}")

    what = f"{next(iter(values))}: {type(owner).__name__} cannot load it"
    return [f"{what}: {error}" for error in errors]


def _hides_tensors(module: nn.Module) -> bool:
    return any(map(hides_tensors, module.modules()))


def _has_own_method(module: nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(type(module), method) is not getattr(nn.Module, method)


def _has_own_listing(cls: type) -> bool:
    """Check whether the class overrides torch's methods that list the state of a module."""
    methods = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return any(getattr(cls, method) is not getattr(nn.Module, method) for method in methods)


def _is_users(hook: Any) -> bool:
    """Check whether a hook is the user's.

    The hooks of engines gather or reorder tensors, and add none.
    """
    return not is_engine_code(str(getattr(getattr(hook, "func", hook), "__module__", "")))


def _memory_key(value: Any) -> Any:
    """Return a key that is equal for tensors that view the same memory.

    Return None for a value without memory.
    """
    local = local_part(value) if isinstance(value, Tensor) else None
    if local is None or local.layout is not torch.strided:
        return None
    if local.is_meta or not local.numel():
        return None
    flags = (local.is_conj(), local.is_neg())
    return (local.device, local.data_ptr(), tuple(value.shape), local.stride(), local.dtype, flags)


def _same_values(first: Any, second: Any) -> bool:
    """Check whether two values are equal, bit for bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        return torch.equal(_tensor_bits(first), _tensor_bits(second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            return False
        return all(_same_values(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same_values, first, second))
    return type(first) is type(second) and pickle.dumps(first) == pickle.dumps(second)


def _tensor_bits(tensor: Any) -> Tensor:
    local = local_part(tensor)
    if local is None:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    plain = local.cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)
