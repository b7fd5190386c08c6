"""Everything that a checkpoint needs of an accelerator, on a device that shows each read of its
memory and missed wait.

Marked `accelerator`: the same on this machine's, where there is one.
"""

import copy
import os
import signal
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from types import SimpleNamespace

import models
import pytest
import sealed_device
import torch
import torch.distributed as dist
from compare import files, raw
from launch import run_python
from on_ranks import IS_RANK, RANK, call_on_ranks, on_ranks
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver, devices, load_model, verify
from ft_ckpt.errors import IncompleteError
from ft_ckpt.formats.files import reading
from ft_ckpt.saving import snapshot
from ft_ckpt.saving.planning import PendingSave
from ft_ckpt.storage.io import read_ahead

sealed = pytest.mark.skipif(bool(sealed_device.why_missing()), reason=sealed_device.why_missing())
START = (
    "import sealed_device, torch; device = sealed_device.become_accelerator(); tensor = "
    "torch.ones(5, device=device); "
)
UNREGISTER = """
host, module = torch.empty(5, pin_memory=True), torch.get_device_module("sealed")
host.copy_(tensor, non_blocking=True)
module.cudaHostUnregister(host.data_ptr())
"""
DEVICE = "FT_CKPT_DEVICE"  # the variable that says "here" for the accelerator of this machine
IS_HERE = os.environ.get(DEVICE) == "here"
QUIET = {"on_difference": "ignore"}
LARGE = 4_200_003  # floats: 17 MB, more than two blocks, and no power of two


def device():
    if not IS_HERE:
        return sealed_device.become_accelerator()
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None, "no accelerator here"
    return torch.empty(0, device=found).device


def become(where):
    """Have the tests' own device for the accelerator of this process, unless it uses the
    machine's.
    """
    if where != "here":
        device()


def on_device(*, is_eager=False, is_slow=False):
    """Run a test in a process with the tests' own accelerator, with one that is early, and with the
    machine's.
    """
    marks = [sealed, pytest.mark.slow] if is_slow else [sealed]
    places = [
        pytest.param("sealed", marks=marks),
        pytest.param("here", marks=pytest.mark.accelerator),
    ]
    if is_eager:
        places.append(pytest.param("eager", marks=sealed))

    def decorate(test):
        @wraps(test)
        def call(tmp_path, where):
            if not IS_RANK:
                call_on_ranks(
                    1, call, tmp_path, where, launch=where, group_seconds=None, env={DEVICE: where}
                )
                return
            become(where)
            with sealed_device.doing_at_once() if where == "eager" else nullcontext():
                test(tmp_path)

        del call.__wrapped__  # whose signature lacks the place
        return pytest.mark.parametrize("where", places)(call)

    return decorate


@contextmanager
def later_copies():
    """Assert that something is copied after its call returned; checked on the tests' device
    alone.
    """
    before = 0 if IS_HERE else sealed_device.count_late_copies()
    yield
    assert IS_HERE or sealed_device.count_late_copies() > before


@contextmanager
def replaced(place, **names):
    before = {name: getattr(place, name) for name in names}
    for name, value in names.items():
        setattr(place, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


class Large(nn.Module):
    """A tensor that is copied in several pieces, a small one, a transposed one, and one without
    elements.
    """

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(LARGE, generator=torch.Generator().manual_seed(1)))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.crossed = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.register_buffer("nothing", torch.empty(0, 3))

    def step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.Linear(64, 1))


def run_of(made, folder, **settings):
    """The model on the device, with its optimizer and saver."""
    model = made.to(device())
    # each operator is slow on this device
    kind = torch.optim.SGD if isinstance(made, Large) else torch.optim.AdamW
    optimizer = kind(
        model.parameters(), lr=1e-2, **({"momentum": 0.9} if kind is torch.optim.SGD else {})
    )
    saver = CheckpointSaver(None, folder, **{**QUIET, **settings})
    saver.register(model=model, optimizer=optimizer)
    return model, optimizer, saver


def learn(model, optimizer, number):
    """A step; dropout draws its numbers from the device's generator."""
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).to(device())
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def assert_same_files(one, other, *suffixes):
    names = {name for name in files(one) if name.endswith(suffixes or (".safetensors", ".h5"))}
    assert names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert verify(one).ok


