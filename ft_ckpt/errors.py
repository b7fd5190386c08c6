"""Defines every exception that ft_ckpt raises on purpose, and functions that raise them.

    CheckpointError
    ├── ConfigError            ValueError          an invalid setting or argument
    ├── SelectionError         ValueError          the requested part is not in the model
    │   ├── UnknownAttributeError  AttributeError  no such submodule
    │   └── NotAnAdapterError      TypeError       adapter_only on a model without adapters
    ├── IncompleteError        ValueError          gathered or staged tensors are not the live ones
    ├── CompanionError         ValueError          config or tokenizer cannot be saved
    ├── TargetError            OSError             the target cannot be written
    │   ├── EngineError            OSError             a server refuses, or holds other weights
    │   ├── NoSpaceError           OSError(ENOSPC) not enough space, found before or while writing
    │   └── NameTakenError         FileExistsError a file or object that must be new exists already
    ├── ManifestError          ValueError          absent, malformed or from a newer ft_ckpt
    │   └── NotACheckpointError    FileNotFoundError   no committed checkpoint there
    ├── CorruptError           ValueError          files differ from what the manifest recorded
    │   ├── UnreadableError        OSError             a file cannot be read now; it may be whole
    │   └── MissingError           FileNotFoundError   no object of that name in a store
    ├── LoadError              ValueError          a load or resume does not fit
    │   └── BaseMismatchError      ValueError      an adapter on another base than its own
    ├── TicketError            ValueError          a report about a sample that is not in flight
    ├── WriterError            RuntimeError        a writer handed in nothing, or something else
    └── RankError              RuntimeError        another rank failed
        └── RanksDisagreeError     RuntimeError    ranks called with different arguments

Each is also a builtin exception, so that code without ft_ckpt can catch it. A message names the
tensor or file first, then what was found, what was expected, and what to do. It is one printable
line without secrets, see `messages.printable`.
"""

import errno
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import TracebackType
from typing import Any, TypeAlias

from ft_ckpt.messages import SECRET, clean_causes, did_you_mean, printable, short_repr

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointError(Exception):
    """Base class of all errors of ft_ckpt."""

    node: str | None = None
    """Host name of the node on which the error occurred. The message ends with it.

    It is "" if the message comes from another rank and has the name already. It is None if the node
    is unknown, or if all ranks are on one node.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))

    def __str__(self) -> str:
        return f"{self.message} (on {self.node})" if self.node else self.message

    @property
    def message(self) -> str:
        """The message without the node."""
        return super().__str__()


class ConfigError(CheckpointError, ValueError):
    """An invalid setting or argument, or an optional package that is not installed."""


class SelectionError(CheckpointError, ValueError):
    """The requested part is not in the model."""


class UnknownAttributeError(SelectionError, AttributeError):
    """The named submodule does not exist."""


class NotAnAdapterError(SelectionError, TypeError):
    """An adapter was requested of a model without adapters."""


class IncompleteError(CheckpointError, ValueError):
    """Tensors about to be committed differ from the live model in name, shape or dtype."""


class CompanionError(CheckpointError, ValueError):
    """A config, generation config or tokenizer that does not fit the model or cannot be saved."""


class TargetError(CheckpointError, OSError):
    """The target cannot be written."""


class EngineError(TargetError):
    """An inference server refuses, does not answer, or has other weights than published."""


class NoSpaceError(TargetError):
    """Not enough space on the device; `errno` is ENOSPC."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)

    @property
    def message(self) -> str:
        return str(self.args[1])


class NameTakenError(TargetError, FileExistsError):
    """A write that must create a new object found that the name is taken."""


class LeaseTakenError(TargetError):
    """Another process trains into the directory of the run."""


class ManifestError(CheckpointError, ValueError):
    """A manifest that is malformed or was written by a newer ft_ckpt."""


class NotACheckpointError(ManifestError, FileNotFoundError):
    """No committed checkpoint at the given place."""


class CorruptError(CheckpointError, ValueError):
    """Files that differ from what the manifest recorded."""


class UnreadableError(CorruptError, OSError):
    """A file that cannot be read now, or that was replaced while it was read; it may be whole."""


class MissingError(CorruptError, FileNotFoundError):
    """No object of that name in a store."""


class LoadError(CheckpointError, ValueError):
    """A load or resume does not fit (missing, unexpected or reshaped tensors) or is unsupported."""


class BaseMismatchError(LoadError):
    """An adapter is loaded onto another base model than it was trained on."""


class TicketError(CheckpointError, ValueError):
    """A report to a `Frontier` about a sample that is not in flight under this ticket."""


class WriterError(CheckpointError, RuntimeError):
    """A writer of the run has ended, handed in a wrong part or none, or is of another session."""


class RankError(CheckpointError, RuntimeError):
    """Another rank failed; the message names it and carries its error."""


class RanksDisagreeError(RankError):
    """Ranks called the same operation with different arguments, or some did not call it."""


@dataclass(frozen=True)
class Problem:
    """A problem of a file or a checkpoint.

    Attributes:
        text: The file, and what is wrong with it.
        is_transient: Whether the system cannot read the file now. The file may be intact.
    """

    text: str
    is_transient: bool = False

    def __str__(self) -> str:
        return self.text


