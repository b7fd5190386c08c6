"""Properties of data loaders (torch, torchdata, Accelerate, others), and their parts.

The parts are recognized by attributes, not by classes: Accelerate's loaders hold a
`base_dataloader`, one that reads on rank 0 for all has a `slice_fn`, batch samplers and data sets
wrap others as `batch_sampler`, `sampler` and `dataset`. Parts are named from the inside
("sampler.0", "dataset.0"), so that names do not depend on the wrappers of more ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ft_ckpt.runs.data.skipping import SkippingSampler

_NUMBERS = {  # counters and seeds that determine the sample order, besides generators
    "loader": ("iteration",),
    "sampler": ("epoch", "initial_seed", "seed"),
    "dataset": ("epoch",),
}
_MAX_DEPTH = 16  # nesting of wrappers around a data set or a sampler


def base_loader(loader: Any) -> Any:
    """Return the innermost loader, which reads the samples."""
    while "base_dataloader" in getattr(loader, "__dict__", {}):
        loader = loader.base_dataloader
    return loader


def is_map(loader: Any) -> bool:
    """Check whether samples are read by index, so that skipped ones are not read."""
    inner = base_loader(loader)
    return isinstance(inner, DataLoader) and not isinstance(inner.dataset, IterableDataset)


def looks_ahead(loader: Any) -> bool:
    """Check whether this process may read batches before they are requested."""
    inner = base_loader(loader)
    if inner is not loader or not isinstance(inner, DataLoader):
        return True
    return type(inner).__iter__.__module__.split(".")[0] not in ("torch", "torchdata")


def reads_here(loader: Any) -> bool:
    """Check whether this process reads the samples, instead of workers."""
    return not getattr(base_loader(loader), "num_workers", 0)


def is_warm(loader: Any) -> bool:
    """Check whether workers of an earlier pass persist: then a pass draws no seed for them."""
    inner = base_loader(loader)
    persists = bool(getattr(inner, "persistent_workers", False))
    return persists and getattr(inner, "_iterator", None) is not None


def forget_premade(loader: Any) -> None:
    """Drop the iterator that a stateful loader creates for its state before the first pass.

    The random draws of that iterator would be unknown. The next iterator draws again.
    """
    inner = base_loader(loader)
    if getattr(inner, "_initial_iter_for_state_dict", False):
        inner.load_state_dict({})


def has_own_state(loader: Any) -> bool:
    """Check whether the loader has a state of its own that is exact and avoids reading again.

    A loader whose data set has no state reads everything again and counts it twice. A loader that
    reads on rank 0 for all ranks corrects its count of batches, but not the state of its data set.
    """
    if hasattr(loader, "slice_fn"):
        return False
    inner = base_loader(loader)
    for part in (inner, getattr(inner, "dataset", None)):
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            return False
    return True


def refills_a_buffer(loader: Any) -> bool:
    """Check whether the data set (of `datasets`) has a shuffle buffer, which its state omits."""
    for dataset in nested_datasets(loader):
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
    for dataset in nested_datasets(loader):
        if getattr(dataset, "_starting_state_dict", None) is not None:
            dataset._starting_state_dict = None


def samples_in(batch: Any) -> int:
    """Count the samples in `batch`.

    The rows of its first tensor count, else the items of its first list. A batch with neither
    counts as one sample.
    """
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, Mapping):
        return samples_in(next(iter(batch.values()), None))
    if isinstance(batch, (list, tuple)) and batch:
        is_columns = isinstance(batch[0], (torch.Tensor, list, tuple)) or isinstance(batch, tuple)
        return samples_in(batch[0]) if is_columns else len(batch)
    return int(batch.shape[0]) if getattr(batch, "shape", ()) else 1


def sampler_places(loader: Any) -> list[tuple[Any, str]]:
    """Return the holder of each sampler as (object, attribute), outermost first."""
    places: list[tuple[Any, str]] = []
    holder = base_loader(loader)
    name = "sampler" if getattr(holder, "batch_sampler", None) is None else "batch_sampler"
    while name in getattr(holder, "__dict__", {}) and len(places) < _MAX_DEPTH:
        places.append((holder, name))
        holder = sampler_at(holder, name)
        name = "batch_sampler" if "batch_sampler" in getattr(holder, "__dict__", {}) else "sampler"
    return places


def sampler_at(holder: Any, name: str) -> Any:
    item = vars(holder)[name]
    return item.plain if type(item) is SkippingSampler else item


def nested_datasets(loader: Any) -> list[Any]:
    datasets: list[Any] = []
    holder = base_loader(loader)
    while "dataset" in getattr(holder, "__dict__", {}) and len(datasets) < _MAX_DEPTH:
        holder = vars(holder)["dataset"]
        datasets.append(holder)
    return datasets


def loader_parts(loader: Any) -> dict[str, Any]:
    samplers = [sampler_at(holder, name) for holder, name in sampler_places(loader)]
    parts = {
        "loader": loader,
        "base": base_loader(loader),
        "collate": getattr(base_loader(loader), "collate_fn", None),
    }
    for kind, items in (("sampler", samplers), ("dataset", nested_datasets(loader))):
        parts |= {f"{kind}.{depth}": item for depth, item in enumerate(reversed(items))}
    return parts


def loader_counters(loader: Any) -> dict[str, int]:
    """Return the epochs and seeds in the loader's parts."""
    counters = {}
    for part_name, part in loader_parts(loader).items():
        for name in _NUMBERS.get(part_name.split(".")[0], ()):
            value = getattr(part, name, None)
            is_settable = name in getattr(part, "__dict__", {}) or hasattr(part, f"set_{name}")
            if is_settable and isinstance(value, int) and not isinstance(value, bool):
                counters[f"{part_name}:{name}"] = value
    return counters


def set_loader_counters(loader: Any, saved: Mapping[str, int]) -> None:
    """Restore `loader_counters` in the parts that this loader has."""
    current = loader_counters(loader)
    parts = loader_parts(loader)
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
