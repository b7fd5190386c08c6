"""Properties of data loaders (torch, torchdata, Accelerate, others): sample order, skipping without
reading.

They are recognized by attributes, not by classes: Accelerate's loaders hold a `base_dataloader`,
one that reads on rank 0 for all has a `slice_fn`, batch samplers and data sets wrap others as
`batch_sampler`, `sampler` and `dataset`. Parts are named from the inside ("sampler.0",
"dataset.0"), so that names do not depend on the wrappers of more ranks.
"""

import operator
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from ft_ckpt.runs.data import rng


class SampleOrder:
    """A digest of the items of the outermost sampler that the run has consumed in a pass.

    Loaders prefetch: items are noted when the sampler yields them, and digested when the run takes
    them.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._forget_items()

    def follow(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of a new pass, each noted when it is requested."""
        self._is_known = True
        self._forget_items()
        for item in items:
            if self._is_known:
                try:
                    self._ahead.append(repr(_plain_item(item)).encode())
                except TypeError:
                    self._is_known = False
            yield item

    def take(self, count: int) -> None:
        """Digest `count` more items, or all noted ones if there are fewer."""
        for _ in range(min(count, len(self._ahead))):
            self._taken.update(self._ahead.popleft())

    @property
    def digest(self) -> str | None:
        """Digest of all taken items.

        None if items are not plain values, or no sampler was followed.
        """
        return self._taken.hexdigest() if self._is_known else None

    def _forget_items(self) -> None:
        self._ahead: deque[bytes] = deque()
        self._taken = blake2b(digest_size=8)


def _plain_item(item: Any) -> Any:
    """The item as nested plain values.

    Raises TypeError for values other than numbers and strings.
    """
    if isinstance(item, str):
        return item
    if isinstance(item, (list, tuple)):
        return [_plain_item(element) for element in item]
    return operator.index(item)


_NUMBERS = {  # counters and seeds that determine the sample order, besides generators
    "loader": ("iteration",),
    "sampler": ("epoch", "initial_seed", "seed"),
    "dataset": ("epoch",),
}
_MAX_DEPTH = 16  # nesting of wrappers around a data set or a sampler


def base_loader(loader: Any) -> Any:
    """The innermost loader, which reads the samples."""
    while "base_dataloader" in getattr(loader, "__dict__", {}):
        loader = loader.base_dataloader
    return loader


def is_map(loader: Any) -> bool:
    """Whether samples are read by index, so that skipped ones are not read."""
    inner = base_loader(loader)
    return isinstance(inner, DataLoader) and not isinstance(inner.dataset, IterableDataset)


def looks_ahead(loader: Any) -> bool:
    """Whether this process may read batches before they are requested."""
    inner = base_loader(loader)
    if inner is not loader or not isinstance(inner, DataLoader):
        return True
    return type(inner).__iter__.__module__.split(".")[0] not in ("torch", "torchdata")


def reads_here(loader: Any) -> bool:
    """Whether this process reads samples, not workers."""
    return not getattr(base_loader(loader), "num_workers", 0)


def is_warm(loader: Any) -> bool:
    """Whether workers of an earlier pass persist: then a pass draws no seed for them."""
    inner = base_loader(loader)
    persists = bool(getattr(inner, "persistent_workers", False))
    return persists and getattr(inner, "_iterator", None) is not None


def forget_premade(loader: Any) -> None:
    """Drop the iterator that a stateful loader creates for its state before the first pass.

    Its random draws would be unknown; the next iterator draws again.
    """
    inner = base_loader(loader)
    if getattr(inner, "_initial_iter_for_state_dict", False):
        inner.load_state_dict({})


def has_own_state(loader: Any) -> bool:
    """Whether the loader has a state of its own that is exact and avoids reading again.

    A loader whose data set has no state reads everything again and counts it twice. One that reads
    on rank 0 for all corrects its count of batches, but not the state of its data set.
    """
    if hasattr(loader, "slice_fn"):
        return False
    inner = base_loader(loader)
    for part in (inner, getattr(inner, "dataset", None)):
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            return False
    return True


