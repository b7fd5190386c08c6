"""One walk over the models of a run: every tensor under its canonical name, and under a key by which it is found.

`Inventory` notes modules and tensors without a look at their layouts; `infos` describes those of one model when it is
asked. Keys count up in the order of noting, so equal walks over equal models give equal keys; those of runs in buffers
have numbers of their own.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ft_ckpt.distributed import added_state as beside
from ft_ckpt.distributed import wrappers
from ft_ckpt.distributed.added_state import AddedValue
from ft_ckpt.distributed.spread_experts import number_experts
from ft_ckpt.distributed.tensor_info import TensorInfo
from ft_ckpt.errors import IncompleteError, SelectionError, listing

Info = TypeVar("Info", bound=TensorInfo)
_DENSITY = attrgetter("layout", "is_quantized")
_DENSE = (torch.strided, False)
_FIRST_RUN = 1 << 40  # the key of the first run


class BufferRun(NamedTuple):
    """This rank's elements of one tensor in a buffer where others may lie, too."""

    buffer: int  # its key
    start: int  # the first element, of the buffer as one row
    shape: tuple[int, ...] | None  # of the elements, as their box; None: this rank has none


@dataclass(frozen=True, eq=False)
class ModelRows:
    """The walk over one model: its modules, and of each the names of its children and of its own tensors."""

    chain: tuple[nn.Module, ...]  # the model as it is given, each wrapped module, the user's own last
    modules: list[nn.Module]
    children: list[tuple[str, ...]]
    tensors: list[tuple[str, ...]]  # parameters and persistent buffers, in that order
    keys: list[int]  # of the tensors of all modules, one after the other
    broadcast: frozenset[int]  # keys of buffers that rank 0 will send to all
    stand_ins: list[tuple[int, int]]  # the key of each, and of the first for the same parameter of an optimizer

    @property
    def places(self) -> Iterator[tuple[str, str, int]]:
        """Canonical name, raw name and key of each tensor."""
        names, keys = wrappers.name_modules(self.modules, self.children), iter(self.keys)
        for (path, raw), tensors in zip(names, self.tensors, strict=True):
            for own in tensors:
                name = f"{path}.{own}" if path else own
                yield name, name if raw == path else f"{raw}.{own}" if raw else own, next(keys)

    @cached_property
    def is_plain(self) -> bool:
        """Whether no module lists more in its state dict than its parameters and persistent buffers."""
        return beside.are_plain(self.modules)


