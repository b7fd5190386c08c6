"""One walk over the models of a run: every tensor under its canonical name, and under a key by which it is found.

`Inventory` notes modules and tensors without a look at their layouts; `infos` describes those of one model when it is
asked. Keys count up in the order of noting, so equal walks over equal models give equal keys.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ft_ckpt.distributed import added_state as beside
from ft_ckpt.distributed import wrappers
from ft_ckpt.distributed.added_state import AddedValue
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.sharding import OwnedSharding
from ft_ckpt.distributed.tensor_info import Source, TensorInfo
from ft_ckpt.errors import IncompleteError, SelectionError, listing

Info = TypeVar("Info", bound=TensorInfo)


class ModuleRow(NamedTuple):
    """One module of a walk, and the keys of its own parameters and persistent buffers, in that order."""

    path: str  # canonical
    raw_path: str
    module: nn.Module
    tensors: tuple[tuple[str, int], ...]  # (name in the module, key)


@dataclass(frozen=True, eq=False)
class ModelRows:
    """The walk over one model: its modules, and of each the names of its children, and its tensors' names and keys."""

    chain: tuple[nn.Module, ...]  # the model as it is given, each wrapped module, the user's own last
    modules: list[nn.Module]
    children: list[tuple[str, ...]]
    tensors: list[tuple[tuple[str, int], ...]]
    broadcast: frozenset[int]  # keys of buffers that rank 0 will send to all

    @property
    def rows(self) -> Iterator[ModuleRow]:
        """The modules with their paths, which nobody needs who knows them already."""
        names = wrappers.name_modules(self.modules, self.children)
        for (path, raw), module, tensors in zip(names, self.modules, self.tensors, strict=True):
            yield ModuleRow(path, raw, module, tensors)


