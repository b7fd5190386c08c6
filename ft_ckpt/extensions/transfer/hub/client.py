"""The client of the Hub: construction, conversion of its errors, further tries, progress bars."""

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

# of requests, httpx or httpx2, by the version of huggingface_hub
HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]
HUB_ERRORS: tuple[Any, ...] = (HTTP_ERROR, OSError, ValueError, RuntimeError)
PAUSE_SECONDS = 1.0  # between two tries
_MAX_TRIES = 4
_Result = TypeVar("_Result")
# in the text of errors of hf_xet, which have no response
_XET_STATUS = re.compile(r"HTTP status \w+ error \((\d{3}) ")


def make_api(token: str | None) -> HfApi:
    """Make the client of the Hub, or of the server in HF_ENDPOINT."""
    return HfApi(token=token, library_name="ft_ckpt", library_version=__version__)


@contextmanager
def hub_errors(where: str, *, writing: bool, failed: str = "not pushed") -> Iterator[None]:
    """Convert errors of the Hub in the block to those of this package.

    With `writing`, errors become TargetError with `failed` in the message, else MissingError or
    UnreadableError.
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
    may_pass: Callable[[BaseException], bool],
) -> _Result:
    """Call `action` until it succeeds, at most four times; returns its result.

    The client repeats single requests; this repeats a sequence of them that begins with a look at
    what is stored. Raises the error of the last try, and each error that may not pass.
    """
    for _ in range(_MAX_TRIES - 1):
        try:
            return action()
        except HUB_ERRORS as error:
            if not may_pass(error):
                raise
        time.sleep(PAUSE_SECONDS)
    return action()


def hub_status(error: BaseException | None) -> int | None:
    """Return the HTTP status of an error or its causes, if any."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return int(status)
        in_text = _XET_STATUS.search(str(error))
        if in_text is not None:
            return int(in_text[1])
        error = error.__cause__ or error.__context__
    return None


def is_transient(error: BaseException) -> bool:
    """Check whether to retry: after a network or server error or a concurrent change.

    The request may have succeeded.
    """
    status = hub_status(error)
    if status is None:
        return isinstance(error, HTTP_ERROR)
    return status in (409, 412) or status >= 500


def _converted(where: str, error: BaseException, failed: str | None) -> CheckpointError:
    text = f"{where}: {failed or 'not read'} ({_hub_reason(error)}); {_advice(error)}"
    if isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError)) and failed is None:
        return MissingError(text)
    return UnreadableError(text) if failed is None else TargetError(text)


def _hub_reason(error: BaseException) -> str:
    """Return the client's message and its cause, in one line of at most 400 characters."""
    words = " ".join(str(error).split()) or shown(error)
    cause = error.__cause__
    if cause is not None and hub_status(error) is not None:
        words += f"; {' '.join(str(cause).split())}"
    return words[:400].rstrip(".")


def _advice(error: BaseException) -> str:
    status = hub_status(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it"
    if status in (401, 403, 404):
        return "look at the name, log in with `hf auth login` or give a token that may do this"
    return "try again"
