"""How a pass over a data loader is cut into batches, divided between ranks, and skipped in part.

A pass is one iteration of a loader over its data, which is an epoch in most loops.

The source of a loader is its innermost sampler whose items the loader yields in their order. For
example, four ranks train with batches of 8 samples from a shuffling sampler:

    source     indices of samples       17, 3, 250, 99, ...
    step 0     items 0 to 31 of it      rank 0 has items 0 to 7, rank 1 has 8 to 15, ...
    step 1     items 32 to 63
    per_step   32
"""

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

    The items of the source are indices of samples. They are batches if the script has a batch
    sampler of its own. The items of a stream are its samples. For any other loader they are its
    batches.

    Attributes:
        per_step: How many items of the source all ranks together take for one batch each.
        divisor: How many shares the source is divided into. 1 if the source of every rank has all
            items.
        unit: The name of an item in messages: "samples" or "batches".
        sharing: The order of the source, such as "RandomSampler". None if it is unknown how ranks
            share the source.
    """

    per_step: int
    divisor: int
    unit: str
    sharing: str | None


def cut_of(loader: Any, shares: int) -> DataCut:
    """Return how the data of `loader` is cut if it is divided into `shares`.

    `shares` is the number of the saved run or of this one.
    """
    if not is_map(loader):
        return _cut_of_stream(loader, shares)
    places = sampler_places(loader)
    source_depth = _source_depth(loader)
    source = sampler_at(*places[source_depth])
    outer_samplers = [sampler_at(holder, name) for holder, name in places[:source_depth]]

    # Outer samplers that hold another batch sampler only pass its batches on.
    batch_samplers = [sampler for sampler in outer_samplers if "batch_sampler" not in vars(sampler)]
    outermost = outer_samplers[0] if outer_samplers else source
    splitter = loader if hasattr(loader, "slice_fn") else outermost

    # Accelerate's split_batches divides each batch between the ranks.
    per_step = 1 if getattr(splitter, "split_batches", False) else shares
    for sampler in batch_samplers:
        per_step *= sampler.batch_size
    has_shards = any(hasattr(sampler, "num_processes") for sampler in outer_samplers)
    all_ranks_read_source = base_loader(loader) is not loader or has_shards
    is_dealt = isinstance(source, DistributedSampler) and _is_of_library(source)
    order = type(source).__name__
    if isinstance(source, SequentialSampler) or (is_dealt and not source.shuffle):
        order = "in order"
    is_known = shares == 1 or all_ranks_read_source or is_dealt
    has_samples = bool(batch_samplers) or places[source_depth][1] == "sampler"
    return DataCut(
        per_step=per_step,
        divisor=1 if all_ranks_read_source else shares,
        unit="samples" if has_samples else "batches",
        sharing=order if is_known else None,
    )


def _cut_of_stream(loader: Any, shares: int) -> DataCut:
    """Return how the data of a loader is cut whose samples are not read by index."""
    batch_size = getattr(base_loader(loader), "batch_size", None)
    # Accelerate's and transformers' shards of a stream deal batches to ranks in turn.
    is_dealt = any(_is_shard(dataset) for dataset in nested_datasets(loader))
    is_known = shares == 1 or hasattr(loader, "slice_fn") or is_dealt
    per_step = batch_size or 1
    if not getattr(loader, "split_batches", False):
        per_step *= shares
    return DataCut(
        per_step=per_step,
        divisor=1,
        unit="samples" if batch_size else "batches",
        sharing="stream" if is_known else None,
    )


def data_shares(loader: Any, size: int) -> int:
    """Return how many shares the data has on `size` ranks.

    Ranks that train on the same data (tensor parallelism) count as one share.
    """
    # Accelerate's loader that reads on rank 0 for all ranks has a `slice_fn`. Under tensor
    # parallelism it gives all ranks the same batch.
    if hasattr(loader, "slice_fn"):
        return 1 if getattr(loader, "submesh_tp", None) else size
    parts = [sampler_at(holder, name) for holder, name in sampler_places(loader)]
    parts += nested_datasets(loader)
    for part in parts:
        for name in ("num_processes", "num_replicas"):
            if hasattr(part, name):
                return int(getattr(part, name))
    # Accelerate adds its shards only if there are several shares. So a loader of Accelerate without
    # shards gives all of the data to each rank.
    is_undivided = base_loader(loader) is not loader and is_map(loader)
    return 1 if is_undivided else size


def batches_per_call(loader: Any) -> int:
    """Return how many batches the base loader reads for one batch of `loader`.

    It is 1, except for a loader that reads on rank 0 for all ranks.
    """
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
    source = sampler_at(*places[_source_depth(loader)])
    try:
        remaining = len(source) - consumed // cut.divisor
    except TypeError:
        return None
    outermost = sampler_at(*places[0])
    drops_last = getattr(loader, "_drop_last", False) or getattr(outermost, "drop_last", False)
    return remaining <= 0 or bool(drops_last and remaining < cut.per_step // cut.divisor)


def ends_together(loader: Any) -> bool:
    """Check whether all ranks have their last batch at the same step.

    They do not with Accelerate's even_batches=False.
    """
    places = sampler_places(loader)
    return not places or getattr(sampler_at(*places[0]), "even_batches", True)


def pass_length(loader: Any) -> int | None:
    """Return the number of batches of a whole pass on this rank; None if unknown."""
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
    """Let a pass that begins in the block skip items: `drop` items after the first `keep`.

    Skipped samples are not read. Items are those of the outermost sampler (usually batches), or
    with `inside` those of the source (usually samples). For example, keep=1 and drop=3 yield the
    items 0, 4, 5, 6, ... The sampler begins in `random_state`, or in the current state if that is
    None. `order` records all items, the skipped ones too.
    """
    depth = _source_depth(loader) if inside else 0
    holder, name = sampler_places(loader)[depth]
    plain = vars(holder)[name]
    # Not by setattr, because loaders forbid it after their construction.
    vars(holder)[name] = SkippingSampler(plain, keep, drop, random_state, order)
    try:
        yield
    finally:
        vars(holder)[name] = plain


def _is_shard(dataset: Any) -> bool:
    """Check whether a library deals the batches of a stream to ranks in turn."""
    return hasattr(dataset, "num_processes") and _is_of_library(dataset)


def _source_depth(loader: Any) -> int:
    """Return the index of the source in `sampler_places`.

    The samplers before it yield all items of the next sampler in order.
    """
    samplers = [sampler_at(holder, name) for holder, name in sampler_places(loader)]
    for index, sampler in enumerate(samplers[:-1]):
        if not _is_of_library(sampler) or hasattr(sampler, "skip_batches"):
            return index
    return len(samplers) - 1


def _is_of_library(part: Any) -> bool:
    """Check whether a library, not the script, defines how `part` is iterated."""
    return type(part).__iter__.__module__.split(".")[0] in (
        "torch",
        "torchdata",
        "accelerate",
        "transformers",
    )
