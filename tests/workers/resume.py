"""Save a run and resume it: in the same launch (exact), or in another one under another wrapper (leave, take).

A case is "ACTION/wrapper/model" with an action of `case`. "take" finds the run that "leave" has left in $LEFT.
"move" resumes from a folder of accelerate's own save_state.
"""

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import models
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from wrappers import WRAPPERS, Live, truth

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.distributed import fill
from ft_ckpt.distributed.gather import gather_tensors
from ft_ckpt.distributed.ranks import current_ranks
from ft_ckpt.errors import CorruptError, LoadError
from ft_ckpt.training import state as training
from ft_ckpt.training.items import known_sources, run_items, walk_models

TOLD = {"enter_timeout_seconds": 60, "on_difference": "ignore"}


def live_model(wrapper: str, model: str, seed: int = 0) -> Live:
    live = WRAPPERS[wrapper](models.build(model, seed))
    torch.compiler.set_stance("force_eager")
    return live


def saver_of(live: Live, folder: Path | str, **settings: Any) -> CheckpointSaver:
    saver = CheckpointSaver(live.accelerator, folder, **TOLD, **settings)
    saver.register(model=live.model, optimizer=live.optimizer)
    return saver


def train(live: Live, saver: CheckpointSaver, first: int, count: int) -> list[float]:
    """Losses of steps on data that differs by step and rank, each plus a random number."""
    rank = 0 if hasattr(next(live.model.parameters()), "placements") else harness.RANK  # tensor parallel: one input
    losses = []
    for step in range(first, first + count):
        losses.append(live.step(models.batch(seed=97 * step + rank)) + float(torch.rand(())))
        saver.step()
    return losses


def exact(wrapper: str, model: str, run: Path | str, **settings: Any) -> None:
    live = live_model(wrapper, model)
    with saver_of(live, run, **settings) as saver:
        train(live, saver, 0, 2)
        saver.save_state()
        before = truth(live)
        expected = train(live, saver, 2, 2)
        after = truth(live)
    fresh = live_model(wrapper, model, seed=0 if model == "lora" else 1)  # a base is not part of an adapter's run
    torch.manual_seed(1234)
    with saver_of(fresh, run, **settings) as saver:
        progress = saver.resume("must")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        same(before, truth(fresh))
        assert train(fresh, saver, 2, 2) == expected
        same(after, truth(fresh))


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


def leave(wrapper: str, model: str, folder: Path) -> None:
    live = live_model(wrapper, model)
    with saver_of(live, folder / "run") as saver:
        train(live, saver, 0, 2)
        saver.save_state()
    tensors, moments = truth(live), optimizer_state(live)
    if harness.RANK == 0:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "truth.safetensors")
        save_file(moments, folder / "moments.safetensors")


def take(wrapper: str, model: str, folder: Path) -> None:
    left = Path(os.environ["LEFT"])
    live = live_model(wrapper, model, seed=1)
    with saver_of(live, left / "run") as saver:
        progress = saver.resume("must")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        assert not [line for line in progress.report.differences if "requires_grad" in line], progress
        same(load_file(left / "truth.safetensors"), truth(live))
        moments = optimizer_state(live)
        if harness.RANK == 0:
            same(load_file(left / "moments.safetensors"), moments)
        train(live, saver, 2, 1)


def move(wrapper: str, model: str, folder: Path) -> None:
    """Resume from a folder that accelerate's save_state wrote under DDP; under FSDP it is refused."""
    live = live_model("ddp", model)
    for step in range(2):
        live.step(models.batch(seed=97 * step + harness.RANK))
    live.accelerator.save_state(str(folder / "theirs"))
    dist.barrier()
    expected = truth(live), optimizer_state(live), [torch.rand(()) for _ in range(2)]
    losses = [live.step(models.batch(seed=97 * step + harness.RANK)) for step in range(2, 4)]
    fresh = live_model(wrapper, model, seed=1)
    with saver_of(fresh, folder / "run") as saver:
        if wrapper.startswith("fsdp"):
            with pytest.raises(LoadError, match=r"by pickles under FSDP, expected a plain model or DDP"):
                saver.resume(folder / "theirs")
            return
        progress = saver.resume(folder / "theirs")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        found = truth(fresh), optimizer_state(fresh), [torch.rand(()) for _ in range(2)]
        same(expected[0], found[0])
        same(expected[1], found[1])
        assert expected[2] == found[2]
        again = [fresh.step(models.batch(seed=97 * step + harness.RANK)) for step in range(2, 4)]
        assert again == losses
        saver.save_state(path=folder / "ours")


def into(wrapper: str, model: str, folder: Path) -> None:
    """`load_model(into=)` fills each rank's shards; it is refused where DeepSpeed's masters would overwrite them."""
    plain = models.build(model, 5)
    CheckpointSaver().save(plain, folder / "out")
    live = live_model(wrapper, model, seed=1)
    if wrapper.startswith("zero"):
        with pytest.raises(LoadError, match=r"in an engine of DeepSpeed.*load before deepspeed\.initialize"):
            ft_ckpt.load_model(folder / "out", into=live.model)
        return
    live.step(models.batch(seed=1))
    assert ft_ckpt.load_model(folder / "out", into=live.model) is live.model
    same({name: tensor.detach() for name, tensor in plain.state_dict().items()}, truth(live))
    live.step(models.batch(seed=2))


def optimizer_state(live: Live) -> dict[str, torch.Tensor]:
    """The optimizer's tensors, whole, on rank 0."""
    items = run_items(None, {"model": live.model, "optimizer": live.optimizer})
    items = [item for item in items if item.kind == "optimizer"]
    found = known_sources(walk_models(live.model, items), items)
    ranks = current_ranks()
    local = training.local_state(items, found, {})
    facts, trees = training.exchange_facts(local, items, ranks, found)
    state = training.assemble_state(local, facts, trees, items, found, ranks.rank)
    return gather_tensors([entry.source for entry in state.entries if entry.source is not None], ranks)


def same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, different


def case(name: str, folder: Path) -> None:
    action, wrapper, model = name.split("/")
    actions: dict[str, Any] = {
        "exact": lambda *of: exact(*of[:2], of[2] / "run"),
        "damaged": damaged,
        "counted": counted,
        "unread": unread,
        "seen": seen,
        "leave": leave,
        "take": take,
        "move": move,
        "into": into,
    }
    actions[action](wrapper, model, folder)


if __name__ == "__main__":
    if not any("/zero" in name for name in sys.argv):
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    harness.run(case)
