"""A sampler that skips samples unread, and a digest of the order of those that are taken."""

import operator
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any, Protocol


class RestorableRandomState(Protocol):
    """The state of the random number generators that a loader may draw from."""

    def put_back(self) -> None:
        """Restore all generators."""

    def now(self) -> "RestorableRandomState":
        """Capture the state of the same generators now."""


class SampleOrder:
    """A digest of the items of the outermost sampler that the run has consumed in a pass.

    Loaders prefetch: items are noted when the sampler yields them, and digested when the run takes
    them.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._forget_items()

    def follow(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items of a new pass, and note each when it is requested."""
        self._is_known = True
        self._forget_items()
        for item in items:
            if self._is_known:
                try:
                    self._ahead.append(repr(_plain_item(item)).encode())
                except TypeError:
                    self._is_known = False
            yield item

    def take(self, count: int) -> None:
        """Digest `count` more items, or all noted ones if there are fewer."""
        for _ in range(min(count, len(self._ahead))):
            self._taken.update(self._ahead.popleft())

    @property
    def digest(self) -> str | None:
        """Return the digest of all taken items.

        The digest is None if items are not plain values, or no sampler was followed.
        """
        return self._taken.hexdigest() if self._is_known else None

    def _forget_items(self) -> None:
        self._ahead: deque[bytes] = deque()
        self._taken = blake2b(digest_size=8)


def _plain_item(item: Any) -> Any:
    """Convert the item to nested plain values.

    Raises TypeError for values other than numbers and strings.
    """
    if isinstance(item, str):
        return item
    if isinstance(item, (list, tuple)):
        return [_plain_item(element) for element in item]
    return operator.index(item)


class SkippingSampler:
    """A sampler that skips items in its first iteration and is `plain` in everything else.

    `random_state` is the random state from which to iterate `plain`; None is the current state.
    """

    def __init__(
        self,
        plain: Any,
        keep: int,
        drop: int,
        random_state: RestorableRandomState | None,
        order: SampleOrder | None,
    ) -> None:
        self.plain = plain
        self._keep = keep
        self._drop = drop
        self._random_state = random_state
        self._order = order
        self._is_new = True

    def __iter__(self) -> Iterator[Any]:
        # At once, as the loader does: some samplers draw here, others at the first item. Loaders
        # with workers make two iterators and use the second.
        if self._random_state is None or not self._is_new:
            return self._remaining_items(iter(self.plain), None)
        self._random_state.put_back()
        items = iter(self.plain)
        return self._remaining_items(items, self._random_state.now())

    def _remaining_items(
        self, items: Iterator[Any], random_state: RestorableRandomState | None
    ) -> Iterator[Any]:
        items = items if self._order is None else self._order.follow(items)
        if self._is_new:
            self._is_new = False
            if random_state is not None:
                random_state.put_back()
            yield from islice(items, self._keep)
            for _ in islice(items, self._drop):
                pass
        yield from items

    def __len__(self) -> int:
        return len(self.plain)

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # absent while this object is being copied
            raise AttributeError(name)
        return getattr(self.plain, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # an isinstance check for batch samplers means the plain one
        return type(self.plain)
