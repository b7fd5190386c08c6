"""Checks JSON values and converts them to records (frozen dataclasses), by msgspec.

The types of the fields of a record are the schema.
"""

import re
import threading
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec

from ft_ckpt.messages import short_repr

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A whole number from 0 on: sizes, offsets and counts are below 2^63."""
Seconds = Annotated[float, msgspec.Meta(ge=0)]
"""A number of seconds from 0 on."""
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""A whole number from 1 on."""
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number of 64 bits."""

_Kind = TypeVar("_Kind")
# msgspec's message, such as "Expected `int`, got `str` - at `$.parts[0].start`"
_PLACE = re.compile(r"Expected (?P<expected>.*?)(, got .*)? - at \$\.?(?P<field>.*)", re.DOTALL)
# a step in a path such as "parts[0].start": a name or an index
_STEP = re.compile(r"([^.\[\]]+)|\[(.*?)\]")
_preparing = threading.Lock()


class FieldError(ValueError):
    """A value that has not the declared type or range. The message names the field."""


def as_record(value: Any, kind: type[_Kind]) -> _Kind:
    """Convert a JSON value to the type `kind`.

    It is a dataclass, a named tuple, `tuple[X, ...]`, `Mapping[str, X]` or a plain type. Fields
    that are not declared are dropped. Raises FieldError for the first value of another type or
    range, for a missing field, and for a key that UTF-8 does not encode.
    """
    hashable_kind: Any = kind  # because type checkers do not know that every type is hashable
    _prepare(hashable_kind)
    try:
        return msgspec.convert(value, kind, strict=True)
    except RecursionError as error:
        raise FieldError(str(error)) from None
    except UnicodeEncodeError as error:
        raise FieldError(
            f"{short_repr(error.object)}: not UTF-8, expected the name of a field"
        ) from None
    except msgspec.ValidationError as error:
        raise FieldError(_field_first(str(error).replace("`", ""), value)) from None


def values_of(record: Any) -> dict[str, Any]:
    """Return the values of a dataclass by the names of its fields, in their order."""
    kind: Any = type(record)
    return {name: getattr(record, name) for name in _field_names(kind)}


@cache
def _prepare(kind: Any) -> None:
    """Let msgspec inspect the type `kind` and the types in it, before their first use.

    msgspec stores what it learns in the classes. If two threads did this at the same time, the
    process could crash by a segmentation fault. So only one thread does it at a time.
    """
    with _preparing:
        msgspec.json.Decoder(kind)


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(declared.name for declared in fields(kind))


def _field_first(text: str, value: Any) -> str:
    """Put the field and its value first in msgspec's text: "parts[0].start: 'x', expected int"."""
    located = _PLACE.fullmatch(text)
    if located is None:
        return text
    field = located["field"]
    expected = located["expected"]
    try:
        return f"{field}: {short_repr(_value_at(field, value))}, expected {expected}"
    except (AttributeError, LookupError, TypeError, ValueError):
        # The value was not found, because msgspec's text has no keys of mappings.
        return f"{field}: expected {expected}"


def _value_at(field: str, value: Any) -> Any:
    """Return what is at the path `field` in a JSON value."""
    for name, index in _STEP.findall(field):
        value = value[int(index)] if index else value[name]
    return value
