"""Reads JSON values into typed records and checks each field."""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from ft_ckpt.messages import without_secrets

_Reader = Callable[[Any], Any]
_LIMIT = 1 << 63  # of numbers: sizes, offsets and counts of real files are below it


class OddValue(ValueError):  # noqa: N818 - named for what was found
    """A value that is not what its field is declared to be; says where."""

    def __init__(self, found: str, where: str = "") -> None:
        super().__init__(f"{where}: {found}" if where else found)
        self.found, self.where = found, where

    def one_level_up(self, step: str) -> "OddValue":
        """The same error with its place as seen from the enclosing value."""
        joint = "" if not self.where or self.where.startswith("[") else "."
        return OddValue(self.found, f"{step}{joint}{self.where}")


@cache
def reader_of(kind: Any) -> _Reader:
    """The function that turns a value of JSON into a `kind`.

    Kinds are dataclasses, named tuples, tuple[X, ...], Mapping[str, X], X | None, str, int, float, bool and Any.

    It raises OddValue for a value of another type, and for a field that is missing; fields that are not declared are
    dropped. A record may come as the list of its fields, too.
    """
    inside = get_args(kind)
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields")):
        return _record_reader(kind)
    if get_origin(kind) is tuple:
        return _list_reader(reader_of(inside[0]))
    if get_origin(kind) is Mapping:
        return _mapping_reader(reader_of(inside[1]))
    if isinstance(kind, UnionType):
        one = reader_of(next(each for each in inside if each is not NoneType))
        return lambda value: None if value is None else one(value)
    return _PLAIN[kind]


def _record_reader(kind: Any) -> _Reader:
    if is_dataclass(kind):
        kinds: dict[str, Any] = {one.name: one.type for one in fields(kind)}
        needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    else:
        kinds, needed = kind.__annotations__, {*kind._fields} - kind._field_defaults.keys()
    readers: dict[str, _Reader] = {name: reader_of(one) for name, one in kinds.items()}

    def read_record(value: Any) -> Any:
        document = value
        if type(value) is list and len(value) == len(readers):
            document = dict(zip(readers, value, strict=True))
        if type(document) is not dict:
            raise _odd_value(value, kind.__name__)
        if not needed <= document.keys():
            raise OddValue("missing", ", ".join(sorted(needed - document.keys())))
        found = {name: reader for name, reader in readers.items() if name in document}
        try:
            return kind(**{name: reader(document[name]) for name, reader in found.items()})
        except OddValue:
            raise _locate_odd((name, reader, document[name]) for name, reader in found.items()) from None

    return read_record


def _list_reader(each: _Reader) -> _Reader:
    def read_list(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _odd_value(value, "a list")
        try:
            return tuple([each(item) for item in value])
        except OddValue:
            raise _locate_odd((f"[{number}]", each, item) for number, item in enumerate(value)) from None

    return read_list


def _mapping_reader(each: _Reader) -> _Reader:
    def read_mapping(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _odd_value(value, "a mapping")
        try:
            return {key: each(item) for key, item in value.items()}
        except OddValue:
            raise _locate_odd((f"[{key!r}]", each, item) for key, item in value.items()) from None

    return read_mapping


def _locate_odd(items: Iterable[tuple[str, _Reader, Any]]) -> OddValue:
    """The error of the first odd item; a second pass finds it, so that the first pass is fast."""
    found = (odd.one_level_up(step) for step, reader, value in items if (odd := _odd_or_none(reader, value)))
    return next(found, OddValue("changed while it was read"))


def _odd_or_none(reader: _Reader, value: Any) -> OddValue | None:
    try:
        reader(value)
    except OddValue as odd:
        return odd
    return None


def _plain_reader(kind: type) -> _Reader:
    def read_plain(value: Any) -> Any:
        if type(value) is kind:
            return value
        raise _odd_value(value, kind.__name__)

    return read_plain


def _read_integer(value: Any) -> int:
    if type(value) is int and -_LIMIT <= value < _LIMIT:
        return value
    raise _odd_value(value, "a whole number")


def _read_float(value: Any) -> float:
    """A float; infinities come as text, and NaN stands for what is no number, which ft_ckpt 0.1.0 let pass."""
    try:
        return value if type(value) in (int, float) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _odd_value(value: Any, expected: str) -> OddValue:
    shown = without_secrets(value) if isinstance(value, str) else value  # before it is cut short
    return OddValue(f"{reprlib.repr(shown)}, expected {expected}")


_PLAIN: dict[Any, _Reader] = {
    str: _plain_reader(str),
    bool: _plain_reader(bool),
    int: _read_integer,
    float: _read_float,
    Any: lambda value: value,
}
