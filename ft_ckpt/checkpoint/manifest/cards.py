"""Model cards, which the Trainer, PEFT and people write again after a save; names on the Hub."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ft_ckpt.checkpoint.manifest.manifest import Manifest
from ft_ckpt.errors import MissingError
from ft_ckpt.storage import Store, Stored
from ft_ckpt.storage.digests import FileRecord, read_record
from ft_ckpt.storage.local import LocalStore

CARD_NAME = "README.md"


def with_current_cards(
    store: Store, manifest: Manifest, objects: Mapping[str, Stored] | None = None
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest with its model cards as they are now, and a note for each change.

    `objects` are the objects of a bucket by name; a card in them is read only if its version
    differs from the recorded one.
    """
    cards = set()
    for part in manifest.parts:
        if part.kind != "state":
            cards.add(PurePosixPath(part.path, CARD_NAME).as_posix())

    files: list[FileRecord] = []
    notes: list[str] = []
    for file in manifest.files:
        is_unchanged = objects is not None and not is_other_version(file, objects.get(file.path))
        if file.path not in cards or is_unchanged:
            files.append(file)
            continue

        try:
            current = read_record(store, file.path)
        except MissingError:
            notes.append(f"{file.path}: the model card was deleted after the save")
            continue

        if (current.size_bytes, current.digest) == (file.size_bytes, file.digest):
            files.append(file)
            continue

        stored = store.stat(file.path)
        files.append(replace(current, etag=None if stored is None else stored.etag))
        notes.append(f"{file.path}: the model card was changed after the save")

    if notes:
        manifest = replace(manifest, files=tuple(files))
    return manifest, tuple(notes)


def is_other_version(file: FileRecord, stored: Stored | None) -> bool:
    """Check whether an object has another version than the one that was committed."""
    if stored is None or file.etag is None or stored.etag is None:
        return False
    return file.etag != stored.etag


def is_hub_name(name: str) -> bool:
    """Check whether `name` is a valid model id of the Hub, and not a local folder."""
    from huggingface_hub.errors import HFValidationError  # lazily: `ft-ckpt ls` does not need it
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not LocalStore(Path(name)).list_folder().exists
