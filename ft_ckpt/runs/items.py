"""The items of a run: named objects (models, optimizers, loaders, ...) and the tensors of its
models.

Names carry no meaning: a tensor is identified by its model's item and its name in that model.
Objects cannot have the names that a state uses itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from ft_ckpt.errors import ConfigError, LoadError, RanksDisagreeError, SelectionError, listing
from ft_ckpt.extensions.deepspeed import EngineCounters, is_zero, zero_optimizer
from ft_ckpt.ranks import (
    ModelTensors,
    Source,
    rank_numbers,
    refuse_one_way_state,
    unwrap,
    user_class,
)
from ft_ckpt.runs import optimizers

ENGINE = "engine"  # the item of the engine's own counters
EXTRA_STATE = "extra state"  # the item of module state beside parameters and buffers
Signatures = Mapping[str, str]
# of a tensor: its model's item, "" for the model that is saved, and its name there
Key = tuple[str, str]
_OWN = frozenset({"weights", "rng", "gradients", "accumulation", ENGINE})  # reserved names
_OWN_BEGINNINGS = ("rank-", "loader-", EXTRA_STATE)


@dataclass(frozen=True, eq=False)
class Item:
    """One object whose state a run needs; `kind` is "optimizer", "model" or "object" (with a state
    dict).
    """

    name: str
    kind: str
    value: Any
    # "model", "scheduler" or "custom" if the name comes from Accelerate's order alone
    series: str = ""


@dataclass(frozen=True, eq=False)
class ExtraState:
    """The state of a model's modules beside parameters and buffers, as an object with a state
    dict.
    """

    model: nn.Module

    def state_dict(self) -> dict[str, Any]:
        """The current values by name."""
        found = ModelTensors(self.model).added()
        refuse_one_way_state(found)
        return {name: one.value for name, one in found.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values. Raises LoadError naming those that were not restored."""
        ModelTensors(self.model).restore_added(state)


def run_items(accelerator: Any, registered: Mapping[str, Any]) -> list[Item]:
    """The objects that Accelerate prepared and those registered by name, without the model that is
    saved.

    A prepared object that is registered has its registered name. Raises SelectionError for a
    registered object that is neither a module, an optimizer nor has a state dict, ConfigError for
    names that are taken or cannot be used.
    """
    names = {bare_identity(value): name for name, value in registered.items() if name != "model"}
    made = _prepared_objects(accelerator, registered)
    found = [(names.get(bare_identity(value), name), value) for name, value in made]
    series = {name: name.split("_")[0] for name, value in made if bare_identity(value) not in names}
    prepared = {bare_identity(value) for _, value in found}
    found += [
        (n, v) for n, v in registered.items() if n != "model" and bare_identity(v) not in prepared
    ]
    _refuse_item_names(found, registered)
    numbered = {
        name: one for name, one in series.items() if one in ("model", "scheduler", "custom")
    }
    return [
        Item(name, _item_kind(name, value), value, numbered.get(name, "")) for name, value in found
    ]


def main_model(accelerator: Any, registered: Mapping[str, Any]) -> nn.Module | None:
    """The model that is saved: the one registered as "model", else the first prepared one without
    another name.
    """
    if "model" in registered:
        return registered["model"]  # type: ignore[no-any-return]
    models = list(getattr(accelerator, "_models", ()))
    named = {bare_identity(value) for value in registered.values()}
    return next(
        (model for model in models if bare_identity(model) not in named),
        models[0] if models else None,
    )


def object_signatures(
    accelerator: Any, registered: Mapping[str, Any], found: Callable[[], Mapping[Key, Source]]
) -> Signatures:
    """Signatures that distinguish several unnamed prepared objects of one kind, by item; "" is the
    saved model.

    A signature is the class and a digest of the tensors or parameters; `found` gives the tensors of
    all models. Raises ConfigError naming objects with equal signatures: a change of their order
    could not be detected.
    """
    series: dict[str, list[Item]] = {}
    for item in run_items(accelerator, registered):
        series.setdefault(item.series, []).append(item)
    if "model" in series and "model" not in registered:
        series["model"].insert(0, Item("", "model", main_model(accelerator, registered), "model"))
    several = [item for kind, some in series.items() if kind and len(some) > 1 for item in some]
    sources = found() if several else {}
    signatures = {
        item.name: f"{item.series} {_object_signature(item, sources)}" for item in several
    }
    groups: dict[str, list[str]] = {}
    for name, signature in signatures.items():
        groups.setdefault(signature, []).append(name or "model")
    problems = [
        f"{', '.join(names)}: differ in their order alone"
        for names in groups.values()
        if len(names) > 1
    ]
    if problems:
        raise ConfigError(
            f"{listing(problems)}; name them, so that they are not confused when the order "
            "changes: saver.register(policy=..., value=...)"
        )
    return signatures


