"""Background saves on several ranks: the same files as a save at that moment, and errors raised on
all ranks.
"""

import importlib.util
import json
import threading
import time
from contextlib import contextmanager, nullcontext

import models
import pytest
import torch
import torch.distributed as dist
import zero_engines
from faulty_stores import unseen_files
from on_ranks import RANK, WORLD, on_ranks
from wrappers import WRAPPERS, Live

from ft_ckpt import CheckpointSaver, verify
from ft_ckpt.errors import CheckpointError, NoSpaceError
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving import PendingSave, shared_folders, snapshot
from ft_ckpt.saving.snapshot import Snapshot
from ft_ckpt.storage import LocalWriting

SHORT = {
    "enter_timeout_seconds": 60,
    "on_difference": "ignore",
    "io_threads": 2,
    "background": True,
}


class Engine(Live):
    """DeepSpeed's own engine, without Accelerate."""

    def step(self, batch):
        loss = self.model(batch["input_ids"] % 13)
        self.model.backward(loss)
        self.model.step()
        return float(loss.detach())


def engine(case):
    made = zero_engines.engine(case)
    return Engine(made, made.optimizer)


def begun(wrapper, folder, **settings):
    torch.compiler.set_stance("force_eager")
    live = WRAPPERS[wrapper](models.build("qwen3")) if wrapper in WRAPPERS else engine(wrapper)
    live.step(models.batch(seed=RANK))
    saver = CheckpointSaver(live.accelerator, folder, **{**SHORT, **settings})
    saver.register(model=live.model, optimizer=live.optimizer)
    return live, saver


@contextmanager
def as_late_as_can_be(moved):
    """Delay copies in threads until a step waits for them, which sets `moved`: a step that does not
    wait comes first.

    Yields the bytes of floating-point tensors that are copied (True: in a thread).
    """
    copy, hold, copied = snapshot._copy_by_device, Snapshot._wait_for_copies, {True: 0, False: 0}

    def late(room, live, ready):
        in_thread = threading.current_thread() is not threading.main_thread()
        copied[in_thread] += sum(
            tensor.nbytes for tensor in live.values() if tensor.is_floating_point()
        )
        if in_thread:
            assert moved.wait(30)
            time.sleep(0.2)
        return copy(room, live, ready)

    def asked(*given):
        moved.set()
        hold(*given)

    snapshot._copy_by_device, Snapshot._wait_for_copies = late, asked
    try:
        yield copied
    finally:
        snapshot._copy_by_device, Snapshot._wait_for_copies = copy, hold


def same_moment(folder, wrapper):
    """A save during two more steps has the values before them, and the steps wait for it."""
    moved = threading.Event()
    with as_late_as_can_be(moved) as copied:
        live, saver = begun(wrapper, folder)
        with saver:
            for number in "12":
                saver.save_state(
                    path=folder / f"now-{number}", adapter_only=False, background=False
                )
                moved.clear()
                handle = saver.save_state(path=folder / f"later-{number}", adapter_only=False)
                for seed in (5, 6):
                    live.step(models.batch(seed=seed + RANK))
                    moved.set()
                    saver.step()
                assert isinstance(handle, PendingSave)
                handle.result(60)
            hooked = [optimizer for optimizer, _ in saver._pending.snapshot._hooks.values()]
            assert all(optimizer._optimizer_step_pre_hooks for optimizer in hooked)
            saver.save(live.model, folder / "after")
    assert len(hooked) == 1
    assert not hooked[0]._optimizer_step_pre_hooks
    dist.barrier()
    if RANK:
        return
    assert copied[True] > copied[False], dict(copied)  # in the foreground only what is frozen
    assert verify(folder / "after").ok
    for number in "12":
        now, later = folder / f"now-{number}", folder / f"later-{number}"
        assert verify(later).ok
        files = sorted(path.relative_to(now) for path in now.rglob("*.safetensors"))
        assert len(files) >= 2
        for file in files:
            assert (now / file).read_bytes() == (later / file).read_bytes(), file
    assert (folder / "after" / files[0]).read_bytes() != (folder / "now-2" / files[0]).read_bytes()