def save_both(model, folder, **asked):
    """The model saved from the device and from the host."""
    twin = copy.deepcopy(model)
    with CheckpointSaver(None, folder, **QUIET) as saver:
        saver.save(twin, folder / "host", **asked)
        with later_copies():
            saver.save(model.to(device()), folder / "device", **asked)
    assert_same_files(folder / "device", folder / "host")


@on_device()
def test_a_whole_model(tmp_path):
    for number, asked in enumerate(
        ({}, {"format": "h5"}, {"dtype": "bfloat16"}, {"max_shard_size": 30_000})
    ):
        save_both(models.trained(models.build("qwen3")), tmp_path / str(number), **asked)
    save_both(models.build("mixtral"), tmp_path / "converted")


@on_device(is_eager=True)
def test_large_tensors(tmp_path):
    save_both(Large(), tmp_path)


@on_device(is_slow=True)
def test_numbers_that_are_none(tmp_path):
    """The check for NaN reads values that have been copied."""
    model = Large().to(device())
    with CheckpointSaver(None, tmp_path, nonfinite="raise", **QUIET) as saver:
        saver.save(model, tmp_path / "sound")
        with torch.no_grad():
            model.table[-1] = float("nan")
        with pytest.raises(IncompleteError, match="table"):
            saver.save(model, tmp_path / "broken")


@on_device()
def test_adapters(tmp_path):
    save_both(models.trained(models.build("lora")), tmp_path / "alone", adapter_only=True)
    save_both(models.trained(models.build("lora")), tmp_path / "beside", adapter_only=False)
    base = models.build("qwen3").to(device())
    found = load_model(tmp_path / "alone/device", base=base, check_base=False)
    wanted = {
        name: one
        for name, one in models.trained(models.build("lora")).state_dict().items()
        if "lora_" in name
    }
    assert wanted
    assert all(raw(found.state_dict()[name].cpu()) == raw(one) for name, one in wanted.items())


@on_device(is_eager=True)
def test_a_save_in_the_background(tmp_path):
    """Training continues during two saves in a row; each has the values of the moment of its
    call.
    """
    model, optimizer, saver = run_of(network(), tmp_path, background=True)
    with saver:
        for number in range(3):
            learn(model, optimizer, number)
        for name in ("one", "two"):
            saver.save_state(path=tmp_path / f"{name}-now", background=False)
            with later_copies():
                handle = saver.save_state(path=tmp_path / name)
                for number in range(3):
                    learn(model, optimizer, number)
                assert isinstance(handle, PendingSave)
                handle.result(60)
            assert_same_files(tmp_path / name, tmp_path / f"{name}-now", ".safetensors")


@on_device(is_slow=True)
def test_a_step_before_the_copy(tmp_path):
    """Work queued on the device before the call is in the copy, although none of it was done by
    then.
    """
    model, optimizer, saver = run_of(Large(), tmp_path, background=True)
    with saver:
        with torch.no_grad():
            model.table += 1
        handle = saver.save_state(path=tmp_path / "later")
        model.step(optimizer)
        handle.result(60)
    saved = ft_ckpt.load(tmp_path / "later/model.safetensors")["table"].values()
    assert raw(saved) == raw(Large().table.detach() + 1) != raw(model.table.detach().cpu())


@on_device(is_slow=True)
def test_memory_of_a_snapshot(tmp_path):
    """A large snapshot allocates exactly what it needs, pinned, and frees it when the saver is
    closed.
    """
    given_back = []
    drop = devices.RegisteredBlock.__del__

    def note_and_drop(block):
        given_back.append(len(block))
        drop(block)

    model, _, saver = run_of(Large(), tmp_path, background=True)
    with replaced(devices.RegisteredBlock, __del__=note_and_drop), saver:
        saver.save(model, tmp_path / "saved").result(60)
        taken = saver._pending.snapshot
        rooms = (taken._call_memory, taken._thread_memory)
        room = max(rooms, key=lambda one: one._memory.numel())
        size = room._memory.numel()
        assert room._memory.is_pinned()
        assert size == snapshot.copies_size(room._tensors)
        assert 4 * LARGE <= size < 1.01 * 4 * LARGE
        del rooms, room, taken
        saver.close()
        offers = hasattr(torch.get_device_module(device()), "cudart")
        assert given_back == [size] * offers, (given_back, size)


