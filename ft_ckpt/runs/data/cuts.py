"""How a pass of a data loader is cut into batches, shared by ranks, and skipped in part."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler, SequentialSampler

from ft_ckpt.runs.data.loaders import (
    base_loader,
    is_map,
    nested_datasets,
    sampler_at,
    sampler_places,
)
from ft_ckpt.runs.data.skipping import RestorableRandomState, SampleOrder, SkippingSampler


@dataclass(frozen=True)
class DataCut:
    """How a pass of a loader is cut into the batches of all ranks.

    The **source** is the innermost sampler whose items the loader yields in order: indices, or
    batches if the script has a batch sampler of its own. For a stream it is the samples; for any
    other loader the batches.
    """

    per_step: int  # items of the source that all ranks together take for one batch each
    # number of shares that the source is divided into; 1 if the source of every rank has all items
    divisor: int
    unit: str  # name of an item in messages
    sharing: str | None  # the order of the source; None if the way that ranks share it is unknown


def cut_of(loader: Any, shares: int) -> DataCut:
    """Return the cut of the data into `shares`, which may differ from that of the `loader`."""
    size = getattr(base_loader(loader), "batch_size", None)
    if not is_map(loader):
        # Accelerate's and transformers' shards of a stream deal batches to ranks in turn.
        is_dealt = any(_is_shard(dataset) for dataset in nested_datasets(loader))
        is_known = shares == 1 or hasattr(loader, "slice_fn") or is_dealt
        per_step = size or 1
        if not getattr(loader, "split_batches", False):
            per_step *= shares
        unit = "samples" if size else "batches"
        return DataCut(per_step, 1, unit, "stream" if is_known else None)
    places = sampler_places(loader)
    at = _source_place(loader)
    source = sampler_at(*places[at])
    outer = [sampler_at(holder, name) for holder, name in places[:at]]
    cutters = [sampler for sampler in outer if "batch_sampler" not in vars(sampler)]
    outermost = outer[0] if outer else source
    splitter = loader if hasattr(loader, "slice_fn") else outermost
    per_step = 1 if getattr(splitter, "split_batches", False) else shares
    for sampler in cutters:
        per_step *= sampler.batch_size
    has_shards = any(hasattr(sampler, "num_processes") for sampler in outer)
    is_shared = base_loader(loader) is not loader or has_shards
    is_dealt = isinstance(source, DistributedSampler) and _is_of_library(source)
    order = type(source).__name__
    if isinstance(source, SequentialSampler) or (is_dealt and not source.shuffle):
        order = "in order"
    is_known = shares == 1 or is_shared or is_dealt
    has_samples = cutters or places[at][1] == "sampler"
    return DataCut(
        per_step,
        divisor=1 if is_shared else shares,
        unit="samples" if has_samples else "batches",
        sharing=order if is_known else None,
    )


def data_shares(loader: Any, size: int) -> int:
    """Return the number of shares of the data over `size` ranks.

    Ranks with the same data (tensor parallelism) have one share.
    """
    # reads on rank 0 for all; under tensor parallelism all ranks get the same batch
    if hasattr(loader, "slice_fn"):
        return 1 if getattr(loader, "submesh_tp", None) else size
    parts = [sampler_at(holder, name) for holder, name in sampler_places(loader)]
    parts += nested_datasets(loader)
    for part in parts:
        for name in ("num_processes", "num_replicas"):
            if hasattr(part, name):
                return int(getattr(part, name))
    # Accelerate shards only for several shares
    is_whole = base_loader(loader) is not loader and is_map(loader)
    return 1 if is_whole else size


def batches_per_call(loader: Any) -> int:
    """Return the number of batches that the reading rank reads for one batch of `loader`."""
    if not hasattr(loader, "slice_fn") or loader.split_batches:
        return 1
    if getattr(loader, "submesh_tp", None):
        return 1
    return int(loader.state.num_processes)


def is_spent(loader: Any, shares: int, consumed: int) -> bool | None:
    """Check whether a pass has no batch left for any rank after `consumed` items of the source.

    Returns None if this is unknown.
    """
    places = sampler_places(loader)
    cut = cut_of(loader, shares)
    source = sampler_at(*places[_source_place(loader)])
    try:
        remaining = len(source) - consumed // cut.divisor
    except TypeError:
        return None
    outermost = sampler_at(*places[0])
    drops_last = getattr(loader, "_drop_last", False) or getattr(outermost, "drop_last", False)
    return remaining <= 0 or bool(drops_last and remaining < cut.per_step // cut.divisor)


def ends_together(loader: Any) -> bool:
    """Check whether all ranks have their last batch at the same step.

    With Accelerate's even_batches=False they do not.
    """
    places = sampler_places(loader)
    return not places or getattr(sampler_at(*places[0]), "even_batches", True)


def pass_length(loader: Any) -> int | None:
    """Return the number of batches of a whole pass; None if unknown."""
    if not is_map(loader):
        return None
    try:
        return len(loader) - _misses_last_batch(loader)
    except (TypeError, AttributeError):
        return None


def _misses_last_batch(loader: Any) -> bool:
    """Check whether this rank gets nothing of the last batch, which Accelerate's `len` counts.

    Such a batch is too short to be split over all ranks, and is not filled up.
    """
    places = sampler_places(loader)
    shard: Any = sampler_at(*places[0]) if places else None
    if not getattr(shard, "split_batches", False) or shard.even_batches or shard.drop_last:
        return False
    last = len(shard.batch_sampler.sampler) % shard.batch_size
    return bool(0 < last <= shard.batch_size // shard.num_processes * shard.process_index)


@contextmanager
def skipping_items(
    loader: Any,
    keep: int,
    drop: int,
    random_state: RestorableRandomState | None = None,
    inside: bool = False,
    order: SampleOrder | None = None,
) -> Iterator[None]:
    """Let a new pass over `loader` in the block skip `drop` items after the first `keep`, unread.

    Items are those of the outermost sampler (usually batches), or with `inside` of the source
    (usually samples), see `DataCut`. `order` records all of them.
    """
    place = _source_place(loader) if inside else 0
    holder, name = sampler_places(loader)[place]
    plain = vars(holder)[name]
    # Not setattr, which loaders forbid after construction.
    vars(holder)[name] = SkippingSampler(plain, keep, drop, random_state, order)
    try:
        yield
    finally:
        vars(holder)[name] = plain


def _is_shard(dataset: Any) -> bool:
    """Check whether a library deals the batches of a stream to ranks in turn."""
    return hasattr(dataset, "num_processes") and _is_of_library(dataset)


def _source_place(loader: Any) -> int:
    """Return the index in `sampler_places` of the source that has the item.

    Samplers before it yield all items of the next one, in order.
    """
    samplers = [sampler_at(holder, name) for holder, name in sampler_places(loader)]
    for index, sampler in enumerate(samplers[:-1]):
        if not _is_of_library(sampler) or hasattr(sampler, "skip_batches"):
            return index
    return len(samplers) - 1


def _is_of_library(part: Any) -> bool:
    return type(part).__iter__.__module__.split(".")[0] in (
        "torch",
        "torchdata",
        "accelerate",
        "transformers",
    )
