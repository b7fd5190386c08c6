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
from ft_ckpt.ranks import module_state, wrappers
from ft_ckpt.ranks.module_state import AddedValue
from ft_ckpt.ranks.ranks import Ranks
from ft_ckpt.ranks.sharding import OwnedSharding
from ft_ckpt.ranks.source import Source
from ft_ckpt.ranks.wrapper import TensorLayout

_DENSITY = attrgetter("layout", "is_quantized")
_DENSE = (torch.strided, False)


class ModelTensors:
    """The tensors of one model inside any wrappers, as of the construction of this object."""

    def __init__(self, model: nn.Module) -> None:
        """List the modules of `model`, after engines have resharded them as for a state dict."""
        # the given model, each wrapped module, the user's own last
        self.chain = wrappers.wrapper_chain(model)
        walked = [*wrappers.walk_modules(self.chain[-1])]
        self.modules = [module for _, _, module in walked]
        everything = [*self.chain[:-1], *self.modules]
        wrappers.reshard_modules(everything)
        stand_ins, self._broadcast = (
            wrappers.tensors_of_modules(everything),
            wrappers.broadcast_buffers(model),
        )
        # canonical name, raw name, tensor; ties included
        self._places: list[tuple[str, str, Any]] = []
        for path, raw, module in walked:
            for own, tensor in _own_tensors(module, stand_ins.get(id(module), {})).items():
                name = f"{path}.{own}" if path else own
                self._places.append(
                    (name, name if raw == path else f"{raw}.{own}" if raw else own, tensor)
                )
        self._sources: dict[bool, dict[str, Source]] = {}

    @cached_property
    def _are_plain(self) -> bool:
        return module_state.are_plain(self.modules)

    def sources(self, allow_meta: bool = False) -> dict[str, Source]:
        """Every tensor of the model's state dict, by canonical name, tied names included.

        These are parameters, persistent buffers, and tensors that modules and hooks add. The order
        and the names are the same on every rank and under every wrapper. Raises IncompleteError
        naming tensors that are cut in an unknown way and, unless `allow_meta`, tensors without data
        on this rank (on the meta device, lazy, or partitioned by an unknown engine); SelectionError
        naming tensors without dense values. Moves no data.
        """
        # a check that passed holds for both
        known = self._sources.get(False) or self._sources.get(allow_meta)
        if known is None:
            known = self._sources[allow_meta] = self._described(allow_meta)
        return known

    def added(self) -> dict[str, AddedValue]:
        """The values in the modules' state beside parameters and persistent buffers, tensors or
        not.
        """
        return self._added_to(
            {
                n: source
                for n, source in self.sources(allow_meta=True).items()
                if not source.is_added
            }
        )

    def names_added(self, given: Iterable[str]) -> list[str]:
        """The names of `added`, as far as they are known before the model is loaded.

        If a module cannot list its extra state yet: the `given` names of extra state that a module
        can load.
        """
        try:
            return list(self.added())
        except SelectionError:
            known, root = self.sources(allow_meta=True), self.chain[-1]
            return [
                name
                for name in given
                if name not in known and module_state.takes_extra_state(root, name)
            ]

    def restore_added(self, values: Mapping[str, Any]) -> None:
        """Restore the values of `added`. Raises LoadError naming values that were not restored."""
        own = {
            n: source.live
            for n, source in self.sources(allow_meta=True).items()
            if not source.is_added
        }
        module_state.load_added_state(self.chain[-1], own, values)

    def _described(self, allow_meta: bool) -> dict[str, Source]:
        unmade = [name for name, _, tensor in self._places if is_lazy(tensor)]
        found = _laid_out(
            [place for place in self._places if place[0] not in unmade] if unmade else self._places
        )
        if self._broadcast:
            found = {
                n: of_rank_0(source) if source.key in self._broadcast else source
                for n, source in found.items()
            }
        with suppress(SelectionError) if allow_meta else nullcontext():
            added = {
                name: entry
                for name, entry in self._added_to(found).items()
                if isinstance(entry.value, Tensor)
            }
            sources = _laid_out([(name, entry.raw, entry.value) for name, entry in added.items()])
            found |= {
                n: replace(source, trainable=False, is_added=True) for n, source in sources.items()
            }
        _refuse_sparse(found)
        _refuse_unknown_cuts(found)
        without_data = [] if allow_meta else unmade + _without_data(found)
        if without_data:
            raise IncompleteError(
                f"{listing(without_data, ', ')}: {len(without_data)} tensor(s) of the model have "
                "no data on this rank (meta device, lazy, offloaded, or partitioned by an engine "
                "this version does not know); materialise the model first"
            )
        return found

    def _added_to(self, found: Mapping[str, Source]) -> dict[str, AddedValue]:
        if self._are_plain:
            return {}
        return module_state.added_state(
            self.chain[-1], {name: source.live for name, source in found.items()}
        )


def source_of_tensor(name: str, raw: str, tensor: Any) -> Source:
    """The source of a parameter, a buffer or a stand-in for one, under any engine."""
    return _source(name, raw, tensor, wrappers.layout_of(tensor))