class Inventory:
    """The tensors of one moment by key: those of models, by name, and any others. It is `Tensors` of the live run."""

    def __init__(self) -> None:
        self.models: dict[str, ModelRows] = {}  # by item
        self._live: list[Any] = []
        self._keys: dict[int, int] = {}  # id -> key
        self._owners: dict[int, int] = {}  # id of an optimizer's parameter -> key of the first that stands for it
        self._runs: list[BufferRun] = []
        self._infos: dict[tuple[str, bool], dict[str, TensorInfo]] = {}

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of all models, in the order of noting."""
        return [module for model in self.models.values() for module in model.modules]

    def note_model(self, model: nn.Module, item: str = "") -> ModelRows:
        """Walk over a model, whatever wraps it, and keep its rows under `item`. Lets engines put shards back first."""
        chain = wrappers.wrapper_chain(model)
        modules, children = wrappers.list_modules(chain[-1])
        everything = [*chain[:-1], *modules]
        wrappers.reshard_modules(everything)
        taken, sent = wrappers.tensors_of_modules(everything), wrappers.broadcast_buffers(model)
        names: list[tuple[str, ...]] = []
        tensors: list[Any] = []
        for module in modules:
            own = _own_tensors(module, taken.get(id(module), {}))
            names.append((*own,))
            tensors += own.values()
        keys = self.keys_of(tensors)
        broadcast = frozenset(self._keys[buffer] for buffer in sent if buffer in self._keys)
        stand_ins = self._note_owners(one for own in taken.values() for one in own.values())
        self.models[item] = ModelRows(tuple(chain), modules, children, names, keys, broadcast, stand_ins)
        return self.models[item]

    def _note_owners(self, stand_ins: Iterable[Any]) -> list[tuple[int, int]]:
        keys = [(id(wrappers.optimizer_parameter(one)), self._keys[id(one)]) for one in stand_ins]
        return [(key, self._owners.setdefault(parameter, key)) for parameter, key in keys]

    def keys_of(self, tensors: Sequence[Any]) -> list[int]:
        """The keys of tensors, or of what stands for them; the same for the same object."""
        known, ids = self._keys, [*map(id, tensors)]
        fresh = {one: tensor for one, tensor in zip(ids, tensors, strict=True) if one not in known}
        known.update(zip(fresh, count(len(self._live)), strict=False))
        self._live += fresh.values()
        return [*map(known.__getitem__, ids)]

    @property
    def noted(self) -> Sequence[Any]:
        """The tensors that are noted, or what stands for them, by key."""
        return self._live

    def known_keys(self, tensors: Iterable[Any]) -> list[int | None]:
        """The keys of tensors that were noted, None for others.

        An optimizer's parameter has the key of what stands for it, the first of several.
        """
        ids = [*map(id, tensors)]
        if not self._owners:
            return [*map(self._keys.get, ids)]
        return [self._keys.get(one, self._owners.get(one)) for one in ids]

    @property
    def runs(self) -> Sequence[BufferRun]:
        """Those that were noted, in the order of their keys."""
        return tuple(self._runs)

    def note_run(self, live: Tensor, local: Tensor | None) -> int:
        """A new key for this rank's run `local` of elements in the buffer `live`, where others may lie, too.

        Raises SelectionError where they do not lie there one after the other.
        """
        start = 0 if local is None else int(local.storage_offset() - live.storage_offset())
        run = BufferRun(self.keys_of([live])[0], start, None if local is None else tuple(local.shape))
        key = self.note_runs([run])
        found = self._run_part(key)
        if (
            local is not None
            and found is not None
            and not (local.is_contiguous() and found.data_ptr() == local.data_ptr())
        ):
            raise SelectionError(
                "elements of a buffer that are no run of it were to be stored as one; please report it"
            )
        return key

    def note_runs(self, runs: Iterable[BufferRun]) -> int:
        """Note runs again that an equal inventory had noted, under the same keys; the last of them."""
        self._runs += runs
        return _FIRST_RUN + len(self._runs) - 1

    def noted_key(self, key: int) -> int:
        """The key of the noted tensor in which that of `key` lies: itself, or the buffer of a run."""
        return key if key < _FIRST_RUN else self._runs[key - _FIRST_RUN].buffer

    def live(self, key: int) -> Any:
        """The parameter, buffer or other tensor itself, or what stands for it."""
        return self._live[self.noted_key(key)]

    def local(self, key: int) -> Tensor | None:
        """This rank's elements, without gradient; None for none, as under keys below 0, of what other ranks have."""
        if key < 0:
            return None
        return wrappers.local_part(self._live[key]) if key < _FIRST_RUN else self._run_part(key)

    def memories(self, keys: Collection[int]) -> dict[int, Tensor]:
        """As `local`, of those of the keys that are here, in haste, to be copied: they may want a gradient."""
        whole = [key for key in keys if 0 <= key < _FIRST_RUN]
        found = dict(zip(whole, wrappers.memory_parts([self._live[key] for key in whole]), strict=True))
        found |= {key: self._run_part(key) for key in keys if key >= _FIRST_RUN}
        return {key: tensor for key, tensor in found.items() if tensor is not None}

    def _run_part(self, key: int) -> Tensor | None:
        run = self._runs[key - _FIRST_RUN]
        if run.shape is None:
            return None
        row = self._live[run.buffer].detach().view(-1)[run.start : run.start + prod(run.shape)]
        return row.view(run.shape)  # type: ignore[no-any-return]  # a Tensor

    def full(self, key: int) -> Tensor:
        """The full tensor of an opaque sharding. Collective."""
        return wrappers.full_tensor(self._live[key])

    def infos(self, item: str = "", allow_meta: bool = False) -> dict[str, TensorInfo]:
        """Every tensor that torch's state dict of the model lists, by canonical name, tied names included.

        These are parameters, persistent buffers, and what modules and hooks add. The order and the names are the same
        on every rank and under every wrapper. Raises IncompleteError naming tensors that have no data here (on the
        meta device, not made yet, or partitioned away without a trace) unless `allow_meta`; SelectionError naming
        those that have no dense values to store. Moves no data.
        """
        if (item, False) in self._infos:  # nothing was refused, so they are what one gets who refuses nothing
            return self._infos[item, False]
        if (item, allow_meta) not in self._infos:
            self._infos[item, allow_meta] = self._described(item, allow_meta)
        return self._infos[item, allow_meta]

    def added(self, item: str = "") -> dict[str, AddedValue]:
        """What the modules of the model list beside parameters and persistent buffers, tensors or not."""
        infos = self.infos(item, allow_meta=True)
        return self._added_to(item, {name: info for name, info in infos.items() if not info.is_added})

    def names_added(self, given: Iterable[str], item: str = "") -> list[str]:
        """The names of `added`, as far as the model can tell before it is loaded.

        A module that cannot list its extra state yet has that of the `given` names that it can take.
        """
        try:
            return list(self.added(item))
        except SelectionError:
            known, root = self.infos(item, allow_meta=True), self.models[item].chain[-1]
            return [name for name in given if name not in known and beside.takes_extra_state(root, name)]

    def _described(self, item: str, allow_meta: bool) -> dict[str, TensorInfo]:
        model = self.models[item]
        places = [*model.places]
        unmade = [name for name, _, key in places if is_lazy(self._live[key])]
        found = self._laid_out([place for place in places if place[0] not in unmade] if unmade else places)
        if model.broadcast:
            found = {name: of_rank_0(info) if info.key in model.broadcast else info for name, info in found.items()}
        found = number_experts(found, wrappers.walk_modules(model.chain[-1]), self)
        with suppress(SelectionError) if allow_meta else nullcontext():
            found |= self._laid_out_beside(self._added_to(item, found))
        self._refuse_sparse(found)
        _refuse_unknown_cuts(found)
        homeless = [] if allow_meta else unmade + self._without_data(found)
        if homeless:
            raise IncompleteError(
                f"{listing(homeless, ', ')}: {len(homeless)} tensor(s) of the model have no data on this rank (meta "
                "device, lazy, offloaded, or partitioned by an engine this version does not know); materialise the "
                "model first"
            )
        return found

    def _laid_out(self, places: Sequence[tuple[str, str, int]]) -> dict[str, TensorInfo]:
        """The descriptions of tensors from their names, raw names and keys."""
        layouts = wrappers.layouts_of(wrappers.by_engine(self._live[key] for _, _, key in places))
        return {n: TensorInfo(key, n, raw, *layout) for (n, raw, key), layout in zip(places, layouts, strict=True)}

    def _laid_out_beside(self, added: Mapping[str, AddedValue]) -> dict[str, TensorInfo]:
        """The descriptions of tensors that modules list beside their own."""
        tensors = {name: one for name, one in added.items() if isinstance(one.value, Tensor)}
        keys = self.keys_of([one.value for one in tensors.values()])
        found = self._laid_out([(n, one.raw, key) for (n, one), key in zip(tensors.items(), keys, strict=True)])
        return {name: replace(info, trainable=False, is_added=True) for name, info in found.items()}

    def _added_to(self, item: str, found: Mapping[str, TensorInfo]) -> dict[str, AddedValue]:
        """What the modules of the model list beside the tensors `found`."""
        model = self.models[item]
        if model.is_plain:
            return {}
        return beside.added_state(model.chain[-1], {name: self._live[info.key] for name, info in found.items()})

    def _refuse_sparse(self, found: Mapping[str, TensorInfo]) -> None:
        tensors = [one for info in found.values() if isinstance(one := self._live[info.key], Tensor)]
        if {*map(_DENSITY, tensors)} <= {_DENSE}:
            return
        live = {name: self._live[info.key] for name, info in found.items()}
        odd = [f"{n}: {one.layout}" for n, one in live.items() if isinstance(one, Tensor) and _DENSITY(one) != _DENSE]
        raise SelectionError(
            f"{listing(odd)}: a tensor without dense values of its own cannot be stored; make it dense, or leave "
            "it out of the model's state dict (persistent=False)"
        )

    def _without_data(self, found: Mapping[str, TensorInfo]) -> list[str]:
        """The names of those whose elements nobody has."""
        have = wrappers.have_data(wrappers.by_engine(self._live[info.key] for info in found.values()))
        return [name for (name, info), has in zip(found.items(), have, strict=True) if _is_lost(info, has)]


