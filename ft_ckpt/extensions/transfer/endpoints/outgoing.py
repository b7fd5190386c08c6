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
        """Return the content of a small file as it is sent; b"" if it is not sent."""
        file = self.files.get(name, b"")
        return file if isinstance(file, bytes) else LocalStore(file.parent).read(file.name)


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
    """Return the files of an open checkpoint to push; with the training state if `state`.

    `base_id` is the Hub name of the base.
    """
    manifest = checkpoint.manifest if state else weights_manifest(checkpoint.manifest)
    sent = [file for file in manifest.files if not is_hidden(file.path)]
    configs = _configs_of(checkpoint, sent)
    base_id = base_id or _base_on_hub(manifest, configs)
    changed_configs = _changed_configs(configs, _local_bases(manifest), base_id)
    files: dict[str, Path | bytes] = {}
    records = []
    for file in sent:
        changed = changed_configs.get(file.path)
        if changed is None:
            files[file.path] = checkpoint.folder / file.path
            record = replace(file, linked=False)
        else:
            files[file.path] = changed.content
            record = record_of(file.path, changed.content)
        if file.path != CARD_NAME:
            records.append(record)
    parts = tuple(replace(part, base=_named_base(part.base, base_id)) for part in manifest.parts)
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
    files = tuple(file for file in bare.files if file.path not in _OF_RUNS)
    # if pulled into its run's folder, retention keeps it
    export = manifest.export or bare.parts != manifest.parts
    return replace(bare, files=files, notes=manifest.notes, export=export)


def is_hidden(path: str) -> bool:
    """Check whether a component of the path begins with a dot."""
    return any(step.startswith(".") for step in path.split("/"))


def _configs_of(
    checkpoint: OpenCheckpoint, files: Sequence[FileRecord]
) -> dict[str, dict[str, Any]]:
    """Return the config files to send, parsed, by path."""
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
    """Return the Hub name of the base, from adapter configs and the manifest."""
    names = [config.get("base_model_name_or_path") for config in configs.values()]
    names += [part.base.id for part in manifest.parts if part.base is not None]
    for name in names:
        if isinstance(name, str) and is_hub_name(name):
            return name
    return None


def _local_bases(manifest: Manifest) -> set[str]:
    paths = set()
    for part in manifest.parts:
        if part.base and part.base.id and not is_hub_name(part.base.id):
            paths.add(part.base.id)
    return paths


def _named_base(base: BaseRecord | None, base_id: str | None) -> BaseRecord | None:
    if base is None or base.id is None or is_hub_name(base.id):
        return base
    return replace(base, id=base_id)


@dataclass(frozen=True)
class _ChangedConfig:
    content: bytes  # without local paths
    changes: str


def _changed_configs(
    configs: Mapping[str, dict[str, Any]], local_bases: set[str], base_id: str | None
) -> dict[str, _ChangedConfig]:
    """Return the configs that contain local paths, by path."""
    changed = {}
    for path, config in configs.items():
        changes: list[str] = []
        config_to_send = _without_places(config, "", local_bases, base_id, changes)
        if changes:
            content = f"{json.dumps(config_to_send, indent=2)}\n".encode()
            changed[path] = _ChangedConfig(content, "; ".join(changes))
    return changed


def _without_places(
    value: Any, key: str, local_bases: set[str], base_id: str | None, changes: list[str]
) -> Any:
    """Return the JSON value without local paths; append descriptions of changes to `changes`."""
    if isinstance(value, dict):
        cleaned = {}
        for name, entry in value.items():
            cleaned[name] = _without_places(entry, name, local_bases, base_id, changes)
        return cleaned
    if isinstance(value, list):
        return [_without_places(entry, key, local_bases, base_id, changes) for entry in value]
    if not isinstance(value, str):
        return value
    is_base = key in _BASE_KEYS and not is_hub_name(value)
    if not (value in local_bases or is_base or _is_place_here(value)):
        return value
    replacement = base_id if key in _BASE_KEYS or value in local_bases else None
    outcome = "left out" if replacement is None else f"now {replacement}"
    changes.append(f"{key} was a path of this machine, {outcome}")
    return replacement


def _is_place_here(text: str) -> bool:
    """Check whether a text is an existing absolute path.

    Paths of one name, such as "/s", may be tokens and do not count.
    """
    path = Path(text)
    if not path.is_absolute() or len(path.parts) < 3 or "\0" in text:
        return False
    with suppress(CheckpointError, OSError):
        is_file = LocalStore(path.parent).stat(path.name) is not None
        return is_file or LocalStore(path).list_folder().exists
    return False