def refills_a_buffer(loader: Any) -> bool:
    """Whether the data set (of `datasets`) has a shuffle buffer, which its state does not hold."""
    for dataset in _nested_datasets(loader):
        part = getattr(dataset, "_ex_iterable", None)
        while part is not None:
            if hasattr(part, "buffer_size"):
                return True
            part = getattr(part, "ex_iterable", None)
    return False


def forget_start(loader: Any) -> None:
    """Make the next pass start at the first sample.

    A data set of `datasets` starts every pass of an epoch at its loaded state, and training loops
    do not always set a new epoch.
    """
    for dataset in _nested_datasets(loader):
        if getattr(dataset, "_starting_state_dict", None) is not None:
            dataset._starting_state_dict = None


def batches_per_call(loader: Any) -> int:
    """Number of batches that the reading rank reads for one batch of `loader`."""
    if not hasattr(loader, "slice_fn") or loader.split_batches:
        return 1
    if getattr(loader, "submesh_tp", None):
        return 1
    return int(loader.state.num_processes)


def data_shares(loader: Any, size: int) -> int:
    """Number of shares of the data over `size` ranks.

    Ranks with the same data (tensor parallelism) have one share.
    """
    # reads on rank 0 for all; under tensor parallelism all ranks get the same batch
    if hasattr(loader, "slice_fn"):
        return 1 if getattr(loader, "submesh_tp", None) else size
    parts = [_sampler_at(holder, name) for holder, name in _sampler_places(loader)]
    parts += _nested_datasets(loader)
    for part in parts:
        for name in ("num_processes", "num_replicas"):
            if hasattr(part, name):
                return int(getattr(part, name))
    # Accelerate shards only for several shares
    is_whole = base_loader(loader) is not loader and is_map(loader)
    return 1 if is_whole else size


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
    """The cut into `shares` of the data; the number may differ from that of the `loader`."""
    size = getattr(base_loader(loader), "batch_size", None)
    if not is_map(loader):
        # Accelerate's and transformers' shards of a stream deal batches to ranks in turn.
        is_dealt = any(_is_shard(dataset) for dataset in _nested_datasets(loader))
        is_known = shares == 1 or hasattr(loader, "slice_fn") or is_dealt
        per_step = (size or 1) * (1 if getattr(loader, "split_batches", False) else shares)
        unit = "samples" if size else "batches"
        return DataCut(per_step, 1, unit, "stream" if is_known else None)
    places = _sampler_places(loader)
    at = _source_place(loader)
    source = _sampler_at(*places[at])
    outer = [_sampler_at(holder, name) for holder, name in places[:at]]
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
    unit = "samples" if cutters or places[at][1] == "sampler" else "batches"
    return DataCut(per_step, 1 if is_shared else shares, unit, order if is_known else None)


def _is_shard(dataset: Any) -> bool:
    """Whether a library deals the batches of a stream to ranks in turn."""
    return hasattr(dataset, "num_processes") and _is_of_library(dataset)


