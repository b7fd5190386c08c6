"""Dataclasses between ranks: what each puts into a meeting comes out of it as the same class, on every rank."""

from dataclasses import asdict
from typing import Any, ClassVar, Protocol, TypeVar

from ft_ckpt.checkpoint.typed_json import reader_of
from ft_ckpt.distributed.ranks import Ranks


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=_Dataclass)


def exchange(
    ranks: Ranks,
    what: str,
    kind: type[T],
    value: T | None,
    error: BaseException | None = None,
    same: tuple[str, ...] = (),
) -> list[T]:
    """Meet at `what` and return every rank's `value`, a `kind`, in rank order, on every rank. Collective.

    It travels as JSON; its fields are what `typed_json.reader_of` reads. None is for a rank that has an `error`. The
    fields named in `same` must be equal everywhere. Raises what `Ranks.agree` does.
    """
    if ranks.size == 1 and value is not None and error is None:
        return [value]
    answers = ranks.agree(what, None if value is None else asdict(value), error, same)
    read = reader_of(kind)
    return [read(answer) for answer in answers]
