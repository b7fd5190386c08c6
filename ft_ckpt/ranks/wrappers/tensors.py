"""Lists every tensor of a model under its canonical name."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ft_ckpt.errors import IncompleteError, SelectionError, listing
from ft_ckpt.ranks.ranks import Ranks
from ft_ckpt.ranks.sharding import OpaqueSharding, OwnedSharding, Source, TensorLayout
from ft_ckpt.ranks.wrappers import module_state, tensor_kinds, wrappers
from ft_ckpt.ranks.wrappers.module_state import AddedValue

_DENSITY = attrgetter("layout", "is_quantized")
_DENSE = (torch.strided, False)


class ModelTensors:
    """The tensors of one model inside any wrappers, as of the construction of this object."""

    def __init__(self, model: nn.Module) -> None:
        """List the modules of `model`, after engines have resharded them as for a state dict."""
        # The model, the module in each wrapper, and last the module of the user.
        self.chain = wrappers.wrapper_chain(model)
        walked = [*wrappers.walk_modules(self.chain[-1])]
        self.modules = [module for _, _, module in walked]
        everything = [*self.chain[:-1], *self.modules]
        wrappers.reshard_modules(everything)
        stand_ins = wrappers.tensors_of_modules(everything)
        self._broadcast = wrappers.broadcast_buffers(model)

        # Canonical name, raw name and tensor. A tied tensor has an item for each name.
        self._places: list[tuple[str, str, Any]] = []
        for path, raw_path, module in walked:
            prefix = f"{path}." if path else ""
            raw_prefix = f"{raw_path}." if raw_path else ""
            direct = _direct_tensors(module, stand_ins.get(id(module), {}))
            for name, tensor in direct.items():
                self._places.append((prefix + name, raw_prefix + name, tensor))

        self._sources: dict[bool, dict[str, Source]] = {}

    @cached_property
    def _are_plain(self) -> bool:
        return module_state.are_plain(self.modules)

    def sources(self, allow_meta: bool = False) -> dict[str, Source]:
        """Return every tensor of the model's state dict by canonical name, including tied names.

        These are parameters, persistent buffers, and tensors that modules and hooks add. The order
        and the names are the same on every rank and under every wrapper. Moves no data. Raises
        IncompleteError naming tensors that are cut in an unknown way and, unless `allow_meta`,
        tensors without data on this rank (on the meta device, lazy, or partitioned by an unknown
        engine); SelectionError naming tensors without dense values.
        """
        # Sources that have passed the check for data (the key False) serve both cases.
        sources = self._sources.get(False) or self._sources.get(allow_meta)
        if sources is None:
            sources = self._describe(allow_meta)
            self._sources[allow_meta] = sources
        return sources

    def added(self) -> dict[str, AddedValue]:
        """Return the values in the modules' state that are neither parameters nor buffers."""
        return self._added_to(self._not_added())

    def _not_added(self) -> dict[str, Source]:
        """Return the parameters and persistent buffers."""
        sources = self.sources(allow_meta=True)
        return {name: source for name, source in sources.items() if not source.is_added}

    def names_added(self, stored: Iterable[str]) -> list[str]:
        """Return the names of `added`, as far as they are known before the model is loaded.

        If a module cannot list its extra state yet, return the `stored` names of extra state that a
        module can load.
        """
        try:
            return list(self.added())
        except SelectionError:
            sources, root = self.sources(allow_meta=True), self.chain[-1]
            unknown = [name for name in stored if name not in sources]
            return [name for name in unknown if module_state.takes_extra_state(root, name)]

    def restore_added(self, values: Mapping[str, Any]) -> None:
        """Restore the values of `added`. Raises LoadError naming values that were not restored."""
        tensors = {name: source.live for name, source in self._not_added().items()}
        module_state.load_added_state(self.chain[-1], tensors, values)

    def _describe(self, allow_meta: bool) -> dict[str, Source]:
        lazy = [name for name, _, tensor in self._places if is_lazy(tensor)]
        places = self._places
        if lazy:
            places = [place for place in places if place[0] not in lazy]
        sources = _lay_out(places)
        for name, source in sources.items():
            if source.key in self._broadcast:
                sources[name] = of_rank_0(source)

        with suppress(SelectionError) if allow_meta else nullcontext():
            added_places = []
            for name, entry in self._added_to(sources).items():
                if isinstance(entry.value, Tensor):
                    added_places.append((name, entry.raw, entry.value))
            for name, source in _lay_out(added_places).items():
                sources[name] = replace(source, trainable=False, is_added=True)

        _refuse_sparse(sources)
        _refuse_unknown_cuts(sources)
        without_data = [] if allow_meta else lazy + _without_data(sources)
        if without_data:
            raise IncompleteError(
                f"{listing(without_data, ', ')}: {len(without_data)} tensor(s) of the model have "
                "no data on this rank (meta device, lazy, offloaded, or partitioned by an engine "
                "this version does not know); materialise the model first"
            )

        return sources

    def _added_to(self, sources: Mapping[str, Source]) -> dict[str, AddedValue]:
        if self._are_plain:
            return {}
        tensors = {name: source.live for name, source in sources.items()}
        return module_state.added_state(self.chain[-1], tensors)


def source_of_tensor(name: str, raw: str, tensor: Any) -> Source:
    """Return the source of a parameter, a buffer or a stand-in for one, under any engine."""
    return _source(name, raw, tensor, tensor_kinds.layout_of(tensor))


