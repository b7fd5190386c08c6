"""Signatures of objects whose names come from Accelerate's order alone.

A resume finds each object by its signature if the order has changed.
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

Signatures = Mapping[str, str]


def object_signatures(
    accelerator: Any,
    registered: Mapping[str, Any],
    sources_of_run: Callable[[], Mapping[Key, Source]],
) -> Signatures:
    """Return signatures that tell several unnamed prepared objects of one kind apart, by item.

    "" is the saved model. A signature is the class and a digest of the tensors or parameters;
    `sources_of_run` gives the tensors of all models. Raises ConfigError naming objects with equal
    signatures: a change of their order could not be detected.
    """
    by_series: dict[str, list[Item]] = {}
    for item in run_items(accelerator, registered):
        by_series.setdefault(item.series, []).append(item)
    if "model" in by_series and "model" not in registered:
        saved_model = Item("", "model", main_model(accelerator, registered), "model")
        by_series["model"].insert(0, saved_model)
    numbered: list[Item] = []
    for series, items in by_series.items():
        if series and len(items) > 1:
            numbered += items
    sources = sources_of_run() if numbered else {}
    signatures: dict[str, str] = {}
    names_by_signature: dict[str, list[str]] = {}
    for item in numbered:
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
    """Return the run's items under the names that such objects had in the `saved` run.

    Objects are recognized by their signatures. Raises LoadError if another model than before would
    be the saved one.
    """
    model = main_model(accelerator, registered)
    items = run_items(accelerator, registered)
    if not saved or model is None:
        return items
    live = object_signatures(
        accelerator, registered, lambda: run_sources(walk_models(model, items), items)
    )
    saved_names: dict[str, str] = {}  # by signature, of objects that now have another name
    for name, signature in saved.items():
        if live.get(name) != signature:
            saved_names[signature] = name
    renamed: dict[str, str] = {}
    for name, signature in live.items():
        if saved.get(name) != signature and signature in saved_names:
            renamed[name] = saved_names[signature]
    if "" in renamed or "" in renamed.values():
        changes = []
        for name, saved_name in renamed.items():
            changes.append(f"{saved_name or 'model'} of the checkpoint is {name or 'model'} here")
        raise LoadError(
            f"{listing(changes)}: prepared in another order; prepare them as before, or say which "
            "one is saved: saver.register(model=...)"
        )
    return [replace(item, name=renamed.get(item.name, item.name)) for item in items]


def _object_signature(item: Item, sources: Mapping[Key, Source]) -> str:
    """Return the class of an object, and a digest of its tensors, parameters or state keys."""
    facts: list[Any] = []
    if item.kind == "model":
        kind = user_class(type(unwrap(item.value)))
        for name, source in model_sources(sources, item.name).items():
            facts.append((name, source.shape, str(source.dtype), source.trainable))
    elif item.series == "scheduler":
        kind = type(unwrap_object(item.value))
        facts += _scheduled_parameters(item.value, sources)
    else:
        kind = type(unwrap_object(item.value))
        facts += sorted(str(key) for key in item.value.state_dict())
    return f"{kind.__name__} {xxhash.xxh3_64_hexdigest(repr(facts).encode())}"


def _scheduled_parameters(scheduler: Any, sources: Mapping[Key, Source]) -> list[str]:
    """Return the labels of the parameters whose optimizer the scheduler steers."""
    optimizer = unwrap_optimizer(getattr(unwrap_object(scheduler), "optimizer", None))
    labels: dict[int, str] = {}
    for label, source in labelled_sources(sources).items():
        labels[id(parameter_of(source))] = label
    names: list[str] = []
    for group in getattr(optimizer, "param_groups", ()):
        names += [str(labels.get(id(parameter))) for parameter in group["params"]]
    return sorted(names)