class Inventory:
    """The tensors of one moment by key: those of models, by name, and any others. It is `Tensors` of the live run."""

    def __init__(self) -> None:
        self.models: dict[str, ModelRows] = {}  # by item
        self._live: list[Any] = []
        self._keys: dict[int, int] = {}  # id -> key
        self._locals: dict[int, Tensor | None] = {}  # of runs in buffers
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
        found = [_own_tensors(module, taken) for module in modules]
        keys = iter(self.keys_of([tensor for own in found for tensor in own.values()]))
        tensors = [(*zip(own, keys, strict=False),) for own in found]  # names first: they take no key too many
        broadcast = frozenset(self._keys[buffer] for buffer in sent if buffer in self._keys)
        self.models[item] = ModelRows(tuple(chain), modules, children, tensors, broadcast)
        return self.models[item]

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
        """The keys of tensors that were noted, None for others."""
        return [*map(self._keys.get, map(id, tensors))]

    def note_run(self, live: Any, local: Tensor | None) -> int:
        """A new key for this rank's run `local` of elements in the buffer `live`, where others may lie, too."""
        self._live.append(live)
        self._locals[len(self._live) - 1] = local
        return len(self._live) - 1

    def live(self, key: int) -> Any:
        """The parameter, buffer or other tensor itself, or what stands for it."""
        return self._live[key]

    def local(self, key: int) -> Tensor | None:
        """This rank's elements, without gradient; None for none, as under keys below 0, of what other ranks have."""
        if key < 0:
            return None
        return self._locals[key] if key in self._locals else wrappers.local_part(self._live[key])

    def memories(self, keys: Collection[int]) -> dict[int, Tensor]:
        """As `local`, of those of the keys that are here, in haste, to be copied: they may want a gradient."""
        whole, runs = [key for key in keys if key >= 0 and key not in self._locals], self._locals
        found = dict(zip(whole, wrappers.memory_parts([self._live[key] for key in whole]), strict=True))
        found |= {key: runs[key] for key in keys if key in runs}
        return {key: tensor for key, tensor in found.items() if tensor is not None}

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

    def info_of(self, key: int, name: str, raw_name: str) -> TensorInfo:
        """The description of one tensor under a name."""
        shape, dtype, trainable, is_parameter, engine, sharding = wrappers.layout_of(self._live[key])
        return TensorInfo(key, name, raw_name, shape, dtype, trainable, is_parameter, engine, sharding)

    def added(self, item: str = "") -> dict[str, AddedValue]:
        """What the modules of the model list beside parameters and persistent buffers, tensors or not."""
        infos = self.infos(item, allow_meta=True)
        live = {name: self.live(info.key) for name, info in infos.items() if not info.is_added}
        return beside.added_state(self.models[item].chain[-1], live)

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
        found: dict[str, TensorInfo] = {}
        unmade: list[str] = []
        for row in model.rows:
            for own, key in row.tensors:
                name = f"{row.path}.{own}" if row.path else own
                if is_lazy(self._live[key]):
                    unmade.append(name)
                    continue
                raw = name if row.raw_path == row.path else f"{row.raw_path}.{own}" if row.raw_path else own
                info = self.info_of(key, name, raw)
                found[name] = of_rank_0(info) if key in model.broadcast else info
        live = {name: self._live[info.key] for name, info in found.items()}
        with suppress(SelectionError) if allow_meta else nullcontext():
            for name, one in beside.added_state(model.chain[-1], live).items():
                if isinstance(one.value, Tensor):
                    added = self.info_of(self.keys_of([one.value])[0], name, one.raw)
                    found[name] = replace(added, trainable=False, is_added=True)
        self._refuse_sparse(found)
        _refuse_unknown_cuts(found)
        homeless = [] if allow_meta else unmade + [name for name, info in found.items() if not self._has_data(info)]
        if homeless:
            raise IncompleteError(
                f"{listing(homeless, ', ')}: {len(homeless)} tensor(s) of the model have no data on this rank (meta "
                "device, lazy, offloaded, or partitioned by an engine this version does not know); materialise the "
                "model first"
            )
        return found

    def _refuse_sparse(self, found: Mapping[str, TensorInfo]) -> None:
        live = {name: self._live[info.key] for name, info in found.items()}
        odd = [f"{name}: {t.layout}" for name, t in live.items() if isinstance(t, Tensor) and not _is_dense(t)]
        if odd:
            raise SelectionError(
                f"{listing(odd)}: a tensor without dense values of its own cannot be stored; make it dense, or leave "
                "it out of the model's state dict (persistent=False)"
            )

    def _has_data(self, info: TensorInfo) -> bool:
        sharding = info.sharding
        if sharding.is_opaque or (sharding.is_sharded and not sharding.owners):
            return True  # torch gathers it, or another group of replicas speaks for this one
        if not sharding.owners:
            return info.numel == 0
        return info.key in self._locals or wrappers.has_data(self._live[info.key])


def _own_tensors(module: nn.Module, taken: Mapping[tuple[int, str], Any]) -> dict[str, Any]:
    """The module's own parameters and persistent buffers, in that order; for those `taken` what stands for them."""
    own, buffers = module._parameters, module._buffers
    found: dict[str, Any] = {}
    if own:
        found |= {key: value for key, value in own.items() if value is not None and key != "_flat_param"}
    if taken:  # FSDP1 with use_orig_params=False leaves plain attributes where the parameters were, known to it alone
        found |= {key: stand_in for (owner, key), stand_in in taken.items() if owner == id(module)}
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


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def of_rank_0(info: Info) -> Info:
    """The tensor as one that other ranks may have otherwise: rank 0's is the one that counts."""
    return replace(info, sharding=replace(info.sharding, is_replicated=False))  # type: ignore[type-var]  # a dataclass


def inventory_of(model: nn.Module) -> Inventory:
    """The inventory of one model."""
    inventory = Inventory()
    inventory.note_model(model)
    return inventory


# Descriptions together with their tensors