def _source(name: str, raw: str, tensor: Any, layout: TensorLayout) -> Source:
    return Source(
        id(tensor),
        name,
        raw,
        *layout,
        live=tensor,
        take=tensor_kinds.local_part,
        gather=tensor_kinds.full_tensor,
    )


def _lay_out(places: Sequence[tuple[str, str, Any]]) -> dict[str, Source]:
    layouts = tensor_kinds.layouts_of(tensor for _, _, tensor in places)
    sources = {}
    for (name, raw, tensor), layout in zip(places, layouts, strict=True):
        sources[name] = _source(name, raw, tensor, layout)
    return sources


def _refuse_sparse(sources: Mapping[str, Source]) -> None:
    live = {name: source.live for name, source in sources.items()}
    tensors = {name: tensor for name, tensor in live.items() if isinstance(tensor, Tensor)}
    if {*map(_DENSITY, tensors.values())} <= {_DENSE}:
        return
    sparse = []
    for name, tensor in tensors.items():
        if _DENSITY(tensor) != _DENSE:
            sparse.append(f"{name}: {tensor.layout}")
    raise SelectionError(
        f"{listing(sparse)}: a tensor without dense values cannot be stored; make it dense, or "
        "leave it out of the model's state dict (persistent=False)"
    )


def _without_data(sources: Mapping[str, Source]) -> list[str]:
    """Return the names of tensors without data on this rank, or on any rank."""
    flags = tensor_kinds.have_data(source.live for source in sources.values())
    names = []
    for (name, source), has_data in zip(sources.items(), flags, strict=True):
        if _is_lost(source, has_data):
            names.append(name)
    return names


def _is_lost(info: Source, has_data: bool) -> bool:
    """Check whether elements are missing.

    `has_data` says whether this rank has the elements that it should have.
    """
    if info.sharding.is_opaque:  # torch gathers the tensor
        return False
    if info.sharding.owners:
        return not has_data
    # No rank of this group contributes elements. If the tensor is sharded, ranks of the group of
    # rank 0 do.
    return info.numel > 0 and not info.sharding.is_sharded


def _direct_tensors(module: nn.Module, stand_ins: Mapping[str, Any]) -> dict[str, Any]:
    """Return the module's direct parameters and persistent buffers, in order.

    `stand_ins` replace the parameters that an engine has taken from the module.
    """
    tensors: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and name != "_flat_param":
            tensors[name] = parameter
    tensors |= stand_ins  # FSDP1 with use_orig_params=False leaves attributes, no parameters
    if module._buffers:
        not_persistent = module._non_persistent_buffers_set
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in not_persistent:
                tensors[name] = buffer
    return tensors


def _refuse_unknown_cuts(sources: Mapping[str, Source]) -> None:
    names_by_reason: dict[str, list[str]] = {}
    for name, source in sources.items():
        if isinstance(source.sharding, OpaqueSharding) and source.sharding.why:
            names_by_reason.setdefault(source.sharding.why, []).append(name)
    if names_by_reason:
        lines = [f"{listing(names, ', ')}: {why}" for why, names in names_by_reason.items()]
        raise IncompleteError(listing(lines))


def of_rank_0(source: Source) -> Source:
    """Mark the tensor as not replicated: ranks may differ, and the save stores rank 0's values."""
    return replace(source, sharding=replace(source.sharding, is_replicated=False))  # type: ignore[type-var]  # a dataclass


def from_state_dict(
    state_dict: Mapping[str, Tensor] | None, live: Mapping[str, Source], ranks: Ranks
) -> dict[str, Source]:
    """Make sources with the data of a gathered state dict, which is checked against `live`.

    Only rank 0's dict is read. Raises IncompleteError naming every entry that is missing,
    unexpected, or of another shape or dtype.
    """
    result: dict[str, Source] = {}
    if not ranks.is_main:
        for name, source in live.items():
            owned = replace(source, sharding=OwnedSharding(source.shape, 0))
            result[name] = owned.holding(None)
        return result

    tied: dict[int, list[str]] = {}
    for name, source in live.items():
        tied.setdefault(source.key, []).append(name)
    entries = state_dict or {}
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    problems = [f"{name}: not in the model" for name in tensors if name not in live]
    for name, source in live.items():
        aliases = [alias for alias in [name, *tied[source.key]] if alias in tensors]
        tensor = tensors[aliases[0]] if aliases else None
        if tensor is None:
            problems.append(f"{name}: missing")
        elif tuple(tensor.shape) != source.shape:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, the model has {source.shape}")
        elif tensor.dtype != source.dtype:
            problems.append(
                f"{name}: {tensor.dtype}, the model has {source.dtype} (dtype= casts while saving)"
            )
        else:
            stored = source_of_tensor(name, source.raw_name, tensor.detach())
            result[name] = replace(stored, trainable=source.trainable, key=source.key)

    if problems:
        raise IncompleteError(
            f"{listing(problems)}: the state dict differs from the live model in {len(problems)} "
            "place(s); gather it with accelerator.get_state_dict under the unwrapped model's "
            "names, or leave state_dict= out"
        )

    return result


def engine_names(sources: Iterable[Source]) -> str:
    """Return the engines that hold the tensors, for the manifest: "plain", or e.g. "fsdp2"."""
    return "+".join(sorted({source.engine for source in sources} - {"plain"})) or "plain"
