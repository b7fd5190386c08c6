"""Lists the items of a run: the named objects whose state it needs.

They are the objects that Accelerate has prepared, and those that the script has registered. The
main model, whose weights are saved, is not among them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ft_ckpt.errors import ConfigError, SelectionError, listing
from ft_ckpt.ranks.wrappers import unwrap
from ft_ckpt.runs.optimizers import (
    OptimizerKind,
    engine_counters,
    kind_of_optimizer,
    unwrap_optimizer,
)

ENGINE = "engine"  # name of the item with DeepSpeed's counters
EXTRA_STATE = "extra state"  # name of the item with the extra state of the main model
# Names that the training state uses itself. No item can have them.
_RESERVED = frozenset({"weights", "rng", "gradients", "accumulation", ENGINE})
_RESERVED_PREFIXES = ("rank-", "loader-", EXTRA_STATE)
# Kinds of prepared objects whose names are numbered in the order of `Accelerator.prepare`.
_SERIES = ("model", "scheduler", "custom")


@dataclass(frozen=True, eq=False)
class Item:
    """One object whose state a run needs.

    Attributes:
        name: Its name in the checkpoint.
        kind: "optimizer", "model" or "object". An "object" has a state dict.
        value: The object.
        series: "model", "scheduler" or "custom" if the name only numbers the objects in the order
            in which Accelerate has prepared them, such as "scheduler_1". Else "".
    """

    name: str
    kind: str
    value: Any
    series: str = ""


@dataclass(frozen=True, eq=False)
class OptimizerItem:
    """An optimizer among the items, without Accelerate's wrapper, and its kind."""

    name: str
    kind: OptimizerKind
    optimizer: Any


def run_items(accelerator: Any, registered: Mapping[str, Any]) -> list[Item]:
    """Return the objects that Accelerate has prepared or the script has registered.

    The main model is left out. A prepared object that is registered too has its registered name.
    Raises SelectionError for a registered object that is no module and no optimizer and has no
    state dict. Raises ConfigError for names that are taken or cannot be used.
    """
    registered_names: dict[int, str] = {}
    for name, value in registered.items():
        if name != "model":
            registered_names[bare_identity(value)] = name

    # name, object and series of each item
    objects: list[tuple[str, Any, str]] = []
    prepared_ids: set[int] = set()
    for name, value in _prepared_objects(accelerator, registered):
        identity = bare_identity(value)
        prepared_ids.add(identity)
        if identity in registered_names:
            objects.append((registered_names[identity], value, ""))
        else:
            objects.append((name, value, _series_of(name)))

    for name, value in registered.items():
        if name != "model" and bare_identity(value) not in prepared_ids:
            objects.append((name, value, ""))

    _refuse_item_names([name for name, _, _ in objects], registered)
    return [Item(name, _item_kind(name, value), value, series) for name, value, series in objects]


def _series_of(name: str) -> str:
    """Return the series of a name such as "scheduler_1"; "" for a name in no series."""
    series = name.split("_")[0]
    return series if series in _SERIES else ""


def main_model(accelerator: Any, registered: Mapping[str, Any]) -> nn.Module | None:
    """Return the main model, whose weights are saved.

    It is the model registered as "model", or else the first prepared model that is not registered
    under another name.
    """
    if "model" in registered:
        return registered["model"]  # type: ignore[no-any-return]
    models: Sequence[nn.Module] = getattr(accelerator, "_models", ())
    identities = {bare_identity(value) for value in registered.values()}
    for model in models:
        if bare_identity(model) not in identities:
            return model
    return models[0] if models else None


def bare_identity(value: Any) -> int:
    """Return the `id` of an object inside the wrappers of Accelerate and engines."""
    if isinstance(value, nn.Module):
        return id(unwrap(value))
    return id(unwrap_object(value))


def unwrap_object(value: Any) -> Any:
    """Return the scheduler or optimizer inside the wrappers of Accelerate."""
    while type(value).__module__.startswith("accelerate.") and hasattr(value, "scheduler"):
        value = value.scheduler
    return unwrap_optimizer(value)


