"""Properties of data loaders (torch, torchdata, Accelerate, others): sample order, skipping without reading.

Known by what they have, not by their classes: Accelerate's loaders hold a `base_dataloader`, one that reads on rank 0
for all has a `slice_fn`, batch samplers and data sets wrap others as `batch_sampler`, `sampler` and `dataset`. Parts
are named from the inside ("sampler.0", "dataset.0"), so that a name means the same whatever wraps it on more ranks.
"""

import math
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

from ft_ckpt.training import rng


class SampleOrder:
    """What the outermost sampler has given in a pass, as one digest of what the run has been given of it.

    Loaders read ahead of what they give: what is noted waits until it is taken.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._forget_items()

    def follow(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of a new pass, each noted when it is asked for."""
        self._is_known = True
        self._forget_items()
        for item in items:
            if self._is_known:
                self._note_item(item)
            yield item

    def take(self, count: int) -> None:
        """So many more items were given to the run, or all that there were."""
        for _ in range(min(count, len(self._ahead))):
            self._taken.update(self._ahead.popleft())

    @property
    def digest(self) -> str | None:
        """Of all that was taken; None where items are no numbers or words, or no sampler was followed here."""
        return self._taken.hexdigest() if self._is_known else None

    def _forget_items(self) -> None:
        self._ahead: deque[bytes] = deque()
        self._taken = blake2b(digest_size=8)

    def _note_item(self, item: Any) -> None:
        try:
            self._ahead.append(repr(_plain_item(item)).encode())
        except TypeError:
            self._is_known = False


def _plain_item(item: Any) -> Any:
    """Numbers, words and nestings of them, however they are held. Raises TypeError for anything else."""
    if isinstance(item, str):
        return item
    if isinstance(item, (list, tuple)):
        return [_plain_item(each) for each in item]
    return operator.index(item)


_NUMBERS = {  # what an order of samples is made of, besides generators; other parts' seeds are the script's to say
    "loader": ("iteration",), "sampler": ("epoch", "initial_seed", "seed"), "dataset": ("epoch",)
}  # fmt: skip
_DEEPEST = 16  # of wrappers around a data set or a sampler


def base_loader(loader: Any) -> Any:
    """The loader that reads, below those that wrap it."""
    while "base_dataloader" in getattr(loader, "__dict__", {}):
        loader = loader.base_dataloader
    return loader


def is_map(loader: Any) -> bool:
    """Whether samples are asked for by index, so that what is skipped need not be read."""
    return isinstance(base_loader(loader), DataLoader) and not isinstance(base_loader(loader).dataset, IterableDataset)


def looks_ahead(loader: Any) -> bool:
    """Whether batches may be read before they are asked for, in this process."""
    inner = base_loader(loader)
    if inner is not loader or not isinstance(inner, DataLoader):
        return True
    return type(inner).__iter__.__module__.split(".")[0] not in ("torch", "torchdata")


def reads_here(loader: Any) -> bool:
    """Whether samples are read in this process and not by workers."""
    return not getattr(base_loader(loader), "num_workers", 0)


def is_warm(loader: Any) -> bool:
    """Whether workers of an earlier pass are kept: then a pass begins without drawing their seed."""
    inner = base_loader(loader)
    return bool(getattr(inner, "persistent_workers", False)) and getattr(inner, "_iterator", None) is not None


def forget_premade(loader: Any) -> None:
    """Drop the iterator that a stateful loader makes when it is asked for its state before the first pass.

    What it drew would be unknown; the one made in its place draws again.
    """
    inner = base_loader(loader)
    if getattr(inner, "_initial_iter_for_state_dict", False):
        inner.load_state_dict({})


