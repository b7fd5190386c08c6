"""How each engine cuts a tensor over the ranks: into blocks that every rank can work out without asking.

Sources: the sharding of FSDP1 flat parameters and DTensor placements as torch defines them, and of DeepSpeed stage 3
parameters as its `ds_tensor` shows it. Everything else is held whole by every rank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    mine: Block | None = None  # where `local` lies in `view` on this rank, even if another speaks for it in a gather
    alike: bool = False  # several ranks have the same part of it, and the same in it; the same answer on every rank


def replicated(tensor: Tensor) -> Holding:
    """A tensor that every rank has in full; rank 0's is the one that counts."""
    everything = Block((0,) * tensor.dim(), tuple(tensor.shape))
    block = _only_rank_0(everything)
    return Holding(tuple(tensor.shape), tensor.detach(), (0,), block, mine=everything, alike=True)


def elsewhere(shape: tuple[int, ...]) -> Holding:
    """A tensor that rank 0 has in full and this rank need not know."""
    return Holding(shape, None, (0,), lambda rank: None)


def held_by(owner: int, shape: tuple[int, ...], local: Tensor | None) -> Holding:
    """A tensor that the rank `owner` alone speaks for; `local` is what this rank has of it, all or nothing."""
    everything = Block((0,) * len(shape), shape)
    mine = everything if local is not None else None
    block: Callable[[int], Block | None] = lambda rank: everything if rank == owner else None  # noqa: E731 - a value
    return Holding(shape, local, (owner,), block, moves=owner != 0, mine=mine)


