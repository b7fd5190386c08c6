"""Turns the errors of the client for object stores into ours. `where` is the object's URL, which begins messages."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from obstore import exceptions

from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    MissingError,
    NameTakenError,
    TargetError,
    UnreadableError,
    shown,
)

ABSENT = (FileNotFoundError, exceptions.NotFoundError)
_TAKEN = (FileExistsError, exceptions.AlreadyExistsError)
_CLIENT = (exceptions.BaseError, OSError, ValueError)


@contextmanager
def reading_object(where: str) -> Iterator[None]:
    """Errors of the block come out as MissingError, CorruptError (another version), ConfigError or UnreadableError."""
    try:
        yield
    except CheckpointError:
        raise
    except ABSENT as error:
        raise missing_object(where) from error
    except exceptions.PreconditionError as error:
        raise changed_object(where) from error
    except _CLIENT as error:
        _refuse_bad_name(where, error)
        raise UnreadableError(f"{where}: cannot be read ({client_reason(error)}); try again") from error


@contextmanager
def writing_object(where: str) -> Iterator[None]:
    """Errors of the block come out as NameTakenError, ConfigError or TargetError."""
    try:
        yield
    except CheckpointError:
        raise
    except _TAKEN as error:
        raise NameTakenError(f"{where}: is there already; nothing was written") from error
    except _CLIENT as error:
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


def client_reason(error: BaseException) -> str:
    """The first line of what the client says: the rest is a dump of its insides."""
    return shown(error).split("\n", 1)[0][:300]


def _refuse_bad_name(where: str, error: BaseException) -> None:
    if isinstance(error, exceptions.InvalidPathError) or "Could not parse path" in str(error):
        raise ConfigError(f"{where}: no name that an object can have ({client_reason(error)})") from error
