"""The fingerprint of a run: settings that a resume compares with those of the saved run."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import engine_names, unwrap, user_class
from ft_ckpt.runs.data import describe_data
from ft_ckpt.runs.items import Item
from ft_ckpt.runs.state.document import Document


def run_fingerprint(
    accelerator: Any,
    model: nn.Module,
    sources: Iterable[Source],
    items: Iterable[Item],
    loaders: Iterable[Any],
    world_size: int,
    versions: Mapping[str, str],
) -> Document:
    """Return the settings of a run as plain values by name. Of an object it has the class.

    `sources` are the tensors of the run's models. `loaders` are the data loaders that it has read
    so far. `versions` has the version of each library by name.
    """
    by_tensor = {source.key: source for source in sources}  # tied names count once
    settings: Document = {
        "world size": world_size,
        "engine": engine_names(sources),
        "model": user_class(type(unwrap(model))).__name__,
        "parameters": sum(source.numel for source in by_tensor.values()),
        "gradient accumulation": getattr(accelerator, "gradient_accumulation_steps", None),
        "mixed precision": getattr(accelerator, "mixed_precision", None),
    }
    for item in items:
        settings[item.name] = type(_unwrap_accelerate(item.value)).__name__
    prepared = list(getattr(accelerator, "_dataloaders", ()))
    for index, loader in enumerate(prepared or loaders):
        batch_size = getattr(loader, "total_batch_size", None)
        if not batch_size:
            batch_size = getattr(loader, "batch_size", None)
        settings[f"loader {index}: batch size"] = batch_size
        _, sample_count = describe_data(loader)
        settings[f"loader {index}: samples"] = sample_count

    for name, version in versions.items():
        settings[f"version of {name}"] = version
    return {name: value for name, value in settings.items() if value is not None}


def fingerprint_differences(saved: Document, live: Document) -> list[str]:
    """Return a sentence for each setting that differs. A setting of one side alone is skipped."""
    return [
        f"{name}: {saved[name]!r} when it was saved, {live[name]!r} now"
        for name in saved
        if name in live and saved[name] != live[name]
    ]


def _unwrap_accelerate(value: Any) -> Any:
    """Return the optimizer or scheduler inside Accelerate's wrappers."""
    for attribute in ("optimizer", "scheduler"):
        if type(value).__module__.startswith("accelerate.") and hasattr(value, attribute):
            return _unwrap_accelerate(getattr(value, attribute))
    return value
