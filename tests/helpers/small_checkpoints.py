"""Small checkpoints written by hand: their files, manifests and contents."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import xxhash

from ft_ckpt.checkpoint.commit import open_staging
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    PartRecord,
    manifest_to_json,
    read_manifest,
)
from ft_ckpt.formats import TensorRecord
from ft_ckpt.storage.digests import FileRecord, digest_of_open, read_record
from ft_ckpt.storage.io import open_local_file
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place

Folder = str | os.PathLike[str]


def make_checkpoint(
    folder: Folder,
    *,
    step: int = 1,
    shards: int = 1,
    kind: str = "model",
    parts: Sequence[str] = ("",),
) -> Manifest:
    """Write a checkpoint of small `parts` into `folder`; return its manifest, which is not written.

    Each byte of its weights is `step`.
    """
    records = [_make_part(Path(folder), part, step, shards, kind) for part in parts]
    return manifest_of(folder, records, step)


def _make_part(folder: Path, part: str, step: int, shards: int, kind: str) -> PartRecord:
    (folder / part).mkdir(parents=True, exist_ok=True)
    stem = "adapter_model" if kind == "adapter" else "model"
    names = [f"layers.{number}.weight" for number in range(4)]
    records: list[TensorRecord] = []
    file_of: dict[str, str] = {}
    for shard in range(shards):
        number = "" if shards == 1 else f"-{shard + 1:05d}-of-{shards:05d}"
        file, in_shard = f"{stem}{number}.safetensors", names[shard::shards]
        path = (Path(part) / file).as_posix()
        records += write_safetensors(folder / path, in_shard, step, path)
        file_of |= dict.fromkeys(in_shard, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": file_of}
        (folder / part / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    config = "adapter_config.json" if kind == "adapter" else "config.json"
    (folder / part / config).write_text(json.dumps({"step": step}))
    return PartRecord(part, part, kind, "safetensors", "Tiny", tuple(records))


def manifest_of(folder: Folder, parts: Iterable[PartRecord], step: int) -> Manifest:
    """Make a manifest of these parts and of all files in `folder`."""
    store = LocalStore(Path(folder))
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    files = [read_record(store, path.relative_to(folder).as_posix()) for path in paths]
    # the same save, the same bytes
    created = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=step)
    return Manifest(tuple(parts), tuple(files), "full", created.isoformat(), step=step)


def digest_like(path: Path, record: FileRecord) -> str:
    """Compute the digest of a file, as the one in `record` was."""
    with closing(open_local_file(path)) as opened:
        return digest_of_open(opened, record)


def write_safetensors(path: Path, names: Sequence[str], fill: int, file: str) -> list[TensorRecord]:
    """Write a safetensors file with a float32 tensor [2, 3] for each name; return their records.

    Each byte of the tensors is `fill`. `file` is the path of the file in the records.
    """
    entries = {}
    for number, name in enumerate(names):
        offsets = [24 * number, 24 * number + 24]
        entries[name] = {"dtype": "F32", "shape": [2, 3], "data_offsets": offsets}
    header = json.dumps(entries).encode()
    data = bytes([fill % 256]) * 24 * len(names)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    records = []
    for number, name in enumerate(names):
        start = 8 + len(header) + 24 * number
        records.append(TensorRecord(name, (2, 3), "float32", file, start, start + 24))
    return records


def save(target: Folder, **options: Any) -> Manifest:
    """Write a checkpoint and commit it, as a saver does; `options` are of `make_checkpoint`."""
    staging = open_staging(Path(target))
    manifest = make_checkpoint(staging.stage, **options)
    staging.commit(manifest)
    return manifest


def rewrite_manifest(checkpoint: Folder, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the JSON of the manifest with `change` and sign it with a valid digest."""
    file = Path(checkpoint) / MANIFEST_NAME
    document = json.loads(file.read_text())
    document.pop("digest", None)
    change(document)
    file.write_text(signed(json.dumps(document, indent=1)))


def signed(text: str) -> str:
    """Add the digest to the JSON object `text` that makes it a manifest."""
    digest = f"xxh3-128:{xxhash.xxh3_128_hexdigest(text.encode())}"
    return text.replace("{\n", f'{{\n  "digest": "{digest}",\n', 1)


def contents(folder: Folder) -> dict[str, bytes]:
    """Read everything below `folder`, hidden or not, by relative path; of a link its target."""
    return {path.relative_to(folder).as_posix(): _content(path) for path in Path(folder).rglob("*")}


def _content(path: Path) -> bytes:
    if path.is_symlink():
        return bytes(path.readlink())
    return b"" if path.is_dir() else path.read_bytes()


def save_with_state(target: Folder, step: int, *, world: int = 2, **facts: Any) -> None:
    """Save a checkpoint with a training state: a file of tensors for each rank, and a JSON file.

    `facts` are fields of its manifest.
    """
    staging = open_staging(Path(target))
    parts = list(make_checkpoint(staging.stage, step=step).parts)
    (staging.stage / "state").mkdir()
    records = []
    for rank in range(world):
        file = f"state/rank-{rank}.safetensors"
        records += write_safetensors(staging.stage / file, ["momentum", f"rng.{rank}"], step, file)
    (staging.stage / "state" / "position.json").write_text(json.dumps({"step": step}))
    parts.append(PartRecord("state", "state", "state", "safetensors", "", tuple(records)))
    staging.commit(replace(manifest_of(staging.stage, parts, step), **facts))


def save_of(target: Folder, **facts: Any) -> None:
    """Save a checkpoint with these fields in its manifest."""
    staging = open_staging(Path(target))
    staging.commit(replace(make_checkpoint(staging.stage), **facts))


def edit(folder: Path, name: str, text: bytes | str) -> None:
    """Write a file and update its record in the manifest."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    manifest = read_manifest(open_place(folder))
    old = next((file for file in manifest.files if file.path == name), manifest.files[0])
    record = read_record(LocalStore(folder), name)
    new = replace(old, path=name, size_bytes=record.size_bytes, digest=record.digest)
    files = (*(file for file in manifest.files if file.path != name), new)
    (folder / MANIFEST_NAME).write_text(manifest_to_json(replace(manifest, files=files)))


def leases_in(folder: Folder) -> list[Path]:
    """List the leases of processes that read a checkpoint now."""
    return sorted(Path(folder).glob(".ft_ckpt-lease-*"))
