"""JSON values in the key-value store of a process group, which takes a few MB under one key."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

_PART_BYTES = 4 << 20  # of one key: torch's store ends at more than 8 MiB, and takes the process group with it
_KEYS_AT_ONCE = 32  # the server has all that one call asks for in memory


def put_value(store: Any, key: str, value: Any) -> int:
    """Store a value under one key, or in parts of which the one under that key comes last; how many these are."""
    text = json.dumps(value).encode()
    parts = [text[low : low + _PART_BYTES] for low in range(0, len(text), _PART_BYTES)]
    for number, part in enumerate(parts[1:], 1):
        store.set(_part_key(key, number), part)
    store.set(key, b"%d %b" % (len(parts), parts[0]))
    return len(parts)


def get_values(store: Any, keys: Sequence[str]) -> Iterator[Any]:
    """The value under each of the keys, which are there; values that are equal are one object."""
    known: dict[bytes, Any] = {}
    for low in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys[low : low + _KEYS_AT_ONCE]
        for key, found in zip(some, store.multi_get(some), strict=True):
            count, _, first = found.partition(b" ")
            text = b"".join([first, *(store.get(_part_key(key, number)) for number in range(1, int(count)))])
            if text not in known:
                known[text] = json.loads(text)
            yield known[text]


def delete_value(store: Any, key: str, parts: int) -> None:
    """Take a value out that is in so many parts. Raises RuntimeError or NotImplementedError where stores only grow."""
    store.delete_key(key)
    for number in range(1, parts):
        store.delete_key(_part_key(key, number))


def _part_key(key: str, number: int) -> str:
    return f"{key}/part-{number}"
