"""Recognizes objects that Accelerate has prepared in another order than in the saved run.

Their names only number them, such as "model_1" and "model_2". A signature is the class of an object
and a digest of its shapes or keys. It tells such objects apart, whatever their order.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import xxhash

from ft_ckpt.errors import ConfigError, LoadError, listing
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import unwrap, user_class
from ft_ckpt.runs.items.objects import Item, main_model, run_items, unwrap_object
from ft_ckpt.runs.items.tensors import (
    Key,
    labelled_sources,
    model_sources,
    run_sources,
    walk_models,
)
from ft_ckpt.runs.optimizers import parameter_of, unwrap_optimizer

# signatures by the names of items; "" is the main model
Signatures = Mapping[str, str]


def object_signatures(
    accelerator: Any,
    registered: Mapping[str, Any],
    sources_of_run: Callable[[], Mapping[Key, Source]],
) -> Signatures:
    """Return the signatures of the unnamed prepared objects, by the names of their items.

    A kind of which the run has only one object is left out, because it cannot be confused.
    `sources_of_run` returns the tensors of all models. Raises ConfigError naming objects with equal
    signatures, because a change of their order could not be detected.
    """
    by_series: dict[str, list[Item]] = {}
    for item in run_items(accelerator, registered):
        by_series.setdefault(item.series, []).append(item)
    if "model" in by_series and "model" not in registered:
        saved_model = Item("", "model", main_model(accelerator, registered), "model")
        by_series["model"].insert(0, saved_model)

    numbered_items: list[Item] = []
    for series, items in by_series.items():
        if series and len(items) > 1:
            numbered_items += items

    sources = sources_of_run() if numbered_items else {}
    signatures: dict[str, str] = {}
    names_by_signature: dict[str, list[str]] = {}
    for item in numbered_items:
        signature = f"{item.series} {_object_signature(item, sources)}"
        signatures[item.name] = signature
        names_by_signature.setdefault(signature, []).append(item.name or "model")

    problems = []
    for names in names_by_signature.values():
        if len(names) > 1:
            problems.append(f"{', '.join(names)}: differ in their order alone")

    if problems:
        raise ConfigError(
            f"{listing(problems)}; name them, so that they are not confused when the order "
            "changes: saver.register(policy=..., value=...)"
        )

    return signatures


def items_in_saved_order(
    accelerator: Any, registered: Mapping[str, Any], saved: Signatures
) -> list[Item]:
    """Return the run's items with the names that the objects had in the saved run.

    `saved` are the signatures of that run. Raises LoadError if the main model is another one than
    before.
    """
    model = main_model(accelerator, registered)
    items = run_items(accelerator, registered)
    if not saved or model is None:
        return items
    live = object_signatures(
        accelerator, registered, lambda: run_sources(walk_models(model, items), items)
    )

    # the saved names of objects that now have another name, by signature
    saved_names: dict[str, str] = {}
    for name, signature in saved.items():
        if live.get(name) != signature:
            saved_names[signature] = name

    new_names: dict[str, str] = {}
    for name, signature in live.items():
        if saved.get(name) != signature and signature in saved_names:
            new_names[name] = saved_names[signature]

    if "" in new_names or "" in new_names.values():
        changes = []
        for name, saved_name in new_names.items():
            changes.append(f"{saved_name or 'model'} of the checkpoint is {name or 'model'} here")
        raise LoadError(
            f"{listing(changes)}: prepared in another order; prepare them as before, or say which "
            "one is saved: saver.register(model=...)"
        )

    return [replace(item, name=new_names.get(item.name, item.name)) for item in items]


def _object_signature(item: Item, sources: Mapping[Key, Source]) -> str:
    """Return the class of an object, and a digest of what distinguishes it.

    It is the names, shapes and dtypes of a model, the parameters that a scheduler steers, or the
    keys in the state dict of another object.
    """
    properties: list[Any] = []
    if item.kind == "model":
        kind = user_class(type(unwrap(item.value)))
        for name, source in model_sources(sources, item.name).items():
            properties.append((name, source.shape, str(source.dtype), source.trainable))
    elif item.series == "scheduler":
        kind = type(unwrap_object(item.value))
        properties += _scheduled_parameters(item.value, sources)
    else:
        kind = type(unwrap_object(item.value))
        properties += sorted(str(key) for key in item.value.state_dict())
    return f"{kind.__name__} {xxhash.xxh3_64_hexdigest(repr(properties).encode())}"


def _scheduled_parameters(scheduler: Any, sources: Mapping[Key, Source]) -> list[str]:
    """Return the labels of the parameters in the optimizer that the scheduler steers."""
    optimizer = unwrap_optimizer(getattr(unwrap_object(scheduler), "optimizer", None))
    labels: dict[int, str] = {}
    for label, source in labelled_sources(sources).items():
        labels[id(parameter_of(source))] = label
    names: list[str] = []
    for group in getattr(optimizer, "param_groups", ()):
        names += [str(labels.get(id(parameter))) for parameter in group["params"]]
    return sorted(names)
