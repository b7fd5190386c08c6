"""Reads and applies rules that rename tensors.

A rule maps an old name to a new name. If both end in *, it maps an old prefix to a new one. For
example, {"encoder.*": "model.encoder.*"} renames "encoder.norm.weight" to
"model.encoder.norm.weight".
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ft_ckpt.errors import ConfigError, SelectionError, listing
from ft_ckpt.storage import read_text
from ft_ckpt.storage.places import Place, open_place

Names = Mapping[str, str]


def read_map(source: str | Path | Names | None) -> dict[str, str]:
    """Return the rules in a mapping, a JSON file or a text file, as new name by old name.

    A text file has lines "old new", in which # begins a comment. Raises ConfigError for another
    source and for ambiguous rules.
    """
    if source is None:
        return {}
    if isinstance(source, Mapping):
        pairs: list[tuple[Any, Any]] = list(source.items())
    else:
        pairs = _read_pairs(open_place(source))

    not_text: list[str] = []
    one_sided: list[str] = []
    for old, new in pairs:
        if not isinstance(old, str) or not isinstance(new, str):
            not_text.append(f"{old!r}")
        elif old.endswith("*") != new.endswith("*"):
            one_sided.append(f"{old!r}")

    if not_text:
        raise ConfigError(
            f"{listing(not_text, ', ')}: expected an old name and a new one, both text"
        )

    counts = Counter(old for old, _ in pairs)
    repeated = sorted(f"{old!r}" for old, count in counts.items() if count > 1)
    if one_sided or repeated:
        raise ConfigError(
            f"{listing(one_sided + repeated, ', ')}: expected each old name once, and * at the end "
            "of both or none"
        )

    return dict(pairs)


def _read_pairs(place: Place) -> list[tuple[Any, Any]]:
    text = read_text(place.store, place.name)
    if text.lstrip().startswith("{"):
        try:
            pairs = json.loads(text, object_pairs_hook=list)  # keeps names that occur twice
        except ValueError as error:
            raise ConfigError(
                f"{place}: not JSON ({error}); expected old names and new ones"
            ) from error
        return [(old, new) for old, new in pairs]

    lines = split_lines(text)
    wrong = [" ".join(words) for words in lines if len(words) != 2]
    if wrong:
        raise ConfigError(
            f"{place}: {listing(wrong)}: expected an old name and a new one in each line"
        )

    return [(words[0], words[1]) for words in lines]


def split_lines(text: str) -> list[list[str]]:
    """Return the words of each line that is not empty or a comment (#)."""
    lines = [line.split() for line in text.splitlines()]
    return [words for words in lines if words and not words[0].startswith("#")]


def check_used(table: Names, names: Iterable[str], source: str) -> None:
    """Raise SelectionError for old names and prefixes in `table` that match none of `names`."""
    tensor_names = set(names)
    unused = []
    for old in table.keys() - tensor_names:
        is_prefix = old.endswith("*")
        if not is_prefix or not any(name.startswith(old[:-1]) for name in tensor_names):
            unused.append(old)
    if unused:
        raise SelectionError(
            f"{listing(sorted(unused), ', ')}: to be renamed, but not in {source}; "
            "`ft-ckpt show` lists names"
        )


def rename_tensors(names: Iterable[str], table: Names) -> dict[str, str]:
    """Return the new name of each of `names`. A name without a rule stays.

    A rule for the exact name comes before a rule for a prefix, and a longer prefix before a
    shorter one. Raises SelectionError naming tensors that would get the same name.
    """
    prefixes = sorted((old for old in table if old.endswith("*")), key=len, reverse=True)
    new_names = {}
    for name in names:
        prefix = next((old for old in prefixes if name.startswith(old[:-1])), None)
        if name in table or prefix is None:
            new_names[name] = table.get(name, name)
        else:
            new_names[name] = table[prefix][:-1] + name[len(prefix) - 1 :]

    first_names: dict[str, str] = {}
    conflicts = []
    for name, new_name in new_names.items():
        first = first_names.setdefault(new_name, name)
        if first != name:
            conflicts.append(f"{name} and {first} -> {new_name}")

    if conflicts:
        raise SelectionError(
            f"{listing(conflicts)}: two tensors would have one name; rename one of them differently"
        )

    return new_names