def listing(items: Sequence[str | Problem], separator: str = "; ", max_items: int = 8) -> str:
    """Join the first `max_items` of `items` in one line, and add the number of the others."""
    text = separator.join(str(item) for item in items[:max_items])
    if len(items) > max_items:
        text = f"{text}{separator}and {len(items) - max_items} more"
    return text


# the name of a field, whether a value of it is valid, and the expected value in words
Rule: TypeAlias = tuple[str, Callable[[Any], bool], str]


def check_settings(settings: Any, rules: Iterable[Rule]) -> None:
    """Raise ConfigError naming every field whose value does not satisfy its rule.

    `settings` is a dataclass. Fields that its repr leaves out may contain secrets, so of their
    values only text is shown.
    """
    secret_fields = {field.name for field in fields(settings) if not field.repr}
    problems = []
    for field, is_valid, words in rules:
        value = getattr(settings, field)
        if _satisfies(is_valid, value):
            continue
        is_secret = field in secret_fields and not isinstance(value, str)
        text = SECRET if is_secret else repr(value)
        problems.append(f"{field}={text}: expected {words}")
    if problems:
        raise ConfigError("; ".join(problems))


def refuse_unknown_fields(kind: type[Any], values: Iterable[Any], names: Iterable[str]) -> None:
    """Raise ConfigError for arguments that the dataclass `kind` does not take.

    `values` are the arguments without a name, of which it takes none. `names` are the names of the
    others.
    """
    choices = [field.name for field in fields(kind)]
    for value in values:
        raise ConfigError(
            f"{kind.__name__}({short_repr(value)}): expected a name for it, such as {choices[0]}="
        )
    for name in names:
        if name not in choices:
            advice = did_you_mean([name], choices) or f"expected some of {', '.join(choices)}"
            raise ConfigError(f"{kind.__name__}({name}=...): not an argument of it; {advice}")


def _satisfies(is_valid: Callable[[Any], bool], value: Any) -> bool:
    """Return the answer of `is_valid`; False if it raises an error, as for another type."""
    with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return is_valid(value)
    return False


def is_number(
    value: Any, minimum: float = -math.inf, maximum: float = math.inf, *, whole: bool = False
) -> bool:
    """Check whether a value is a real number in [minimum, maximum], or with `whole` an integer.

    True and False are not numbers here.
    """
    kind: Any = Integral if whole else Real
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    return bool(minimum <= value <= maximum)


@contextmanager
def explained(target: object) -> Iterator[None]:
    """Convert an OSError of the block into a TargetError, or on a full disk into a NoSpaceError.

    `target` is what the block writes.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpaceError(
                f"{target}: no room on its device ({error}); make room and save again"
            ) from error
        refusal = TargetError(
            f"{target}: cannot be written ({error}); check its permissions and its disk, or choose "
            "another path"
        )
        refusal.errno = error.errno
        raise refusal from error


class damaged_input:  # noqa: N801 - reads as a statement where it is used
    """Converts errors of the block, which reads `source`, into errors of ft_ckpt that name it.

        FileNotFoundError    NotACheckpointError
        another OSError      UnreadableError
        ImportError          ConfigError
        any other error      CorruptError, because it is attributed to damaged bytes

    This context manager is a class because it is entered for each tensor, and a generator would
    take 1.5 times as long.
    """

    __slots__ = ("source",)

    def __init__(self, source: object) -> None:
        self.source = source

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _at: TracebackType | None,
    ) -> None:
        name = printable(str(self.source).partition(":")[0])
        if type(error) is CorruptError and name not in str(error):
            raise CorruptError(f"{self.source}: {error}") from error
        if error is None or isinstance(error, CheckpointError) or not isinstance(error, Exception):
            return
        clean_causes(error)
        if isinstance(error, ImportError):
            raise ConfigError(
                f"{self.source}: a module that reads it cannot be imported ({error}); install it"
            ) from error

        if isinstance(error, FileNotFoundError) and error.errno is not None:
            raise NotACheckpointError(f"{self.source}: no such file ({error})") from error
        if isinstance(error, OSError) and error.errno is not None:
            unreadable = UnreadableError(
                f"{self.source}: cannot be read ({error}); try again, or use another copy"
            )
            unreadable.errno = error.errno
            raise unreadable from error

        raise CorruptError(
            f"{self.source}: not whole ({shown(error)}); use another copy"
        ) from error


def system_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that caused `error`; None if there is none. Libraries wrap such errors."""
    while error is not None and not (isinstance(error, OSError) and error.errno is not None):
        error = error.__cause__ or error.__context__
    return error


def reason_of(error: OSError) -> str:
    """Return the system's message for an OSError, or for an error of ft_ckpt with its errno."""
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))


# descriptions of errors whose own messages say little
_IN_WORDS: tuple[tuple[type[BaseException], str], ...] = (
    (UnicodeDecodeError, "no text in UTF-8"),
    (RecursionError, "nested too deeply"),
    (EOFError, "it ends early"),
    (KeyError, "no entry {}"),
    (struct.error, "it ends early, or has other fields"),
)


def shown(error: BaseException) -> str:
    """Describe the error of a library in a few words, without the name of its class.

    Only texts and numbers of the error are shown, because other values come from a file and may be
    nested endlessly.
    """
    parts = [part for part in error.args if isinstance(part, (str, int))]
    text = ", ".join(printable(str(part))[:200] for part in parts[:3])
    for kind, words in _IN_WORDS:
        if isinstance(error, kind):
            return words.format(repr(text))
    return text or "malformed"