def items_in_saved_order(
    accelerator: Any, registered: Mapping[str, Any], saved: Signatures
) -> list[Item]:
    """The run's items under the names that objects with the same signatures had in the `saved` run.

    Raises LoadError if another model than before would be the saved one.
    """
    model, items = main_model(accelerator, registered), run_items(accelerator, registered)
    if not saved or model is None:
        return items
    live = object_signatures(
        accelerator, registered, lambda: known_sources(walk_models(model, items), items)
    )
    moved = {name: signature for name, signature in live.items() if saved.get(name) != signature}
    free = {signature: name for name, signature in saved.items() if live.get(name) != signature}
    names = {name: free[signature] for name, signature in moved.items() if signature in free}
    wrong = [
        f"{old or 'model'} of the checkpoint is {now or 'model'} here" for now, old in names.items()
    ]
    if "" in names or "" in names.values():
        raise LoadError(
            f"{listing(wrong)}: prepared in another order; prepare them as before, or say which "
            "one is saved: saver.register(model=...)"
        )
    return [replace(item, name=names.get(item.name, item.name)) for item in items]


def check_same_items(everyone: Sequence[Mapping[str, str]]) -> None:
    """Raise RanksDisagreeError naming objects that some ranks lack, or that differ in kind between
    ranks.

    `everyone`: each rank's items, their kinds by name.
    """
    problems = []
    for name in dict.fromkeys(name for one in everyone for name in one):
        kinds: dict[str | None, list[int]] = {}
        for rank, one in enumerate(everyone):
            kinds.setdefault(one.get(name), []).append(rank)
        if len(kinds) > 1:
            found = [
                f"{kind or 'absent'} on rank(s) {rank_numbers(ranks)}"
                for kind, ranks in kinds.items()
            ]
            problems.append(f"{name}: {', '.join(found)}")
    if problems:
        raise RanksDisagreeError(
            f"{listing(problems)}; register the same objects on every rank, not under `if "
            "is_main_process`"
        )


def optimizers_among(items: Iterable[Item]) -> list[tuple[Item, ModuleType, Any]]:
    """The optimizers among `items`, each as `optimizer_of` returns it."""
    return [(item, *optimizer_of(item)) for item in items if item.kind == "optimizer"]


def optimizer_of(item: Item) -> tuple[ModuleType, Any]:
    """The module with the functions for an optimizer, `zero_optimizer` or `optimizers`, and the
    unwrapped optimizer.
    """
    optimizer = optimizers.unwrap_optimizer(item.value)
    return (zero_optimizer if is_zero(optimizer) else optimizers), optimizer


def plain_optimizers(items: Iterable[Item]) -> list[Any]:
    """The torch optimizers among `items`, unwrapped: their steps use gradients of the models' own
    parameters.
    """
    return [optimizer for _, _, optimizer in optimizers_among(items) if not is_zero(optimizer)]


def zero_optimizers(items: Iterable[Item]) -> list[Any]:
    """DeepSpeed's ZeRO optimizers among `items`, unwrapped."""
    return [optimizer for _, _, optimizer in optimizers_among(items) if is_zero(optimizer)]


def refuse_unsaveable(items: Iterable[Item]) -> None:
    """Raise SelectionError naming all optimizers whose state can never be saved."""
    plain = [
        (item.name, optimizer)
        for item, _, optimizer in optimizers_among(items)
        if not is_zero(optimizer)
    ]
    problems = [
        f"{name}: {why}"
        for name, optimizer in plain
        for why in optimizers.unsaveable_state(optimizer)
    ]
    if problems:
        raise SelectionError(
            f"{listing(problems)}: cannot be saved, so a run could not be resumed exactly; use "
            "another optimizer, or save without its state"
        )


