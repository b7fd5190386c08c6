"""Records which parameters require a gradient, and compares them with those of a saved run."""

from collections.abc import Mapping, Sequence
from typing import Any

from ft_ckpt.errors import listing
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import layouts_of
from ft_ckpt.runs.items.tensors import Key

FLAGS = "requires_grad"  # key in the document of the training state
_TRAINED = "trained"
_FROZEN = "frozen"


def gradient_flags(sources: Mapping[Key, Source]) -> dict[str, list[str]]:
    """Return the labels of the parameters that require a gradient, or of those that do not.

    The shorter list is returned, as {"trained": [...]} or {"frozen": [...]}.
    """
    trained: list[str] = []
    frozen: list[str] = []
    for label, requires_grad in _flags_by_label(sources).items():
        if requires_grad:
            trained.append(label)
        else:
            frozen.append(label)
    return {_TRAINED: trained} if len(trained) < len(frozen) else {_FROZEN: frozen}


def flags_problem(flags: Mapping[str, Sequence[str]]) -> str | None:
    """Return why `flags` cannot be a result of `gradient_flags`; None if they can."""
    if [*flags] in ([_TRAINED], [_FROZEN]):
        return None
    return f"{listing(sorted(flags), ', ') or 'nothing'}, expected {_TRAINED!r} or {_FROZEN!r}"


def changed_flags(document: Mapping[str, Any], sources: Mapping[Key, Source]) -> list[str]:
    """Return which parameters had another `requires_grad` when `document` was saved.

    There is one sentence for newly frozen parameters, and one for newly trained ones. A document of
    an earlier version has no flags: the result is [].
    """
    flags: Mapping[str, Sequence[str]] | None = document.get(FLAGS)
    if flags is None:
        return []
    lists_trained = _TRAINED in flags
    listed = frozenset(flags[_TRAINED if lists_trained else _FROZEN])
    now_frozen: list[str] = []
    now_trained: list[str] = []
    for label, requires_grad in _flags_by_label(sources).items():
        was_trained = (label in listed) is lists_trained
        if was_trained and not requires_grad:
            now_frozen.append(label)
        elif requires_grad and not was_trained:
            now_trained.append(label)

    sentences = []
    for labels, before, now in (
        (now_frozen, _TRAINED, _FROZEN),
        (now_trained, _FROZEN, _TRAINED),
    ):
        if labels:
            change = f"{before} when it was saved, {now} now (requires_grad)"
            sentences.append(f"{listing(labels, ', ')}: {change}")

    return sentences


def _flags_by_label(sources: Mapping[Key, Source]) -> dict[str, bool]:
    """Return the current `requires_grad` of each parameter by its label.

    `Source.trainable` would not do, because it is also True for what an optimizer has trained.
    """
    parameters = {
        f"{item}: {name}" if item else name: source
        for (item, name), source in sources.items()
        if source.is_parameter
    }
    layouts = layouts_of(source.live for source in parameters.values())
    return {label: layout.trainable for label, layout in zip(parameters, layouts, strict=True)}
