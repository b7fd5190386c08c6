"""What makes two runs the same run: the facts that decide its losses, told apart when it is resumed."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.tensors import engine_names
from ft_ckpt.distributed.wrappers import unwrap, user_class

Fingerprint = dict[str, Any]


def run_fingerprint(
    model: nn.Module,
    found: Collection[Source],
    objects: Mapping[str, Any],
    loaders: Sequence[Any],
    accelerator: Any,
    world_size: int,
    versions: Mapping[str, str],
) -> Fingerprint:
    """The facts of this run, as plain values under dotted names; `objects` are those whose class matters."""
    facts: Fingerprint = {
        "world size": world_size,
        "engine": engine_names(found),
        "model": user_class(type(unwrap(model))).__name__,
        "parameters": sum(one.numel for one in {s.key: s for s in found}.values()),
        "gradient accumulation": getattr(accelerator, "gradient_accumulation_steps", None),
        "mixed precision": getattr(accelerator, "mixed_precision", None),
    }
    for name, value in objects.items():
        facts[name] = type(_unwrap_accelerate(value)).__name__
    for index, loader in enumerate(loaders):
        facts |= {f"loader {index}: {name}": value for name, value in _loader_settings(loader).items()}
    facts |= {f"version of {name}": version for name, version in versions.items()}
    return {name: value for name, value in facts.items() if value is not None}


def fingerprint_differences(saved: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """A sentence for each fact that both know and that is not the same."""
    return tuple(
        f"{name}: {saved[name]!r} when it was saved, {now[name]!r} now"
        for name in saved
        if name in now and saved[name] != now[name]
    )


def _unwrap_accelerate(value: Any) -> Any:
    for attribute in ("optimizer", "scheduler"):
        if type(value).__module__.startswith("accelerate.") and hasattr(value, attribute):
            return _unwrap_accelerate(getattr(value, attribute))
    return value


def _loader_settings(loader: Any) -> dict[str, Any]:
    batch = getattr(loader, "total_batch_size", None) or getattr(loader, "batch_size", None)
    return {"batch size": batch, "samples": _count_samples(getattr(loader, "dataset", None))}


def _count_samples(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None