def has_own_state(loader: Any) -> bool:
    """Whether the loader says where it is, in a way that is worth using and can be trusted.

    One whose data set does not know where it is can only read all again, as we can, and counts it twice. One that
    reads on rank 0 for all corrects its count of batches, and not the state of its data set.
    """
    inner = base_loader(loader)
    knowing = (inner, getattr(inner, "dataset", None))
    is_stateful = all(hasattr(part, "state_dict") and hasattr(part, "load_state_dict") for part in knowing)
    return is_stateful and not hasattr(loader, "slice_fn")


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
    """Let the next pass begin at the first sample: a data set of `datasets` begins each pass of an epoch where it was
    told to, and loops do not always tell it a new epoch.
    """
    for dataset in _nested_datasets(loader):
        if getattr(dataset, "_starting_state_dict", None) is not None:
            dataset._starting_state_dict = None


def batches_per_call(loader: Any) -> int:
    """Batches of the loader that reads which one batch of `loader` takes on the rank that reads."""
    if not hasattr(loader, "slice_fn") or loader.split_batches or getattr(loader, "submesh_tp", None):
        return 1
    return int(loader.state.num_processes)


def data_shares(loader: Any, size: int) -> int:
    """Into how many shares the data is cut over `size` ranks: fewer where some are given the same, as under tensor
    parallelism.
    """
    if hasattr(loader, "slice_fn"):  # one that reads for all gives one batch to all of a mesh with tensor parallelism
        return 1 if getattr(loader, "submesh_tp", None) else size
    parts = [_sampler_at(holder, name) for holder, name in _sampler_places(loader)] + _nested_datasets(loader)
    told = [getattr(part, name) for part in parts for name in ("num_processes", "num_replicas") if hasattr(part, name)]
    is_whole = base_loader(loader) is not loader and is_map(loader)  # Accelerate cuts what is more than one share
    return int(told[0]) if told else 1 if is_whole else size


@dataclass(frozen=True)
class DataCut:
    """How the pass of a loader is cut into the batches of all ranks.

    Its **source** is the innermost sampler whose items the loader gives in order: indices, or batches where a batch
    sampler of the script's own decides. Of a stream it is the samples; of any other loader the batches.
    """

    per_step: int  # items of the source that all ranks together take for one batch each
    divisor: int  # into how many shares the source is divided: 1 when every rank's is of all items
    unit: str  # what an item is, for people
    sharing: str | None  # the order of the source; None where it is not known how ranks share it


def cut_of(loader: Any, shares: int) -> DataCut:
    """How so many shares of the data are cut; they may be others than those of the `loader`."""
    size = getattr(base_loader(loader), "batch_size", None)
    if not is_map(loader):
        known = shares == 1 or hasattr(loader, "slice_fn") or any(map(_deals_in_turn, _nested_datasets(loader)))
        whole = (size or 1) * (1 if getattr(loader, "split_batches", False) else shares)
        return DataCut(whole, 1, "samples" if size else "batches", "stream" if known else None)
    places, at = _sampler_places(loader), _source_place(loader)
    outer = [_sampler_at(holder, name) for holder, name in places[:at]]
    source, cutters = _sampler_at(*places[at]), [sampler for sampler in outer if "batch_sampler" not in vars(sampler)]
    is_split = getattr(loader if hasattr(loader, "slice_fn") else [*outer, source][0], "split_batches", False)
    whole = math.prod((1 if is_split else shares, *(sampler.batch_size for sampler in cutters)))
    is_shared = base_loader(loader) is not loader or any(hasattr(sampler, "num_processes") for sampler in outer)
    is_dealt = isinstance(source, DistributedSampler) and _is_of_library(source)
    order = type(source).__name__
    if isinstance(source, SequentialSampler) or (is_dealt and not source.shuffle):
        order = "in order"
    known = shares == 1 or is_shared or is_dealt
    unit = "samples" if cutters or places[at][1] == "sampler" else "batches"
    return DataCut(whole, 1 if is_shared else shares, unit, order if known else None)


