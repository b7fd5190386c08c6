"""Small checkpoints written by hand, and processes that die at a chosen call."""

import json
import os
import signal
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from ft_ckpt import disk
from ft_ckpt.catalog import digest_of
from ft_ckpt.commit import commit, open_stage
from ft_ckpt.manifest import FileRecord, Manifest, PartRecord, TensorRecord

CALLS = ("mkdir", "move", "exchange", "unlink", "chmod", "fsync", "rmtree")  # every call that changes the disk


def make_checkpoint(folder, *, step=1, shards=1, kind="model", part_path="", fill=None, tensors=4) -> Manifest:
    """Fill `folder` with a checkpoint (but not its manifest); each byte of its weights is `fill` (default `step`)."""
    fill, part = step if fill is None else fill, Path(folder) / part_path
    part.mkdir(parents=True, exist_ok=True)
    stem = "adapter_model" if kind == "adapter" else "model"
    names = [f"layers.{i}.weight" for i in range(tensors)]
    records, files = [], {}
    for shard in range(shards):
        file = f"{stem}.safetensors" if shards == 1 else f"{stem}-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        files |= dict.fromkeys(mine, file)
        records += write_safetensors(part / file, mine, fill, (Path(part_path) / file).as_posix())
    if shards > 1:
        (part / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (part / ("adapter_config.json" if kind == "adapter" else "config.json")).write_text(json.dumps({"step": step}))
    record = PartRecord(part_path, part_path, kind, "safetensors", "Tiny", tuple(records))
    return manifest_of(folder, (record,), step)


def manifest_of(folder, parts, step) -> Manifest:
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    files = [FileRecord(p.relative_to(folder).as_posix(), p.stat().st_size, digest_of(p)) for p in paths]
    return Manifest(tuple(parts), tuple(files), "full", datetime.now(timezone.utc).isoformat(), step=step)


def write_safetensors(path, names, fill, file) -> list[TensorRecord]:
    """A float32 [2, 3] tensor for each name, as the format has it: length, JSON header, bytes."""
    entries = {n: {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * i, 24 * i + 24]} for i, n in enumerate(names)}
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes([fill % 256]) * 24 * len(names))
    first = 8 + len(header)
    return [TensorRecord(n, (2, 3), "float32", file, first + 24 * i, first + 24 * i + 24) for i, n in enumerate(names)]


def save(target, **what) -> Manifest:
    """A checkpoint made and committed as a saver would."""
    stage = open_stage(Path(target))
    manifest = make_checkpoint(stage, **what)
    commit(stage, Path(target), manifest)
    return manifest


def dies_at(call: int, action: Callable[[], object]) -> bool:
    """Run `action` in a forked process that is killed just before its `call`-th call (1 is the first) to the disk.

    False when `action` made fewer calls and returned. A removal of a folder is killed half way, too.
    """
    child = os.fork()
    if child == 0:
        _count_down(call)
        try:
            action()
        except BaseException:
            os._exit(3)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"the action raised, at call {call}"
    return os.WIFSIGNALED(status)


def _count_down(call: int) -> None:
    left = call

    def killing(name, real):
        def run(*args):
            nonlocal left
            left -= 1
            if left == 0:
                if name == "rmtree":
                    _remove_half(args[0])
                os.kill(os.getpid(), signal.SIGKILL)
            return None if name == "fsync" else real(*args)  # no power is cut here: leave the disk alone

        return run

    for name in CALLS:
        setattr(disk, name, killing(name, getattr(disk, name)))


def _remove_half(folder) -> None:
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    for path in files[: (len(files) + 1) // 2]:
        path.unlink()
