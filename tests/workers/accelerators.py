"""Saves, resumes and loads of a model on an accelerator: the machine's with FT_CKPT_DEVICE=here, else the tests' own.

The files are compared with those of the same model saved from the host.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import models
import pytest
import sealed_device
import torch
import torch.distributed as dist
from compare import files, raw
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver, devices, load_model, verify
from ft_ckpt.errors import IncompleteError
from ft_ckpt.formats import file_io
from ft_ckpt.saving import snapshot
from ft_ckpt.saving.background import PendingSave
from ft_ckpt.storage.read_ahead import read_ahead

IS_HERE = os.environ.get("FT_CKPT_DEVICE") == "here"
QUIET: dict[str, Any] = {"on_difference": "ignore"}
LARGE = 4_200_003  # floats: 17 MB, more than two blocks, and no power of two


def device() -> torch.device:
    if not IS_HERE:
        return sealed_device.become_accelerator()
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None, "no accelerator here"
    return torch.empty(0, device=found).device


@contextmanager
def later_copies() -> Iterator[None]:
    """Assert that something is copied after its call returned; checked on the tests' device alone."""
    before = 0 if IS_HERE else sealed_device.count_late_copies()
    yield
    assert IS_HERE or sealed_device.count_late_copies() > before


@contextmanager
def replaced(place: Any, **names: Any) -> Iterator[None]:
    before = {name: getattr(place, name) for name in names}
    for name, value in names.items():
        setattr(place, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


class Large(nn.Module):
    """A tensor that is copied in several pieces, a small one, a transposed one, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LARGE, generator=torch.Generator().manual_seed(1)))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.crossed = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.register_buffer("nothing", torch.empty(0, 3))

    def step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.Linear(64, 1))


def run_of(made: nn.Module, folder: Path, **settings: Any) -> tuple[nn.Module, Any, CheckpointSaver]:
    """The model on the device, with its optimizer and saver."""
    model = made.to(device())
    kind = torch.optim.SGD if isinstance(made, Large) else torch.optim.AdamW  # each operator is slow on this device
    optimizer = kind(model.parameters(), lr=1e-2, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    saver = CheckpointSaver(None, folder, **{**QUIET, **settings})
    saver.register(model=model, optimizer=optimizer)
    return model, optimizer, saver


def learn(model: nn.Module, optimizer: Any, number: int) -> float:
    """A step; dropout draws its numbers from the device's generator."""
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).to(device())
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def assert_same_files(one: Path, other: Path, *suffixes: str) -> None:
    names = {name for name in files(one) if name.endswith(suffixes or (".safetensors", ".h5"))}
    assert names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert verify(one).ok


def save_both(model: nn.Module, folder: Path, **asked: Any) -> None:
    """The model saved from the device and from the host."""
    twin = copy.deepcopy(model)
    with CheckpointSaver(None, folder, **QUIET) as saver:
        saver.save(twin, folder / "host", **asked)
        with later_copies():
            saver.save(model.to(device()), folder / "device", **asked)
    assert_same_files(folder / "device", folder / "host")


@harness.named
def whole_model(folder: Path) -> None:
    for number, asked in enumerate(({}, {"format": "h5"}, {"dtype": "bfloat16"}, {"max_shard_size": 30_000})):
        save_both(models.trained(models.build("qwen3")), folder / str(number), **asked)
    save_both(models.build("mixtral"), folder / "converted")


@harness.named
def large_tensors(folder: Path) -> None:
    save_both(Large(), folder)


@harness.named
def numbers_that_are_none(folder: Path) -> None:
    """The check for NaN reads values that have been copied."""
    model = Large().to(device())
    with CheckpointSaver(None, folder, nonfinite="raise", **QUIET) as saver:
        saver.save(model, folder / "sound")
        with torch.no_grad():
            model.table[-1] = float("nan")
        with pytest.raises(IncompleteError, match="table"):
            saver.save(model, folder / "broken")


@harness.named
def adapters(folder: Path) -> None:
    save_both(models.trained(models.build("lora")), folder / "alone", adapter_only=True)
    save_both(models.trained(models.build("lora")), folder / "beside", adapter_only=False)
    base = models.build("qwen3").to(device())
    found = load_model(folder / "alone/device", base=base, check_base=False)
    wanted = {name: one for name, one in models.trained(models.build("lora")).state_dict().items() if "lora_" in name}
    assert wanted
    assert all(raw(found.state_dict()[name].cpu()) == raw(one) for name, one in wanted.items())


