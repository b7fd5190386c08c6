"""Conversion from one format to another, of a source that is not in the page cache to a durable
result.
"""

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
    """A row for each direction, and for a plain copy of the same bytes."""
    subject, folder = make_subject(size_bytes), setting.folder
    h5, safetensors, target = folder / "a.h5", folder / "b.safetensors", folder / "target.h5"
    other = folder / "target.safetensors"
    ft_ckpt.save(dict(subject.state), h5)
    ft_ckpt.save(dict(subject.state), safetensors)
    convert = partial(ft_ckpt.convert, progress=False)
    ways: dict[str, Way] = {
        LIMIT: partial(
            _once, target, lambda: (limits.read(h5), limits.write(target, h5.stat().st_size))
        ),
        "ours, h5 to safetensors": partial(_once, other, lambda: convert(h5, other)),
        "ours, safetensors to h5": partial(_once, target, lambda: convert(safetensors, target)),
        "cp": partial(_once, target, lambda: (shutil.copyfile(h5, target), sync_tree(target))),
    }
    rows = in_turns(ways, setting, lambda way: drop_cached(folder))
    return [row | {"tensor_bytes": subject.size_bytes} for row in rows]


def _once(target: Path, action: Callable[[], Any]) -> Row:
    try:
        return timed(action)
    finally:
        target.unlink(missing_ok=True)