@on_device()
def test_a_resume(tmp_path):
    """The losses after a resume are the uninterrupted run's, dropout included; the moments are on
    the device.
    """
    model, optimizer, saver = run_of(network(), tmp_path)
    torch.manual_seed(5)
    with saver:
        for number in range(4):
            learn(model, optimizer, number)
        saver.save_state(path=tmp_path / "point")
        expected = [learn(model, optimizer, number) for number in range(4, 8)]
    fresh, other, saver = run_of(network(), tmp_path)
    torch.manual_seed(6)
    learn(fresh, other, 99)
    with saver:
        report = saver.resume("point").report
        assert not report.problems, report
        assert [learn(fresh, other, number) for number in range(4, 8)] == expected
    moments = [
        value for state in other.state.values() for name, value in state.items() if name != "step"
    ]
    assert {value.device for value in moments} == {device()}


def small_blocks():
    """Blocks so small that each is filled several times."""
    return replaced(reading, read_ahead=partial(read_ahead, block_bytes=1 << 20))


@on_device(is_eager=True, is_slow=True)
def test_a_resume_of_large_tensors(tmp_path):
    """Read through pinned blocks that are refilled while the device copies from them."""
    model, optimizer, saver = run_of(Large(), tmp_path)
    with saver:
        model.step(optimizer)
        saver.save_state(path=tmp_path / "point")
        fresh, other, _ = run_of(Large(), tmp_path)
    with CheckpointSaver(None, tmp_path, **QUIET) as saver, later_copies(), small_blocks():
        saver.register(model=fresh, optimizer=other)
        saver.resume("point")
    for one, two in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True):
        assert raw(one.cpu()) == raw(two.cpu())
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert {name: raw(value.cpu()) for name, value in one.items()} == {
            n: raw(v.cpu()) for n, v in two.items()
        }


@on_device(is_eager=True)
def test_loads_onto_the_device(tmp_path):
    """`load_model(device=)` and `load(map_location=)`, from each format and with the table in
    several blocks.
    """
    model, where = Large(), device()
    wanted = {name: raw(tensor) for name, tensor in model.state_dict().items()}
    with CheckpointSaver(None, tmp_path, **QUIET) as saver:
        for name in ("safetensors", "h5", "dual"):
            path = saver.save(model, tmp_path / name, format=name).path
            empty = Large().to(where)
            with later_copies(), small_blocks():
                found = load_model(path, into=empty, device=where)
            assert {one.device for one in found.state_dict().values()} == {where}
            assert {n: raw(tensor.cpu()) for n, tensor in found.state_dict().items()} == wanted
            file = next(
                one for one in path.glob("model.*") if one.suffix in (".safetensors", ".h5")
            )
            with later_copies(), small_blocks():
                loaded = ft_ckpt.load(file, map_location=where)
            assert {one.device for one in loaded.values()} == {where}
            assert {n: raw(tensor.cpu()) for n, tensor in loaded.items()} == wanted


@on_device(is_eager=True)
def test_single_files(tmp_path):
    """Any state in one file, from the device and back, compressed too."""
    table = torch.randn(LARGE, generator=torch.Generator().manual_seed(2))
    state = {
        "table": table.to(device()),
        "tied": None,
        "crossed": table[:12].view(3, 4).t().to(device()),
        "lr": 0.1,
    }
    state["tied"] = state["table"]
    for name, asked in {
        "a.h5": {},
        "a.safetensors": {},
        "a.pt": {},
        "packed.h5": {"compression": "gzip"},
    }.items():
        ft_ckpt.save(state, tmp_path / name, **asked)
        found = ft_ckpt.load(tmp_path / name, map_location=device())
        assert found["lr"] == 0.1
        assert found["table"] is found["tied"] or name.endswith(".pt")
        assert found["table"].device == device()
        assert raw(found["table"].cpu()) == raw(table)
        assert raw(found["crossed"].cpu()) == raw(table[:12].view(3, 4).t())


