"""Pairs of saves of one moment that write the same bytes.

One is in the background and one in the foreground, or all ranks write and one rank does.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import models
import torch
import torch.distributed as dist
import zero_engines
from on_ranks import RANK
from wrappers import WRAPPERS, Live

from ft_ckpt import CheckpointSaver, verify
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import CheckpointError
from ft_ckpt.saving import snapshot
from ft_ckpt.saving.planning import PendingSave, write_plan
from ft_ckpt.saving.snapshot import Snapshot
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import open_place

SHORT: dict[str, Any] = {
    "enter_timeout_seconds": 60,
    "on_difference": "ignore",
    "io_threads": 2,
}


class Engine(Live):
    """DeepSpeed's own engine, without Accelerate."""

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        engine: Any = self.model
        loss = engine(batch["input_ids"] % 13)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())


def live_model(wrapper: str, model: str = "qwen3") -> Live:
    """Make a model under that wrapper, or an engine by its name, and train a step."""
    torch.compiler.set_stance("force_eager")
    if wrapper in WRAPPERS:
        live = WRAPPERS[wrapper](models.build(model))
    else:
        engine = zero_engines.engine(wrapper)
        live = Engine(engine, engine.optimizer)
    live.step(models.batch(seed=RANK))
    return live


def saver_of(live: Live, folder: Path, **settings: Any) -> CheckpointSaver[Any]:
    saver: CheckpointSaver[Any] = CheckpointSaver(live.accelerator, folder, **SHORT, **settings)
    saver.register(model=live.model, optimizer=live.optimizer)
    return saver


def meet() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def weight_files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))


@contextmanager
def late_copies(moved: threading.Event) -> Iterator[dict[bool, int]]:
    """Delay copies in threads until a step waits for them, which sets `moved`.

    A step that does not wait changes the tensors before they are copied. Yields the bytes of
    floating-point tensors that are copied (True: in a thread).
    """
    copy, hold = snapshot._copy_by_device, Snapshot._wait_for_copies
    copied = {True: 0, False: 0}

    def late(room: Any, live: dict[Any, torch.Tensor], ready: Any) -> Any:
        in_thread = threading.current_thread() is not threading.main_thread()
        floats = [tensor for tensor in live.values() if tensor.is_floating_point()]
        copied[in_thread] += sum(tensor.nbytes for tensor in floats)
        if in_thread:
            assert moved.wait(30)
            time.sleep(0.2)
        return copy(room, live, ready)

    def wait_for_copies(*arguments: Any) -> None:
        moved.set()
        hold(*arguments)

    with (
        patch.object(snapshot, "_copy_by_device", late),
        patch.object(Snapshot, "_wait_for_copies", wait_for_copies),
    ):
        yield copied


def same_moment(wrapper: str, folder: Path) -> None:
    """Check that a save during two more steps has the values before them, and that steps wait."""
    moved = threading.Event()
    with late_copies(moved) as copied:
        live = live_model(wrapper)
        with saver_of(live, folder, background=True) as saver:
            for number in "12":
                now, later = folder / f"now-{number}", folder / f"later-{number}"
                saver.save_state(path=now, adapter_only=False, background=False)
                moved.clear()
                handle = saver.save_state(path=later, adapter_only=False)
                for seed in (5, 6):
                    live.step(models.batch(seed=seed + RANK))
                    moved.set()
                    saver.step()
                assert isinstance(handle, PendingSave)
                handle.result(60)
            saver.save(live.model, folder / "after")
    meet()
    if RANK:
        return
    if "tensor" not in wrapper:  # its columns are gathered before `save_state` returns
        assert copied[True] > copied[False], copied  # in the foreground only what is frozen
    assert verify(folder / "after").ok
    for number in "12":
        now, later = folder / f"now-{number}", folder / f"later-{number}"
        assert verify(later).ok
        files = weight_files(now)
        assert len(files) >= 2
        for file in files:
            assert (now / file).read_bytes() == (later / file).read_bytes(), file
    assert (folder / "after" / files[0]).read_bytes() != (folder / "now-2" / files[0]).read_bytes()


def a_rate(live: Live) -> None:
    for group in live.optimizer.param_groups:
        group["lr"] = 0.5


def a_rate_of_one_rank(live: Live) -> None:
    for group in live.optimizer.param_groups:
        group["lr"] = 0.5 + RANK


def less_state(live: Live) -> None:
    for state in inner_optimizer(live).state.values():
        state.pop("more", None)


def less_state_of_one_rank(live: Live) -> None:
    if RANK:
        less_state(live)


def more_state(live: Live) -> None:
    for state in inner_optimizer(live).state.values():
        state["more"] = state["exp_avg"].clone()


