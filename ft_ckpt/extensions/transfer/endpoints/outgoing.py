"""Selects the files of a checkpoint to push, and removes local paths from its configs.

The pushed manifest lists the files as they are sent. The model card is not listed, because people
edit it on the Hub.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.checks import SIGNATURE_NAME
from ft_ckpt.checkpoint.commit import without_state
from ft_ckpt.checkpoint.manifest import (
    CARD_NAME,
    MANIFEST_NAME,
    BaseRecord,
    Manifest,
    is_hub_name,
    manifest_to_json,
)
from ft_ckpt.errors import CheckpointError, CorruptError, listing
from ft_ckpt.storage.digests import FileRecord, record_of
from ft_ckpt.storage.local import LocalStore

# Files of a Trainer, which are pushed only with the training state.
_STATE_FILES = {"trainer_state.json"}
_BASE_KEYS = {"base_model_name_or_path", "_name_or_path", "name_or_path"}
_CONFIG_LIMIT_BYTES = 8 << 20


@dataclass(frozen=True)
class OutgoingFiles:
    """The files of a checkpoint to push.

    Attributes:
        files: The file, or the bytes that are sent in its place, by path in the checkpoint.
        manifest: The manifest of these files.
        base_id: The name of the base model on the Hub.
        notes: Sentences about files that were left out or changed.
    """

    files: Mapping[str, Path | bytes]
    manifest: Manifest
    base_id: str | None
    notes: tuple[str, ...]

    def content(self, name: str) -> bytes:
        """Return the content of a small file as it is sent, or b"" if it is not sent."""
        file = self.files.get(name, b"")
        if isinstance(file, bytes):
            return file
        return LocalStore(file.parent).read(file.name)


def refuse_damaged(checkpoint: OpenCheckpoint) -> None:
    """Raise CorruptError if a file differs from the manifest."""
    problems = checkpoint.find_problems(deep=True)
    if problems:
        raise CorruptError(
            f"{checkpoint.path}: {listing(problems)}; not sent, use another checkpoint"
        )


def outgoing_files(
    checkpoint: OpenCheckpoint, *, state: bool, base_id: str | None
) -> OutgoingFiles:
    """Return the files of an open checkpoint to push, with the training state if `state`.

    `base_id` is the name of the base model on the Hub, if it is known.
    """
    manifest = checkpoint.manifest if state else weights_manifest(checkpoint.manifest)
    sent = [file for file in manifest.files if not is_hidden(file.path)]
    configs = _configs_of(checkpoint, sent)
    base_id = base_id or _base_on_hub(manifest, configs)
    changed_configs = _changed_configs(configs, _local_bases(manifest), base_id)
    files: dict[str, Path | bytes] = {}
    records = []
    for file in sent:
        changed_config = changed_configs.get(file.path)
        if changed_config is None:
            files[file.path] = checkpoint.folder / file.path
            record = replace(file, linked=False)
        else:
            files[file.path] = changed_config.content
            record = record_of(file.path, changed_config.content)
        if file.path != CARD_NAME:
            records.append(record)

    parts = tuple(
        replace(part, base=_without_local_path(part.base, base_id)) for part in manifest.parts
    )
    manifest = replace(manifest, files=tuple(records), parts=parts)
    files[MANIFEST_NAME] = manifest_to_json(manifest).encode("utf-8")
    notes = _notes_on_left_out(checkpoint, sent)
    notes += [f"{path}: {config.changes}" for path, config in changed_configs.items()]
    return OutgoingFiles(files, manifest, base_id, tuple(notes))


def _notes_on_left_out(checkpoint: OpenCheckpoint, sent: Sequence[FileRecord]) -> list[str]:
    notes = []
    left_out = {file.path for file in checkpoint.manifest.files} - {file.path for file in sent}
    if left_out:
        notes.append(f"{listing(sorted(left_out), ', ')}: left out")
    if checkpoint.place.folder.stat(SIGNATURE_NAME) is not None:
        notes.append(
            f"{SIGNATURE_NAME}: left out, because the pushed manifest differs from the signed one"
        )
    return notes


def weights_manifest(manifest: Manifest) -> Manifest:
    """Return the manifest without the training state."""
    bare = without_state(manifest)
    files = tuple(file for file in bare.files if file.path not in _STATE_FILES)
    # A checkpoint without its state is an export: if it is pulled into the folder of its run,
    # retention rules do not delete it.
    export = manifest.export or bare.parts != manifest.parts
    return replace(bare, files=files, notes=manifest.notes, export=export)


def is_hidden(path: str) -> bool:
    """Check whether a component of the path begins with a dot."""
    return any(component.startswith(".") for component in path.split("/"))


def _configs_of(
    checkpoint: OpenCheckpoint, files: Sequence[FileRecord]
) -> dict[str, dict[str, Any]]:
    """Return the parsed contents of the config files to send, by path."""
    configs = {}
    for file in files:
        name = PurePosixPath(file.path).name
        if name.endswith("config.json") and file.size_bytes <= _CONFIG_LIMIT_BYTES:
            try:
                config = json.loads(LocalStore(checkpoint.folder).read(file.path))
            except (ValueError, RecursionError):
                continue
            if isinstance(config, dict):
                configs[file.path] = config
    return configs


def _base_on_hub(manifest: Manifest, configs: Mapping[str, dict[str, Any]]) -> str | None:
    """Return the name of the base on the Hub, if adapter configs or the manifest have it."""
    names = [config.get("base_model_name_or_path") for config in configs.values()]
    names += [part.base.id for part in manifest.parts if part.base is not None]
    for name in names:
        if isinstance(name, str) and is_hub_name(name):
            return name
    return None


def _local_bases(manifest: Manifest) -> set[str]:
    """Return the bases in the manifest that are local paths."""
    paths = set()
    for part in manifest.parts:
        if part.base and part.base.id and not is_hub_name(part.base.id):
            paths.add(part.base.id)
    return paths


def _without_local_path(base: BaseRecord | None, base_id: str | None) -> BaseRecord | None:
    """Replace the name of a base by `base_id` if it is a local path."""
    if base is None or base.id is None or is_hub_name(base.id):
        return base
    return replace(base, id=base_id)


@dataclass(frozen=True)
class _ChangedConfig:
    """A config without its local paths, and the changes in words."""

    content: bytes
    changes: str


def _changed_configs(
    configs: Mapping[str, dict[str, Any]], local_bases: set[str], base_id: str | None
) -> dict[str, _ChangedConfig]:
    """Return the configs that contain local paths, by path."""
    changed = {}
    for path, config in configs.items():
        changes: list[str] = []
        config_to_send = _without_local_paths(config, "", local_bases, base_id, changes)
        if changes:
            content = f"{json.dumps(config_to_send, indent=2)}\n".encode()
            changed[path] = _ChangedConfig(content, "; ".join(changes))
    return changed


def _without_local_paths(
    value: Any, key: str, local_bases: set[str], base_id: str | None, changes: list[str]
) -> Any:
    """Return the JSON value without local paths, and append the changes in words to `changes`.

    `key` is the key of the value in its JSON object.
    """
    if isinstance(value, dict):
        cleaned = {}
        for name, entry in value.items():
            cleaned[name] = _without_local_paths(entry, name, local_bases, base_id, changes)
        return cleaned

    if isinstance(value, list):
        return [_without_local_paths(entry, key, local_bases, base_id, changes) for entry in value]
    if not isinstance(value, str):
        return value
    is_base_path = key in _BASE_KEYS and not is_hub_name(value)
    if value not in local_bases and not is_base_path and not _is_existing_path(value):
        return value
    replacement = None
    if key in _BASE_KEYS or value in local_bases:
        replacement = base_id
    outcome = "left out" if replacement is None else f"now {replacement}"
    changes.append(f"{key} was a path of this machine, {outcome}")
    return replacement


def _is_existing_path(text: str) -> bool:
    """Check whether a text is an absolute path that exists on this machine.

    Paths with one component, such as "/s", may be tokens and do not count.
    """
    path = Path(text)
    if not path.is_absolute() or len(path.parts) < 3 or "\0" in text:
        return False
    with suppress(CheckpointError, OSError):
        is_file = LocalStore(path.parent).stat(path.name) is not None
        return is_file or LocalStore(path).list_folder().exists
    return False