def walk_models(model: nn.Module, items: Iterable[Item]) -> dict[str, ModelTensors]:
    """The tensors of all the run's models by item; "" is the model that is saved."""
    models = {"": model, **{item.name: item.value for item in items if item.kind == "model"}}
    return {item: ModelTensors(one) for item, one in models.items()}


def known_sources(models: Mapping[str, ModelTensors], items: Sequence[Item]) -> dict[Key, Source]:
    """The sources of `walk_models`; those that an optimizer of the run has trained are marked
    trainable too.

    Loops freeze and unfreeze parameters: `requires_grad` at one moment does not say which ones a
    run has changed.
    """
    found = {
        (item, name): source
        for item, one in models.items()
        for name, source in one.sources().items()
    }
    labels = labelled_sources(found)
    trained = frozenset(
        i for one in plain_optimizers(items) for i in optimizers.trained_identities(one, labels)
    )
    again = {
        key: replace(s, trainable=True)
        for key, s in found.items()
        if s.key in trained and not s.trainable
    }
    return {**found, **again}


def walk_run(
    model: nn.Module, items: Sequence[Item]
) -> tuple[list[Item], dict[str, ModelTensors], dict[Key, Source]]:
    """The items of a run with their extra state, `walk_models` and `known_sources` of them."""
    models = walk_models(model, items)
    extended = with_extra_state(model, items, models)
    return extended, models, known_sources(models, extended)


def model_sources(found: Mapping[Key, Source], item: str = "") -> dict[str, Source]:
    """The tensors of one model by their names in it."""
    return {name: source for (owner, name), source in found.items() if owner == item}


def labelled_sources(found: Mapping[Key, Source]) -> dict[str, Source]:
    """The tensors of all models by unique labels, for optimizers.

    The label of a further model's tensor is "item:name"; no model's item has a colon in its name. A
    tensor of the saved model has its name, after a colon if it contains one.
    """
    labels = {key: f"{key[0]}:{key[1]}" if key[0] or ":" in key[1] else key[1] for key in found}
    return {
        labels[key]: source if labels[key] == source.name else replace(source, name=labels[key])
        for key, source in found.items()
    }


def tied_names(found: Mapping[str, Source]) -> list[tuple[str, ...]]:
    """The names of each parameter and buffer, in order: several for a tied one."""
    groups: dict[int, list[str]] = {}
    for name, source in found.items():
        if not source.is_added:
            groups.setdefault(source.key, []).append(name)
    return [tuple(group) for group in groups.values()]


