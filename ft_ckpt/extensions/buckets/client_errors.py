"""Errors of the client, obstore: converted into those of this package, or retried."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from obstore import exceptions

from ft_ckpt.errors import CheckpointError, ConfigError, TargetError, UnreadableError
from ft_ckpt.messages import clean_causes, without_secrets
from ft_ckpt.storage import changed_object, missing_object

ABSENT = (FileNotFoundError, exceptions.NotFoundError)
TAKEN = (FileExistsError, exceptions.AlreadyExistsError)
_REFUSED = ("401", "403")  # status codes of refused credentials
_CLIENT = (exceptions.BaseError, OSError, ValueError)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # error codes of the services
# messages of the client about a response that ended early
_CUT_OFF = ("response body error", "invalid list response", "invalid DeleteObjects response")
_T = TypeVar("_T")


@contextmanager
def reading_object(where: str) -> Iterator[None]:
    """Convert errors of the client in the block into those of this package.

    They become MissingError, ConfigError or UnreadableError, which also stands for another version
    of the object.
    """
    try:
        yield
    except CheckpointError:
        raise
    except _CLIENT as error:
        clean_causes(error)
        refuse_missing_bucket(where, error)
        if isinstance(error, ABSENT):
            raise missing_object(where) from error
        if isinstance(error, exceptions.PreconditionError):
            raise changed_object(where) from error
        _refuse_bad_name(where, error)
        reason = client_reason(error)
        advice = "try again"
        if reason.startswith(_REFUSED):
            advice = "use credentials that may read there"
        raise UnreadableError(f"{where}: cannot be read ({reason}); {advice}") from error


@contextmanager
def writing_object(where: str) -> Iterator[None]:
    """Convert errors of the block into ConfigError or TargetError."""
    try:
        yield
    except CheckpointError:
        raise
    except _CLIENT as error:
        clean_causes(error)
        refuse_missing_bucket(where, error)
        _refuse_bad_name(where, error)
        reason = client_reason(error)
        raise TargetError(
            f"{where}: cannot be written ({reason}); check credentials and network, or choose "
            "another place"
        ) from error


def client_reason(error: BaseException) -> str:
    """Status, code and message of the service, or the first line of the client's error.

    The rest is internal.
    """
    text = str(error)
    status = re.search(r"status code: (\d+ [A-Za-z ]+)", text)
    if status is None:
        first_line = text.split("\n", 1)[0]
        first_line = re.sub(r".* - (?=HTTP error|Received)", "", first_line)
        return f"{type(error).__name__}: {without_secrets(first_line)[:300]}"
    reason = status[1].strip()
    code = re.search(r"<Code>(.*?)</Code>", text)
    if code is not None:
        reason += f", {code[1].strip()}"
    message = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if message is not None:
        reason += f": {without_secrets(message[1])[:300]}"
    return reason


def until_whole(request: Callable[[], _T], max_attempts: int = 3) -> _T:
    """Repeat `request` until its response is complete: the client does not retry cut-off bodies."""
    attempt = 1
    while True:
        try:
            return request()
        except exceptions.BaseError as error:
            is_cut_off = any(message in str(error) for message in _CUT_OFF)
            if attempt == max_attempts or not is_cut_off:
                raise
        attempt += 1


def refuse_missing_bucket(where: str, error: BaseException) -> None:
    """Raise ConfigError if the bucket does not exist.

    The client raises the same error for a missing object.
    """
    if any(code in str(error) for code in _NO_BUCKET):
        raise ConfigError(f"{where}: no such bucket; create it, or correct its name") from error


def _refuse_bad_name(where: str, error: BaseException) -> None:
    if isinstance(error, exceptions.InvalidPathError) or "Could not parse path" in str(error):
        raise ConfigError(
            f"{where}: no name that an object can have ({client_reason(error)})"
        ) from error
