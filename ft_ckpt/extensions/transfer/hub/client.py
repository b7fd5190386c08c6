"""Wraps the client of the Hub: converts its errors, retries, and shows or hides progress bars."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # in its __init__, not in its __all__
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from ft_ckpt._version import __version__
from ft_ckpt.errors import CheckpointError, MissingError, TargetError, UnreadableError, shown
from ft_ckpt.messages import clean_causes

# The base class of errors of the HTTP library, which depends on the version of huggingface_hub:
# requests, httpx or httpx2.
HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]
HUB_ERRORS: tuple[Any, ...] = (HTTP_ERROR, OSError, ValueError, RuntimeError)
PAUSE_SECONDS = 1.0  # between two tries
_MAX_TRIES = 4
_Result = TypeVar("_Result")
# Errors of hf_xet have no response. Their text has the status.
_XET_STATUS = re.compile(r"HTTP status \w+ error \((\d{3}) ")


def make_api(token: str | None) -> HfApi:
    """Return a client of the Hub, or of the server in HF_ENDPOINT."""
    return HfApi(token=token, library_name="ft_ckpt", library_version=__version__)


@contextmanager
def hub_errors(where: str, *, writing: bool, failed: str = "not pushed") -> Iterator[None]:
    """Convert errors of the Hub in the block to those of this package.

    With `writing`, errors become TargetError with `failed` in the message. Otherwise they become
    MissingError or UnreadableError.
    """
    try:
        yield
    except CheckpointError:
        raise
    except HUB_ERRORS as error:
        clean_causes(error)
        raise _converted(where, error, failed if writing else None) from error


@contextmanager
def progress_bars(*, shown: bool) -> Iterator[None]:
    """Disable the client's progress bars in the block, unless `shown`."""
    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def with_retries(
    action: Callable[[], _Result],
    is_retryable: Callable[[BaseException], bool],
) -> _Result:
    """Call `action` until it succeeds, at most four times, and return its result.

    The client itself repeats single requests. This repeats a sequence of requests, of which the
    first must read what is stored. Raises the error of the last try, and each error for which
    `is_retryable` returns False.
    """
    for _ in range(_MAX_TRIES - 1):
        try:
            return action()
        except HUB_ERRORS as error:
            if not is_retryable(error):
                raise
        time.sleep(PAUSE_SECONDS)
    return action()


def hub_status(error: BaseException | None) -> int | None:
    """Return the HTTP status of an error or of its causes, or None."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return int(status)
        match = _XET_STATUS.search(str(error))
        if match is not None:
            return int(match[1])
        error = error.__cause__ or error.__context__
    return None


def is_transient(error: BaseException) -> bool:
    """Check whether the error is one of the network or the server, or a concurrent change.

    A request with such an error may have succeeded.
    """
    status = hub_status(error)
    if status is None:
        return isinstance(error, HTTP_ERROR)
    return status in (409, 412) or status >= 500


def _converted(where: str, error: BaseException, failed: str | None) -> CheckpointError:
    """Return the error of this package. `failed` is None for errors of reading."""
    text = f"{where}: {failed or 'not read'} ({_hub_reason(error)}); {_advice(error)}"
    if isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError)) and failed is None:
        return MissingError(text)
    return UnreadableError(text) if failed is None else TargetError(text)


def _hub_reason(error: BaseException) -> str:
    """Return the client's message and its cause, in one line of at most 400 characters."""
    text = " ".join(str(error).split())
    if not text:
        text = shown(error)
    cause = error.__cause__
    if cause is not None and hub_status(error) is not None:
        text += f"; {' '.join(str(cause).split())}"
    return text[:400].rstrip(".")


def _advice(error: BaseException) -> str:
    status = hub_status(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it"
    if status in (401, 403, 404):
        return "look at the name, log in with `hf auth login` or give a token that may do this"
    return "try again"
