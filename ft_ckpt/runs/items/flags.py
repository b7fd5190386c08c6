"""Which parameters of a run's models require a gradient, in its document and now."""

from collections.abc import Mapping, Sequence
from typing import Any

from ft_ckpt.errors import listing
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import layouts_of
from ft_ckpt.runs.items.tensors import Key

FLAGS = "requires_grad"  # key in the document
_TRAINED, _FROZEN = "trained", "frozen"


def gradient_flags(sources: Mapping[Key, Source]) -> dict[str, list[str]]:
    """List the parameters that require a gradient, or those that do not, whichever are fewer."""
    trained: list[str] = []
    frozen: list[str] = []
    for label, requires_grad in _flags_by_label(sources).items():
        if requires_grad:
            trained.append(label)
        else:
            frozen.append(label)
    return {_TRAINED: trained} if len(trained) < len(frozen) else {_FROZEN: frozen}


def flags_problem(flags: Mapping[str, Sequence[str]]) -> str | None:
    """Tell why `flags`, as they were read, are not those of `gradient_flags`."""
    if [*flags] in ([_TRAINED], [_FROZEN]):
        return None
    return f"{listing(sorted(flags), ', ') or 'nothing'}, expected {_TRAINED!r} or {_FROZEN!r}"


def changed_flags(document: Mapping[str, Any], sources: Mapping[Key, Source]) -> list[str]:
    """Describe which parameters had another `requires_grad` when `document` was saved.

    There is a sentence for each direction; none for documents of earlier versions without flags.
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
    """Map each parameter to its `requires_grad`, whether an optimizer has trained it or not."""
    parameters = {
        f"{item}: {name}" if item else name: source
        for (item, name), source in sources.items()
        if source.is_parameter
    }
    layouts = layouts_of(source.live for source in parameters.values())
    return {label: layout.trainable for label, layout in zip(parameters, layouts, strict=True)}
