"""Selects the files of a checkpoint to push; options and reports of pushes and pulls.

The pushed manifest lists the files as they are sent. The model card is not listed, because people
edit it on the Hub.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ft_ckpt.checkpoint import (
    CARD_NAME,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    BaseRecord,
    Manifest,
    OpenCheckpoint,
    is_hub_name,
    manifest_to_json,
    without_state,
)
from ft_ckpt.errors import CheckpointError, CorruptError, listing
from ft_ckpt.storage import FileRecord, LocalStore, record_of

_OF_RUNS = {"trainer_state.json"}  # of a Trainer; pushed only with the training state
_BASE_KEYS = {"base_model_name_or_path", "_name_or_path", "name_or_path"}
_CONFIG_LIMIT_BYTES = 8 << 20


@dataclass(frozen=True)
class OutgoingFiles:
    """The files of a checkpoint to push."""

    # by path in the checkpoint: the file, or content sent in its place
    files: Mapping[str, Path | bytes]
    manifest: Manifest  # of the sent files
    base_id: str | None  # name of the base on the Hub
    notes: tuple[str, ...]

    def content(self, name: str) -> bytes:
        """The content of a small file as it is sent; b"" if it is not sent."""
        file = self.files.get(name, b"")
        return file if isinstance(file, bytes) else LocalStore(file.parent).read(file.name)


def refuse_damaged(held: OpenCheckpoint) -> None:
    """Raise CorruptError if a file differs from the manifest."""
    problems = held.find_problems(deep=True)
    if problems:
        raise CorruptError(f"{held.path}: {listing(problems)}; not sent, use another checkpoint")


def outgoing_files(held: OpenCheckpoint, *, state: bool, base_id: str | None) -> OutgoingFiles:
    """The files of an open checkpoint to push; with the training state if `state`.

    `base_id`: Hub name of the base.
    """
    manifest = held.manifest if state else weights_manifest(held.manifest)
    sent = [file for file in manifest.files if not is_hidden(file.path)]
    left_out = sorted({file.path for file in held.manifest.files} - {file.path for file in sent})
    notes = [f"{listing(left_out, ', ')}: left out"] if left_out else []
    if held.place.folder.stat(SIGNATURE_NAME) is not None:
        notes.append(
            f"{SIGNATURE_NAME}: left out, because the pushed manifest differs from the signed one"
        )
    configs = dict(_configs_of(held, sent))
    base_id = base_id or _base_on_hub(manifest, configs)
    changed = dict(_changed_configs(configs, _local_bases(manifest), base_id))
    notes += [f"{path}: {what}" for path, (_, what) in changed.items()]
    parts = tuple(replace(part, base=_named_base(part.base, base_id)) for part in manifest.parts)
    records = tuple(
        record_of(file.path, changed[file.path][0])
        if file.path in changed
        else replace(file, linked=False)
        for file in sent
        if file.path != CARD_NAME
    )
    manifest = replace(manifest, files=records, parts=parts)
    files: dict[str, Path | bytes] = {file.path: held.folder / file.path for file in sent}
    files |= {path: content for path, (content, _) in changed.items()}
    files[MANIFEST_NAME] = manifest_to_json(manifest).encode("utf-8")
    return OutgoingFiles(files, manifest, base_id, tuple(notes))


def weights_manifest(manifest: Manifest) -> Manifest:
    """The manifest without the training state."""
    bare = without_state(manifest)
    files = tuple(file for file in bare.files if file.path not in _OF_RUNS)
    # if pulled into its run's folder, retention keeps it
    export = manifest.export or bare.parts != manifest.parts
    return replace(bare, files=files, notes=manifest.notes, export=export)


def is_hidden(path: str) -> bool:
    """Whether a component of the path begins with a dot."""
    return any(step.startswith(".") for step in path.split("/"))


def _configs_of(
    held: OpenCheckpoint, files: list[FileRecord]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config files to send, parsed, by path."""
    for file in files:
        name = PurePosixPath(file.path).name
        if name.endswith("config.json") and file.size_bytes <= _CONFIG_LIMIT_BYTES:
            try:
                found = json.loads(LocalStore(held.folder).read(file.path))
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield file.path, found


