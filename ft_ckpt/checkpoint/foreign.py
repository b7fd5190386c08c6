"""Checks weights without a manifest of ours by their headers, indexes and configs. Needs no torch."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from ft_ckpt.checkpoint.catalog import VerifyReport
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CheckpointError, CorruptError, LoadError, listing
from ft_ckpt.formats.safetensors import read_header
from ft_ckpt.storage.paths import is_inside
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.store import Store

_INDEX = ".safetensors.index.json"


def verify_foreign(place: Place) -> VerifyReport:
    """Check the safetensors files at `place`, a file or a folder of them, as far as they say what they should hold.

    Of each file the header, of each index that its tensors are where it says, of each JSON file that it is JSON.
    Values cannot be checked: nobody recorded their digests. Raises LoadError where there is no such file.
    """
    store, names = (place.store, [place.name]) if place.is_object else (place.folder, None)
    names = names or [each.name for each in store.list()]
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights and not any(name.endswith(_INDEX) for name in names):
        found = f"no {MANIFEST_NAME} and no safetensors files in it"
        raise LoadError(f"{place}: {found}; `ft-ckpt show` reads other formats")
    told = {name: _names_or_reason(store, name) for name in weights}
    held = {name: found for name, found in told.items() if isinstance(found, set)}
    problems = [f"{name}: {found}" for name, found in told.items() if isinstance(found, str)]
    for name in names:
        if name.endswith(".json"):
            problems += _document_problems(store, name, held)
    size = sum(each.size_bytes for name in weights if (each := store.stat(name)) is not None)
    return VerifyReport(place.location, not problems, tuple(problems), len(weights), size)


def _names_or_reason(store: Store, name: str) -> set[str] | str:
    try:
        with closing(store.open(name)) as file:
            return set(read_header(file))
    except CorruptError as error:
        return str(error)


def _document_problems(store: Store, name: str, held: dict[str, set[str]]) -> Iterator[str]:
    try:
        found = json.loads(store.read(name).decode("utf-8"))
    except (CheckpointError, ValueError, RecursionError) as error:
        yield f"{name}: not JSON ({error})"
        return
    if name.endswith(_INDEX):
        yield from _index_file_problems(store, name, found, held)


def _index_file_problems(store: Store, index: str, found: Any, held: dict[str, set[str]]) -> Iterator[str]:
    """Check that an index sends each tensor to a file beside it that has it."""
    where = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(where, dict):
        yield f"{index}: no weight_map in it"
        return
    folder = index.rpartition("/")[0]
    shards = {str(file): f"{folder}/{file}" if folder else str(file) for file in where.values()}
    lost = sorted(shard for shard, name in shards.items() if not is_inside(shard) or store.stat(name) is None)
    if lost:
        yield f"{index}: shards missing: {listing(lost, ', ')}"
    tensors = {shard: held[name] for shard, name in shards.items() if shard not in lost and name in held}
    wrong = sorted(name for name, shard in where.items() if name not in tensors.get(str(shard), where))
    if wrong:
        yield f"{index}: not in the shards it sends them to: {listing(wrong, ', ')}"
    stray = sorted(name for names in tensors.values() for name in names if name not in where)
    if stray:
        yield f"{index}: in its shards, not in it: {listing(stray, ', ')}"