def runs(buffer: Tensor, numel: int, first: int, shard: int, members: Sequence[int], rank: int) -> Holding:
    """A tensor that lies at [first, first + numel) of a flat buffer cut into equal shards, one per member.

    `buffer` is the shard, of `shard` elements or the rest, that this `rank` has. Members without rank 0 hold again
    what others hold, and contribute nothing.
    """
    place, alike = {member: index for index, member in enumerate(members)}, _are_some(len(members))

    def block(member: int) -> Block | None:
        return _run(numel, first, shard, place[member]) if member in place and 0 in place else None

    touched = members[first // shard : (first + numel - 1) // shard + 1] if numel else ()
    owners = tuple(touched) if 0 in place else ()
    mine = _run(numel, first, shard, place[rank]) if rank in place else None
    if mine is None:
        return Holding((numel,), None, owners, block, moves=True, alike=alike)
    begin = first + mine.offsets[0] - place[rank] * shard
    local = buffer.detach().view(-1)[begin : begin + mine.sizes[0]]
    return Holding((numel,), local, owners, block, moves=True, mine=mine, alike=alike)


def _run(numel: int, first: int, shard: int, index: int) -> Block | None:
    """What of [first, first + numel) lies in the shard at `index`, counted from `first`."""
    start = max(index * shard, first) - first
    stop = min((index + 1) * shard, first + numel) - first
    return Block((start,), (stop - start,)) if stop > start else None


def _are_some(count: int) -> bool:
    """Whether `count` ranks that hold a tensor together are not all: then others hold it again."""
    import torch.distributed as dist

    return dist.is_initialized() and bool(count < dist.get_world_size())


def zero3_holding(parameter: Any, shape: tuple[int, ...]) -> Holding:
    """DeepSpeed stage 3: every rank of the group keeps one equal part of the flattened, padded parameter."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None or (shard.numel() == 0 and math.prod(shape)):
        return Holding(shape, None, (), lambda rank: None)
    import torch.distributed as dist

    members = dist.get_process_group_ranks(parameter.ds_process_group) if dist.is_initialized() else [0]
    return runs(shard, math.prod(shape), 0, shard.numel(), members, dist.get_rank() if dist.is_initialized() else 0)


def is_dtensor(tensor: Any) -> bool:
    """Whether torch's distributed tensors describe it (FSDP2, tensor parallelism)."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")


def dtensor_holding(tensor: Any) -> tuple[str, Holding]:
    """The engine's name and the holding of a distributed tensor."""
    shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
    sharded = [p.dim % max(len(shape), 1) for p in placements if p.is_shard()]
    engine = "fsdp2" if sharded in ([], [0]) else "tensor parallel"
    plain = all(type(p).__name__ in {"Shard", "Replicate"} for p in placements)
    again = any(p.is_replicate() and count > 1 for p, count in zip(placements, mesh.shape, strict=True))
    alike = (again or _are_some(mesh.size())) and not any(p.is_partial() for p in placements)
    where, owners = _owners(mesh, placements)
    with torch.no_grad():  # or torch would make a step of autograd of it
        local = tensor.to_local().detach()
    local = local.wait() if hasattr(local, "wait") else local  # still on its way when a collective made it
    mine = _place(shape, mesh, placements, tuple(mesh.get_coordinate() or ()))
    if not plain or len(set(sharded)) != len(sharded):
        # A dimension cut twice, a strided shard or a pending sum: torch's own gather puts it together.
        full = lambda: tensor.detach().full_tensor()  # noqa: E731 - a def would hide that it is one call
        return engine, Holding(shape, local, (0,), lambda rank: None, whole=full, mine=mine, alike=alike)

    if 0 not in where:  # another group of ranks that holds the same again, such as the next tensor-parallel column
        return engine, Holding(shape, local, (), lambda rank: None, moves=True, mine=mine, alike=alike)

    sizes, speaks = tuple(mesh.shape), frozenset(owners)  # asked for every rank: `mesh.mesh` makes a tensor each time

    def block(rank: int) -> Block | None:
        if rank not in speaks:
            return None
        cuts = zip(where[rank], placements, sizes, strict=True)
        return _cut(shape, tuple((p.dim % len(shape), index, parts) for index, p, parts in cuts if p.is_shard()))

    return engine, Holding(shape, local, owners, block, moves=True, mine=mine, alike=alike)


@lru_cache(maxsize=1024)  # torch counts out every index of a cut dimension; a model has few shapes and many tensors
def _place(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], here: tuple[int, ...]) -> Block | None:
    """Where this rank's part of a distributed tensor lies, for any layout torch knows; None when it is empty.

    `here` is this rank's place in the mesh, which torch asks the mesh for.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Block(tuple(offsets), tuple(sizes)) if all(sizes) and offsets is not None else None


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


@lru_cache(maxsize=1 << 16)  # for each shape and rank
def _cut(shape: tuple[int, ...], cuts: tuple[tuple[int, int, int], ...]) -> Block | None:
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
    original: Any = None  # the parameter that optimizers are given; None where that is the flat parameter itself

    def holding(self) -> Holding:
        """Its runs in the ranks' flat shards."""

        local = getattr(self.handle.flat_param, "_local_shard", None)
        return self.holding_of(self.handle.flat_param if local is None else local)

    def holding_of(self, buffer: Tensor) -> Holding:
        """The same runs in any `buffer` that is cut like the flat parameter, such as its optimizer state."""
        import torch.distributed as dist

        numel, buffer = math.prod(self.shape), buffer.detach().view(-1)
        if not self.handle.uses_sharded_strategy:
            everything = Block((0,), (numel,))
            local = buffer[self.first : self.first + numel]
            return Holding((numel,), local, (0,), _only_rank_0(everything), mine=everything, alike=True)
        members = dist.get_process_group_ranks(self.handle.process_group)
        return runs(buffer, numel, self.first, buffer.numel(), members, dist.get_rank())


def _only_rank_0(block: Block) -> Callable[[int], Block | None]:
    return lambda rank: block if rank == 0 else None


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
        places[id(info.module), info.param_name] = Flat(handle, tuple(shape), flat.dtype, wants, first, original)
    yield from places.items()
    for shared in flat._shared_param_infos:
        yield (id(shared.module), shared.param_name), places[id(shared.prim_module), shared.prim_param_name]
