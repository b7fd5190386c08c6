"""Verifies a checkpoint: `verify`, and the damage that keeps a checkpoint from being chosen."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.checks.problems import (
    are_transient,
    checkpoint_problems,
    file_problems,
    retry_transient,
    stored_bytes,
)
from ft_ckpt.checkpoint.checks.signature import SignedBy, signature_problems
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    load_manifest,
    manifest_version,
    why_no_checkpoint,
    with_current_cards,
)
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    LoadError,
    NotACheckpointError,
    Problem,
    UnreadableError,
    damaged_input,
    listing,
)
from ft_ckpt.formats.safetensors import read_header
from ft_ckpt.storage import Store, is_inside
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import Place, hold_listed, open_place


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify`."""

    path: str | Path
    """The checkpoint: its path, or its URL."""
    ok: bool
    """Whether there are no problems."""
    problems: tuple[str, ...]
    """Differences from the manifest, each with the file first."""
    files: int
    """Number of files that the manifest lists."""
    bytes: int
    """Total size of these files, in bytes."""
    notes: tuple[str, ...] = ()
    """Changes since the save that are not problems: a model card that was written again."""
    is_transient: bool = False
    """Whether the only problems are files that cannot be read now, which may be whole."""


def verify(
    path: str | os.PathLike[str] | Place, *, deep: bool = True, signed_by: SignedBy | None = None
) -> VerifyReport:
    """Compare the files of checkpoint `path` with its manifest.

    Names, sizes, the tensors in each safetensors header, each index and the digests of files below
    1 MiB are always compared, and weights of another save in the folder are a problem. `deep` also
    reads all other bytes and compares their digests. `signed_by` also checks the signature (see
    `sign`), and that no file was added, deleted or changed since it was made: it is the path of a
    public key, or (identity, provider) of a keyless signature. A model card that was written again
    since the save is a note of the report.

    Raises NotACheckpointError, ManifestError or UnreadableError as `read_manifest` does;
    ConfigError if a signature cannot be checked: an unusable key, a checkpoint in a bucket, no
    model-signing library.
    """
    store = open_place(path).folder
    place = Place(store)
    while True:
        version = _version_or_none(store)
        view = store if version is None else hold_listed(store)
        try:
            manifest = load_manifest(view)
        except NotACheckpointError:
            raise NotACheckpointError(why_no_checkpoint(place)) from None

        with damaged_input(place.location):
            current, notes = with_current_cards(view, manifest)
            problems = list(dict.fromkeys(checkpoint_problems(view, current, deep=deep)))
            if signed_by is not None:
                problems += map(Problem, signature_problems(store, store, manifest, signed_by))

        # A concurrent save may have overwritten the checkpoint, so that a mixture of both was read:
        # read again.
        if problems and _version_or_none(store) != version:
            continue
        return VerifyReport(
            place.location,
            ok=not problems,
            problems=tuple(str(problem) for problem in problems),
            files=len(manifest.files),
            bytes=stored_bytes(view, current),
            notes=notes,
            is_transient=are_transient(problems),
        )


def damage_of(place: Place, *, deep: bool = False) -> tuple[str, ...]:
    """Return the problems that `verify` reports, which is repeated if they may be temporary.

    Raises what `verify` raises, and UnreadableError if the only problem is that files cannot be
    read now.
    """

    def find_problems() -> tuple[Problem, ...]:
        try:
            report = verify(place, deep=deep)
        except UnreadableError as error:
            return (Problem(str(error), is_transient=True),)
        return tuple(Problem(text, report.is_transient) for text in report.problems)

    problems = retry_transient(find_problems, are_transient)
    if are_transient(problems):
        raise UnreadableError(f"{place}: {listing(problems)}; try again")
    return tuple(problem.text for problem in problems)


def _version_or_none(store: Store) -> str | None:
    try:
        return manifest_version(store)
    except UnreadableError:
        return None


_INDEX = ".safetensors.index.json"


