"""Peak memory of the host and of the device, in two background saves, and in a load of a model.

The first save allocates memory that the second one reuses. Each way of saving has a process of its
own.
"""

import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.bench.background import Background, installed_backgrounds
from scripts.bench.common import (
    ACCELERATOR,
    PEER_ERRORS,
    Row,
    Setting,
    as_child,
    describe,
    in_child,
)
from scripts.bench.loaders import LOADERS, Loader
from scripts.bench.models import Subject, make_subject
from scripts.bench.savers import SAVERS
from scripts.bench.stall import make_training

TITLE = "memory at its peak: two saves in the background, and a load onto the device"
LOADS = ("ours", "safetensors", "safetensors, prefetch", "from_pretrained")
_PERIOD_SECONDS = 0.01


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each way to save `size_bytes` of weights and moments, and to load the weights.

    The weights are a third of these bytes.
    """
    saves = list(setting.chosen(installed_backgrounds()))
    loads = list(setting.chosen({name: LOADERS[name] for name in LOADS if name in LOADERS}))
    rows = []
    for name in saves:
        rows += in_child("peaks", setting, size_bytes, "save", [name])
    rows += in_child("peaks", setting, size_bytes, "load", loads)
    return rows


def measure_in_child(setting: Setting, size_bytes: int, kind: str, names: list[str]) -> list[Row]:
    """Measure these ways to "save" or to "load", in the child."""
    rows = []
    subject = make_subject(size_bytes // 3) if kind == "load" else None
    for name in names:
        if subject is None:
            action = partial(_save_twice, setting, size_bytes, name)
        else:
            action = partial(_load_once, setting, subject, LOADERS[name])
        rows.append(_attempt(f"{kind}: {name}", action))
    return rows


def _attempt(way: str, action: Callable[[], Row]) -> Row:
    try:
        return {"way": way, **action()}
    except PEER_ERRORS as error:
        if ": ours" in way:
            raise
        return {"way": way, "error": describe(error)}


def _save_twice(setting: Setting, size_bytes: int, name: str) -> Row:
    training = make_training(size_bytes)
    tokens = torch.ones(1, 4, dtype=torch.int64, device=training.model.device)
    training.model(input_ids=tokens, labels=tokens).loss.backward()
    training.optimizer.step()  # makes the moments
    training.optimizer.zero_grad()
    saver = installed_backgrounds()[name](training)
    with _watched_memory() as row:
        for _ in range(2):
            _finish_save(saver, setting.folder / "target")
    saver.close()
    return row


def _finish_save(saver: Background, target: Path) -> None:
    saver.save(target)
    saver.finish()
    shutil.rmtree(target)


def _load_once(setting: Setting, subject: Subject, loader: Loader) -> Row:
    folder = setting.folder / loader.saved_by
    if not folder.exists():
        SAVERS[loader.saved_by](subject, folder)
    loader.load(folder, subject)  # what libraries start and keep is not part of a load
    with _watched_memory() as row:
        loaded = loader.load(folder, subject)
        if ACCELERATOR is not None:
            torch.accelerator.synchronize()
    del loaded
    return row | {"tensor_bytes": subject.size_bytes}


@contextmanager
def _watched_memory() -> Iterator[Row]:
    """Yield a row that has, after the block, the peak growth of memory in use.

    For the host that is the decrease of available memory: pinned memory is not always counted for
    its process.
    """
    gc.collect()
    before, row = _available_bytes(), dict[str, Any]()
    with suppress(RuntimeError):  # the backend has no memory statistics
        torch.accelerator.reset_peak_memory_stats()
        row["device_bytes"] = -torch.accelerator.memory_allocated()
    lowest, ended = before, threading.Event()

    def watch() -> None:
        nonlocal lowest
        while not ended.wait(_PERIOD_SECONDS):
            lowest = min(lowest, _available_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield row
    finally:
        ended.set()
        watcher.join()
        row["host_bytes"] = before - lowest
        if "device_bytes" in row:
            row["device_bytes"] += torch.accelerator.max_memory_allocated()


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


if __name__ == "__main__":
    as_child("peaks", measure_in_child)
