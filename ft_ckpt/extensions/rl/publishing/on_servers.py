"""Runs a step of a publish on all servers at the same time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from ft_ckpt.errors import CheckpointError

_Target = TypeVar("_Target")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


def run_on(
    targets: Sequence[_Target],
    step: Callable[Concatenate[_Target, _Arguments], _Result],
    *arguments: _Arguments.args,
    **keywords: _Arguments.kwargs,
) -> list[_Result | CheckpointError]:
    """Call `step` for all targets at the same time.

    Returns for each target, in order, the result or the CheckpointError that the step raised.
    """

    def outcome(target: _Target) -> _Result | CheckpointError:
        try:
            return step(target, *arguments, **keywords)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return list(pool.map(outcome, targets))


def errors_on(
    targets: Sequence[_Target],
    step: Callable[Concatenate[_Target, _Arguments], Any],
    *arguments: _Arguments.args,
    **keywords: _Arguments.kwargs,
) -> list[str]:
    """Call `step` for all targets at the same time, and return the texts of the errors.

    The results of the step are dropped. Targets without an error have no text.
    """
    outcomes = run_on(targets, step, *arguments, **keywords)
    return [str(outcome) for outcome in outcomes if isinstance(outcome, CheckpointError)]