def a_rate(live):
    for group in live.optimizer.param_groups:
        group["lr"] = 0.5


def a_rate_of_one_rank(live):
    for group in live.optimizer.param_groups:
        group["lr"] = 0.5 + RANK


def less_state(live):
    for state in inner_optimizer(live).state.values():
        state.pop("more", None)


def less_state_of_one_rank(live):
    if RANK:
        less_state(live)


def more_state(live):
    for state in inner_optimizer(live).state.values():
        state["more"] = state["exp_avg"].clone()


def more_state_of_one_rank(live):
    if RANK:
        more_state(live)


def trained_no_more(live):
    last = [*live.model.parameters()][-1]
    last.requires_grad_(not last.requires_grad)


CHANGES = [
    *(a_rate, a_rate_of_one_rank, a_rate, trained_no_more),
    *(more_state_of_one_rank, more_state, less_state_of_one_rank, less_state),
]


def inner_optimizer(live):
    """The optimizer with the state, inside the wrappers of Accelerate and DeepSpeed."""
    optimizer = live.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def same_after_changes(folder, wrapper):
    """A save in the background writes the bytes of one in the foreground, whatever has changed
    before it.
    """
    live, saver = begun(wrapper, folder)
    with saver:
        for change in CHANGES:
            change(live)
            written, errors = [], []
            for background in (False, True):
                path = folder / f"{change.__name__}-{background}"
                try:
                    pending = saver.save_state(path=path, adapter_only=False, background=background)
                    if background:
                        pending.result(60)
                    written.append(path)
                except CheckpointError as error:
                    errors.append(type(error))
            dist.barrier()
            is_lost = wrapper != "ddp" and change in (
                more_state_of_one_rank,
                less_state_of_one_rank,
            )
            assert len(errors) == (2 if is_lost else 0), (change, errors)
            if RANK == 0 and written:
                expected, *others = map(saved_bytes, written)
                for other in others:
                    assert [
                        name
                        for name in {*expected, *other}
                        if expected.get(name) != other.get(name)
                    ] == [], change