@harness.named
def background(folder: Path) -> None:
    """Training continues during two saves in a row; each has the values of the moment of its call."""
    model, optimizer, saver = run_of(network(), folder, background=True)
    with saver:
        for number in range(3):
            learn(model, optimizer, number)
        for name in ("one", "two"):
            saver.save_state(path=folder / f"{name}-now", background=False)
            with later_copies():
                handle = saver.save_state(path=folder / name)
                for number in range(3):
                    learn(model, optimizer, number)
                assert isinstance(handle, PendingSave)
                handle.result(60)
            assert_same_files(folder / name, folder / f"{name}-now", ".safetensors")


@harness.named
def background_before_the_copy(folder: Path) -> None:
    """Work queued on the device before the call is in the copy, although none of it was done by then."""
    model, optimizer, saver = run_of(Large(), folder, background=True)
    with saver:
        with torch.no_grad():
            model.table += 1
        handle = saver.save_state(path=folder / "later")
        model.step(optimizer)
        handle.result(60)
    saved = ft_ckpt.load(folder / "later/model.safetensors")["table"].values()
    assert raw(saved) == raw(Large().table.detach() + 1) != raw(model.table.detach().cpu())


@harness.named
def exact_memory(folder: Path) -> None:
    """A large snapshot allocates exactly what it needs, pinned, and frees it when the saver is closed."""
    given_back: list[int] = []
    drop = devices.RegisteredBlock.__del__

    def note_and_drop(block: devices.RegisteredBlock) -> None:
        given_back.append(len(block))
        drop(block)

    model, _, saver = run_of(Large(), folder, background=True)
    with replaced(devices.RegisteredBlock, __del__=note_and_drop), saver:
        saver.save(model, folder / "saved").result(60)
        rooms = (saver._pending.snapshot._now, saver._pending.snapshot._late)
        room = max(rooms, key=lambda one: one._memory.numel())
        size = room._memory.numel()
        assert room._memory.is_pinned()
        assert size == snapshot.copies_size(room._places) < 1.01 * 4 * LARGE
        del rooms, room
        saver.close()
        offers = hasattr(torch.get_device_module(device()), "cudart")
        assert given_back == [size] * offers, (given_back, size)


@harness.named
def resume(folder: Path) -> None:
    """The losses after a resume are the uninterrupted run's, dropout included; the moments are on the device."""
    model, optimizer, saver = run_of(network(), folder)
    torch.manual_seed(5)
    with saver:
        for number in range(4):
            learn(model, optimizer, number)
        saver.save_state(path=folder / "point")
        expected = [learn(model, optimizer, number) for number in range(4, 8)]
    fresh, other, saver = run_of(network(), folder)
    torch.manual_seed(6)
    learn(fresh, other, 99)
    with saver:
        report = saver.resume("point").report
        assert not report.problems, report
        assert [learn(fresh, other, number) for number in range(4, 8)] == expected
    moments = [value for state in other.state.values() for name, value in state.items() if name != "step"]
    assert {value.device for value in moments} == {device()}


def small_blocks() -> Any:
    """Blocks so small that each is filled several times."""
    return replaced(file_io, read_ahead=partial(read_ahead, block_bytes=1 << 20))


@harness.named
def resume_large(folder: Path) -> None:
    """Read through pinned blocks that are refilled while the device copies from them."""
    model, optimizer, saver = run_of(Large(), folder)
    with saver:
        model.step(optimizer)
        saver.save_state(path=folder / "point")
        fresh, other, _ = run_of(Large(), folder)
    with CheckpointSaver(None, folder, **QUIET) as saver, later_copies(), small_blocks():
        saver.register(model=fresh, optimizer=other)
        saver.resume("point")
    for one, two in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True):
        assert raw(one.cpu()) == raw(two.cpu())
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert {name: raw(value.cpu()) for name, value in one.items()} == {n: raw(v.cpu()) for n, v in two.items()}


