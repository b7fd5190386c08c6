"""Which parameters of a run want a gradient: told by a save, and compared with the run that is resumed.

It is for the script to say what is frozen, and nothing here changes it. A run that unfroze layers at one step, resumed
behind that step, would train fewer without a word.
"""

from collections.abc import Mapping
from typing import Any

from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.wrappers import by_engine, layouts_of
from ft_ckpt.errors import CorruptError, listing
from ft_ckpt.training.items import Key
from ft_ckpt.training.state import Document

FLAGS = "requires_grad"  # their key in the document of a state
_TRAINED, _FROZEN = "trained", "frozen"


def gradient_flags(found: Mapping[Key, Source]) -> Document:
    """The labels of parameters that want a gradient, or of those that want none, whichever are fewer."""
    flags = _flags_by_label(found)
    trained, frozen = [[label for label, one in flags.items() if one is flag] for flag in (True, False)]
    return {_TRAINED: trained} if len(trained) < len(frozen) else {_FROZEN: frozen}


def check_flags(told: Mapping[str, Any] | None) -> None:
    """Raise CorruptError for what `gradient_flags` did not give; None is of an earlier version."""
    if told is not None and [*told] not in ([_TRAINED], [_FROZEN]):
        raise CorruptError(f"{listing(sorted(told), ', ') or 'nothing'}, expected {_TRAINED!r} or {_FROZEN!r}")


def changed_flags(document: Document, found: Mapping[Key, Source]) -> list[str]:
    """In words, what wants a gradient now and did not when the state of `document` was saved, and the reverse.

    Nothing is said of states of earlier versions, which did not tell.
    """
    told: Document | None = document.get(FLAGS)
    if told is None:
        return []
    listed = frozenset(told[_TRAINED] if _TRAINED in told else told[_FROZEN])
    changed: dict[bool, list[str]] = {True: [], False: []}
    for label, flag in _flags_by_label(found).items():
        if ((label in listed) is (_TRAINED in told)) is not flag:
            changed[flag].append(label)
    words = {
        False: f"{_TRAINED} when it was saved, {_FROZEN} now",
        True: f"{_FROZEN} when it was saved, {_TRAINED} now",
    }
    return [f"{listing(labels, ', ')}: {words[flag]} (requires_grad)" for flag, labels in changed.items() if labels]


def _flags_by_label(found: Mapping[Key, Source]) -> dict[str, bool]:
    """What the parameters themselves say, whatever an optimizer has trained."""
    parameters = {f"{item}: {name}" if item else name: one for (item, name), one in found.items() if one.is_parameter}
    layouts = layouts_of(by_engine(one.live for one in parameters.values()))
    return {label: layout.trainable for label, layout in zip(parameters, layouts, strict=True)}
