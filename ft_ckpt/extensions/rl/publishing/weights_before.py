"""Restores the weights that a server held before a publish that has failed."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeAlias

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CheckpointError, EngineError
from ft_ckpt.extensions.rl.publishing.on_servers import run_on
from ft_ckpt.extensions.rl.publishing.source import ServedFolder, as_name, config_in, open_part
from ft_ckpt.extensions.rl.publishing.weights_update import (
    FIRST_VERSION,
    Update,
    Weights,
    base_folder_of_server,
    difference,
)
from ft_ckpt.model.files import open_folder
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place

# A version of weights, "RUN/CHECKPOINT#DIGEST". The digest is the beginning of the manifest's.
_VERSION = re.compile(r"([^/]+)/([^/]+)#([0-9a-f]{16})", re.DOTALL)
# The previous weights: open files, or a path on the servers, or None if they are unknown.
WeightsBefore: TypeAlias = Weights | str | None


@contextmanager
def open_weights_before(
    update: Update, weights: Weights, *, compares: bool = True
) -> Iterator[WeightsBefore]:
    """Open the previous weights of a server.

    They are a checkpoint near the new one, or the server's initial weights. Yields a path if only
    the servers see the weights, and None if they are unknown. With `compares`, the digests of the
    checkpoint are compared. Raises EngineError if the checkpoint is not found.
    """
    if update.before == FIRST_VERSION:
        with _initial_weights(update, weights) as before:
            yield before
        return

    version = _VERSION.fullmatch(update.before or "")
    if version is None:
        yield None
        return

    run, name, identity = version.groups()
    folder = weights.checkpoint.absolute().parent
    for path in _possible_paths(run, name, folder):
        if LocalStore(path).stat(MANIFEST_NAME) is None:
            continue
        with open_part(Place(LocalStore(path)), weights.options, compares=compares) as part:
            if not part.checkpoint.identity.startswith(identity):
                continue  # it is of another run, or was saved again
            served_folder = part.served_folder()
            with part.opened_file() as file:
                yield Weights(
                    version=str(update.before),
                    folder=served_folder,
                    checkpoint=part.checkpoint.path,
                    file=file,
                    config=part.config(),
                    options=weights.options,
                )
            return

    raise EngineError(
        f"it is neither in {folder} nor in a run {run!r} near it, or was saved again since"
    )


@contextmanager
def _initial_weights(update: Update, weights: Weights) -> Iterator[WeightsBefore]:
    base = base_folder_of_server(update, weights.options)
    if base is None:
        yield update.base_path
        return
    with closing(open_folder(Place(LocalStore(base)))) as file:
        yield Weights(
            version=FIRST_VERSION,
            folder=ServedFolder(base, str(update.base_path)),
            checkpoint=base,
            file=file,
            config=config_in(LocalStore(base)),
            options=weights.options,
        )


def _possible_paths(run: str, name: str, folder: Path) -> Iterator[Path]:
    """Yield the paths that the checkpoint `name` of a run may have.

    It is in `folder`, as the new checkpoint is, or in a folder of the run near it. `run` is the
    name of that folder in the characters that versions allow; see `as_name`.
    """
    yield folder / name
    for parent in (folder, *folder.parents[:2]):
        yield parent / run / name
        for entry in sorted(entry.name for entry in LocalStore(parent).list_folder().folders):
            if entry != run and as_name(entry) == run:
                yield parent / entry / name


def put_all_back(updates: Sequence[Update], weights: Weights) -> list[str]:
    """Restore the previous weights on each server whose update has begun.

    A server stays as it is if another publisher has replaced its weights. Returns, for each server,
    a line about the weights that it has now.
    """
    touched = [update for update in updates if update.has_begun or update.is_overtaken]
    return [str(outcome) for outcome in run_on(touched, _put_back, weights)]


def _put_back(update: Update, weights: Weights) -> str:
    """Restore the previous weights, unless another publisher has replaced them.

    Returns a line about the weights that the server has now.
    """
    server = update.server
    url = update.url
    before = update.before
    loading = weights.loading_version
    try:
        reported = server.weight_version()
        is_of_publish = reported in (weights.version, loading)
        if reported is None and before is None:
            is_of_publish = True
        if not update.has_loaded:
            return _put_version_back(update, reported, is_of_publish=is_of_publish)
        if is_of_publish and update.is_overtaken:
            server.set_weight_version(loading)
            return f"{url} holds other weights, so its version was set to {loading}: publish again"

        # Another version means that another publisher has replaced the weights. With the version
        # before, or the first one, the server was restarted, perhaps before it loaded the weights.
        if not is_of_publish and reported not in (before, FIRST_VERSION):
            if update.digests and server.digests() != update.digests:
                return f"{url} reports {reported} now, and was left as it is"
            server.set_weight_version(loading)
            return (
                f"{url} reported {reported}, but may hold {weights.version}: set to {loading}, "
                "publish again"
            )

        _restore(update, weights)
    except (CheckpointError, OSError) as error:
        return (
            f"{url} may hold a part of {weights.version}, and {before} was not loaded again "
            f"({error})"
        )

    return f"{url} holds {before} again"


def _put_version_back(update: Update, reported: str | None, *, is_of_publish: bool) -> str:
    """Restore the version of a server whose weights were not touched."""
    if not is_of_publish and reported != update.before:
        return f"{update.url} reports {reported} now, and was left as it is"
    if reported != update.before:
        update.server.set_weight_version(str(update.before))
    return f"{update.url} holds {update.before} again"


def _restore(update: Update, weights: Weights) -> None:
    """Load the previous weights.

    Raises EngineError if they are unknown, or if the server does not hold them after the load.
    """
    server = update.server
    with open_weights_before(update, weights) as before:
        if before is None:
            raise EngineError(f"where its version {update.before} came from is not known")
        if update.paused_at is None:
            update.paused_at = time.monotonic()
            server.pause(weights.options.in_flight)

        server.set_weight_version(weights.loading_version)
        if isinstance(before, str):
            server.load_weights(before)
        else:
            server.load_weights(before.folder.path_on_servers)
            wrong = difference(update, before)
            if wrong:
                raise EngineError(wrong)

        server.set_weight_version(str(update.before))
