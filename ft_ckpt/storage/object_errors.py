"""Turns the errors of the client for object stores into ours. `where` is the object's URL, which begins messages."""

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from obstore import exceptions

from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    MissingError,
    NameTakenError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.messages import clean_causes

ABSENT = (FileNotFoundError, exceptions.NotFoundError)
TAKEN = (FileExistsError, exceptions.AlreadyExistsError)
_REFUSED = ("401", "403")  # begin the reasons of stores that do not take the credentials
_CLIENT = (exceptions.BaseError, OSError, ValueError)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # as the stores say it
_CUT_OFF = ("response body error", "invalid list response", "invalid DeleteObjects response")  # as the client says it
_T = TypeVar("_T")


@contextmanager
def reading_object(where: str) -> Iterator[None]:
    """Errors of the block come out as MissingError, CorruptError (another version), ConfigError or UnreadableError."""
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
        advice = "use credentials that may read there" if reason.startswith(_REFUSED) else "try again"
        raise UnreadableError(f"{where}: cannot be read ({reason}); {advice}") from error


@contextmanager
def writing_object(where: str) -> Iterator[None]:
    """Errors of the block come out as ConfigError or TargetError."""
    try:
        yield
    except CheckpointError:
        raise
    except _CLIENT as error:
        clean_causes(error)
        refuse_missing_bucket(where, error)
        _refuse_bad_name(where, error)
        reason = client_reason(error)
        raise TargetError(f"{where}: cannot be written ({reason}); mend that or choose another place") from error


def missing_object(where: str) -> MissingError:
    """The error for an object that is not there."""
    found = MissingError(f"{where}: no such object")
    found.errno = errno.ENOENT
    return found


def changed_object(where: str) -> CorruptError:
    """The error for an object that is no longer the one that was opened."""
    return CorruptError(f"{where}: written over while it was read; read it again")


def taken_name(where: str) -> NameTakenError:
    """The error for an object that was to be made new."""
    return NameTakenError(f"{where}: is there already; nothing was written")


def client_reason(error: BaseException) -> str:
    """What the client says: status, code and message of the store, or its own first line; the rest is its insides."""
    text = str(error)
    status, code = re.search(r"status code: (\d+ [A-Za-z ]+)", text), re.search(r"<Code>(.*?)</Code>", text)
    if status is None:
        first = re.sub(r".* - (?=HTTP error|Received)", "", text.split("\n", 1)[0])
        return f"{type(error).__name__}: {first[:300]}"
    message = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    said = ", ".join(found[1].strip() for found in (status, code) if found is not None)
    return f"{said}: {message[1][:300]}" if message is not None else said


def until_whole(ask: Callable[[], _T], tries: int = 3) -> _T:
    """What `ask` gives; it is asked again where an answer was cut off, which the client does not do by itself."""
    try:
        return ask()
    except exceptions.BaseError as error:
        if tries == 1 or not any(said in str(error) for said in _CUT_OFF):
            raise
    return until_whole(ask, tries - 1)


def refuse_missing_bucket(where: str, error: BaseException) -> None:
    """Raise ConfigError where it is the bucket that is not there: the client says the same of an object."""
    if any(code in str(error) for code in _NO_BUCKET):
        raise ConfigError(f"{where}: there is no such bucket; make it, or mend its name") from error


def _refuse_bad_name(where: str, error: BaseException) -> None:
    if isinstance(error, exceptions.InvalidPathError) or "Could not parse path" in str(error):
        raise ConfigError(f"{where}: no name that an object can have ({client_reason(error)})") from error
