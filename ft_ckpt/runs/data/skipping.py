"""A sampler that skips samples without reading them, and a digest of the order of samples."""

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
    """A digest of the items that the run has consumed in a pass, in their order.

    The items are those of the outermost sampler. Because loaders prefetch, an item is queued when
    the sampler yields it, and goes into the digest when the run takes its batch.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._forget_items()

    def follow(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items of a new pass, and queue each when it is requested."""
        self._is_known = True
        self._forget_items()
        for item in items:
            if self._is_known:
                try:
                    self._queued.append(repr(_plain_item(item)).encode())
                except TypeError:
                    self._is_known = False
            yield item

    def take(self, count: int) -> None:
        """Add the next `count` items to the digest, or all queued ones if there are fewer."""
        for _ in range(min(count, len(self._queued))):
            self._taken.update(self._queued.popleft())

    @property
    def digest(self) -> str | None:
        """The digest of all taken items as hexadecimal text.

        It is None if an item is not a number, a text or a list of them, and before `follow`.
        """
        return self._taken.hexdigest() if self._is_known else None

    def _forget_items(self) -> None:
        self._queued: deque[bytes] = deque()
        self._taken = blake2b(digest_size=8)


def _plain_item(item: Any) -> Any:
    """Convert the item to integers, strings and lists of them.

    Raises TypeError for any other value.
    """
    if isinstance(item, str):
        return item
    if isinstance(item, (list, tuple)):
        return [_plain_item(element) for element in item]
    return operator.index(item)


class SkippingSampler:
    """A sampler that skips items in its first iteration, and otherwise acts as the sampler `plain`.

    The first iteration yields `keep` items, skips `drop` items and yields the rest. `plain` begins
    in `random_state`, or in the current state if that is None.
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
        # Begin to iterate `plain` now and not at the first item, as the loader would: some samplers
        # draw random numbers here. Loaders with workers make two iterators and use the second one,
        # so `_is_new` stays True until items are requested.
        if self._random_state is None or not self._is_new:
            return self._remaining_items(iter(self.plain), None)
        self._random_state.put_back()
        items = iter(self.plain)
        return self._remaining_items(items, self._random_state.now())

    def _remaining_items(
        self, items: Iterator[Any], random_state: RestorableRandomState | None
    ) -> Iterator[Any]:
        if self._order is not None:
            items = self._order.follow(items)
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
        if name == "plain":  # it does not exist yet while this object is being copied
            raise AttributeError(name)
        return getattr(self.plain, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # so that isinstance checks for batch samplers see the plain sampler
        return type(self.plain)
