"""The commit of a checkpoint that many processes write, and of one of the trainer alone.

The writers are processes on this machine. Each has a state of a few tensors, and writes it when the
trainer saves.
"""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch

from ft_ckpt import CheckpointSaver, Writer
from scripts.bench.common import Row, Setting, as_child, in_child, medians, seconds
from scripts.bench.models import make_subject

TITLE = "commit of a checkpoint with the parts of other processes"
COUNTS = (0, 10, 100)
_STATE_BYTES = 100_000  # of each writer


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each number of writers, with one trainer."""
    rows = []
    for count in COUNTS:
        rows += in_child("writers", setting, size_bytes, count)
    return rows


def measure_in_child(setting: Setting, size_bytes: int, count: int) -> list[Row]:
    """Measure the trainer, in the child, which forks the writers before it has threads."""
    run = setting.folder / f"run-{count}"
    writers = [_start_writer(run, index) for index in range(count)]
    try:
        with CheckpointSaver(None, run) as saver:
            saver.register(model=make_subject(size_bytes).model)
            if count:
                saver.invite(w=count)
                _await_all(run, count)
            rows = [_save(saver, run, step) for step in range(1, setting.rounds + 2)]
    finally:
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
    return [{"way": f"ours, {count} writers", "tensor_bytes": size_bytes, **medians(rows[1:])}]


def _save(saver: CheckpointSaver, run: Path, step: int) -> Row:
    """Save once, and delete the checkpoint before it: disks need a second for a gigabyte."""
    saver.step(step=step)
    row = {"seconds": seconds(lambda: saver.save_state())}
    shutil.rmtree(run / f"checkpoint-{step - 1}", ignore_errors=True)
    return row


def _start_writer(run: Path, index: int) -> int:
    process = os.fork()
    if process:
        return process
    state: dict[str, Any] = {"samples": torch.zeros(_STATE_BYTES // 4), "cursor": index}
    with Writer(run, "w", index=index, timeout_seconds=120) as writer:
        writer.provide(lambda: state)
        writer.wait()
    os._exit(0)


def _await_all(run: Path, count: int) -> None:
    """Wait until all writers have joined: their start is not measured."""
    while sum(1 for _ in run.glob(".ft_ckpt-writers/*/joined/*")) < count:
        time.sleep(0.1)
    time.sleep(1)


if __name__ == "__main__":
    as_child("writers", measure_in_child)