def _base_on_hub(manifest: Manifest, configs: Mapping[str, dict[str, Any]]) -> str | None:
    """The Hub name of the base, from adapter configs and the manifest."""
    names = [config.get("base_model_name_or_path") for config in configs.values()]
    names += [part.base.id for part in manifest.parts if part.base is not None]
    return next((name for name in names if isinstance(name, str) and is_hub_name(name)), None)


def _local_bases(manifest: Manifest) -> set[str]:
    return {
        part.base.id
        for part in manifest.parts
        if part.base and part.base.id and not is_hub_name(part.base.id)
    }


def _named_base(base: BaseRecord | None, base_id: str | None) -> BaseRecord | None:
    if base is None or base.id is None or is_hub_name(base.id):
        return base
    return replace(base, id=base_id)


def _changed_configs(
    configs: Mapping[str, dict[str, Any]], local: set[str], base_id: str | None
) -> Iterator[tuple[str, tuple[bytes, str]]]:
    """The configs that contain local paths, by path: (content without these, description of the
    change).
    """
    for path, config in configs.items():
        changes: list[str] = []
        found = _without_places(config, "", local, base_id, changes)
        if changes:
            yield path, (f"{json.dumps(found, indent=2)}\n".encode(), "; ".join(changes))


def _without_places(
    value: Any, key: str, local: set[str], base_id: str | None, changes: list[str]
) -> Any:
    """The JSON value without local paths; descriptions of changes are appended to `changes`."""
    if isinstance(value, dict):
        return {
            name: _without_places(each, name, local, base_id, changes)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_without_places(each, key, local, base_id, changes) for each in value]
    is_base = key in _BASE_KEYS and isinstance(value, str) and not is_hub_name(value)
    if not isinstance(value, str) or not (value in local or is_base or _is_place_here(value)):
        return value
    instead = base_id if key in _BASE_KEYS or value in local else None
    changes.append(
        f"{key} was a path of this machine, {'left out' if instead is None else f'now {instead}'}"
    )
    return instead


def _is_place_here(text: str) -> bool:
    """Whether a text is an existing absolute path; paths of one name, such as "/s", may be tokens
    and do not count.
    """
    path = Path(text)
    if not path.is_absolute() or len(path.parts) < 3 or "\0" in text:
        return False
    with suppress(CheckpointError, OSError):
        return (
            LocalStore(path.parent).stat(path.name) is not None
            or LocalStore(path).list_folder().exists
        )
    return False


@dataclass(frozen=True)
class PushOptions:
    """How a checkpoint is pushed."""

    revision: str | None = None
    private: bool | None = None
    token: str | None = field(default=None, repr=False)
    state: bool = False  # push the training state, too
    base_id: str | None = None  # name of the base on the Hub
    message: str | None = None
    quiet: bool = False  # no progress bars
    card: str | None = None  # replaces the card of the repository; None keeps it


@dataclass(frozen=True)
class PushReport:
    """A finished push."""

    path: Path | str
    """The checkpoint that was pushed."""
    url: str
    """The destination, as `pull` takes it."""
    repo_id: str
    """The repository; "" in a bucket."""
    oid: str
    """The commit; in a bucket the digest of the manifest of `path`."""
    commit_url: str
    """URL of the commit, or of the manifest in a bucket."""
    is_new: bool
    """Whether a commit was made; False if the destination had all files."""
    files: tuple[str, ...]
    """Paths of the pushed files in the repository; in a bucket, relative to the checkpoint, without
    the manifest.
    """
    deleted: tuple[str, ...]
    """Paths of files of older checkpoints that were deleted with the same commit."""
    bytes: int
    """Size of the files, in bytes."""
    seconds: float
    """Duration."""
    notes: tuple[str, ...]
    """Files that were left out or changed, and metadata of the card that could not be updated."""


@dataclass(frozen=True)
class PullReport:
    """A finished pull."""

    path: Path
    """The folder of the checkpoint."""
    url: str
    """The source."""
    oid: str
    """The commit; of a bucket the digest of the manifest."""
    verified: bool
    """Whether there was a manifest; then all files agree with it."""
    files: tuple[str, ...]
    """Paths of its files, relative to the folder."""
    bytes: int
    """Size of the files, in bytes."""
    seconds: float
    """Duration."""
