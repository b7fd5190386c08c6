"""Converts errors of the client, obstore, into those of this package, or retries the request."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from obstore import exceptions

from ft_ckpt.errors import CheckpointError, ConfigError, TargetError, UnreadableError
from ft_ckpt.messages import clean_causes, without_secrets
from ft_ckpt.storage import changed_object, missing_object

ABSENT = (FileNotFoundError, exceptions.NotFoundError)
TAKEN = (FileExistsError, exceptions.AlreadyExistsError)
_REFUSED = ("401", "403")  # status codes for credentials that are refused
_CLIENT = (exceptions.BaseError, OSError, ValueError)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # error codes of the services
# What the client says about a response that ended early.
_CUT_OFF = ("response body error", "invalid list response", "invalid DeleteObjects response")
_T = TypeVar("_T")


class _ConvertingErrors(ABC):
    """Converts errors of the client that are raised in its `with` block.

    This is a class and not a generator. From Python 3.12 on, an error that leaves a generator stays
    in a cycle of references, and its traceback keeps the tensors of a save until the next garbage
    collection.
    """

    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> "_ConvertingErrors":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if not isinstance(error, _CLIENT) or isinstance(error, CheckpointError):
            return
        clean_causes(error)
        refuse_missing_bucket(self.where, error)
        raise self._converted(error) from error

    @abstractmethod
    def _converted(self, error: Exception) -> CheckpointError: ...


class reading_object(_ConvertingErrors):  # noqa: N801 - reads as a statement where it is used
    """Converts errors of the client into MissingError, ConfigError or UnreadableError.

    UnreadableError is also raised if the object has another version than was requested.
    """

    __slots__ = ()

    def _converted(self, error: Exception) -> CheckpointError:
        if isinstance(error, ABSENT):
            return missing_object(self.where)
        if isinstance(error, exceptions.PreconditionError):
            return changed_object(self.where)
        _refuse_bad_name(self.where, error)
        reason = client_reason(error)
        advice = "try again"
        if reason.startswith(_REFUSED):
            advice = "use credentials that may read there"
        return UnreadableError(f"{self.where}: cannot be read ({reason}); {advice}")


class writing_object(_ConvertingErrors):  # noqa: N801 - reads as a statement where it is used
    """Converts errors of the client into ConfigError or TargetError."""

    __slots__ = ()

    def _converted(self, error: Exception) -> CheckpointError:
        _refuse_bad_name(self.where, error)
        return TargetError(
            f"{self.where}: cannot be written ({client_reason(error)}); check credentials and "
            "network, or choose another place"
        )


def client_reason(error: BaseException) -> str:
    """Return the reason of an error in words, without secrets.

    It is the status, the code and the message of the service, or else the first line of the
    client's error. The other lines have internals of the client.
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
    """Repeat `request` until its response is complete, and return its result.

    The client itself does not retry a response whose body ended early.
    """
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
    """Raise ConfigError if `error` says that the bucket does not exist.

    The client raises an error of the same class for a missing object.
    """
    if any(code in str(error) for code in _NO_BUCKET):
        raise ConfigError(f"{where}: no such bucket; create it, or correct its name") from error


def _refuse_bad_name(where: str, error: BaseException) -> None:
    """Raise ConfigError if `error` says that no object can have this name."""
    if isinstance(error, exceptions.InvalidPathError) or "Could not parse path" in str(error):
        raise ConfigError(
            f"{where}: no name that an object can have ({client_reason(error)})"
        ) from error