def saved_bytes(folder):
    """Every file of a checkpoint, but its times."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    manifest = json.loads(found.pop("ft_ckpt.json"))
    training = found["state/training.json"]
    return found | {
        "parts": manifest["parts"],
        "state/training.json": training[: training.index(b'"history"')],
    }


WRAPPED = ("ddp", "fsdp2", "fsdp1", "fsdp1_flat")
ENGINES = (
    "zero1",
    "zero2",
    "zero1_bf16_gradients32",
    "zero2_bf16_offload",
    "zero3",
    "zero3_bf16_subgroups_persistent",
)
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"
)


def under_zero(test):
    """Run a test on two ranks of DeepSpeed."""
    return needs_deepspeed(on_ranks(2, env={"DS_ACCELERATOR": "cpu"}, timeout=280)(test))


@pytest.mark.sample("ddp", "fsdp2")
@pytest.mark.parametrize("wrapper", WRAPPED)
@on_ranks(2)
def test_the_moment_of_the_call_is_saved(tmp_path, wrapper):
    same_moment(tmp_path, wrapper)


@pytest.mark.sample("zero2")
@pytest.mark.parametrize("engine", ENGINES)
@under_zero
def test_the_moment_of_the_call_is_saved_under_zero(tmp_path, engine):
    same_moment(tmp_path, engine)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPED)
@on_ranks(2)
def test_the_same_bytes_whatever_has_changed(tmp_path, wrapper):
    same_after_changes(tmp_path, wrapper)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
@under_zero
def test_the_same_bytes_whatever_has_changed_under_zero(tmp_path, engine):
    same_after_changes(tmp_path, engine)


@pytest.mark.slow
@under_zero
def test_muon_is_copied_at_once(tmp_path):
    """Muon updates its momentum before ZeRO's inner optimizer steps, where no hook waits: all is
    copied at once.
    """
    moved = threading.Event()
    moved.set()
    with as_late_as_can_be(moved) as copied:
        live, saver = begun("zero1", tmp_path)
        for group in live.optimizer.optimizer.optimizer.param_groups:
            group["use_muon"] = False
        with saver:
            assert isinstance(
                saver.save_state(path=tmp_path / "saved", adapter_only=False), PendingSave
            )
            assert not saver._pending.snapshot._hooks
    assert copied[False] > copied[True] == 0


def done_at_once(saver, live, path, **settings):
    """A save that cannot run beside training returns a PendingSave that is done."""
    handle = saver.save(live.model, path, **settings)
    assert isinstance(handle, PendingSave)
    assert handle.done
    assert handle.result() == saver.wait()
    assert handle.result().path == handle.path == path


@pytest.mark.slow
@on_ranks(2)
def test_gathered_tensors_are_gathered_before_save_returns(tmp_path):
    """Tensors that must be gathered on rank 0 are gathered before save() returns."""
    live, saver = begun("fsdp2", tmp_path, each_rank_writes="off")
    with saver:
        done_at_once(saver, live, tmp_path / "saved")
        done_at_once(saver, live, tmp_path / "h5", format="h5")
        live.step(models.batch(seed=RANK))
        saver.step()
    assert verify(tmp_path / "saved").ok


@pytest.mark.slow
@on_ranks(2)
def test_one_rank_does_not_see_the_files(tmp_path):
    """Rank 1 does not see rank 0's files."""
    live, saver = begun("fsdp2", tmp_path)
    with saver, unseen_files(shared_folders._PROBE) if RANK else nullcontext():
        done_at_once(saver, live, tmp_path / "saved")
    assert verify(tmp_path / "saved").ok
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@on_ranks(2)
def test_ranks_synchronise_at_few_points(tmp_path):
    """Once all ranks are known to see the folder, they synchronise only at capture, plan, write and
    commit.
    """
    live, saver = begun("fsdp2", tmp_path, each_rank_writes="on")
    met = []
    real = Ranks.agree

    def counted(ranks, what, *rest, **named):
        met.append(what)
        return real(ranks, what, *rest, **named)

    Ranks.agree = counted
    try:
        with saver:
            saver.save_state(adapter_only=False)
            saver.wait()
            for background in (True, False):
                live.step(models.batch(seed=RANK))
                saver.step()
                met.clear()
                saver.save_state(adapter_only=False, background=background)
                saver.wait()
                planned = ["save() in the background"] if background else []
                expected = ["save_state()", *planned, "save()"]
                assert met == [*expected, "the commit of save()"], met
    finally:
        Ranks.agree = real


def broken():
    """Rank 1 cannot write."""
    real = LocalWriting.write

    def full(file, offset, memory):
        if RANK == 1:
            raise NoSpaceError(f"{file.path}: no space")
        real(file, offset, memory)

    LocalWriting.write = full
    return real


@pytest.mark.slow
@on_ranks(2)
def test_one_rank_cannot_write(tmp_path):
    live, saver = begun("fsdp2", tmp_path)
    real = broken()
    try:
        handle = saver.save(live.model, tmp_path / "saved")
        with pytest.raises(CheckpointError):
            handle.result(50)
    finally:
        LocalWriting.write = real
    with pytest.raises(NoSpaceError if RANK else CheckpointError, match="no space"):
        saver.save(live.model, tmp_path / "saved")
    dist.barrier()
    assert not any(tmp_path.iterdir()), list(tmp_path.iterdir())
    saver.save(live.model, tmp_path / "saved")
    saver.close()
    assert verify(tmp_path / "saved").ok


@pytest.mark.slow
@on_ranks(2)
def test_all_ranks_are_told_at_the_same_step(tmp_path):
    """All ranks raise at the same step, though they learn of the error at different times."""
    live, saver = begun("fsdp2", tmp_path)
    real = broken()
    try:
        saver.save(live.model, tmp_path / "saved")
        with pytest.raises(CheckpointError, match="no space"):  # noqa: PT012 - one of the steps
            for _ in range(5000):
                time.sleep(0.001 * (1 + RANK))
                saver.step()
    finally:
        LocalWriting.write = real
    told = [None] * WORLD
    dist.all_gather_object(told, saver.progress.step)
    assert len(set(told)) == 1, told
    saver.close()
