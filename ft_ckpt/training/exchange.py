"""Dataclasses as messages between ranks.

Who needs what of the others decides how: `hear_leader` where rank 0's is everybody's, `decide_together` where all need
what follows from all, `tell_leader` where rank 0 alone needs each of them. No rank gets what it does not need.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Protocol, TypeVar

from ft_ckpt.checkpoint.manifest import reader_of
from ft_ckpt.distributed.agreement import Values
from ft_ckpt.distributed.ranks import Ranks


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=_Dataclass)
R = TypeVar("R", bound=_Dataclass)


def hear_leader(
    ranks: Ranks,
    what: str,
    kind: type[T],
    value: T | None,
    error: BaseException | None = None,
    same: tuple[str, ...] = (),
) -> T:
    """Meet at `what` with each rank's `value`, a `kind`; rank 0's, on every rank. Collective.

    It travels as JSON; its fields are what `manifest.reader_of` reads. None is for a rank that has an `error`. The
    fields named in `same` must be equal everywhere. Raises what `Ranks.agree` does.
    """
    if ranks.size == 1 and value is not None and error is None:
        return value
    found: T = reader_of(kind)(ranks.agree(what, _sent_fields(value), error, same).told)
    return found


def decide_together(
    ranks: Ranks,
    what: str,
    value: T | None,
    decide: Callable[[Sequence[T]], R],
    kinds: tuple[type[T], type[R]],
    error: BaseException | None = None,
    same: tuple[str, ...] = (),
) -> tuple[R, Sequence[T]]:
    """As `hear_leader`, and what `decide` makes on rank 0 of the values in rank order; on rank 0 also these.

    `kinds` are those of the values and of the decision. Raises on all ranks what `decide` raises.
    """
    if ranks.size == 1 and value is not None and error is None:
        return decide([value]), [value]
    known: dict[int, T] = {}
    read: Callable[[Any], T] = reader_of(kinds[0])

    def all_read(values: Values) -> Sequence[T]:
        known.update({id(one): read(one) for one in {id(one): one for one in values}.values()})
        return [known[id(one)] for one in values]

    agreed = ranks.agree(what, _sent_fields(value), error, same, decide=lambda values: asdict(decide(all_read(values))))
    return reader_of(kinds[1])(agreed.told), [known[id(one)] for one in agreed.values]


def tell_leader(
    ranks: Ranks, what: str, kind: type[T], value: T | None, error: BaseException | None = None
) -> Sequence[T]:
    """As `hear_leader`; on rank 0 every rank's value, in rank order, and nothing on the others."""
    if ranks.size == 1 and value is not None and error is None:
        return [value]
    values = ranks.agree(what, _sent_fields(value), error, decide=lambda _: None).values
    read: Callable[[Any], T] = reader_of(kind)
    return [read(one) for one in values]


def _sent_fields(value: _Dataclass | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