def is_spent(loader: Any, shares: int, taken: int) -> bool:
    """Whether a pass gives no batch after `taken` items of the source; False where that is not known."""
    places, cut = _sampler_places(loader), cut_of(loader, shares)
    try:
        left = len(_sampler_at(*places[_source_place(loader)])) - taken // cut.divisor
    except TypeError:
        return False
    drops = getattr(loader, "_drop_last", False) or getattr(_sampler_at(*places[0]), "drop_last", False)
    return left <= 0 or bool(drops and left < cut.per_step // cut.divisor)


def _source_place(loader: Any) -> int:
    """Which of the `_sampler_places` is the source."""
    samplers = [_sampler_at(holder, name) for holder, name in _sampler_places(loader)]
    return next((at for at, sampler in enumerate(samplers[:-1]) if not _cuts_in_order(sampler)), len(samplers) - 1)


def _cuts_in_order(sampler: Any) -> bool:
    """Whether a sampler gives what is in the one that it wraps, in its order, all of it."""
    return _is_of_library(sampler) and not hasattr(sampler, "skip_batches")


def _deals_in_turn(dataset: Any) -> bool:
    """Whether it is Accelerate's or transformers' share of a stream, of batches of all ranks."""
    return hasattr(dataset, "num_processes") and _is_of_library(dataset)


def _is_of_library(part: Any) -> bool:
    return type(part).__iter__.__module__.split(".")[0] in ("torch", "torchdata", "accelerate", "transformers")


def pass_length(loader: Any) -> int | None:
    """Batches of a whole pass, None where that cannot be known for certain."""
    try:
        return len(loader) if is_map(loader) else None
    except TypeError:
        return None


def samples_in(batch: Any) -> int:
    """Samples in `batch`: rows of its first tensor, else items of its first list; 1 when it has neither."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, Mapping):
        return samples_in(next(iter(batch.values()), None))
    if isinstance(batch, (list, tuple)) and batch:
        is_columns = isinstance(batch[0], (torch.Tensor, list, tuple)) or isinstance(batch, tuple)
        return samples_in(batch[0]) if is_columns else len(batch)
    return int(batch.shape[0]) if getattr(batch, "shape", ()) else 1


def _sampler_places(loader: Any) -> list[tuple[Any, str]]:
    """Where each sampler is held (object, attribute), the outermost first."""
    places: list[tuple[Any, str]] = []
    holder = base_loader(loader)
    name = "sampler" if getattr(holder, "batch_sampler", None) is None else "batch_sampler"
    while name in getattr(holder, "__dict__", {}) and len(places) < _DEEPEST:
        places.append((holder, name))
        holder = _sampler_at(holder, name)
        name = "batch_sampler" if "batch_sampler" in getattr(holder, "__dict__", {}) else "sampler"
    return places


def _sampler_at(holder: Any, name: str) -> Any:
    item = vars(holder)[name]
    return item.plain if type(item) is _SkippingSampler else item


def _nested_datasets(loader: Any) -> list[Any]:
    found: list[Any] = []
    holder = base_loader(loader)
    while "dataset" in getattr(holder, "__dict__", {}) and len(found) < _DEEPEST:
        holder = vars(holder)["dataset"]
        found.append(holder)
    return found


def _loader_parts(loader: Any) -> dict[str, Any]:
    samplers = [_sampler_at(holder, name) for holder, name in _sampler_places(loader)]
    parts = {"loader": loader, "base": base_loader(loader), "collate": getattr(base_loader(loader), "collate_fn", None)}
    for kind, items in (("sampler", samplers), ("dataset", _nested_datasets(loader))):
        parts |= {f"{kind}.{depth}": item for depth, item in enumerate(reversed(items))}
    return parts


def loader_counters(loader: Any) -> dict[str, int]:
    """Epochs and seeds that the loader's parts count and keep."""
    found = {}
    for part_name, part in _loader_parts(loader).items():
        for name in _NUMBERS.get(part_name.split(".")[0], ()):
            value = getattr(part, name, None)
            is_ours = name in getattr(part, "__dict__", {}) or hasattr(part, f"set_{name}")
            if is_ours and isinstance(value, int) and not isinstance(value, bool):
                found[f"{part_name}:{name}"] = value
    return found


def set_loader_counters(loader: Any, saved: Mapping[str, int]) -> None:
    """Put back what `loader_counters` told, in the parts that are here too."""
    here, parts = loader_counters(loader), _loader_parts(loader)
    for key in saved.keys() & here.keys():
        part_name, name = key.split(":")
        if hasattr(parts[part_name], f"set_{name}"):
            getattr(parts[part_name], f"set_{name}")(saved[key])
        else:
            setattr(parts[part_name], name, saved[key])


def loader_generators(loader: Any) -> dict[str, tuple[Any, str, Any]]:
    """The loader's own random number generators: (part, attribute, generator), None where one could be."""
    found = {}
    for part_name, part in _loader_parts(loader).items():
        for name, value in getattr(part, "__dict__", {}).items():
            is_slot = name == "generator" and value is None
            if is_slot or isinstance(value, rng.KINDS):
                found[f"{part_name}:{name}"] = (part, name, value)
    return found


def generator_states(loader: Any) -> dict[str, Any]:
    """The state of each of `loader_generators`, None for an empty place. One that several parts share is read once."""
    states: dict[int, Any] = {}
    found = {}
    for key, (_, _, generator) in loader_generators(loader).items():
        if id(generator) not in states:
            states[id(generator)] = rng.state_of(generator)
        found[key] = states[id(generator)]
    return found


def set_generator_states(loader: Any, saved: Mapping[str, Any]) -> None:
    """Put back what `generator_states` told: empty places are emptied, and filled ones filled. Raises CorruptError."""
    for key, (part, name, generator) in loader_generators(loader).items():
        if key not in saved:
            continue
        state = saved[key]
        wanted = None if state is None else rng.generator_in(state, generator)
        if wanted is not generator:
            setattr(part, name, wanted)


class _SkippingSampler:
    """A sampler that leaves some items out the first time it gives any, and is `plain` in everything else.

    `moment` is the random state to iterate `plain` from; None means: whatever it is.
    """

    def __init__(
        self, plain: Any, keep: int, drop: int, moment: "RandomState | None", order: SampleOrder | None
    ) -> None:
        self.plain, self._keep, self._drop, self._moment, self._order = plain, keep, drop, moment, order
        self._is_new = True

    def __iter__(self) -> Iterator[Any]:
        # At once, as the loader would: some samplers draw here, and some when the first item is asked for. Loaders
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
        if name == "plain":  # not there yet: this object is being copied
            raise AttributeError(name)
        return getattr(self.plain, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # whoever asks whether this is a batch sampler means the plain one
        return type(self.plain)


class RandomState:
    """All random number generators that `loader` may draw from: as they are now, or as a `state` says they were."""

    def __init__(self, loader: Any, state: Mapping[str, Any] | None = None) -> None:
        self.loader = loader
        self.state = state or {"global": rng.capture_generators(), "own": generator_states(loader)}
        self._objects = {} if state else loader_generators(loader)

    def put_back(self) -> None:
        """Make all of them what they were, and the same objects. Raises CorruptError for one that does not fit."""
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
    """While this lasts, a pass over `loader` that begins leaves out `drop` items after the first `keep`, unread.

    Items are what the outermost sampler gives (batches, as a rule), or with `inside` the source (samples, as a rule),
    see `DataCut`. The `order` notes them all.
    """
    holder, name = _sampler_places(loader)[_source_place(loader) if inside else 0]
    plain = vars(holder)[name]
    vars(holder)[name] = _SkippingSampler(
        plain, keep, drop, moment, order
    )  # loaders forbid to set it, for reasons that are not ours
    try:
        yield
    finally:
        vars(holder)[name] = plain
