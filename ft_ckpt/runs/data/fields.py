"""Checks the fields of a stored position in the data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_ckpt.errors import CorruptError, listing
from ft_ckpt.runs.data import rng
from ft_ckpt.schema import Count, FieldError, Positive, Whole, as_record


@dataclass(frozen=True)
class _Generator:
    """The state of one generator, see `rng.state_of`."""

    kind: str
    state: Any


@dataclass(frozen=True)
class _Start:
    """The random states with which a pass or a batch begins.

    `own` has the generators of the loader by name. The global ones are checked apart.
    """

    own: Mapping[str, _Generator | None]


@dataclass(frozen=True)
class _Position:
    """The fields of `DataPosition.state_dict`. Older states lack those with a default."""

    size: Positive
    epoch: Count
    batch: Count
    samples: Count
    given: Count
    offset: Whole
    warm: bool
    at_end: bool | None
    numbers: Mapping[str, Whole]
    start: _Start | None
    last: _Start | None
    own: Mapping[str, _Generator | None]
    loader: Any
    shares: Positive = 1
    per_step: Positive = 1
    over: bool = False
    least: Whole | None = None
    sharing: str | None = None
    order: str | None = None
    # a result of `describe_data`: class and size of the data
    about: tuple[str, Whole | None] | None = None


def check_position(state: Any) -> None:
    """Raise CorruptError for invalid values of a `DataPosition.state_dict`."""
    try:
        as_record(state, _Position)
    except FieldError as error:
        raise CorruptError(
            f"position in the data: {error}; it is not what state_dict returns"
        ) from error

    problems = []
    own_states = [state["own"]]
    for start in (state["start"], state["last"]):
        if start is not None:
            problems += rng.generator_problems(start.get("global"))
            own_states.append(start["own"])

    for own in own_states:
        for saved in own.values():
            # A generator of torch may be of a device that this process does not have.
            if saved is not None and saved["kind"] != "torch":
                rng.generator_in(saved)

    if problems:
        raise CorruptError(
            f"position in the data: {listing(problems)}; it is not what state_dict returns"
        )
