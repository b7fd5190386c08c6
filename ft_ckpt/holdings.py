"""How each engine cuts a tensor over the ranks: into blocks that every rank can work out without asking.

Sources: the sharding of FSDP1 flat parameters and DTensor placements as torch defines them, and of DeepSpeed stage 3
parameters as its `ds_tensor` shows it. Everything else is held whole by every rank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Block:
    """A box cut from a tensor: `offsets` inclusive, `sizes` in elements, one of each per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Holding:
    """How the ranks hold one tensor. Over all `owners`, each element of `view` lies in exactly one block."""

    view: tuple[int, ...]  # the shape blocks are cut from: the tensor's own, or (numel,) for flat shards
    local: Tensor | None  # this rank's block, None where it has none
    owners: tuple[int, ...]  # global ranks that contribute, as far as this rank can tell
    block: Callable[[int], Block | None]  # global rank -> its block
    moves: bool = False  # cut over ranks by its engine; the same on every rank, whoever owns what
    whole: Callable[[], Tensor] | None = None  # collective that gives the full tensor, for layouts that are no blocks


def replicated(tensor: Tensor) -> Holding:
    """A tensor that every rank has in full; rank 0's is the one that counts."""
    everything = Block((0,) * tensor.dim(), tuple(tensor.shape))
    return Holding(tuple(tensor.shape), tensor.detach(), (0,), lambda rank: everything if rank == 0 else None)


def elsewhere(shape: tuple[int, ...]) -> Holding:
    """A tensor that rank 0 has in full and this rank need not know."""
    return Holding(shape, None, (0,), lambda rank: None)


def _runs(local: Tensor | None, numel: int, first: int, shard: int, members: Sequence[int]) -> Holding:
    """A tensor that lies at [first, first + numel) of a flat buffer cut into equal shards, one per member."""
    place = {rank: index for index, rank in enumerate(members)}

    def block(rank: int) -> Block | None:
        if rank not in place:
            return None
        start = max(place[rank] * shard, first) - first
        stop = min((place[rank] + 1) * shard, first + numel) - first
        return Block((start,), (stop - start,)) if stop > start else None

    low, high = first // shard, (first + numel - 1) // shard
    return Holding((numel,), local, tuple(members[low : high + 1]) if numel else (), block, moves=True)


def zero3_holding(parameter: Any, shape: tuple[int, ...]) -> Holding:
    """DeepSpeed stage 3: every rank of the group keeps one equal part of the flattened, padded parameter."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None or (shard.numel() == 0 and math.prod(shape)):
        return Holding(shape, None, (), lambda rank: None)
    import torch.distributed as dist

    members = dist.get_process_group_ranks(parameter.ds_process_group) if dist.is_initialized() else [0]
    first_copy = members if 0 in members else []  # further replica groups hold the same again
    holding = _runs(None, math.prod(shape), 0, shard.numel(), first_copy)
    mine = holding.block(dist.get_rank() if dist.is_initialized() else 0)
    local = shard.detach().view(-1)[: mine.sizes[0]] if mine else None
    return replace(holding, local=local)


def is_dtensor(tensor: Any) -> bool:
    """Whether torch's distributed tensors describe it (FSDP2, tensor parallelism)."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")


def dtensor_holding(tensor: Any) -> tuple[str, Holding]:
    """The engine's name and the holding of a distributed tensor."""
    shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
    sharded = [p.dim % max(len(shape), 1) for p in placements if p.is_shard()]
    engine = "fsdp2" if sharded in ([], [0]) else "tensor parallel"
    plain = all(type(p).__name__ in {"Shard", "Replicate"} for p in placements)
    where, owners = _owners(mesh, placements)
    if not plain or len(set(sharded)) != len(sharded):
        # A dimension cut twice, a strided shard or a pending sum: no block describes it, torch's own gather does.
        return engine, Holding(shape, None, (0,), lambda rank: None, whole=lambda: tensor.detach().full_tensor())

    if 0 not in where:  # another group of ranks that holds the same again, such as the next tensor-parallel column
        return engine, Holding(shape, None, (), lambda rank: None, moves=True)

    def block(rank: int) -> Block | None:
        if rank not in owners:
            return None
        cuts = zip(where[rank], placements, mesh.mesh.shape, strict=True)
        return _cut(shape, [(p.dim % len(shape), index, parts) for index, p, parts in cuts if p.is_shard()])

    local = tensor.detach().to_local()
    local = local.wait() if hasattr(local, "wait") else local  # still on its way when a collective made it
    return engine, Holding(shape, local, owners, block, moves=True)


