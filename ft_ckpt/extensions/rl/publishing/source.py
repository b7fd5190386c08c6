"""Opens the checkpoint to publish, compares its digests, and names its version.

A part is one model or one adapter of a checkpoint. A place is a folder on a disk or in a bucket.
The stage is a local folder of the caller for checkpoints that servers could not read otherwise.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, PartRecord, is_delta
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    LoadError,
    NameTakenError,
    damaged_input,
    listing,
)
from ft_ckpt.extensions.rl.deltas import drop_rebuilt, is_staged, mark_staged
from ft_ckpt.extensions.rl.engines import Server, ServerOptions
from ft_ckpt.extensions.rl.limits import export, needs_export
from ft_ckpt.extensions.transfer.sending import pull
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.messages import LOG
from ft_ckpt.model.files import open_folder
from ft_ckpt.storage import Store, read_text
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place

_KINDS = {"auto": ("adapter", "model"), "adapter": ("adapter",), "weights": ("model",)}


@dataclass(frozen=True)
class ServedFolder:
    """The folder to publish, with its paths on this machine and on the servers."""

    path: Path
    path_on_servers: str

    @classmethod
    def of(cls, path: Path, options: ServerOptions) -> "ServedFolder":
        """Return the folder with its path on the servers.

        The longest folder of `visible_at` that contains `path` is replaced. Raises ConfigError if
        `visible_at` has folders, and none contains `path`.
        """
        path = path.absolute()
        visible_at = options.visible_at
        parents = [folder for folder in visible_at if path.is_relative_to(Path(folder).absolute())]
        if visible_at and not parents:
            raise ConfigError(
                f"{path}: below no folder of visible_at= ({', '.join(visible_at)}); "
                "the servers do not see it"
            )
        if not parents:
            return cls(path, str(path))
        folder = max(parents, key=len)
        below = path.relative_to(Path(folder).absolute())
        return cls(path, str(Path(visible_at[folder]) / below))

    def __str__(self) -> str:
        if str(self.path) == self.path_on_servers:
            return str(self.path)
        return f"{self.path}, for the server {self.path_on_servers}"


@dataclass(frozen=True)
class PublishedPart:
    """The part of an open checkpoint that is published.

    Attributes:
        checkpoint: The checkpoint.
        record: The description of the part in the manifest.
        options: The options of the publish.
        has_given_version: Whether the caller gave the version.
    """

    checkpoint: OpenCheckpoint
    record: PartRecord
    options: ServerOptions
    has_given_version: bool

    @property
    def place(self) -> Place:
        return Place(self.checkpoint.store, self.record.path)

    @property
    def path(self) -> Path:
        return self.checkpoint.path / self.record.path

    @property
    def is_adapter(self) -> bool:
        return self.record.kind == "adapter"

    @property
    def adapter_name(self) -> str:
        """The name of the adapter on servers, with its version."""
        step = self.checkpoint.manifest.step
        head = self.checkpoint.path.name if step is None else str(step)
        # The identity distinguishes checkpoints, because the same step may be saved again.
        version = self.options.version or f"{head}-{self.checkpoint.identity[:8]}"
        return f"{self.options.name}@{version}"

    @property
    def weights_version(self) -> str:
        """The version of full weights that servers report."""
        if self.options.version:
            return self.options.version
        checkpoint = self.checkpoint
        return f"{run_of(checkpoint.place)}/{checkpoint.path.name}#{checkpoint.identity[:16]}"

    def served_folder(self) -> ServedFolder:
        return ServedFolder.of(self.path, self.options)

    def config(self) -> dict[str, Any]:
        """Read the config.json of the part."""
        return config_in(self.place.folder)

    @contextmanager
    def opened_file(self) -> Iterator[TensorFile]:
        with closing(open_folder(self.place)) as file:
            yield file


def checkpoint_place(checkpoint: Any) -> Place:
    """Return the place of a checkpoint. Raises ConfigError for an object that names none."""
    is_path = isinstance(checkpoint, (str, os.PathLike, Place)) and str(checkpoint)
    if not is_path or "\0" in str(checkpoint):
        raise ConfigError(
            f"checkpoint={checkpoint!r}: expected the path, the URL or the Place of a checkpoint"
        )
    return open_place(checkpoint)


@contextmanager
def open_published(
    place: Place, servers: Sequence[Server], options: ServerOptions
) -> Iterator[PublishedPart]:
    """Open the part to publish; see `open_part`.

    If the engines would scale an adapter wrongly and there is a stage, the adapter is exported into
    the stage, and the export is opened.
    """
    with open_part(place, options) as part:
        if options.name is None:
            part = replace(part, options=replace(options, name=_default_name(place, part)))
        stage = options.stage
        engine = _engine_that_misscales(part, servers)
        if stage is None or engine is None:
            yield part
            return
        with _exported(part, engine, stage) as exported:
            yield exported


@contextmanager
def open_part(
    place: Place, options: ServerOptions, *, compares: bool = True
) -> Iterator[PublishedPart]:
    """Open the part to publish, and lease its checkpoint.

    A checkpoint in a bucket or a chain is first pulled into the stage or the cache. With
    `compares`, digests are compared. Raises CorruptError if they differ.
    """
    if not place.is_local or is_delta(place):
        stage = options.stage
        folder = pull(place).path if stage is None else _pull_to_stage(place, stage)
        place = Place(LocalStore(folder))
    with open_checkpoint(place) as checkpoint:
        problems = checkpoint.find_problems(deep=True) if compares else ()
        if problems:
            raise CorruptError(
                f"{checkpoint.path}: {listing(problems)}; not published, use another checkpoint"
            )
        record = _chosen_part(checkpoint, options)
        yield PublishedPart(checkpoint, record, options, options.version is not None)


def drop_rebuilt_entries(entry: Place, options: ServerOptions) -> None:
    """Delete checkpoints in the stage that were rebuilt from older entries of the chain.

    A failure is logged as a warning.
    """
    if options.stage is None:
        return
    try:
        drop_rebuilt(Place(entry.absolute.beside), options.stage / run_of(entry))
    except (CheckpointError, OSError) as error:
        LOG.warning("%s: rebuilt checkpoints were not deleted: %s", options.stage, error)


def path_on_this_machine(path: str | None, visible_at: Mapping[str, str]) -> str:
    """Return the path on this machine of the servers' `path`.

    It is the same path if no folder of `visible_at` contains it. Returns "" for None.
    """
    if not path:
        return ""
    parents = [folder for folder, served in visible_at.items() if Path(path).is_relative_to(served)]
    if not parents:
        return path
    folder = max(parents, key=lambda folder: len(visible_at[folder]))
    return str(Path(folder) / Path(path).relative_to(visible_at[folder]))


def run_of(place: Place) -> str:
    """Return the name of a checkpoint's run: its parent folder, as `as_name` converts it."""
    return as_name(Place(place.absolute.beside).basename) or "run"


