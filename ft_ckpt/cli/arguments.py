"""The places that a command is given, as paths or URLs: what its options leave over."""

import typer

from ft_ckpt.checkpoint import catalog
from ft_ckpt.checkpoint.catalog import CheckpointInfo
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import ConfigError, NotACheckpointError
from ft_ckpt.storage.place import Place, open_place


def given_words(context: typer.Context, *expected: str) -> list[str]:
    """The words that are no options, one for each `expected` name. Raises ConfigError for another number of them."""
    if len(context.args) != len(expected):
        given, command = " ".join(context.args) or "nothing", context.info_name
        raise ConfigError(f"{command}: {given} given, expected {' '.join(expected)}; see `ft-ckpt {command} --help`")
    return list(context.args)


def given_paths(context: typer.Context, *expected: str) -> list[str]:
    """The paths and URLs that are given, one for each `expected` name. Raises ConfigError for what is neither."""
    for word in given_words(context, *expected):
        open_place(word)
    return list(context.args)


def several_paths(context: typer.Context, expected: str) -> list[str]:
    """The words that are no options, two or more of them. Raises ConfigError for fewer."""
    if len(context.args) < 2:
        given, command = " ".join(context.args) or "nothing", context.info_name
        raise ConfigError(f"{command}: {given} given, expected {expected}; see `ft-ckpt {command} --help`")
    return given_paths(context, *context.args)


def only_place(context: typer.Context, expected: str = "PATH") -> Place:
    """What the one path or URL given leads to. Raises ConfigError for none or several, and for what is neither."""
    return open_place(given_words(context, expected)[0])


def run_checkpoints_in(run: Place) -> list[CheckpointInfo]:
    """The checkpoints of a run. Raises NotACheckpointError when the folder is a checkpoint itself."""
    infos = catalog.run_checkpoints(run)
    if not infos and run.folder.stat(MANIFEST_NAME) is not None:
        raise NotACheckpointError(f"{run}: a checkpoint, expected the folder of a run; `ft-ckpt show` shows one")
    return infos


def run_folder(context: typer.Context) -> Place:
    """The one folder given, of a run. Raises NotACheckpointError when it is not there."""
    run = only_place(context, "RUN")
    if not run.is_folder:
        raise NotACheckpointError(f"{run}: no such folder; give one that holds checkpoints")
    return run
