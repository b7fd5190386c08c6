"""The tensors of a run's models.

Names carry no meaning: a tensor is identified by its model's item and its name in that model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import ModelTensors
from ft_ckpt.runs.items.extra_state import with_extra_state
from ft_ckpt.runs.items.objects import Item, plain_optimizers
from ft_ckpt.runs.optimizers import trained_identities

# of a tensor: its model's item, "" for the model that is saved, and its name there
Key = tuple[str, str]


def walk_run(
    model: nn.Module, items: Sequence[Item]
) -> tuple[list[Item], dict[str, ModelTensors], dict[Key, Source]]:
    """Return the items of a run with their extra state, `walk_models` and `run_sources` of them."""
    models = walk_models(model, items)
    extended = with_extra_state(model, items, models)
    return extended, models, run_sources(models, extended)


def walk_models(model: nn.Module, items: Iterable[Item]) -> dict[str, ModelTensors]:
    """Return the tensors of all the run's models by item; "" is the model that is saved."""
    models = {"": model, **{item.name: item.value for item in items if item.kind == "model"}}
    return {item: ModelTensors(module) for item, module in models.items()}


def run_sources(models: Mapping[str, ModelTensors], items: Sequence[Item]) -> dict[Key, Source]:
    """Return the sources of `walk_models`.

    Sources that an optimizer of the run has trained are marked trainable too. Loops freeze and
    unfreeze parameters: `requires_grad` at one moment does not say which ones a run has changed.
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

    The label of a further model's tensor is "item:name"; no model's item has a colon in its name. A
    tensor of the saved model has its name, after a colon if it contains one.
    """
    labelled: dict[str, Source] = {}
    for (item, name), source in sources.items():
        label = f"{item}:{name}" if item or ":" in name else name
        labelled[label] = source if label == source.name else replace(source, name=label)
    return labelled


def tied_names(sources: Mapping[str, Source]) -> list[tuple[str, ...]]:
    """Return the names of each parameter and buffer, in order: several for a tied one."""
    groups: dict[int, list[str]] = {}
    for name, source in sources.items():
        if not source.is_added:
            groups.setdefault(source.key, []).append(name)
    return [tuple(group) for group in groups.values()]
