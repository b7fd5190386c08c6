"""Detects that a script prepares its objects in another order than the saved run did.

Accelerate numbers the models, schedulers and custom objects of a run in the order in which it
has prepared them. If the order changes, "scheduler_1" of the checkpoint is another scheduler than
"scheduler_1" of this run, and each would get the state of the other.

So a save stores a signature of each numbered object. It is the class of the object and a digest of
what tells it from others, such as the names and shapes of the tensors of a model. For example:

                   saved run                     this run
    scheduler_1    "scheduler LambdaLR 5d0e"     "scheduler StepLR 91fa"
    scheduler_2    "scheduler StepLR 91fa"       "scheduler LambdaLR 5d0e"

A resume finds the equal signatures, and gives each object here the name that it had in the saved
run. An item is one object with the name under which the checkpoint stores its state.
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

# Signatures by the names of items.
Signatures = Mapping[str, str]

# The main model has no name of its own. The checkpoint stores it under the empty name.
_MAIN_MODEL = ""


def object_signatures(
    accelerator: Any,
    registered: Mapping[str, Any],
    sources_of_run: Callable[[], Mapping[Key, Source]],
) -> Signatures:
    """Return the signatures of the numbered objects, by the names of their items.

    An object that is the only one of its series, such as the only scheduler, gets no signature. No
    change of the order can confuse it with another.

    Args:
        accelerator: The Accelerator that has prepared the objects.
        registered: The objects that the user has named with `saver.register()`, by name.
        sources_of_run: Returns the tensors of all models. It is called only if there are numbered
            objects.

    Raises:
        ConfigError: Several objects have the same signature, so a change of their order could not
            be detected.
    """
    numbered_items = _numbered_items(accelerator, registered)
    sources: Mapping[Key, Source] = {}
    if numbered_items:
        sources = sources_of_run()

    signatures: dict[str, str] = {}
    names_by_signature: dict[str, list[str]] = {}
    for item in numbered_items:
        signature = f"{item.series} {_class_and_digest(item, sources)}"
        signatures[item.name] = signature
        names_by_signature.setdefault(signature, []).append(_shown_name(item.name))

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
    """Return the items of this run, each with the name that its object had in the saved run.

    Args:
        accelerator: The Accelerator that has prepared the objects.
        registered: The objects that the user has named with `saver.register()`, by name.
        saved: The signatures of the saved run.

    Raises:
        LoadError: The main model was not the main model of the saved run.
        ConfigError: Several objects of this run have the same signature.
    """
    model = main_model(accelerator, registered)
    items = run_items(accelerator, registered)
    if not saved or model is None:
        return items

    def sources_of_run() -> Mapping[Key, Source]:
        return run_sources(walk_models(model, items), items)

    current = object_signatures(accelerator, registered, sources_of_run)
    saved_names = _saved_names(current, saved)

    if _MAIN_MODEL in saved_names or _MAIN_MODEL in saved_names.values():
        changes = []
        for name, saved_name in saved_names.items():
            changes.append(
                f"{_shown_name(saved_name)} of the checkpoint is {_shown_name(name)} here"
            )
        raise LoadError(
            f"{listing(changes)}: prepared in another order; prepare them as before, or say which "
            "one is saved: saver.register(model=...)"
        )

    return [replace(item, name=saved_names.get(item.name, item.name)) for item in items]


def _numbered_items(accelerator: Any, registered: Mapping[str, Any]) -> list[Item]:
    """Return the items whose names only number them, from each series with several objects.

    A series is "model", "scheduler" or "custom". The main model counts as the first of the models
    unless the user has registered it.
    """
    items_by_series: dict[str, list[Item]] = {}
    for item in run_items(accelerator, registered):
        items_by_series.setdefault(item.series, []).append(item)

    if "model" in items_by_series and "model" not in registered:
        model = main_model(accelerator, registered)
        main_item = Item(name=_MAIN_MODEL, kind="model", value=model, series="model")
        items_by_series["model"].insert(0, main_item)

    # Items that the user has named are in the series "".
    numbered_items: list[Item] = []
    for series, items in items_by_series.items():
        if series and len(items) > 1:
            numbered_items += items

    return numbered_items


def _class_and_digest(item: Item, sources: Mapping[Key, Source]) -> str:
    """Return the class of an object, and a digest of the properties that tell it from others.

    The properties of a model are the names, shapes and dtypes of its tensors, and which of them are
    trained. Those of a scheduler are the parameters whose learning rate it sets. Those of another
    object are the keys of its state dict.
    """
    properties: list[Any] = []
    if item.kind == "model":
        object_class = user_class(type(unwrap(item.value)))
        for name, source in model_sources(sources, item.name).items():
            properties.append((name, source.shape, str(source.dtype), source.trainable))
    elif item.series == "scheduler":
        object_class = type(unwrap_object(item.value))
        properties += _scheduled_parameters(item.value, sources)
    else:
        object_class = type(unwrap_object(item.value))
        properties += sorted(str(key) for key in item.value.state_dict())

    return f"{object_class.__name__} {xxhash.xxh3_64_hexdigest(repr(properties).encode())}"


def _scheduled_parameters(scheduler: Any, sources: Mapping[Key, Source]) -> list[str]:
    """Return the labels of the parameters whose learning rate the scheduler sets.

    A label is the name of a parameter, with the name of its model unless that is the main model.
    """
    labels: dict[int, str] = {}
    for label, source in labelled_sources(sources).items():
        labels[id(parameter_of(source))] = label

    optimizer = unwrap_optimizer(getattr(unwrap_object(scheduler), "optimizer", None))
    parameter_labels: list[str] = []
    for group in getattr(optimizer, "param_groups", ()):
        parameter_labels += [str(labels.get(id(parameter))) for parameter in group["params"]]

    return sorted(parameter_labels)


def _shown_name(name: str) -> str:
    """Return the name of an item for messages."""
    return "model" if name == _MAIN_MODEL else name


def _saved_names(current: Signatures, saved: Signatures) -> dict[str, str]:
    """Return the saved name of each object whose name has changed, by its name in this run."""
    # An object under the same name and with the same signature has not moved.
    moved_names: dict[str, str] = {}
    for saved_name, signature in saved.items():
        if current.get(saved_name) != signature:
            moved_names[signature] = saved_name

    saved_names: dict[str, str] = {}
    for name, signature in current.items():
        if saved.get(name) != signature and signature in moved_names:
            saved_names[name] = moved_names[signature]

    return saved_names
