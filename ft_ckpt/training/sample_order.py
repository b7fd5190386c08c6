"""The proof that a sampler gives, in a pass that is gone on with, what it gave in the pass that was left."""

import operator
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any


class SampleOrder:
    """What the outermost sampler has given in a pass, as one digest of what the run has been given of it.

    Loaders read ahead of what they give: what is noted waits until it is taken.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._forget_items()

    def follow(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of a new pass, each noted when it is asked for."""
        self._is_known = True
        self._forget_items()
        for item in items:
            if self._is_known:
                self._note_item(item)
            yield item

    def take(self, count: int) -> None:
        """So many more items were given to the run, or all that there were."""
        for _ in range(min(count, len(self._ahead))):
            self._taken.update(self._ahead.popleft())

    @property
    def digest(self) -> str | None:
        """Of all that was taken; None where items are no numbers or words, or no sampler was followed here."""
        return self._taken.hexdigest() if self._is_known else None

    def _forget_items(self) -> None:
        self._ahead: deque[bytes] = deque()
        self._taken = blake2b(digest_size=8)

    def _note_item(self, item: Any) -> None:
        try:
            self._ahead.append(repr(_plain_item(item)).encode())
        except TypeError:
            self._is_known = False


def _plain_item(item: Any) -> Any:
    """Numbers, words and nestings of them, however they are held. Raises TypeError for anything else."""
    if isinstance(item, str):
        return item
    if isinstance(item, (list, tuple)):
        return [_plain_item(each) for each in item]
    return operator.index(item)
