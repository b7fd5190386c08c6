"""What each rank holds of the model, under every wrapper.

A rank holds, of each full tensor, either all of it or one block: rows of it (FSDP2), a run of its flattened elements
(FSDP1, ZeRO-3), a slab (tensor parallelism). `sources` finds these without moving a byte; `gather` moves them.
Wrappers are told by their tensors and modules, never by what a launcher says it configured.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy

from ft_ckpt.distributed import tensor_names as names
from ft_ckpt.distributed.fsdp1 import FlatParameter, flat_parameters
from ft_ckpt.distributed.fsdp2 import dtensor_full, dtensor_local, dtensor_sharding, is_dtensor
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.sharding import OwnedSharding, ReplicatedSharding, Sharding, unravel_index
from ft_ckpt.distributed.tensor_info import Source
from ft_ckpt.distributed.tensor_names import Added, walk_modules, wrapped_key
from ft_ckpt.distributed.zero import zero3_local, zero3_sharding
from ft_ckpt.errors import IncompleteError, SelectionError, listing


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside any stack of DDP, FSDP1, DeepSpeed and torch.compile wrappers."""
    return wrapper_chain(model)[-1]


def wrapper_chain(model: nn.Module) -> list[nn.Module]:
    """`model` and what each wrapper holds, the user's own module last."""
    inner = _wrapped_module(model)
    return [model] if inner is None else [model, *wrapper_chain(inner)]


def sources(model: nn.Module, allow_meta: bool = False) -> dict[str, Source]:
    """Every tensor that torch's state dict of `model` lists, by canonical name, tied names included. Moves no data.

    These are parameters, persistent buffers, and what modules and hooks add. The order and the names are the same on
    every rank and under every wrapper. Raises IncompleteError naming tensors that have no data here (on the meta
    device, not made yet, or partitioned away without a trace) unless `allow_meta`; SelectionError naming those that
    have no dense values to store.
    """
    root = unwrap(model)
    modules = list(walk_modules(root))
    reshard_modules(module for _, _, module in modules)
    flat, sent = flat_parameters(model), broadcast_buffers(model)
    found: dict[str, Source] = {}
    unmade: list[str] = []
    for path, raw, module in modules:
        for key, tensor in _own_tensors(module, flat):
            name = f"{path}.{key}" if path else key
            if is_lazy(tensor):
                unmade.append(name)
            else:
                found[name] = source_of_tensor(
                    name, f"{raw}.{key}" if raw else key, tensor, flat.get((id(module), key))
                )
                found[name] = of_rank_0(found[name]) if id(tensor) in sent else found[name]
    with suppress(SelectionError) if allow_meta else nullcontext():
        for name, new in _added_tensors(root, found).items():
            found[name] = replace(source_of_tensor(name, new.raw, new.value), trainable=False, is_added=True)
    _refuse_sparse(found)
    homeless = [] if allow_meta else unmade + [name for name, source in found.items() if not _has_data(source)]
    if homeless:
        raise IncompleteError(
            f"{listing(homeless, ', ')}: {len(homeless)} tensor(s) of the model have no data on this rank (meta "
            "device, lazy, offloaded, or partitioned by an engine this version does not know); materialise the model "
            "first"
        )
    return found


def added_state_of(model: nn.Module, found: Mapping[str, Source] | None = None) -> dict[str, Added]:
    """What the modules of `model` list beside parameters and persistent buffers, tensors or not, by canonical name.

    `found` are its sources, if they are known.
    """
    found = sources(model, allow_meta=True) if found is None else found
    return names.added_state(unwrap(model), _live_tensors(found))


def names_listed_beside(model: nn.Module, found: Mapping[str, Source], given: Iterable[str]) -> list[str]:
    """Names that `model`, whose sources are `found`, lists beside these, as far as it can tell before it is loaded.

    A module that cannot list its extra state yet has that of the `given` names that it can take.
    """
    try:
        return list(added_state_of(model, found))
    except SelectionError:
        return [name for name in given if name not in found and names.takes_extra_state(unwrap(model), name)]


def restore_added_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give back what `added_state_of` told when it was saved. Raises LoadError naming what was not taken back."""
    names.load_added_state(unwrap(model), _live_tensors(sources(model, allow_meta=True)), values)


def reshard_modules(modules: Iterable[nn.Module]) -> None:
    """Let FSDP2 put its shards back in place, as it does for a state dict.

    Between a forward and what follows it, the outermost parameters are whole and in the compute dtype: copies, with
    less precision than the shards.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def broadcast_buffers(model: nn.Module) -> frozenset[int]:
    """Ids of the buffers that DDP will send from rank 0 to all before the next forward, whatever these have."""
    sent: set[int] = set()
    for wrapper in wrapper_chain(model):
        if isinstance(wrapper, nn.parallel.DistributedDataParallel) and wrapper.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            sent.update(id(buffer) for buffer in wrapper.modules_buffers)
    return frozenset(sent)


def of_rank_0(source: Source) -> Source:
    """The source as one that other ranks may have otherwise: rank 0's is the one that counts."""
    return replace(source, sharding=replace(source.sharding, is_replicated=False))  # type: ignore[type-var]  # a dataclass


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
            given_source = source_of_tensor(name, source.raw_name, tensor.detach(), None)
            result[name] = replace(given_source, trainable=source.trainable, key=source.key)
    if problems:
        raise IncompleteError(
            f"{listing(problems)}: the state dict differs from the live model in {len(problems)} place(s); gather it "
            "with accelerator.get_state_dict under the unwrapped model's names, or leave state_dict= out"
        )
    return result


