"""Backends with fewer features, whose checkpoints are right all the same; and wrong bytes without the waits."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness  # first: it arms the stack dump
import sealed_device
import torch
from accelerators import LARGE, Large, assert_same_files, device, replaced, run_of, small_blocks
from compare import raw

import ft_ckpt
from ft_ckpt import devices, load_model
from ft_ckpt.formats import file_io
from ft_ckpt.saving import snapshot


@harness.named
def without_streams(folder: Path) -> None:
    """A backend that is not torch's accelerator: copies block."""
    with ExitStack() as stack:
        for place in (devices, devices, devices, file_io):
            stack.enter_context(replaced(place, has_streams=lambda _: False))
        before = sealed_device.count_late_copies()
        rounds(folder)
    assert sealed_device.count_late_copies() == before


@harness.named
def without_events(folder: Path) -> None:
    """A backend without streams and events: each copy is waited for at once."""

    def refuse(*_: Any) -> None:
        raise NotImplementedError("no such thing here")

    with replaced(torch, Event=refuse, Stream=refuse):
        rounds(folder)


@harness.named
def without_waits(folder: Path) -> None:
    """A backend whose streams and events cannot wait: only the whole device can be synchronised."""

    class Poor:
        def synchronize(self, *_: Any) -> None:
            raise NotImplementedError("no such thing here")

        wait_event = synchronize

    class Stream(Poor, torch.Stream):
        pass

    class Event(Poor, torch.Event):
        pass

    with replaced(torch, Event=Event, Stream=Stream):
        rounds(folder)


@harness.named
def without_registration(folder: Path) -> None:
    """A backend that refuses to register memory, one without that call, and one that cannot pin memory."""
    module = torch.get_device_module(device())
    with replaced(type(module), cudaHostRegister=lambda *_: 2):
        rounds(folder / "refused")
    with replaced(devices, _runtime_of=lambda _: None):
        rounds(folder / "absent")

        def refuse(*given: Any, pin_memory: bool = False, **asked: Any) -> torch.Tensor:
            if pin_memory:
                raise RuntimeError("no pinned memory here")
            return torch.empty(*given, **asked)

        before = sealed_device.count_late_copies()
        with replaced(devices, torch=SimpleNamespace(**{**vars(torch), "empty": refuse})):
            rounds(folder / "unpinned")
        assert sealed_device.count_late_copies() == before


def rounds(folder: Path) -> None:
    """Save, save in the background, load and resume."""
    model, optimizer, saver = run_of(Large(), folder, background=True)
    with saver:
        model.step(optimizer)
        saver.save_state(path=folder / "now", background=False)
        saver.save_state(path=folder / "later").result(60)
    assert_same_files(folder / "later", folder / "now", ".safetensors")
    fresh, _, saver = run_of(Large(), folder)
    with saver:
        saver.resume("later")
    loaded = load_model(folder / "now", into=Large(), device=device())
    for one in (fresh, loaded):
        assert all(raw(one.state_dict()[name].cpu()) == raw(t.cpu()) for name, t in model.state_dict().items())


@harness.named
def nobody_waits(folder: Path) -> None:
    """Without the wait for copies, poison is saved: the tests' device shows that the wait is needed."""
    model = Large().to(device())
    with replaced(devices.Moment, await_done=lambda _: None):
        ft_ckpt.save({"table": model.table.detach()}, folder / "table.h5")
    assert raw(ft_ckpt.load(folder / "table.h5")["table"].values()) != raw(model.table.detach().cpu())


@harness.named
def nobody_keeps_blocks(folder: Path) -> None:
    """Likewise: blocks that are refilled too soon give bytes of other tensors."""
    table = torch.randn(LARGE, generator=torch.Generator().manual_seed(2))
    ft_ckpt.save({"table": table}, folder / "table.h5")
    with replaced(devices.PinnedBlocks, await_block=lambda *_: None), small_blocks():
        found = ft_ckpt.load(folder / "table.h5", map_location=device())
    assert raw(found["table"].cpu()) != raw(table)


@harness.named
def nobody_marks_the_moment(folder: Path) -> None:
    """Likewise: a stream that does not begin after the moment of the call copies older values."""
    model, _, saver = run_of(Large(), folder, background=True)
    with replaced(snapshot, record_moment=lambda where: devices.Moment(where, None)), saver:
        with torch.no_grad():
            model.table += 1
        saver.save_state(path=folder / "wrong").result(60)
    saved = ft_ckpt.load(folder / "wrong/model.safetensors")["table"].values()
    assert raw(saved) != raw(model.table.detach().cpu())


def case(name: str, folder: Path) -> None:
    harness.NAMED[name](folder)


if __name__ == "__main__":
    device()
    harness.run(case)