def _prepared_objects(accelerator: Any, registered: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The objects that Accelerate prepared, by kind and number, without the model that is saved."""
    main = main_model(accelerator, registered)
    models = [
        m
        for m in getattr(accelerator, "_models", ())
        if main is None or bare_identity(m) != bare_identity(main)
    ]
    found = [(f"model_{i}", m) for i, m in enumerate(models, 1)]
    found += [
        (_numbered_name("optimizer", i), o)
        for i, o in enumerate(getattr(accelerator, "_optimizers", ()))
    ]
    found += [
        (_numbered_name("scheduler", i), s)
        for i, s in enumerate(getattr(accelerator, "_schedulers", ()))
    ]
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    engine = main if wrapped is None else wrapped.engine
    if hasattr(engine, "global_samples"):  # DeepSpeed's, with or without Accelerate
        found.append((ENGINE, EngineCounters(engine)))
    if getattr(accelerator, "scaler", None) is not None:
        found.append(("scaler", accelerator.scaler))
    return found + [
        (_numbered_name("custom", i), o)
        for i, o in enumerate(getattr(accelerator, "_custom_objects", ()))
    ]


def bare_identity(value: Any) -> int:
    """The identity of an object without the wrappers of Accelerate and engines."""
    return id(unwrap(value) if isinstance(value, nn.Module) else _unwrap_object(value))


def _unwrap_object(value: Any) -> Any:
    while type(value).__module__.startswith("accelerate.") and hasattr(value, "scheduler"):
        value = value.scheduler
    return optimizers.unwrap_optimizer(value)


def _object_signature(item: Item, found: Mapping[Key, Source]) -> str:
    """The class of an object, and a digest of its tensors, parameters or state keys."""
    if item.kind == "model":
        held: Any = [
            (n, s.shape, str(s.dtype), s.trainable)
            for n, s in model_sources(found, item.name).items()
        ]
        kind = user_class(type(unwrap(item.value))).__name__
    else:
        value = _unwrap_object(item.value)
        kind, steps = (
            type(value).__name__,
            optimizers.unwrap_optimizer(getattr(value, "optimizer", None)),
        )
        labels = {
            id(optimizers.parameter_of(source)): name
            for name, source in labelled_sources(found).items()
        }
        groups = getattr(steps, "param_groups", ())
        held = sorted(str(labels.get(id(p))) for group in groups for p in group["params"])
        held = held if item.series == "scheduler" else sorted(map(str, item.value.state_dict()))
    return f"{kind} {xxhash.xxh3_64_hexdigest(repr(held).encode())}"


def _refuse_item_names(found: Sequence[tuple[str, Any]], registered: Mapping[str, Any]) -> None:
    """Raise ConfigError for names of two objects, and for reserved names."""
    names = [name for name, _ in found]
    problems = [
        f"{n}: the name of what Accelerate has prepared" for n in registered if names.count(n) > 1
    ]
    problems += [
        f"{name}: a name that checkpoints use themselves"
        for name in registered
        if name in _OWN or name.startswith(_OWN_BEGINNINGS)
    ]
    problems += [
        f"{n!r}: names are not empty, without '/' and ':'"
        for n in registered
        if not n or {"/", ":"} & {*n}
    ]
    if problems:
        raise ConfigError(f"{listing(problems)}; register it under another name")


def _numbered_name(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index}"


def _item_kind(name: str, value: Any) -> str:
    if isinstance(value, nn.Module):
        return "model"
    if is_zero(value) or isinstance(optimizers.unwrap_optimizer(value), torch.optim.Optimizer):
        return "optimizer"
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return "object"
    raise SelectionError(
        f"{name}: {type(value).__name__} has no state_dict() and load_state_dict(); define both, "
        "or leave it out"
    )


_SCORES = ("ipt", "exp_avg_ipt", "exp_avg_unc")


@dataclass(frozen=True, eq=False)
class RankAllocation:
    """The scores and the ranks of AdaLoRA's rank allocator, as an object with a state dict."""

    tuner: Any

    def state_dict(self) -> dict[str, Any]:
        """The current ranks, and scores by parameter name."""
        allocator = self.tuner.rankallocator
        scores = {kind: dict(getattr(allocator, kind)) for kind in _SCORES}
        return {**scores, "rank_pattern": allocator.peft_config.rank_pattern}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ranks and scores, each score on the device of its parameter."""
        allocator, homes = self.tuner.rankallocator, dict(self.tuner.model.named_parameters())
        for kind in _SCORES:
            scores: Mapping[str, Tensor] = state[kind]
            setattr(
                allocator,
                kind,
                {name: score.to(homes[name].device) for name, score in scores.items()},
            )
        allocator.peft_config.rank_pattern = state["rank_pattern"]


def with_extra_state(
    model: nn.Module, items: Sequence[Item], walked: Mapping[str, ModelTensors]
) -> list[Item]:
    """`items`, an item for each model with module state beside parameters and buffers, and
    AdaLoRA's allocators.

    `walked` are the tensors of the models by item, see `walk_models`.
    """
    extended, inside = list(items), unwrap(model)
    # AdaLoRA trains the model itself or direct submodules.
    tuners = [getattr(unwrap(one), "base_model", None) for one in (inside, *inside.children())]
    allocations = [
        RankAllocation(one) for one in tuners if getattr(one, "rankallocator", None) is not None
    ]
    for number, allocation in enumerate(allocations):
        extended.append(Item(f"{EXTRA_STATE}: AdaLoRA's ranks {number}", "object", allocation))
    for name, one in [
        ("", model),
        *((item.name, item.value) for item in items if item.kind == "model"),
    ]:
        if walked[name].added():
            extended.append(
                Item(f"{EXTRA_STATE} of {name}" if name else EXTRA_STATE, "object", ExtraState(one))
            )
    return extended