def sample_elements(
    chosen: Mapping[str, Source], rank: int, tensors: int = 32, elements: int = 8
) -> dict[str, dict[str, float]]:
    """A few elements of `chosen` that `rank` holds, as {name: {flat index: value}}: the stuff of fingerprints.

    Evenly spread over the floating tensors; over all ranks together at most `tensors` x `elements` values, each held
    by one rank. Not collective: merge what the ranks return.
    """
    indices = picked_indices(chosen, tensors, elements)
    return {name: values for name in indices if (values := elements_at(chosen[name], rank, indices[name]))}


def picked_indices(chosen: Mapping[str, Source], tensors: int = 32, elements: int = 8) -> dict[str, list[int]]:
    """The flat indices of the elements that `sample_elements` takes, by name."""
    floating = sorted(name for name, s in chosen.items() if s.dtype.is_floating_point and s.numel > 0)
    names = floating[:: max(1, -(-len(floating) // tensors))]
    return {name: sorted({chosen[name].numel * i // elements for i in range(elements)}) for name in names}


def elements_at(source: Source, rank: int, indices: Sequence[int]) -> dict[str, float]:
    """The elements at flat `indices` that `rank`, this one, contributes to `source`, by index."""
    mine, local = source.sharding.box(rank), source.local
    if mine is None or local is None or not local.numel():
        return {}
    values = {}
    for index in indices:
        inside = [at - low for at, low in zip(unravel_index(index, source.sharding.view), mine.offsets, strict=True)]
        if all(0 <= at < size for at, size in zip(inside, mine.sizes, strict=True)):
            values[str(index)] = float(local[tuple(inside)])
    return values


def engine_names(found: Iterable[Source]) -> str:
    """Which engines hold the tensors, for the manifest: "plain", or e.g. "fsdp2"."""
    return "+".join(sorted({source.engine for source in found} - {"plain"})) or "plain"


def _wrapped_module(model: nn.Module) -> nn.Module | None:
    key = wrapped_key(model)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or _is_deepspeed(model):
        key = "module"
    return None if key is None else model._modules[key]


def _is_deepspeed(model: nn.Module) -> bool:
    return type(model).__name__.endswith("Engine") and "deepspeed" in type(model).__module__


def _own_tensors(module: nn.Module, flat: Mapping[tuple[int, str], FlatParameter]) -> Iterator[tuple[str, Any]]:
    """The module's own parameters and persistent buffers, in that order."""
    own = {key: value for key, value in module._parameters.items() if key != "_flat_param"}
    yield from ((key, value) for key, value in own.items() if value is not None)
    # With use_orig_params=False the wrapped module's parameters are plain attributes that only FSDP knows of.
    yield from ((key, None) for owner, key in flat if owner == id(module) and key not in own)
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield key, buffer


def _added_tensors(root: nn.Module, found: Mapping[str, Source]) -> dict[str, Added]:
    listed = names.added_state(root, _live_tensors(found))
    return {name: one for name, one in listed.items() if isinstance(one.value, Tensor)}


def _live_tensors(found: Mapping[str, Source]) -> dict[str, Any]:
    """The parameters and buffers among `found`."""
    return {name: source.live for name, source in found.items() if not source.is_added}


def _refuse_sparse(found: Mapping[str, Source]) -> None:
    odd = [f"{s.name}: {s.live.layout}" for s in found.values() if isinstance(s.live, Tensor) and not _is_dense(s.live)]
    if odd:
        raise SelectionError(
            f"{listing(odd)}: a tensor without dense values of its own cannot be stored; make it dense, or leave it "
            "out of the model's state dict (persistent=False)"
        )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def source_of_tensor(name: str, raw: str, tensor: Any, flat: FlatParameter | None = None) -> Source:
    """The source of a parameter or buffer, under whatever engine holds it."""
    if flat is not None:
        one = Source(id(flat), name, raw, flat.shape, flat.dtype, flat.trainable, True, "fsdp1", flat.sharding())
        return replace(one, live=flat, local=flat.local_run(flat.shard_buffer()))
    shape, full = tuple(tensor.shape), Source.gather_full
    engine: str
    sharding: Sharding
    local: Tensor | None
    if hasattr(tensor, "ds_shape"):
        shape = tuple(tensor.ds_shape)
        engine, sharding = "zero3", zero3_sharding(tensor, shape)
        local = zero3_local(tensor, sharding)
    elif is_dtensor(tensor):
        (engine, sharding), local = dtensor_sharding(tensor), dtensor_local(tensor)
        full = partial(dtensor_full, tensor) if sharding.is_opaque else full
    else:
        engine, sharding, local = "plain", ReplicatedSharding(shape), tensor.detach()
    trainable, is_parameter = bool(tensor.requires_grad), isinstance(tensor, nn.Parameter)
    one = Source(id(tensor), name, raw, shape, tensor.dtype, trainable, is_parameter, engine, sharding)
    return replace(one, live=tensor, local=local, gather_full=full)


def _has_data(source: Source) -> bool:
    sharding = source.sharding
    if sharding.is_opaque or (sharding.is_sharded and not sharding.owners):
        return True  # torch gathers it, or another group of replicas speaks for this one
    if not sharding.owners:
        return source.numel == 0
    return source.local is None or source.local.device.type != "meta"
