"""Every exception ft_ckpt raises on purpose.

    CheckpointError
    ├── ConfigError            ValueError          a setting that cannot work
    ├── SelectionError         ValueError          what was asked for is not in the model
    │   ├── UnknownAttributeError  AttributeError  no such submodule
    │   └── NotAnAdapterError      TypeError       adapter_only on a model without adapters
    ├── IncompleteError        ValueError          gathered or staged tensors differ from the live model
    ├── CompanionError         ValueError          config, generation config or tokenizer cannot be saved as they are
    ├── TargetError            OSError             the place to write to cannot be written
    │   └── NoSpaceError           OSError(ENOSPC) not enough room, found before or while writing
    ├── ManifestError          ValueError          a manifest that is absent, malformed or from a newer ft_ckpt
    │   └── NotACheckpointError    FileNotFoundError   no committed checkpoint there
    ├── CorruptError           ValueError          files differ from what the manifest recorded
    ├── LoadError              ValueError          a strict load that did not fit
    │   └── BaseMismatchError      ValueError      an adapter put on another base than it was trained on
    └── RankError              RuntimeError        another rank failed
        └── RanksDisagreeError     RuntimeError    ranks called with different arguments, or not at all

Each is also a builtin exception, so code that knows nothing of ft_ckpt can catch it. A message says what was
found, what was expected, and what to do, with the name of the tensor or file first.
"""

import errno


class CheckpointError(Exception):
    """Root of everything raised here."""


class ConfigError(CheckpointError, ValueError):
    """A setting that cannot work, found when the configuration is made."""


class SelectionError(CheckpointError, ValueError):
    """What was asked for is not in the model."""


class UnknownAttributeError(SelectionError, AttributeError):
    """The named submodule does not exist."""


class NotAnAdapterError(SelectionError, TypeError):
    """An adapter was asked of a model that has none."""


class IncompleteError(CheckpointError, ValueError):
    """Tensors about to be committed differ from the live model in name, shape or dtype."""


class CompanionError(CheckpointError, ValueError):
    """A config, generation config or tokenizer that does not fit the model or cannot be saved."""


class TargetError(CheckpointError, OSError):
    """The place to write to cannot be written."""


class NoSpaceError(TargetError):
    """Not enough room on the device; `errno` is ENOSPC."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)

    def __str__(self) -> str:
        return str(self.args[1])


class ManifestError(CheckpointError, ValueError):
    """A manifest that is malformed or was written by a newer ft_ckpt."""


class NotACheckpointError(ManifestError, FileNotFoundError):
    """No committed checkpoint at the given place."""


class CorruptError(CheckpointError, ValueError):
    """Files that differ from what the manifest recorded."""


class LoadError(CheckpointError, ValueError):
    """A strict load that found missing, unexpected or reshaped tensors."""


class BaseMismatchError(LoadError):
    """An adapter is being put on a base model other than the one it was trained on."""


class RankError(CheckpointError, RuntimeError):
    """Another rank failed; the message names it and carries its error."""


class RanksDisagreeError(RankError):
    """Ranks called the same operation with different arguments, or some did not call it."""


def listing(items: list[str], separator: str = "; ", most: int = 8) -> str:
    """The first `most` of `items` in one line, with the number left out: every message lists problems this way."""
    shown = separator.join(items[:most])
    return shown if len(items) <= most else f"{shown}{separator}and {len(items) - most} more"