def _source(name: str, raw: str, tensor: Any, layout: TensorLayout) -> Source:
    how = {"live": tensor, "take": wrappers.local_part, "gather": wrappers.full_tensor}
    return Source(id(tensor), name, raw, *layout, **how)


def _laid_out(places: Sequence[tuple[str, str, Any]]) -> dict[str, Source]:
    layouts = wrappers.layouts_of(tensor for _, _, tensor in places)
    return {
        place[0]: _source(*place, layout) for place, layout in zip(places, layouts, strict=True)
    }


def _refuse_sparse(found: Mapping[str, Source]) -> None:
    live = {name: source.live for name, source in found.items() if isinstance(source.live, Tensor)}
    if {*map(_DENSITY, live.values())} <= {_DENSE}:
        return
    sparse = [
        f"{name}: {tensor.layout}" for name, tensor in live.items() if _DENSITY(tensor) != _DENSE
    ]
    raise SelectionError(
        f"{listing(sparse)}: a tensor without dense values cannot be stored; make it dense, or "
        "leave it out of the model's state dict (persistent=False)"
    )


def _without_data(found: Mapping[str, Source]) -> list[str]:
    """The names of tensors without data on this rank, or on any."""
    have = wrappers.have_data(source.live for source in found.values())
    return [
        name
        for (name, source), has in zip(found.items(), have, strict=True)
        if _is_lost(source, has)
    ]


def _is_lost(info: Source, has_data: bool) -> bool:
    """Whether elements are missing; `has_data`: whether this rank has the elements that it should
    have.
    """
    if info.sharding.is_opaque:  # torch gathers it
        return False
    if info.sharding.owners:
        return not has_data
    # the group of rank 0 holds a replica of a sharded one
    return info.numel > 0 and not info.sharding.is_sharded


def _own_tensors(module: nn.Module, stand_ins: Mapping[str, Any]) -> dict[str, Any]:
    """The module's direct parameters and persistent buffers, in order; `stand_ins` replace those an
    engine took.
    """
    own: Any = module._parameters
    buffers: Any = module._buffers
    found = (
        {key: value for key, value in own.items() if value is not None and key != "_flat_param"}
        if own
        else {}
    )
    if stand_ins:  # FSDP1 with use_orig_params=False leaves plain attributes in place of parameters
        found |= stand_ins
    if buffers:
        left_out = module._non_persistent_buffers_set
        found |= {
            key: buffer
            for key, buffer in buffers.items()
            if buffer is not None and key not in left_out
        }
    return found


def _refuse_unknown_cuts(found: Mapping[str, Source]) -> None:
    refused: dict[str, list[str]] = {}
    for name, info in found.items():
        if why := getattr(info.sharding, "why", ""):
            refused.setdefault(why, []).append(name)
    if refused:
        raise IncompleteError(
            listing([f"{listing(names, ', ')}: {why}" for why, names in refused.items()])
        )


def of_rank_0(source: Source) -> Source:
    """The tensor, marked as not replicated: it may differ between ranks, and rank 0's is stored."""
    return replace(source, sharding=replace(source.sharding, is_replicated=False))  # type: ignore[type-var]  # a dataclass


def from_state_dict(
    state_dict: Mapping[str, Tensor] | None, live: Mapping[str, Source], ranks: Ranks
) -> dict[str, Source]:
    """Sources that take their data from a state dict the caller gathered, checked against the
    `live` model.

    Only rank 0's dict is read. Raises IncompleteError naming every entry that is missing,
    unexpected, or of another shape or dtype.
    """
    if not ranks.is_main:
        return {
            n: replace(source, sharding=OwnedSharding(source.shape, 0)).holding(None)
            for n, source in live.items()
        }
    tied: dict[int, list[str]] = {}
    for name, source in live.items():
        tied.setdefault(source.key, []).append(name)
    given = {
        name: tensor for name, tensor in (state_dict or {}).items() if isinstance(tensor, Tensor)
    }
    problems = [f"{name}: not in the model" for name in given if name not in live]
    result: dict[str, Source] = {}
    for name, source in live.items():
        tensor = next((given[alias] for alias in [name, *tied[source.key]] if alias in given), None)
        if tensor is None:
            problems.append(f"{name}: missing")
        elif tuple(tensor.shape) != source.shape:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, the model has {source.shape}")
        elif tensor.dtype != source.dtype:
            problems.append(
                f"{name}: {tensor.dtype}, the model has {source.dtype} (dtype= casts while saving)"
            )
        else:
            made = source_of_tensor(name, source.raw_name, tensor.detach())
            result[name] = replace(made, trainable=source.trainable, key=source.key)
    if problems:
        raise IncompleteError(
            f"{listing(problems)}: the state dict differs from the live model in {len(problems)} "
            "place(s); gather it with accelerator.get_state_dict under the unwrapped model's "
            "names, or leave state_dict= out"
        )
    return result


def engine_names(found: Iterable[Source]) -> str:
    """The engines that hold the tensors, for the manifest: "plain", or e.g. "fsdp2"."""
    return "+".join(sorted({source.engine for source in found} - {"plain"})) or "plain"
