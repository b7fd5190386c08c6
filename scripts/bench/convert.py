"""Conversions from one format to another: the source is in no page cache, the result is durable."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ft_ckpt
from scripts.bench import limits
from scripts.bench.common import Row, Setting, Way, drop_cached, in_turns, sync_tree, timed
from scripts.bench.models import make_subject

TITLE = "convert from the disk until it is durable"
LIMIT = "limit: O_DIRECT read, then write"


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each direction, and a plain copy of the same bytes."""
    subject, folder = make_subject(size_bytes), setting.folder
    h5, safetensors = folder / "a.h5", folder / "b.safetensors"
    new_h5, new_safetensors = folder / "target.h5", folder / "target.safetensors"
    ft_ckpt.save(dict(subject.state), h5)
    ft_ckpt.save(dict(subject.state), safetensors)
    convert = partial(ft_ckpt.convert, progress=False)

    def read_and_write() -> None:
        limits.read(h5)
        limits.write(new_h5, h5.stat().st_size)

    def copy() -> None:
        shutil.copyfile(h5, new_h5)
        sync_tree(new_h5)

    ways: dict[str, Way] = {
        LIMIT: partial(_timed, new_h5, read_and_write),
        "ours, h5 to safetensors": partial(
            _timed, new_safetensors, partial(convert, h5, new_safetensors)
        ),
        "ours, safetensors to h5": partial(_timed, new_h5, partial(convert, safetensors, new_h5)),
        "cp": partial(_timed, new_h5, copy),
    }
    rows = in_turns(ways, setting, lambda way: drop_cached(folder))
    return [row | {"tensor_bytes": subject.size_bytes} for row in rows]


def _timed(target: Path, action: Callable[[], Any]) -> Row:
    """Measure an action, and delete its result."""
    try:
        return timed(action)
    finally:
        target.unlink(missing_ok=True)