@lru_cache(maxsize=64)  # one entry for each mesh and layout of a model, however many tensors
def _owners(mesh: Any, placements: tuple[Any, ...]) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
    """Each global rank's place in the mesh, and the ranks that contribute: of replicas, the first."""
    grid = mesh.mesh
    where = {int(grid[tuple(index)]): tuple(index) for index in torch.ones_like(grid).nonzero().tolist()}
    first = [
        rank
        for rank, at in where.items()
        if not any(c for c, p in zip(at, placements, strict=True) if not p.is_shard())
    ]
    return where, tuple(sorted(first))


def _cut(shape: tuple[int, ...], cuts: list[tuple[int, int, int]]) -> Block | None:
    """The block left of `shape` after cutting dimension d into n chunks and taking the i-th, as torch.chunk does."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, index, parts in cuts:
        step = -(-shape[dim] // parts)
        offsets[dim] = min(index * step, shape[dim])
        sizes[dim] = min(step, shape[dim] - offsets[dim])
    return Block(tuple(offsets), tuple(sizes)) if all(sizes) else None


@dataclass(frozen=True, eq=False)
class Flat:
    """One original parameter inside an FSDP1 flat parameter."""

    handle: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    first: int  # index of its first element in the unsharded flat parameter

    def holding(self) -> Holding:
        """Its runs in the ranks' flat shards."""
        import torch.distributed as dist

        parameter, numel = self.handle.flat_param, math.prod(self.shape)
        members = dist.get_process_group_ranks(self.handle.process_group)
        first_copy = members if 0 in members else []
        local = getattr(parameter, "_local_shard", None)
        local = (parameter if local is None else local).detach().view(-1)
        if not self.handle.uses_sharded_strategy:
            return Holding((numel,), local[self.first : self.first + numel], (0,), _everything(numel))
        runs = _runs(None, numel, self.first, local.numel(), first_copy)
        mine = runs.block(dist.get_rank())
        if mine is None:
            return runs
        begin = self.first + mine.offsets[0] - self.handle.rank * local.numel()
        return replace(runs, local=local[begin : begin + mine.sizes[0]])


def _everything(numel: int) -> Callable[[int], Block | None]:
    return lambda rank: Block((0,), (numel,)) if rank == 0 else None


def flat_holdings(model: nn.Module) -> dict[tuple[int, str], Flat]:
    """(id of the owning module, parameter name) -> its place in an FSDP1 flat parameter."""
    found: dict[tuple[int, str], Flat] = {}
    for module in model.modules():
        handle = getattr(module, "_handle", None) if type(module).__name__ == "FullyShardedDataParallel" else None
        if handle is not None:
            found.update(_flat_parameters(handle))
    return found


def _flat_parameters(handle: Any) -> Iterator[tuple[tuple[int, str], Flat]]:
    flat = handle.flat_param
    originals = flat._params or [None] * len(flat._param_infos)  # None with use_orig_params=False
    trainable = {id(info.module): flat.requires_grad for info in flat._param_infos}
    starts, position = [], 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            starts.append(position)
        position += numel
    places = {}
    for info, shape, first, original in zip(flat._param_infos, flat._shapes, starts, originals, strict=True):
        wants = trainable[id(info.module)] if original is None else bool(original.requires_grad)
        places[id(info.module), info.param_name] = Flat(handle, tuple(shape), flat.dtype, wants, first)
    yield from places.items()
    for shared in flat._shared_param_infos:
        yield (id(shared.module), shared.param_name), places[id(shared.prim_module), shared.prim_param_name]