def optimizers_among(items: Iterable[Item]) -> list[OptimizerItem]:
    return [optimizer_of(item) for item in items if item.kind == "optimizer"]


def optimizer_of(item: Item) -> OptimizerItem:
    """Return the optimizer of an item whose kind is "optimizer"."""
    optimizer = unwrap_optimizer(item.value)
    kind = kind_of_optimizer(optimizer)
    assert kind is not None, "an item is an optimizer because its kind was recognized"
    return OptimizerItem(item.name, kind, optimizer)


def plain_optimizers(items: Iterable[Item]) -> list[Any]:
    """Return the optimizers whose steps use the gradients of the models' own parameters."""
    optimizers = optimizers_among(items)
    return [item.optimizer for item in optimizers if item.kind.uses_model_gradients]


def refuse_unsaveable(items: Iterable[Item]) -> None:
    """Raise SelectionError naming all optimizers whose state can never be saved."""
    problems: list[str] = []
    for item in optimizers_among(items):
        reasons = item.kind.unsaveable_state(item.optimizer)
        problems += [f"{item.name}: {reason}" for reason in reasons]
    if problems:
        raise SelectionError(
            f"{listing(problems)}: cannot be saved, so a run could not be resumed exactly; use "
            "another optimizer, or save without its state"
        )


def _prepared_objects(accelerator: Any, registered: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the objects that Accelerate has prepared, without the main model, each with a name.

    Names are numbered within a kind: "optimizer", "optimizer_1", "optimizer_2", ...
    """
    main = main_model(accelerator, registered)
    objects: list[tuple[str, Any]] = []
    number = 1
    for model in getattr(accelerator, "_models", ()):
        if main is None or bare_identity(model) != bare_identity(main):
            objects.append((f"model_{number}", model))
            number += 1

    objects += _numbered("optimizer", getattr(accelerator, "_optimizers", ()))
    objects += _numbered("scheduler", getattr(accelerator, "_schedulers", ()))
    engine_wrapper = getattr(accelerator, "deepspeed_engine_wrapped", None)

    # Without Accelerate, the main model may itself be DeepSpeed's engine.
    engine = main if engine_wrapper is None else engine_wrapper.engine
    counters = engine_counters(engine)
    if counters is not None:
        objects.append((ENGINE, counters))
    scaler = getattr(accelerator, "scaler", None)
    if scaler is not None:
        objects.append(("scaler", scaler))
    objects += _numbered("custom", getattr(accelerator, "_custom_objects", ()))
    return objects


def _numbered(name: str, objects: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the objects with the names `name`, `name`_1, `name`_2, ..."""
    named = []
    for number, value in enumerate(objects):
        named.append((f"{name}_{number}" if number else name, value))
    return named


def _refuse_item_names(names: Sequence[str], registered: Mapping[str, Any]) -> None:
    """Raise ConfigError for registered names that are taken, reserved or not usable."""
    twice: list[str] = []
    reserved: list[str] = []
    unusable: list[str] = []
    for name in registered:
        if names.count(name) > 1:
            twice.append(f"{name}: the name of what Accelerate has prepared")
        if name in _RESERVED or name.startswith(_RESERVED_PREFIXES):
            reserved.append(f"{name}: a name that checkpoints use themselves")
        if not name or "/" in name or ":" in name:
            unusable.append(f"{name!r}: names are not empty, without '/' and ':'")
    problems = twice + reserved + unusable
    if problems:
        raise ConfigError(f"{listing(problems)}; register it under another name")


def _item_kind(name: str, value: Any) -> str:
    """Return the kind of an item. Raises SelectionError if `value` has no state."""
    if isinstance(value, nn.Module):
        return "model"
    if kind_of_optimizer(unwrap_optimizer(value)) is not None:
        return "optimizer"
    methods = [getattr(value, name, None) for name in ("state_dict", "load_state_dict")]
    if all(callable(method) for method in methods):
        return "object"
    raise SelectionError(
        f"{name}: {type(value).__name__} has no state_dict() and load_state_dict(); define both, "
        "or leave it out"
    )
