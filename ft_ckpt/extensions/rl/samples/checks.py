"""Checks of the settings and of the stored state of a `Frontier`."""

import hashlib
import operator
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from ft_ckpt.errors import ConfigError, CorruptError, LoadError, listing

VERSION = 1  # of the state and of the shuffled order
ENDLESS = 1 << 62  # the end of the last epoch if there is no last epoch
# Types whose repr is the same in every process and version of Python.
_PLAIN_IDS = {str, int, bytes}
_KEYS = ("version", "samples", "ids", "seed", "epochs", "low", "runs", "dropped")


def count_samples(samples: Any) -> int:
    """Return the number of samples, or -1 for an object that is no number and has no length."""
    if isinstance(samples, (bool, str, bytes)):
        return -1
    try:
        return len(samples) if isinstance(samples, Sized) else operator.index(samples)
    except (TypeError, NotImplementedError):  # a loader of an iterable dataset
        return -1


def check_frontier_settings(
    samples: object, count: int, epochs: object, shuffle: object, seed: object
) -> None:
    """Raise ConfigError naming all invalid settings."""
    problems = []
    if count < 0:
        problems.append(
            f"samples={samples!r}: expected their number, a list of ids, or a dataset with a length"
        )
    elif count == 0:
        problems.append("samples: there are none; expected at least one")

    if epochs is not None and (type(epochs) is not int or epochs < 1):
        problems.append(f"epochs={epochs!r}: expected an int of at least 1, or None for no end")
    if type(shuffle) is not bool:
        problems.append(f"shuffle={shuffle!r}: expected True or False")
    if type(seed) is not int:
        problems.append(f"seed={seed!r}: expected an int")
    if problems:
        raise ConfigError(listing(problems))


def digest_of(ids: Sequence[Any]) -> str:
    """Compute a digest of ids and their order.

    Raises ConfigError for ids whose repr may differ in another process.
    """
    digest = hashlib.blake2b(digest_size=16)
    for begin in range(0, len(ids), 4096):
        block = list(ids[begin : begin + 4096])
        kinds: set[type] = set()
        for sample_id in block:
            if type(sample_id) is tuple:
                kinds.update(map(type, sample_id))
            else:
                kinds.add(type(sample_id))

        if not kinds <= _PLAIN_IDS:
            names = ", ".join(sorted(kind.__name__ for kind in kinds - _PLAIN_IDS))
            raise ConfigError(
                f"samples: ids of type {names}, expected str, int, bytes or tuples of these; give "
                "len(samples), and tickets have indices"
            )

        digest.update(repr(block).encode("utf-8", "surrogatepass"))

    return digest.hexdigest()


def check_state(state: Mapping[str, Any]) -> None:
    """Raise CorruptError naming missing or invalid fields, LoadError for another version."""
    missing = [name for name in _KEYS if name not in state]
    if missing:
        raise CorruptError(
            f"frontier: {', '.join(missing)} missing; it is not what state_dict returns"
        )

    if state["version"] != VERSION:
        raise LoadError(
            f"frontier: version {state['version']!r}, expected {VERSION}; resume with the ft_ckpt "
            "that saved it"
        )

    is_allowed = {
        "low": _is_count(state["low"]),
        "dropped": _is_count(state["dropped"]),
        "epochs": state["epochs"] is None or _is_count(state["epochs"]),
        "runs": _are_run_lengths(state["runs"]),
    }
    wrong = [name for name, allowed in is_allowed.items() if not allowed]
    if wrong:
        raise CorruptError(
            f"frontier: {', '.join(wrong)} invalid; it is not what state_dict returns"
        )


def _is_number(text: str) -> bool:
    """Check whether the text is a number of at most 19 digits."""
    return text.isascii() and text.isdigit() and 0 < len(text) < 20


def _are_run_lengths(runs: object) -> bool:
    """Check whether `runs` is text with an even count of numbers above 0."""
    if not isinstance(runs, str):
        return False
    lengths = runs.split()
    are_numbers = all(_is_number(length) for length in lengths)
    return are_numbers and len(lengths) % 2 == 0 and all(map(int, lengths))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= ENDLESS
