"""Checks weights without a manifest of ours by their headers, indexes and configs. Needs no torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.catalog import VerifyReport
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CorruptError, LoadError, listing
from ft_ckpt.formats.safetensors import read_header
from ft_ckpt.storage.paths import is_inside

_INDEX = ".safetensors.index.json"


def verify_foreign(path: Path) -> VerifyReport:
    """Check the safetensors files at `path`, a file or a folder of them, as far as they say what they should hold.

    Of each file the header, of each index that its tensors are where it says, of each JSON file that it is JSON.
    Values cannot be checked: nobody recorded their digests. Raises LoadError where there is no such file.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    weights = [file for file in files if file.suffix == ".safetensors" and file.is_file()]
    folder = path.parent if path.is_file() else path
    if not weights and not any(file.name.endswith(_INDEX) for file in files):
        found = f"no {MANIFEST_NAME} and no safetensors files in it"
        raise LoadError(f"{path}: {found}; `ft-ckpt show` reads other formats")
    told = {file: _names_or_reason(file) for file in weights}
    names = {file: held for file, held in told.items() if isinstance(held, set)}
    problems = [f"{file.relative_to(folder)}: {held}" for file, held in told.items() if isinstance(held, str)]
    for file in files:
        if file.suffix == ".json" and file.is_file():
            problems += _document_problems(file, folder, names)
    size = sum(file.stat().st_size for file in weights)
    return VerifyReport(path, not problems, tuple(problems), len(weights), size)


def _names_or_reason(file: Path) -> set[str] | str:
    try:
        return set(read_header(file))
    except (CorruptError, OSError) as error:
        return str(error)


def _document_problems(file: Path, folder: Path, names: dict[Path, set[str]]) -> Iterator[str]:
    label = file.relative_to(folder).as_posix()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield f"{label}: not JSON ({error})"
        return
    if file.name.endswith(_INDEX):
        yield from _index_file_problems(file, label, found, names)


def _index_file_problems(index: Path, label: str, found: Any, names: dict[Path, set[str]]) -> Iterator[str]:
    """Check that an index sends each tensor to a file beside it that has it."""
    where = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(where, dict):
        yield f"{label}: no weight_map in it"
        return
    shards = {str(file) for file in where.values()}
    lost = sorted(shard for shard in shards if not is_inside(shard) or not (index.parent / shard).is_file())
    if lost:
        yield f"{label}: shards missing: {listing(lost, ', ')}"
    held = {shard: names[index.parent / shard] for shard in shards - set(lost) if index.parent / shard in names}
    wrong = sorted(name for name, shard in where.items() if str(shard) in held and name not in held[str(shard)])
    if wrong:
        yield f"{label}: not in the shards it sends them to: {listing(wrong, ', ')}"
    stray = sorted(name for tensors in held.values() for name in tensors if name not in where)
    if stray:
        yield f"{label}: in its shards, not in it: {listing(stray, ', ')}"
