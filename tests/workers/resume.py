"""A damaged checkpoint on two ranks: a case is "ACTION/wrapper/model" with a function here."""

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import torch.distributed as dist
from exact_runs import live_model, optimizer_state, same, saver_of, train
from wrappers import truth

from ft_ckpt.distributed import fill
from ft_ckpt.errors import CorruptError


def damaged(wrapper: str, model: str, folder: Path) -> None:
    """Each file in turn is damaged, whichever rank is to compare it: all ranks take the older checkpoint."""
    live, run = live_model(wrapper, model), folder / "run"
    found = []
    with saver_of(live, run) as saver:
        for step in range(2):
            train(live, saver, step, 1)
            saver.save_state()
            found.append((truth(live), optimizer_state(live)))
    files = sorted((run / "checkpoint-2").rglob("*.safetensors"))
    assert len(files) > 1, files
    for file in files:
        flip_last_byte(file)
        fresh = live_model(wrapper, model, seed=0 if model == "lora" else 1)
        with saver_of(fresh, run) as saver, warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            progress = saver.resume("auto")
            assert (progress.step, progress.report.problems) == (1, ()), progress
            assert harness.RANK or any(file.name in str(one.message) for one in heard), heard
            same(found[0][0], truth(fresh))
            same(found[0][1], optimizer_state(fresh))
        flip_last_byte(file)
    fresh = live_model(wrapper, model, seed=0 if model == "lora" else 1)
    with saver_of(fresh, run) as saver:
        assert saver.resume("must").step == 2
        same(found[1][0], truth(fresh))


def seen(wrapper: str, model: str, folder: Path) -> None:
    """One rank alone reads a wrong byte, at several places of a file: all ranks take the older checkpoint."""
    live, run = live_model(wrapper, model), folder / "run"
    with saver_of(live, run, each_rank_writes="on") as saver:
        for step in range(2):
            train(live, saver, step, 1)
            saver.save_state()
    file, real = (run / "checkpoint-2" / "model.safetensors").stat(), os.preadv
    for rank, part in ((rank, part) for rank in range(harness.WORLD) for part in (0.3, 0.6, 0.9)):

        def other(descriptor: int, buffers: list[Any], start: int, place: int = int(part * file.st_size)) -> int:
            count = real(descriptor, buffers, start)
            if os.fstat(descriptor).st_ino == file.st_ino and start <= place < start + count:
                buffers[0][place - start] ^= 1
            return count

        if rank == harness.RANK:
            os.preadv = other
        fresh = live_model(wrapper, model, seed=1)
        with saver_of(fresh, run) as saver, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert saver.resume("auto").step == 1, (rank, part)
        os.preadv = real


def unread(wrapper: str, model: str, folder: Path) -> None:
    """One rank alone cannot read a file, which is whole for the others: all take the older checkpoint."""
    live, run, found = live_model(wrapper, model), folder / "run", []
    with saver_of(live, run) as saver:
        for step in range(2):
            train(live, saver, step, 1)
            saver.save_state()
            found.append(truth(live))
    fresh, real, calls = live_model(wrapper, model, seed=1), fill.read_runs, iter([1])

    def broken(*given: Any) -> int:
        if harness.RANK and next(calls, None):
            raise CorruptError("model.safetensors: cannot be read at byte 7 (Input/output error)")
        return real(*given)

    fill.read_runs = broken
    with saver_of(fresh, run) as saver:
        progress = saver.resume("auto")
    fill.read_runs = real
    assert (progress.step, progress.report.problems) == (1, ()), progress
    same(found[0], truth(fresh))


def counted(wrapper: str, model: str, folder: Path) -> None:
    """Together, the ranks read each tensor file once, digests included."""
    live, run = live_model(wrapper, model), folder / "run"
    with saver_of(live, run, each_rank_writes="on") as saver:
        train(live, saver, 0, 1)
        path = saver.save_state().path
    fresh = live_model(wrapper, model, seed=1)
    sizes = {file.stat().st_ino: file.stat().st_size for file in path.rglob("*.safetensors")}
    read, real = dict.fromkeys(sizes, 0), os.preadv

    def noted(descriptor: int, *given: Any) -> int:
        count = real(descriptor, *given)
        number = os.fstat(descriptor).st_ino
        read[number] = read.get(number, 0) + count
        return count

    os.preadv = noted
    with saver_of(fresh, run) as saver:
        assert saver.resume("must").step == 1
    os.preadv = real
    same(truth(live), truth(fresh))
    for number, size_bytes in sizes.items():
        assert read[number] < 1.2 * size_bytes / harness.WORLD, (read, sizes)  # headers come first, and pages are whole


def flip_last_byte(file: Path) -> None:
    """Done on rank 0, between two barriers."""
    dist.barrier()
    if harness.RANK == 0:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()


def case(name: str, folder: Path) -> None:
    action, wrapper, model = name.split("/")
    actions: dict[str, Any] = {"damaged": damaged, "counted": counted, "unread": unread, "seen": seen}
    actions[action](wrapper, model, folder)


if __name__ == "__main__":
    if not any("/zero" in name for name in sys.argv):
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    harness.run(case)