@on_device(is_slow=True)
def test_frozen_files_are_reused(tmp_path):
    """A frozen file is hard-linked while its bytes on the device are unchanged, and written again
    after a change.
    """
    for background in (False, True):
        reuse_frozen(tmp_path / str(background), background=background)


def reuse_frozen(folder, **settings):
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
    assert all(
        raw(loaded[name]) == raw(tensor.cpu()) for name, tensor in model.state_dict().items()
    )


@pytest.mark.slow
@sealed
@on_ranks(2)
def test_two_ranks(tmp_path):
    """Each rank writes its share of the replicated tensors, from its own device; in the background,
    too.
    """
    model, _, saver = run_of(
        Large(), tmp_path, each_rank_writes="on", background=True, enter_timeout_seconds=60
    )
    with saver:
        saver.save(model, tmp_path / "now", background=False)
        saver.save(model, tmp_path / "later").result(60)
    dist.barrier()
    if RANK == 0:
        assert_same_files(tmp_path / "later", tmp_path / "now")
        assert raw(ft_ckpt.load(tmp_path / "now/model.safetensors")["table"].values()) == raw(
            Large().table.detach()
        )


@pytest.mark.parametrize(
    "where",
    [pytest.param("sealed", marks=sealed), pytest.param("here", marks=pytest.mark.accelerator)],
)
def test_a_model_on_the_host_leaves_the_accelerator_alone(tmp_path, where):
    call_on_ranks(2, unused, tmp_path, where, launch="unused", env={DEVICE: where})


def unused(folder, where):
    """A model on the host is gathered and resumed without the device, whose memory and generator
    are not in use.
    """
    become(where)
    module = torch.get_device_module(torch.accelerator.current_accelerator(check_available=True))
    assert not module.is_initialized(), "by an earlier case"
    with CheckpointSaver(
        None, folder, each_rank_writes="off", enter_timeout_seconds=60, **QUIET
    ) as saver:
        saver.register(model=network())
        saver.save_state(path=folder / "point")
        saver.resume("point")
    assert not module.is_initialized()


def poor(test):
    """Run a test in a process with the tests' own accelerator, parts of which it replaces."""

    @sealed
    @on_ranks(1, launch="poor", group_seconds=None)
    @wraps(test)
    def call(tmp_path):
        device()
        test(tmp_path)

    return call


@pytest.mark.slow
@poor
def test_a_backend_without_streams(tmp_path):
    """A backend that is not torch's accelerator: copies block."""
    with ExitStack() as stack:
        for place in (devices, devices, devices, reading):
            stack.enter_context(replaced(place, has_streams=lambda _: False))
        before = sealed_device.count_late_copies()
        rounds(tmp_path)
    assert sealed_device.count_late_copies() == before


@pytest.mark.slow
@poor
def test_a_backend_without_events(tmp_path):
    """A backend without streams and events: each copy is waited for at once."""

    def refuse(*_):
        raise NotImplementedError("no such thing here")

    with replaced(torch, Event=refuse, Stream=refuse):
        rounds(tmp_path)


@pytest.mark.slow
@poor
def test_a_backend_without_waits(tmp_path):
    """A backend whose streams and events cannot wait: only the whole device can be synchronised."""

    class Poor:
        def synchronize(self, *_):
            raise NotImplementedError("no such thing here")

        wait_event = synchronize

    class Stream(Poor, torch.Stream):
        pass

    class Event(Poor, torch.Event):
        pass

    with replaced(torch, Event=Event, Stream=Stream):
        rounds(tmp_path)


@pytest.mark.slow
@poor
def test_a_backend_without_registration(tmp_path):
    """A backend that refuses to register memory, one without that call, and one that cannot pin
    memory.
    """
    module = torch.get_device_module(device())
    with replaced(type(module), cudaHostRegister=lambda *_: 2):
        rounds(tmp_path / "refused")
    with replaced(devices, _runtime_of=lambda _: None):
        rounds(tmp_path / "absent")

        def refuse(*given, pin_memory=False, **asked):
            if pin_memory:
                raise RuntimeError("no pinned memory here")
            return torch.empty(*given, **asked)

        before = sealed_device.count_late_copies()
        with replaced(devices, torch=SimpleNamespace(**{**vars(torch), "empty": refuse})):
            rounds(tmp_path / "unpinned")
        assert sealed_device.count_late_copies() == before