def _is_lost(info: TensorInfo, has_data: bool) -> bool:
    """Whether nobody has the elements, where this rank has those that it should have if it `has_data`."""
    if info.sharding.is_opaque:  # torch gathers it
        return False
    if info.sharding.owners:
        return not has_data
    return info.numel > 0 and not info.sharding.is_sharded  # else another group of replicas speaks for this one


def _own_tensors(module: nn.Module, taken: Mapping[str, Any]) -> dict[str, Any]:
    """The module's own parameters and persistent buffers, in that order; for those `taken` what stands for them."""
    own: Any = module._parameters
    buffers: Any = module._buffers
    found = {key: value for key, value in own.items() if value is not None and key != "_flat_param"} if own else {}
    if taken:  # FSDP1 with use_orig_params=False leaves plain attributes where the parameters were, known to it alone
        found |= taken
    if buffers:
        passing = module._non_persistent_buffers_set
        found |= {key: one for key, one in buffers.items() if one is not None and key not in passing}
    return found


def _refuse_unknown_cuts(found: Mapping[str, TensorInfo]) -> None:
    odd: dict[str, list[str]] = {}
    for name, info in found.items():
        if why := getattr(info.sharding, "why", ""):
            odd.setdefault(why, []).append(name)
    if odd:
        raise IncompleteError(listing([f"{listing(names, ', ')}: {why}" for why, names in odd.items()]))


def of_rank_0(info: Info) -> Info:
    """The tensor as one that other ranks may have otherwise: rank 0's is the one that counts."""
    return replace(info, sharding=replace(info.sharding, is_replicated=False))  # type: ignore[type-var]  # a dataclass


def inventory_of(model: nn.Module) -> Inventory:
    """The inventory of one model."""
    inventory = Inventory()
    inventory.note_model(model)
    return inventory
