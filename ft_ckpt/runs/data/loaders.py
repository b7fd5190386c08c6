"""Properties of data loaders (torch, torchdata, Accelerate, others), and their parts.

Parts are recognized by their attributes, not by their classes:

- Accelerate's loaders hold a `base_dataloader`.
- A loader of Accelerate that reads on rank 0 for all ranks has a `slice_fn`.
- Samplers and data sets wrap others as `batch_sampler`, `sampler` and `dataset`.

Parts are numbered from the inside ("sampler.0" is the innermost sampler), so that the name of a
part does not depend on the wrappers that several ranks add.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ft_ckpt.runs.data.skipping import SkippingSampler

# Attributes of each kind of part that determine the order of samples: counters and seeds.
_COUNTERS = {
    "loader": ("iteration",),
    "sampler": ("epoch", "initial_seed", "seed"),
    "dataset": ("epoch",),
}
_MAX_DEPTH = 16  # how many wrappers around a data set or a sampler are followed


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
    """Check whether the loader may read batches before they are requested."""
    inner = base_loader(loader)
    if inner is not loader or not isinstance(inner, DataLoader):
        return True
    return type(inner).__iter__.__module__.split(".")[0] not in ("torch", "torchdata")


def reads_here(loader: Any) -> bool:
    """Check whether this process reads the samples itself, without worker processes."""
    return not getattr(base_loader(loader), "num_workers", 0)


def is_warm(loader: Any) -> bool:
    """Check whether workers of an earlier pass are still there.

    If so, a new pass draws no random seed for them.
    """
    inner = base_loader(loader)
    persists = bool(getattr(inner, "persistent_workers", False))
    return persists and getattr(inner, "_iterator", None) is not None


def forget_premade(loader: Any) -> None:
    """Drop the iterator that a stateful loader has made for its state before the first pass.

    It has drawn random numbers in an unknown state. The next iterator draws its own.
    """
    inner = base_loader(loader)
    if getattr(inner, "_initial_iter_for_state_dict", False):
        inner.load_state_dict({})


def has_own_state(loader: Any) -> bool:
    """Check whether the loader has a state of its own from which it continues exactly.

    Two kinds of loaders with a `state_dict` do not. If the data set has no state, the loader reads
    everything again and counts it twice. If the loader reads on rank 0 for all ranks, it corrects
    its count of batches, but not the state of its data set.
    """
    if hasattr(loader, "slice_fn"):
        return False
    inner = base_loader(loader)
    for part in (inner, getattr(inner, "dataset", None)):
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            return False
    return True


def refills_a_buffer(loader: Any) -> bool:
    """Check whether the data set has a shuffle buffer, as streams of `datasets` may have.

    The state of the data set leaves out what is in the buffer.
    """
    for dataset in nested_datasets(loader):
        part = getattr(dataset, "_ex_iterable", None)
        while part is not None:
            if hasattr(part, "buffer_size"):
                return True
            part = getattr(part, "ex_iterable", None)
    return False


def forget_start(loader: Any) -> None:
    """Make the next pass start at the first sample.

    A data set of `datasets` starts every pass at its loaded state until a new epoch is set, and
    training loops do not always set one.
    """
    for dataset in nested_datasets(loader):
        if getattr(dataset, "_starting_state_dict", None) is not None:
            dataset._starting_state_dict = None


def samples_in(batch: Any) -> int:
    """Count the samples in `batch`.

    It is the number of rows of the first tensor, or else the number of items of the first list. A
    batch with neither counts as one sample.
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
    """Return the sampler in the attribute `name` of `holder`, without a `SkippingSampler`."""
    sampler = vars(holder)[name]
    return sampler.plain if type(sampler) is SkippingSampler else sampler


def nested_datasets(loader: Any) -> list[Any]:
    """Return the data sets of the loader, outermost first."""
    datasets: list[Any] = []
    holder = base_loader(loader)
    while "dataset" in getattr(holder, "__dict__", {}) and len(datasets) < _MAX_DEPTH:
        holder = vars(holder)["dataset"]
        datasets.append(holder)
    return datasets


def loader_parts(loader: Any) -> dict[str, Any]:
    """Return the parts of the loader that may have generators or counters, by name."""
    samplers = [sampler_at(holder, name) for holder, name in sampler_places(loader)]
    parts = {
        "loader": loader,
        "base": base_loader(loader),
        "collate": getattr(base_loader(loader), "collate_fn", None),
    }
    for number, sampler in enumerate(reversed(samplers)):
        parts[f"sampler.{number}"] = sampler
    for number, dataset in enumerate(reversed(nested_datasets(loader))):
        parts[f"dataset.{number}"] = dataset
    return parts


def loader_counters(loader: Any) -> dict[str, int]:
    """Return the epochs and seeds in the loader's parts, as {"sampler.0:epoch": 3}."""
    counters = {}
    for part_name, part in loader_parts(loader).items():
        for name in _COUNTERS.get(part_name.split(".")[0], ()):
            value = getattr(part, name, None)
            is_settable = name in getattr(part, "__dict__", {}) or hasattr(part, f"set_{name}")
            if is_settable and isinstance(value, int) and not isinstance(value, bool):
                counters[f"{part_name}:{name}"] = value
    return counters


def set_loader_counters(loader: Any, saved: Mapping[str, int]) -> None:
    """Restore the result of `loader_counters`. Counters that this loader lacks are skipped."""
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
    """Count a finished pass for the loader, if the loader has not counted it.

    `at_start` are the counters at the start of the pass. Accelerate's loaders do not count a pass
    in which this rank got no batch. Without the count, this rank would use the order of that pass
    again.
    """
    key = "loader:iteration"
    count = loader_counters(loader).get(key)
    if count is not None and at_start.get(key) == count:
        set_loader_counters(loader, {key: count + 1})
