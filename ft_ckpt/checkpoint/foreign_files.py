"""Verifies a single file, or a folder of another program: headers, indexes, JSON, a manifest that
lists the file.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

from ft_ckpt.checkpoint.cards import with_current_cards
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest
from ft_ckpt.checkpoint.problems import file_problems
from ft_ckpt.checkpoint.stored_manifest import load_manifest
from ft_ckpt.checkpoint.verification import VerifyReport
from ft_ckpt.errors import CheckpointError, CorruptError, LoadError, listing
from ft_ckpt.formats import read_header
from ft_ckpt.storage import FileRecord, Place, Store, is_inside


def listing_manifest(place: Place) -> tuple[Store, Manifest, FileRecord] | None:
    """The checkpoint that lists the file at `place`: its store, its manifest, the record.

    None if none does.

    Raises ManifestError for a damaged manifest.
    """
    for store, name in islice(place.folders_around(), 1, None):
        if store.stat(MANIFEST_NAME) is not None:
            manifest = load_manifest(store)
            record = {record.path: record for record in manifest.files}.get(name)
            if record is not None:
                return store, manifest, record
    return None


def verify_listed(place: Place) -> VerifyReport | None:
    """Compare size and digest of the file at `place`; None if no manifest lists it.

    Raises ManifestError.
    """
    found = listing_manifest(place) if place.is_object else None
    if found is None:
        return None
    store, manifest, record = found
    current, notes = with_current_cards(store, manifest)
    record = next((file for file in current.files if file.path == record.path), record)
    problems = tuple(str(problem) for problem in file_problems(store, record))
    return VerifyReport(place.location, not problems, problems, 1, record.size_bytes, notes)


_INDEX = ".safetensors.index.json"


def verify_foreign(place: Place) -> VerifyReport:
    """Check the safetensors file or folder at `place`, without a manifest.

    Checks the header of each file, the tensors that each index maps to files, and the syntax of
    each JSON file. Values cannot be checked without recorded digests. Raises LoadError if there is
    no safetensors file.
    """
    store, names = (place.store, [place.name]) if place.is_object else (place.folder, None)
    names = names or [each.name for each in store.list()]
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights and not any(name.endswith(_INDEX) for name in names):
        problem = f"no {MANIFEST_NAME} and no safetensors files in it"
        if place.is_object:
            problem = "not a safetensors file, and no checkpoint lists it"
        raise LoadError(f"{place}: {problem}; `ft-ckpt show` reads other formats")
    tensors: dict[str, set[str]] = {}
    problems: list[str] = []
    for name in weights:
        try:
            with closing(store.open(name)) as file:
                tensors[name] = set(read_header(file))
        except CorruptError as error:  # noqa: PERF203 - one for each file
            problems.append(
                str(error) if str(error).startswith(f"{name}: ") else f"{name}: {error}"
            )
    for name in names:
        if name.endswith(".json"):
            problems += _document_problems(store, name, tensors)
    size = sum(each.size_bytes for name in weights if (each := store.stat(name)) is not None)
    return VerifyReport(place.location, not problems, tuple(problems), len(weights), size)


def _document_problems(store: Store, name: str, held: dict[str, set[str]]) -> Iterator[str]:
    try:
        found = json.loads(store.read(name).decode("utf-8"))
    except (CheckpointError, ValueError, RecursionError) as error:
        yield f"{name}: not JSON ({error})"
        return
    if name.endswith(_INDEX):
        yield from _index_file_problems(store, name, found, held)


def _index_file_problems(
    store: Store, index: str, found: Any, held: dict[str, set[str]]
) -> Iterator[str]:
    """Check that an index maps each tensor to a file beside it that contains it."""
    where = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(where, dict):
        yield f"{index}: no weight_map in it"
        return
    folder = index.rpartition("/")[0]
    shards = {str(file): f"{folder}/{file}" if folder else str(file) for file in where.values()}
    lost = sorted(
        shard for shard, name in shards.items() if not is_inside(shard) or store.stat(name) is None
    )
    if lost:
        yield f"{index}: shards missing: {listing(lost, ', ')}"
    tensors = {
        shard: held[name] for shard, name in shards.items() if shard not in lost and name in held
    }
    wrong = sorted(
        name for name, shard in where.items() if name not in tensors.get(str(shard), where)
    )
    if wrong:
        yield f"{index}: not in the shards that it maps them to: {listing(wrong, ', ')}"
    stray = sorted(name for names in tensors.values() for name in names if name not in where)
    if stray:
        yield f"{index}: in its shards, not in it: {listing(stray, ', ')}"