def as_name(text: str) -> str:
    """Replace the characters of `text` that the names of adapters and versions do not allow."""
    return re.sub(r"[^\w.-]+", "-", text)


def config_in(store: Store) -> dict[str, Any]:
    """Read the config.json of a folder. Raises CorruptError if it is invalid."""
    with damaged_input(store.where("config.json")):
        return dict(json.loads(read_text(store, "config.json")))


def _default_name(place: Place, part: PublishedPart) -> str:
    """Return the name of the run, followed by the part's if there are several adapters."""
    kinds = [record.kind for record in part.checkpoint.manifest.parts]
    if kinds.count("adapter") > 1 and part.record.name:
        return f"{run_of(place)}-{as_name(part.record.name)}"
    return run_of(place)


def _engine_that_misscales(part: PublishedPart, servers: Sequence[Server]) -> str | None:
    """Return the first engine of the servers, by name, that needs an export of the adapter."""
    if not part.is_adapter:
        return None
    store = part.place.folder
    engines = {server.engine.lower() for server in servers}
    return min((engine for engine in engines if needs_export(engine, store)), default=None)


@contextmanager
def _exported(part: PublishedPart, engine: str, stage: Path) -> Iterator[PublishedPart]:
    record = part.record
    name, _, version = part.adapter_name.partition("@")
    suffix = f"-{record.path.replace('/', '-')}" if record.path else ""
    folder = stage / f"{name}-{version}-{part.checkpoint.identity[:8]}{suffix}"
    if LocalStore(folder).stat(MANIFEST_NAME) is None:
        export(part.path, folder, engine)
    options = replace(part.options, part=None, name=name, version=version)
    with open_part(Place(LocalStore(folder)), options) as exported:
        yield replace(exported, has_given_version=part.has_given_version)


def _pull_to_stage(place: Place, stage: Path) -> Path:
    """Pull the checkpoint into the stage, and return its path.

    It may replace an earlier copy there. Raises NameTakenError for anything else at its path.
    """
    folder = stage / run_of(place) / place.basename
    if LocalStore(folder).identity == place.folder.identity:
        raise ConfigError(f"{stage}: stage= is where the chain is, expected another folder")
    is_copy = is_staged(folder)
    is_free = LocalStore(folder).stat(MANIFEST_NAME) is None
    try:
        path = pull(place, folder, overwrite=is_copy).path
    except NameTakenError as error:
        raise NameTakenError(
            f"{folder}: no publish has put there what it holds, so it is not replaced; expected "
            f"another folder as stage= ({error})"
        ) from error

    if is_copy or is_free:
        mark_staged(path)
    return path


def _chosen_part(checkpoint: OpenCheckpoint, options: ServerOptions) -> PartRecord:
    """Return the part to publish. An adapter comes before a model.

    Raises LoadError if there is none, or several.
    """
    records = checkpoint.manifest.parts
    kinds = _KINDS[options.kind]
    parts = [record for record in records if record.kind in kinds]
    if options.part is not None:
        parts = [record for record in parts if record.name == options.part]
    adapters = [record for record in parts if record.kind == "adapter"]
    candidates = adapters or parts
    if len(candidates) != 1:
        contents = [f"{record.name or 'the whole model'} ({record.kind})" for record in records]
        raise LoadError(
            f"{checkpoint.path}: {len(candidates) or 'no'} parts to publish as {options.kind}; it "
            f"holds {', '.join(contents)}; name one of them with part= and kind="
        )

    return candidates[0]
