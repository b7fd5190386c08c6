"""Loads of a whole checkpoint from the disk or from the page cache, and of its first tensor.

All ways end with a read of a byte of every page of every tensor: what is only mapped has not been
loaded.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

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
from scripts.bench.loaders import FIRST, LOADERS, FirstLoader, Loader
from scripts.bench.models import Subject, make_subject
from scripts.bench.savers import RUN, SAVERS

COLD, WARM, FIRST_TENSOR = (
    "load from the disk",
    "load from the page cache",
    "first tensor, from the disk",
)
AnyLoader = TypeVar("AnyLoader", Loader, FirstLoader)
LIMIT = limits.READ
LIMITS = {LIMIT: limits.read, limits.READ_AND_KEEP: limits.read_and_keep}


def cold(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each way to load a file that is in no cache."""
    return _whole(setting, size_bytes, drop_cached, LIMITS)


def warm(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each way to load a file that is in the page cache."""
    return _whole(setting, size_bytes, fill_cache, {})


def first(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each way to open a file that is in no cache and read one tensor in its middle."""
    subject = make_subject(size_bytes)
    name = list(subject.state)[len(subject.state) // 2]
    loaders = setting.chosen(_installed(FIRST))
    folders = _saved(setting.folder, subject, _savers(loaders))
    ways = {}
    for way, loader in loaders.items():
        load = partial(loader.load, folders[way] / loader.file, name)
        ways[way] = partial(_timed_tensor, load)
    rows = in_turns(ways, setting, lambda way: drop_cached(folders[way]))
    return [row | {"tensor_bytes": subject.size_bytes} for row in rows]


def _whole(
    setting: Setting,
    size_bytes: int,
    prepare: Callable[[Path], None],
    limits_by_name: Mapping[str, Callable[[Path], Any]],
) -> list[Row]:
    subject = make_subject(size_bytes)
    loaders = setting.chosen(_installed(LOADERS))
    savers = _savers(loaders) | dict.fromkeys(limits_by_name, "ours")
    folders = _saved(setting.folder, subject, savers)
    ways = {}
    for name, read in limits_by_name.items():
        ways[name] = partial(timed, partial(read, folders[name] / "model.safetensors"))
    for name, loader in loaders.items():
        ways[name] = partial(_timed, partial(loader.load, folders[name], subject))
    rows = in_turns(ways, setting, lambda way: prepare(folders[way]))
    return [row | {"tensor_bytes": subject.size_bytes} for row in rows]


def _installed(loaders: Mapping[str, AnyLoader]) -> dict[str, AnyLoader]:
    return {name: loader for name, loader in loaders.items() if is_installed(loader.module)}


def _savers(loaders: Mapping[str, AnyLoader]) -> dict[str, str]:
    """Return the name of the saver whose files each loader reads."""
    return {name: loader.saved_by for name, loader in loaders.items()}


def _saved(folder: Path, subject: Subject, savers: Mapping[str, str]) -> dict[str, Path]:
    """Write the files that the ways read; return the folder of each."""
    for name in sorted(set(savers.values())):
        save = RUN if name == RUN.name else SAVERS[name]
        save(subject, folder / name)
        sync_tree(folder / name)  # what is not on the disk stays in the page cache
    return {way: folder / name for way, name in savers.items()}


def _timed(load: Callable[[], Any]) -> Row:
    return timed(lambda: touch(load()))


def _timed_tensor(load: Callable[[], Tensor]) -> Row:
    return timed(lambda: touch({"tensor": load()}))
