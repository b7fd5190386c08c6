"""Loading a whole checkpoint from the disk or from the page cache, and the first tensor of one.

All ways end with a byte of every page of every tensor read: what is only mapped has not been
loaded.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench import limits
from scripts.bench.common import (
    Row,
    Setting,
    drop_cached,
    fill_cache,
    in_turns,
    is_installed,
    sync_tree,
    timed,
    touch,
)
from scripts.bench.loaders import FIRST, LOADERS
from scripts.bench.models import Subject, make_subject
from scripts.bench.savers import RUN, SAVERS

COLD, WARM, FIRST_TENSOR = (
    "load from the disk",
    "load from the page cache",
    "first tensor, from the disk",
)
LIMIT = limits.READ
LIMITS = {LIMIT: limits.read, limits.READ_AND_KEEP: limits.read_and_keep}


def cold(setting: Setting, size_bytes: int) -> list[Row]:
    """A row for each way to load a file that is in no cache."""
    return _whole(setting, size_bytes, drop_cached, LIMITS)


def warm(setting: Setting, size_bytes: int) -> list[Row]:
    """A row for each way to load a file that is in the page cache."""
    return _whole(setting, size_bytes, fill_cache, {})


def first(setting: Setting, size_bytes: int) -> list[Row]:
    """A row for each way to open a file that is in no cache and read one tensor, from the
    middle.
    """
    subject = make_subject(size_bytes)
    name = list(subject.state)[len(subject.state) // 2]
    found = setting.chosen({way: one for way, one in FIRST.items() if is_installed(one.module)})
    folders = _written(setting.folder, subject, {way: one.saved_by for way, one in found.items()})
    ways = {
        way: partial(
            _timed, lambda one, path: {name: one.load(path, name)}, one, folders[way] / one.file
        )
        for way, one in found.items()
    }
    rows = in_turns(ways, setting, lambda way: drop_cached(folders[way]))
    return [row | {"tensor_bytes": subject.size_bytes} for row in rows]


def _whole(
    setting: Setting,
    size_bytes: int,
    prepare: Callable[[Path], None],
    reads: Mapping[str, Callable[[Path], Any]],
) -> list[Row]:
    subject = make_subject(size_bytes)
    found = setting.chosen({name: one for name, one in LOADERS.items() if is_installed(one.module)})
    folders = _written(
        setting.folder,
        subject,
        {name: one.saved_by for name, one in found.items()} | dict.fromkeys(reads, "ours"),
    )
    ways = {
        name: partial(timed, partial(read, folders[name] / "model.safetensors"))
        for name, read in reads.items()
    }
    ways |= {
        name: partial(_timed, lambda one, folder: one.load(folder, subject), one, folders[name])
        for name, one in found.items()
    }
    rows = in_turns(ways, setting, lambda way: prepare(folders[way]))
    return [row | {"tensor_bytes": subject.size_bytes} for row in rows]


def _written(place: Path, subject: Subject, savers: dict[str, str]) -> dict[str, Path]:
    """The folder that each way reads, written by its saver."""
    for saver in sorted(set(savers.values())):
        (RUN if saver == RUN.name else SAVERS[saver])(subject, place / saver)
        sync_tree(place / saver)  # what is not on the disk stays in the page cache
    return {way: place / saver for way, saver in savers.items()}


def _timed(load: Callable[..., Any], *arguments: Any) -> Row:
    return timed(lambda: touch(load(*arguments)))