def sources(model: nn.Module, allow_meta: bool = False) -> dict[str, Source]:
    """What `Inventory.infos` says of `model`, each with its tensor. Raises what that raises."""
    inventory = inventory_of(model)
    infos = inventory.infos("", allow_meta)
    return {name: _source_with_tensor(info, inventory.live(info.key)) for name, info in infos.items()}


def source_of_tensor(name: str, raw: str, tensor: Any) -> Source:
    """The source of a parameter, a buffer or what stands for one, under whatever engine holds it."""
    shape, dtype, trainable, is_parameter, engine, sharding = wrappers.layout_of(tensor)
    info = TensorInfo(id(tensor), name, raw, shape, dtype, trainable, is_parameter, engine, sharding)
    return _source_with_tensor(info, tensor)


def added_state_of(model: nn.Module, found: Mapping[str, Source] | None = None) -> dict[str, AddedValue]:
    """What the modules of `model` list beside parameters and persistent buffers, tensors or not, by canonical name.

    `found` are its sources, if they are known.
    """
    found = sources(model, allow_meta=True) if found is None else found
    return beside.added_state(wrappers.unwrap(model), _live_tensors(found))


def restore_added_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give back what `added_state_of` listed when it was saved. Raises LoadError naming what was not taken back."""
    inventory = inventory_of(model)
    infos = inventory.infos(allow_meta=True)
    live = {name: inventory.live(info.key) for name, info in infos.items() if not info.is_added}
    beside.load_added_state(wrappers.unwrap(model), live, values)


def from_state_dict(
    state_dict: Mapping[str, Tensor] | None, live: Mapping[str, Source], ranks: Ranks
) -> dict[str, Source]:
    """Sources that take their data from a state dict the caller gathered, checked against the `live` model.

    Only rank 0's dict is read. Raises IncompleteError naming every entry that is missing, unexpected, or of another
    shape or dtype.
    """
    if not ranks.leads:
        return {n: replace(one, sharding=OwnedSharding(one.shape, 0), local=None) for n, one in live.items()}
    tied: dict[int, list[str]] = {}
    for name, source in live.items():
        tied.setdefault(source.key, []).append(name)
    given = {name: tensor for name, tensor in (state_dict or {}).items() if isinstance(tensor, Tensor)}
    problems = [f"{name}: not in the model" for name in given if name not in live]
    result: dict[str, Source] = {}
    for name, source in live.items():
        tensor = next((given[alias] for alias in [name, *tied[source.key]] if alias in given), None)
        if tensor is None:
            problems.append(f"{name}: missing")
        elif tuple(tensor.shape) != source.shape:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, the model has {source.shape}")
        elif tensor.dtype != source.dtype:
            problems.append(f"{name}: {tensor.dtype}, the model has {source.dtype} (dtype= casts while saving)")
        else:
            made = source_of_tensor(name, source.raw_name, tensor.detach())
            result[name] = replace(made, trainable=source.trainable, key=source.key)
    if problems:
        raise IncompleteError(
            f"{listing(problems)}: the state dict differs from the live model in {len(problems)} place(s); gather it "
            "with accelerator.get_state_dict under the unwrapped model's names, or leave state_dict= out"
        )
    return result


def engine_names(found: Iterable[TensorInfo]) -> str:
    """Which engines hold the tensors, for the manifest: "plain", or e.g. "fsdp2"."""
    return "+".join(sorted({info.engine for info in found} - {"plain"})) or "plain"


def _source_with_tensor(info: TensorInfo, live: Any) -> Source:
    facts = info.shape, info.dtype, info.trainable, info.is_parameter, info.engine, info.sharding, info.is_added
    local, full = wrappers.local_part(live), partial(wrappers.full_tensor, live)
    return Source(id(live), info.name, info.raw_name, *facts, live, local, full)


def _live_tensors(found: Mapping[str, Source]) -> dict[str, Any]:
    """The parameters and buffers among `found`."""
    return {name: source.live for name, source in found.items() if not source.is_added}
