"""Lists the tensors of a run's models as sources.

A source describes one tensor: its name, shape, dtype, and which elements of it this rank holds. A
tensor is identified by the item of its model and by its name in that model. The names have no
meaning here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import ModelTensors
from ft_ckpt.runs.items.extra_state import with_extra_state
from ft_ckpt.runs.items.objects import Item, plain_optimizers
from ft_ckpt.runs.optimizers import trained_identities

# The key of a tensor: the item of its model ("" is the main model), and its name in the model.
Key = tuple[str, str]


def walk_run(
    model: nn.Module, items: Sequence[Item]
) -> tuple[list[Item], dict[str, ModelTensors], dict[Key, Source]]:
    """Return the items of a run with the extra state of its models, and the tensors of the models.

    The tensors are returned twice: as `walk_models` returns them, and as `run_sources` does.
    """
    models = walk_models(model, items)
    all_items = with_extra_state(model, items, models)
    return all_items, models, run_sources(models, all_items)


def walk_models(model: nn.Module, items: Iterable[Item]) -> dict[str, ModelTensors]:
    """Return the tensors of each model by the name of its item; "" is the main model."""
    models = {"": model, **{item.name: item.value for item in items if item.kind == "model"}}
    return {item: ModelTensors(module) for item, module in models.items()}


def run_sources(models: Mapping[str, ModelTensors], items: Sequence[Item]) -> dict[Key, Source]:
    """Return the sources of all models by key.

    Sources that an optimizer of the run has trained are marked trainable, even if their
    `requires_grad` is False now. Loops freeze and unfreeze parameters, so `requires_grad` at one
    moment does not say which parameters a run has changed.
    """
    sources: dict[Key, Source] = {}
    for item, tensors in models.items():
        for name, source in tensors.sources().items():
            sources[item, name] = source
    labels = labelled_sources(sources)
    trained: set[int] = set()
    for optimizer in plain_optimizers(items):
        trained |= trained_identities(optimizer, labels)
    for key, source in sources.items():
        if source.key in trained and not source.trainable:
            sources[key] = replace(source, trainable=True)
    return sources


def model_sources(sources: Mapping[Key, Source], item: str = "") -> dict[str, Source]:
    """Return the tensors of one model by their names in it."""
    return {name: source for (owner, name), source in sources.items() if owner == item}


def labelled_sources(sources: Mapping[Key, Source]) -> dict[str, Source]:
    """Return the tensors of all models by unique labels, for optimizers.

        main model, "lm_head.weight"     lm_head.weight
        main model, "a:b"                :a:b
        item "value", "head.weight"      value:head.weight

    The labels are unique, because the name of an item has no colon.
    """
    labelled: dict[str, Source] = {}
    for (item, name), source in sources.items():
        label = f"{item}:{name}" if item or ":" in name else name
        labelled[label] = source if label == source.name else replace(source, name=label)
    return labelled


def tied_names(sources: Mapping[str, Source]) -> list[tuple[str, ...]]:
    """Return the names of each parameter and buffer. A tied tensor has several names."""
    groups: dict[int, list[str]] = {}
    for name, source in sources.items():
        if not source.is_added:
            groups.setdefault(source.key, []).append(name)
    return [tuple(group) for group in groups.values()]