def more_state_of_one_rank(live: Live) -> None:
    if RANK:
        more_state(live)


def trained_no_more(live: Live) -> None:
    last = [*live.model.parameters()][-1]
    last.requires_grad_(not last.requires_grad)


CHANGES: list[Callable[[Live], None]] = [
    *(a_rate, a_rate_of_one_rank, a_rate, trained_no_more),
    *(more_state_of_one_rank, more_state, less_state_of_one_rank, less_state),
]


def inner_optimizer(live: Live) -> Any:
    """Return the optimizer with the state, inside the wrappers of Accelerate and DeepSpeed."""
    optimizer = live.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def same_after_changes(wrapper: str, folder: Path) -> None:
    """Check after each change that both kinds of saves write the same bytes, or raise an error."""
    live = live_model(wrapper)
    with saver_of(live, folder) as saver:
        for change in CHANGES:
            change(live)
            now, later = (folder / f"{change.__name__}-{way}" for way in ("now", "later"))
            errors = [_error_of(saver, now), _error_of(saver, later, background=True)]
            meet()
            is_lost = change in (more_state_of_one_rank, less_state_of_one_rank)
            if is_lost and wrapper not in ("none", "ddp"):
                assert None not in errors, change
                continue
            assert errors == [None, None], change
            if RANK == 0:
                expected, saved = saved_bytes(now), saved_bytes(later)
                assert saved.keys() == expected.keys()
                assert [name for name in saved if saved[name] != expected[name]] == [], change


def _error_of(
    saver: CheckpointSaver[Any], path: Path, *, background: bool = False
) -> CheckpointError | None:
    try:
        pending = saver.save_state(path=path, adapter_only=False, background=background)
        if isinstance(pending, PendingSave):
            pending.result(60)
    except CheckpointError as error:
        return error
    return None


def saved_bytes(folder: Path) -> dict[str, Any]:
    """Read every file of a checkpoint, without its times."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    files: dict[str, Any] = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    files["ft_ckpt.json"] = json.loads(files["ft_ckpt.json"])["parts"]
    training = files["state/training.json"]
    files["state/training.json"] = training[: training.index(b'"history"')]
    return files


def same_files(wrapper: str, model: str, folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that all ranks write the files that one rank writes alone.

    Shards of tensors this small are gathered on rank 0 unless they are rows; so of wrappers that
    cut columns they are written in runs of any length, too.
    """
    live = live_model(wrapper, model)
    _same_files(live, folder / "usual", settings, are_cut="tensor" not in wrapper)
    if "tensor" in wrapper:
        write_plan.MIN_RUN_BYTES, usual = 1, write_plan.MIN_RUN_BYTES
        try:
            _same_files(live, folder / "in-runs", settings, are_cut=True)
        finally:
            write_plan.MIN_RUN_BYTES = usual
        if RANK == 0 and model != "experts":
            _check_runs(folder / "in-runs" / "all")


def _same_files(live: Live, folder: Path, settings: Mapping[str, Any], *, are_cut: bool) -> None:
    for name, who in (("one", "off"), ("all", "on")):
        with saver_of(live, folder, each_rank_writes=who, **settings) as saver:
            saver.save(live.model, folder / name, dtype=settings.get("dtype"))
            saver.save_state(path=folder / f"{name}-state", adapter_only=False)
    meet()
    if RANK:
        return
    for name in ("", "-state"):
        of_one, of_all = folder / f"one{name}", folder / f"all{name}"
        files = weight_files(of_one)
        assert files == weight_files(of_all)
        for file in files:
            assert (of_one / file).read_bytes() == (of_all / file).read_bytes(), file
        assert verify(of_all).ok, verify(of_all)
        weights = record_of_weights(of_all)
        assert weights.cuts or not are_cut
        assert weights.digest.startswith("xxh3-128-of-ranks:")
        assert not list(of_all.rglob(".ft_ckpt-probe*"))
    flip(folder / "all" / "model.safetensors")
    assert not verify(folder / "all").ok


def record_of_weights(folder: Path) -> FileRecord:
    records = {file.path: file for file in read_manifest(open_place(folder)).files}
    return records["model.safetensors"]


def _check_runs(folder: Path) -> None:
    """Check that each rank has written its run of each row; neighbours may be joined."""
    tensors = read_manifest(open_place(folder)).parts[0].tensors
    columns = next(tensor for tensor in tensors if "o_proj" in tensor.name)
    starts = [cut.start for cut in record_of_weights(folder).cuts]
    pieces = [start for start in starts if columns.start <= start < columns.end]
    assert len(pieces) >= columns.shape[0] - 1


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