def is_spent(loader: Any, shares: int, consumed: int) -> bool | None:
    """Whether a pass has no batch left for any rank after `consumed` items of the source.

    None if unknown.
    """
    places = _sampler_places(loader)
    cut = cut_of(loader, shares)
    source = _sampler_at(*places[_source_place(loader)])
    try:
        remaining = len(source) - consumed // cut.divisor
    except TypeError:
        return None
    outermost = _sampler_at(*places[0])
    drops_last = getattr(loader, "_drop_last", False) or getattr(outermost, "drop_last", False)
    return remaining <= 0 or bool(drops_last and remaining < cut.per_step // cut.divisor)


def ends_together(loader: Any) -> bool:
    """Whether all ranks have their last batch at the same step: not with Accelerate's
    even_batches=False.
    """
    places = _sampler_places(loader)
    return not places or getattr(_sampler_at(*places[0]), "even_batches", True)


def _source_place(loader: Any) -> int:
    """The index of the source in `_sampler_places`: samplers before it yield all items of the next
    one, in order.
    """
    samplers = [_sampler_at(holder, name) for holder, name in _sampler_places(loader)]
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


def pass_length(loader: Any) -> int | None:
    """Number of batches of a whole pass; None if unknown."""
    try:
        return len(loader) - _misses_last_batch(loader) if is_map(loader) else None
    except (TypeError, AttributeError):
        return None


def _misses_last_batch(loader: Any) -> bool:
    """Whether this rank gets nothing of the last batch, which Accelerate's `len` counts for all
    ranks.

    That batch is too short to be split over all ranks, and is not filled up.
    """
    places = _sampler_places(loader)
    shard: Any = _sampler_at(*places[0]) if places else None
    if not getattr(shard, "split_batches", False) or shard.even_batches or shard.drop_last:
        return False
    last = len(shard.batch_sampler.sampler) % shard.batch_size
    return bool(0 < last <= shard.batch_size // shard.num_processes * shard.process_index)


def samples_in(batch: Any) -> int:
    """Number of samples in `batch`: rows of its first tensor, else items of its first list, else
    1.
    """
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, Mapping):
        return samples_in(next(iter(batch.values()), None))
    if isinstance(batch, (list, tuple)) and batch:
        is_columns = isinstance(batch[0], (torch.Tensor, list, tuple)) or isinstance(batch, tuple)
        return samples_in(batch[0]) if is_columns else len(batch)
    return int(batch.shape[0]) if getattr(batch, "shape", ()) else 1


def _sampler_places(loader: Any) -> list[tuple[Any, str]]:
    """The holder of each sampler as (object, attribute), outermost first."""
    places: list[tuple[Any, str]] = []
    holder = base_loader(loader)
    name = "sampler" if getattr(holder, "batch_sampler", None) is None else "batch_sampler"
    while name in getattr(holder, "__dict__", {}) and len(places) < _MAX_DEPTH:
        places.append((holder, name))
        holder = _sampler_at(holder, name)
        name = "batch_sampler" if "batch_sampler" in getattr(holder, "__dict__", {}) else "sampler"
    return places


def _sampler_at(holder: Any, name: str) -> Any:
    item = vars(holder)[name]
    return item.plain if type(item) is _SkippingSampler else item


def _nested_datasets(loader: Any) -> list[Any]:
    datasets: list[Any] = []
    holder = base_loader(loader)
    while "dataset" in getattr(holder, "__dict__", {}) and len(datasets) < _MAX_DEPTH:
        holder = vars(holder)["dataset"]
        datasets.append(holder)
    return datasets


def _loader_parts(loader: Any) -> dict[str, Any]:
    samplers = [_sampler_at(holder, name) for holder, name in _sampler_places(loader)]
    parts = {
        "loader": loader,
        "base": base_loader(loader),
        "collate": getattr(base_loader(loader), "collate_fn", None),
    }
    for kind, items in (("sampler", samplers), ("dataset", _nested_datasets(loader))):
        parts |= {f"{kind}.{depth}": item for depth, item in enumerate(reversed(items))}
    return parts


def loader_counters(loader: Any) -> dict[str, int]:
    """The epochs and seeds in the loader's parts."""
    counters = {}
    for part_name, part in _loader_parts(loader).items():
        for name in _NUMBERS.get(part_name.split(".")[0], ()):
            value = getattr(part, name, None)
            is_settable = name in getattr(part, "__dict__", {}) or hasattr(part, f"set_{name}")
            if is_settable and isinstance(value, int) and not isinstance(value, bool):
                counters[f"{part_name}:{name}"] = value
    return counters


def set_loader_counters(loader: Any, saved: Mapping[str, int]) -> None:
    """Restore `loader_counters` in the parts that this loader has."""
    current = loader_counters(loader)
    parts = _loader_parts(loader)
    for key in saved.keys() & current.keys():
        part_name, name = key.split(":")
        part = parts[part_name]
        if hasattr(part, f"set_{name}"):
            getattr(part, f"set_{name}")(saved[key])
        else:
            setattr(part, name, saved[key])


def count_empty_pass(loader: Any, at_start: Mapping[str, int]) -> None:
    """Count a finished pass if the loader has not; `at_start` are the counters at its start.

    Accelerate's loaders do not count a pass without a batch on this rank, and would repeat its
    order on this rank.
    """
    key = "loader:iteration"
    count = loader_counters(loader).get(key)
    if count is not None and at_start.get(key) == count:
        set_loader_counters(loader, {key: count + 1})


def loader_generators(loader: Any) -> dict[str, tuple[Any, str, Any]]:
    """The loader's own generators as (part, attribute, generator); None for an empty attribute."""
    generators = {}
    for part_name, part in _loader_parts(loader).items():
        for name, value in getattr(part, "__dict__", {}).items():
            is_slot = name == "generator" and value is None
            if is_slot or isinstance(value, rng.KINDS):
                generators[f"{part_name}:{name}"] = (part, name, value)
    return generators


def generator_states(loader: Any) -> dict[str, Any]:
    """The state of each of `loader_generators`, None for an empty attribute.

    A shared generator is read once.
    """
    states: dict[int, Any] = {}
    by_key = {}
    for key, (_, _, generator) in loader_generators(loader).items():
        if id(generator) not in states:
            states[id(generator)] = rng.state_of(generator)
        by_key[key] = states[id(generator)]
    return by_key


def set_generator_states(loader: Any, saved: Mapping[str, Any]) -> None:
    """Restore `generator_states`; attributes that were empty become None. Raises CorruptError."""
    for key, (part, name, generator) in loader_generators(loader).items():
        if key not in saved:
            continue
        state = saved[key]
        restored = None if state is None else rng.generator_in(state, generator)
        if restored is not generator:
            setattr(part, name, restored)


class _SkippingSampler:
    """Sampler proxy that skips items in its first iteration and delegates everything else to
    `plain`.

    `moment` is the random state from which to iterate `plain`; None for the current state.
    """

    def __init__(
        self,
        plain: Any,
        keep: int,
        drop: int,
        moment: "RandomState | None",
        order: SampleOrder | None,
    ) -> None:
        self.plain = plain
        self._keep = keep
        self._drop = drop
        self._moment = moment
        self._order = order
        self._is_new = True

    def __iter__(self) -> Iterator[Any]:
        # At once, as the loader does: some samplers draw here, others at the first item. Loaders
        # with workers make two iterators and use the second.
        if self._moment is None or not self._is_new:
            return self._remaining_items(iter(self.plain), None)
        self._moment.put_back()
        items = iter(self.plain)
        return self._remaining_items(items, RandomState(self._moment.loader))

    def _remaining_items(self, items: Iterator[Any], moment: "RandomState | None") -> Iterator[Any]:
        items = items if self._order is None else self._order.follow(items)
        if self._is_new:
            self._is_new = False
            if moment is not None:
                moment.put_back()
            yield from islice(items, self._keep)
            for _ in islice(items, self._drop):
                pass
        yield from items

    def __len__(self) -> int:
        return len(self.plain)

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # absent while this object is being copied
            raise AttributeError(name)
        return getattr(self.plain, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # an isinstance check for batch samplers means the plain one
        return type(self.plain)


class RandomState:
    """The state of all generators that `loader` may draw from: now, or as stored in `state`."""

    def __init__(self, loader: Any, state: Mapping[str, Any] | None = None) -> None:
        self.loader = loader
        self.state = state or {"global": rng.capture_generators(), "own": generator_states(loader)}
        self._objects = {} if state else loader_generators(loader)

    def put_back(self) -> None:
        """Restore all generators, as the same objects.

        Raises CorruptError for a state that does not fit.
        """
        for part, name, generator in self._objects.values():
            vars(part)[name] = generator
        set_generator_states(self.loader, self.state["own"])
        rng.restore_generators(self.state["global"])


@contextmanager
def skipping_items(
    loader: Any,
    keep: int,
    drop: int,
    moment: RandomState | None = None,
    inside: bool = False,
    order: SampleOrder | None = None,
) -> Iterator[None]:
    """During the block, a new pass over `loader` skips `drop` items after the first `keep`, unread.

    Items are those of the outermost sampler (usually batches), or with `inside` of the source
    (usually samples), see `DataCut`. `order` records all of them.
    """
    holder, name = _sampler_places(loader)[_source_place(loader) if inside else 0]
    plain = vars(holder)[name]
    # Not setattr, which loaders forbid after construction.
    vars(holder)[name] = _SkippingSampler(plain, keep, drop, moment, order)
    try:
        yield
    finally:
        vars(holder)[name] = plain