def rounds(folder):
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
        assert all(
            raw(one.state_dict()[name].cpu()) == raw(t.cpu())
            for name, t in model.state_dict().items()
        )


@poor
def test_it_shows_that_nobody_waits(tmp_path):
    """Without the wait for copies, poison is saved: the tests' device shows that the wait is
    needed.
    """
    model = Large().to(device())
    with replaced(devices.Moment, await_done=lambda _: None):
        ft_ckpt.save({"table": model.table.detach()}, tmp_path / "table.h5")
    assert raw(ft_ckpt.load(tmp_path / "table.h5")["table"].values()) != raw(
        model.table.detach().cpu()
    )


@poor
def test_it_shows_that_nobody_keeps_blocks(tmp_path):
    """Likewise: blocks that are refilled too soon give bytes of other tensors."""
    table = torch.randn(LARGE, generator=torch.Generator().manual_seed(2))
    ft_ckpt.save({"table": table}, tmp_path / "table.h5")
    with replaced(devices.PinnedBlocks, await_copies=lambda *_: None), small_blocks():
        found = ft_ckpt.load(tmp_path / "table.h5", map_location=device())
    assert raw(found["table"].cpu()) != raw(table)


@poor
def test_it_shows_that_nobody_marks_the_moment(tmp_path):
    """Likewise: a stream that does not begin after the moment of the call copies older values."""
    model, _, saver = run_of(Large(), tmp_path, background=True)
    with replaced(snapshot, record_moment=lambda where: devices.Moment(where, None)), saver:
        with torch.no_grad():
            model.table += 1
        saver.save_state(path=tmp_path / "wrong").result(60)
    saved = ft_ckpt.load(tmp_path / "wrong/model.safetensors")["table"].values()
    assert raw(saved) != raw(model.table.detach().cpu())


@sealed
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import ctypes; ctypes.string_at(tensor.data_ptr(), 4)", -signal.SIGSEGV),
        ("(ctypes := __import__('ctypes')).memset(tensor.data_ptr(), 0, 4)", -signal.SIGSEGV),
        (UNREGISTER, -signal.SIGABRT),
    ],
    ids=["read", "written", "unregistered too soon"],
)
def test_the_device_kills_who_touches_its_memory(code, status):
    assert run_python(START + code).returncode == status


@sealed
def test_a_fork_has_no_part_in_registered_memory():
    """Else its pages would be copied at the next write, and the device would go on with those that
    nobody sees.
    """
    code = """
import gc, os
from ft_ckpt.devices import pinned_memory
module, given_back = torch.get_device_module("sealed"), []
type(module).cudaHostUnregister = lambda _, address: given_back.append(address)
memory = pinned_memory(20_000_064, device).fill_(1)
pid = os.fork()
if not pid:
    print(int(memory.sum(dtype=torch.int64)), flush=True)
    del memory
    gc.collect()
    os._exit(len(given_back))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), int(memory.sum(dtype=torch.int64)))
del memory
print(len(given_back))
"""
    done = run_python(START + code)
    assert done.stdout.split() == ["0", "0", "20000064", "1"], done.stderr


@sealed
def test_what_nobody_waited_for_is_poison():
    code = """
host = torch.empty(5, pin_memory=True)
host.copy_(tensor, non_blocking=True)
print(host.tolist() == [1.0] * 5)
torch.accelerator.current_stream().synchronize()
print(host.tolist() == [1.0] * 5)
"""
    done = run_python(START + code)
    assert done.stdout.split() == ["False", "True"], done.stderr


@sealed
def test_a_stream_sees_what_it_waited_for():
    code = """
stream, host = torch.Stream(device), torch.empty(5, pin_memory=True)
torch.accelerator.synchronize()
tensor += 1
for wait in (False, True):
    if wait:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        stream.wait_event(event)
    with stream:
        host.copy_(tensor, non_blocking=True)
    stream.synchronize()
    print(host[0].item())
"""
    done = run_python(START + code)
    assert done.stdout.split() == ["1.0", "2.0"], done.stderr