@harness.named
def load_onto(folder: Path) -> None:
    """`load_model(device=)` and `load(map_location=)`, from each format and with the table in several blocks."""
    model, where = Large(), device()
    wanted = {name: raw(tensor) for name, tensor in model.state_dict().items()}
    with CheckpointSaver(None, folder, **QUIET) as saver:
        for name in ("safetensors", "h5", "dual"):
            path = saver.save(model, folder / name, format=name).path
            empty = Large().to(where)
            with later_copies(), small_blocks():
                found = load_model(path, into=empty, device=where)
            assert {one.device for one in found.state_dict().values()} == {where}
            assert {n: raw(tensor.cpu()) for n, tensor in found.state_dict().items()} == wanted
            file = next(one for one in path.glob("model.*") if one.suffix in (".safetensors", ".h5"))
            with later_copies(), small_blocks():
                loaded = ft_ckpt.load(file, map_location=where)
            assert {one.device for one in loaded.values()} == {where}
            assert {n: raw(tensor.cpu()) for n, tensor in loaded.items()} == wanted


@harness.named
def single_files(folder: Path) -> None:
    """Any state in one file, from the device and back, compressed too."""
    table = torch.randn(LARGE, generator=torch.Generator().manual_seed(2))
    state = {"table": table.to(device()), "tied": None, "crossed": table[:12].view(3, 4).t().to(device()), "lr": 0.1}
    state["tied"] = state["table"]
    for name, asked in {"a.h5": {}, "a.safetensors": {}, "a.pt": {}, "packed.h5": {"compression": "gzip"}}.items():
        ft_ckpt.save(state, folder / name, **asked)
        found = ft_ckpt.load(folder / name, map_location=device())
        assert found["lr"] == 0.1
        assert found["table"] is found["tied"] or name.endswith(".pt")
        assert found["table"].device == device()
        assert raw(found["table"].cpu()) == raw(table)
        assert raw(found["crossed"].cpu()) == raw(table[:12].view(3, 4).t())


@harness.named
def frozen_reuse(folder: Path) -> None:
    """A frozen file is hard-linked while its bytes on the device are unchanged, and written again after a change."""
    for background in (False, True):
        reuse_frozen(folder / str(background), background=background)


def reuse_frozen(folder: Path, **settings: Any) -> None:
    model = models.build("wide").to(device())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.norm.weight")
    with CheckpointSaver(None, folder, reuse_frozen="on", **QUIET, **settings) as saver:
        saver.save(model, folder / "1")
        for number, name in ((2, "model.norm.weight"), (3, "model.embed_tokens.weight")):
            with torch.no_grad():
                dict(model.named_parameters())[name].flatten()[-1] += 1
            saver.save(model, folder / str(number))
    paths = [folder / str(number) for number in (1, 2, 3)]
    first, second, third = (path / "model-00001-of-00002.safetensors" for path in paths)
    assert first.samefile(second)
    assert not first.samefile(third)
    loaded = load_model(paths[2]).state_dict()
    assert all(raw(loaded[name]) == raw(tensor.cpu()) for name, tensor in model.state_dict().items())


@harness.named
def two_ranks(folder: Path) -> None:
    """Each rank writes its share of the replicated tensors, from its own device; in the background, too."""
    model, _, saver = run_of(Large(), folder, each_rank_writes="on", background=True, enter_timeout_seconds=60)
    with saver:
        saver.save(model, folder / "now", background=False)
        saver.save(model, folder / "later").result(60)
    dist.barrier()
    if harness.RANK == 0:
        assert_same_files(folder / "later", folder / "now")
        assert raw(ft_ckpt.load(folder / "now/model.safetensors")["table"].values()) == raw(Large().table.detach())


@harness.named
def unused(folder: Path) -> None:
    """A model on the host is gathered and resumed without the device, whose memory and generator are not in use."""
    module = torch.get_device_module(torch.accelerator.current_accelerator(check_available=True))
    assert not module.is_initialized(), "by an earlier case"
    with CheckpointSaver(None, folder, each_rank_writes="off", enter_timeout_seconds=60, **QUIET) as saver:
        saver.register(model=network())
        saver.save_state(path=folder / "point")
        saver.resume("point")
    assert not module.is_initialized()


def case(name: str, folder: Path) -> None:
    name, _, how = name.partition("/")
    with sealed_device.doing_at_once() if how == "eager" else nullcontext():
        harness.NAMED[name](folder)


if __name__ == "__main__":
    if not IS_HERE:
        device()
    if harness.WORLD > 1:
        dist.init_process_group("gloo")
    harness.run(case)
