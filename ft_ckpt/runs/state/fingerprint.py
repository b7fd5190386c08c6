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
    """Return the settings of a run as plain values by name; objects are compared by their class.

    `sources` are the tensors of its models, `loaders` those that it has read so far, and `versions`
    those of libraries, by name.
    """
    by_tensor = {source.key: source for source in sources}
    facts: Document = {
        "world size": world_size,
        "engine": engine_names(sources),
        "model": user_class(type(unwrap(model))).__name__,
        "parameters": sum(source.numel for source in by_tensor.values()),
        "gradient accumulation": getattr(accelerator, "gradient_accumulation_steps", None),
        "mixed precision": getattr(accelerator, "mixed_precision", None),
    }
    for item in items:
        facts[item.name] = type(_unwrap_accelerate(item.value)).__name__
    prepared = list(getattr(accelerator, "_dataloaders", ()))
    for index, loader in enumerate(prepared or loaders):
        size = getattr(loader, "total_batch_size", None) or getattr(loader, "batch_size", None)
        facts[f"loader {index}: batch size"] = size
        facts[f"loader {index}: samples"] = describe_data(loader)[1]
    for name, version in versions.items():
        facts[f"version of {name}"] = version
    return {name: value for name, value in facts.items() if value is not None}


def fingerprint_differences(saved: Document, live: Document) -> list[str]:
    """Write a sentence for each setting that both have and that differs."""
    return [
        f"{name}: {saved[name]!r} when it was saved, {live[name]!r} now"
        for name in saved
        if name in live and saved[name] != live[name]
    ]


def _unwrap_accelerate(value: Any) -> Any:
    for attribute in ("optimizer", "scheduler"):
        if type(value).__module__.startswith("accelerate.") and hasattr(value, attribute):
            return _unwrap_accelerate(getattr(value, attribute))
    return value
