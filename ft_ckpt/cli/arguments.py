"""The paths that a command is given: what its options leave over."""

from pathlib import Path

import typer

from ft_ckpt.errors import ConfigError, NotACheckpointError
from ft_ckpt.storage.local_disk import local_path
from ft_ckpt.storage.place import open_place


def given_words(context: typer.Context, *expected: str) -> list[str]:
    """The words that are no options, one for each `expected` name. Raises ConfigError for another number of them."""
    if len(context.args) != len(expected):
        given, command = " ".join(context.args) or "nothing", context.info_name
        raise ConfigError(f"{command}: {given} given, expected {' '.join(expected)}; see `ft-ckpt {command} --help`")
    return list(context.args)


def given_paths(context: typer.Context, *expected: str) -> list[str]:
    """The paths of this machine that are given, one for each `expected` name. Raises ConfigError for others."""
    for word in given_words(context, *expected):
        local_path(word)
    return list(context.args)


def several_paths(context: typer.Context, expected: str) -> list[str]:
    """The words that are no options, two or more of them. Raises ConfigError for fewer."""
    if len(context.args) < 2:
        given, command = " ".join(context.args) or "nothing", context.info_name
        raise ConfigError(f"{command}: {given} given, expected {expected}; see `ft-ckpt {command} --help`")
    return given_paths(context, *context.args)


def only_path(context: typer.Context, expected: str = "PATH") -> Path:
    """The one path given. Raises ConfigError for none or several, and for a URL."""
    return Path(given_paths(context, expected)[0])


def run_folder(context: typer.Context) -> Path:
    """The one folder given, of a run. Raises NotACheckpointError when it is not there."""
    run = only_path(context, "RUN")
    if not open_place(run).is_folder:
        raise NotACheckpointError(f"{run}: no such folder; give one that holds checkpoints")
    return run