def listing_manifest(place: Place) -> tuple[Store, Manifest, FileRecord] | None:
    """Return the store, the manifest and the record of the checkpoint that lists a file.

    Return None if no checkpoint lists the file at `place`. Raises ManifestError for a damaged
    manifest.
    """
    for store, name in islice(place.folders_around(), 1, None):
        if store.stat(MANIFEST_NAME) is None:
            continue
        manifest = load_manifest(store)
        for record in manifest.files:
            if record.path == name:
                return store, manifest, record
    return None


def verify_listed(place: Place) -> VerifyReport | None:
    """Compare the size and the digest of the file at `place` with the manifest that lists it.

    Return None if no manifest lists the file. Raises ManifestError for a damaged manifest.
    """
    listed = listing_manifest(place) if place.is_object else None
    if listed is None:
        return None
    store, manifest, record = listed
    current, notes = with_current_cards(store, manifest)
    for file in current.files:
        if file.path == record.path:
            record = file
    problems = tuple(str(problem) for problem in file_problems(store, record))
    return VerifyReport(place.location, not problems, problems, 1, record.size_bytes, notes)


def verify_foreign(place: Place) -> VerifyReport:
    """Check the safetensors file or folder at `place`, without a manifest.

    Checks the header of each file, the tensors that each index maps to files, and the syntax of
    each JSON file. Values cannot be checked without recorded digests. Raises LoadError if there is
    no safetensors file.
    """
    if place.is_object:
        store, names = place.store, [place.name]
    else:
        store = place.folder
        names = [stored.name for stored in store.list()]

    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights and not any(name.endswith(_INDEX) for name in names):
        problem = f"no {MANIFEST_NAME} and no safetensors files in it"
        if place.is_object:
            problem = "not a safetensors file, and no checkpoint lists it"
        raise LoadError(f"{place}: {problem}; `ft-ckpt show` reads other formats")

    tensors: dict[str, set[str]] = {}
    problems: list[str] = []
    size_bytes = 0
    for name in weights:
        try:
            with closing(store.open(name)) as file:
                size_bytes += file.size_bytes
                tensors[name] = set(read_header(file))
        except CorruptError as error:  # noqa: PERF203 - of each file
            text = str(error)
            problems.append(text if text.startswith(f"{name}: ") else f"{name}: {text}")

    documents = [name for name in names if name.endswith(".json")]
    for name in documents:
        problems += _document_problems(store, name, tensors)
    return VerifyReport(place.location, not problems, tuple(problems), len(weights), size_bytes)


def _document_problems(
    store: Store, name: str, tensors: Mapping[str, Collection[str]]
) -> Iterator[str]:
    try:
        document = json.loads(store.read(name).decode("utf-8"))
    except (CheckpointError, ValueError, RecursionError) as error:
        yield f"{name}: not JSON ({error})"
        return
    if name.endswith(_INDEX):
        yield from _index_file_problems(store, name, document, tensors)


def _index_file_problems(
    store: Store, index: str, document: Any, tensors: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Yield problems of an index, which must map each tensor to a file in its folder that has it.

    `tensors` has the names in each readable file.
    """
    shard_of = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(shard_of, dict):
        yield f"{index}: no weight_map in it"
        return

    folder = index.rpartition("/")[0]
    missing: list[str] = []
    tensors_in: dict[str, Collection[str]] = {}  # each shard whose header was read
    for shard in sorted({str(file) for file in shard_of.values()}):
        name = f"{folder}/{shard}" if folder else shard
        if not is_inside(shard) or store.stat(name) is None:
            missing.append(shard)
        elif name in tensors:
            tensors_in[shard] = tensors[name]

    if missing:
        yield f"{index}: shards missing: {listing(missing, ', ')}"
    wrong = []
    for name, shard in shard_of.items():
        if name not in tensors_in.get(str(shard), shard_of):
            wrong.append(name)

    if wrong:
        yield f"{index}: not in the shards that it maps them to: {listing(sorted(wrong), ', ')}"
    unmapped: list[str] = []
    for names in tensors_in.values():
        unmapped += [name for name in names if name not in shard_of]
    if unmapped:
        yield f"{index}: in its shards, not in it: {listing(sorted(unmapped), ', ')}"
