"""Compares a transformers model with the model that transformers makes from its saved config.

`from_pretrained` makes the model that config.json describes, and fills it from the files. It drops
a stored tensor that this model lacks, and draws a tensor at random that the files lack, with at
most a line in a log. So the save compares the names and shapes of both models before it commits, on
the meta device.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from ft_ckpt.errors import CompanionError, listing, shown
from ft_ckpt.messages import warn
from ft_ckpt.model.empty import Shapes, read_config, shapes_of_new
from ft_ckpt.model.sidecars.quantisation import has_packed_tensors, is_quantised
from ft_ckpt.model.tensors import Part
from ft_ckpt.ranks.wrappers import user_class

_CACHED_COMPARISONS = 16  # a process saves at most so many models in turns
_SAVES_TO_RESUME = "save a checkpoint to resume from with save_state()"


@dataclass(frozen=True)
class _ConfigComparison:
    """Result of comparing a model with the one that transformers makes from its config.

    Attributes:
        differences: a text for each tensor that differs.
        argument: an argument of the class with which there are no differences, such as
            "add_pooling_layer=False".
        unreadable: why transformers cannot read the config, or "".
        unbuildable: why the class cannot make a model from the config, or "".
    """

    differences: tuple[str, ...] = ()
    argument: str = ""
    unreadable: str = ""
    unbuildable: str = ""


def check_config(part: Part, config: str, *, is_run: bool) -> tuple[str, ...]:
    """Return notes on what `from_pretrained` would not load of a saved model.

    `config` is the text of its config.json. A class that transformers does not know gets a note
    that says how to load it.

    Raises CompanionError if transformers cannot read the config, or would make a model with other
    tensors from it. If `is_run`, this is a note and a warning instead, because the tensors of a run
    are restored into the live model.
    """
    cls = user_class(type(part.module))
    packed = _packed_layers(part)
    sources = {name: source for name, source in part.tensors.items() if not source.is_added}
    shapes = tuple((name, source.shape) for name, source in sources.items())
    is_loadable = _is_public(cls) or getattr(cls, "_auto_class", None) is not None
    loaded_class = cls if is_loadable else _public_ancestor(cls)
    comparison = _ConfigComparison()
    if loaded_class is not None:
        comparison = _compare(loaded_class, config, shapes, packed)
    if not is_loadable:
        return (_note_on_own_class(cls, loaded_class, comparison),)
    if comparison.argument:
        remedy = f"load it with from_pretrained(..., {comparison.argument})"
        return (f"{cls.__name__}: made with {comparison.argument}, which no config says; {remedy}",)

    # Custom code can need more than a config, so this is no error.
    if comparison.unbuildable and not _is_public(cls):
        reason = f"of which it cannot be made here ({comparison.unbuildable})"
        return (f"{cls.__name__}: not compared with its config, {reason}",)

    problem = _problem_of(cls, comparison)
    if not problem:
        return ()
    if not is_run:
        raise CompanionError(f"{problem}, or {_SAVES_TO_RESUME}; nothing is committed")
    warn(f"{problem}; until then, save() refuses this model")
    return (
        f"{problem}; from_pretrained cannot load this checkpoint, a resume into the same model can",
    )


def _problem_of(cls: type, comparison: _ConfigComparison) -> str:
    """Return what transformers would not load, and the remedy. "" if it would load everything."""
    name = cls.__name__
    if comparison.unreadable:
        return (
            f"config.json: transformers cannot read it again ({comparison.unreadable}); correct "
            "model.config"
        )

    if comparison.unbuildable:
        return (
            f"config.json: transformers cannot make a {name} of it ({comparison.unbuildable}); "
            "correct model.config"
        )

    if not comparison.differences:
        return ""
    return (
        f"{listing(list(comparison.differences))}: {len(comparison.differences)} difference(s) "
        f"between the model and the {name} that from_pretrained makes of its config; set the "
        "fields of model.config that describe the change (such as num_labels, num_hidden_layers, "
        "intermediate_size, vocab_size), or give the model a class of its own"
    )


def _note_on_own_class(cls: type, ancestor: type | None, comparison: _ConfigComparison) -> str:
    """Return a note on how to load a class of the script.

    It also says what the Auto classes would load instead: `ancestor`, a class of transformers.
    """
    name = cls.__name__
    note = (
        f"{name}: a class that transformers does not have; load it with ft_ckpt.load_model(folder, "
        f"into=model), where model is a {name}"
    )
    if ancestor is None:
        return note
    loss = ", without the code of its own"
    if comparison.differences:
        loss = f", which differs in {listing(list(comparison.differences))}"
    return f"{note}; the Auto classes may load the folder as {ancestor.__name__}{loss}"


def _is_public(cls: type) -> bool:
    """Check whether transformers finds the class by the name in `architectures`."""
    import transformers

    return getattr(transformers, cls.__name__, None) is cls


def _public_ancestor(cls: type) -> type | None:
    """Return the nearest class of transformers that a class of the script is derived from.

    Returns None if it is derived from PreTrainedModel directly.
    """
    import transformers

    for base in cls.__mro__[1:]:
        if base is transformers.PreTrainedModel:
            return None
        if _is_public(base):
            return base
    return None


def _packed_layers(part: Part) -> frozenset[str]:
    """Return the paths of the layers whose weights a quantiser has packed."""
    module: nn.Module = part.module
    if not is_quantised(module, module.config):
        return frozenset()
    packed: set[int] = set()
    for layer in module.modules():
        if has_packed_tensors(layer):
            tensors = [*layer._parameters.values(), *layer._buffers.values()]
            packed.update(id(tensor) for tensor in tensors if tensor is not None)
    paths = [_layer_of(name) for name, source in part.tensors.items() if source.key in packed]
    return frozenset(paths)


# The result is kept, so that the model is made once while its config and its names stay the same.
@lru_cache(_CACHED_COMPARISONS)
def _compare(
    cls: Any, config: str, shapes: tuple[tuple[str, tuple[int, ...]], ...], packed: frozenset[str]
) -> _ConfigComparison:
    """Compare `shapes` with those of the model that `cls` makes from the text of a config."""
    try:
        settings = read_config(cls.config_class, config)
    except Exception as error:  # noqa: BLE001 - anything that a config class raises for its fields
        return _ConfigComparison(unreadable=shown(error))

    live = dict(shapes)
    try:
        differences = _differences(live, *shapes_of_new(cls, settings, {}), packed)
    except Exception as error:  # noqa: BLE001 - anything that a model class raises for its config
        return _ConfigComparison(unbuildable=shown(error))

    if not differences:
        return _ConfigComparison()
    for name, value in _other_arguments(cls):
        if not _differences(live, *shapes_of_new(cls, settings, {name: value}), packed):
            return _ConfigComparison(argument=f"{name}={value}")

    return _ConfigComparison(tuple(differences))


def _other_arguments(cls: type) -> Iterator[tuple[str, bool]]:
    """Yield the boolean arguments of the class, each with the value that is not its default."""
    for name, parameter in inspect.signature(cls).parameters.items():
        if isinstance(parameter.default, bool):
            yield name, not parameter.default


def _differences(
    live: Shapes,
    expected: Shapes,
    optional: re.Pattern[str] | None,
    packed: frozenset[str],
) -> list[str]:
    """List what `from_pretrained` would drop, draw at random, or refuse because of its shape.

    `live` are the shapes of the saved model, `expected` those of the model made from its config.
    Names that match `optional` need not be in the files. `packed` are the paths of quantised
    layers.
    """
    layers = {_layer_of(name) for name in expected}
    live_layers = {_layer_of(name) for name in live}
    differences = []
    for name, shape in live.items():
        layer = _layer_of(name)
        if packed and layer in layers and (name not in expected or layer in packed):
            continue  # A quantiser changes the shapes of a layer and adds scales to it.
        if name not in expected:
            differences.append(f"{name}: in the model, not in that of its config")
        elif expected[name] != shape:
            differences.append(
                f"{name}: {shape} in the model, {expected[name]} in that of its config"
            )

    for name in expected:
        is_packed = _layer_of(name) in packed and _layer_of(name) in live_layers
        is_optional = optional is not None and optional.search(name) is not None
        if name not in live and not is_packed and not is_optional:
            differences.append(f"{name}: not in the model, in that of its config")

    return differences


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0]
