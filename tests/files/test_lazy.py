"""Lazy tensors: nothing is read before it is used, a used tensor is a tensor, and files that change
are noticed.
"""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contract_format import equal

from ft_ckpt.errors import CorruptError
from ft_ckpt.extensions.tools import LazyTensor, load, save


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.h5"
    save(
        {"big": torch.arange(100_000.0).view(1000, 100), "small": torch.arange(12).view(3, 4)}, path
    )
    return path


def test_nothing_is_read_before_it_is_used(path):
    found = load(path)
    big = found["big"]
    assert (big.shape, big.dtype, big.device.type, big.ndim, len(big)) == (
        (1000, 100),
        torch.float32,
        "cpu",
        2,
        1000,
    )
    assert "not loaded" in repr(found)
    assert big.size(1) == 100
    assert big.numel() == 100_000
    assert big.stride() == (100, 1)
    assert not big.requires_grad
    assert not big.is_loaded
    assert big.sum() == torch.arange(100_000.0).sum()
    assert big.is_loaded


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: x[3:5, 1],
        lambda x: x.to(torch.float64),
        lambda x: x.t().contiguous(),
        lambda x: torch.cat([x, x]),
        lambda x: torch.stack((x, x)),
        lambda x: x.view(-1),
        lambda x: x @ x.t(),
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: copy.deepcopy(x),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: x.clone(),
        lambda x: next(iter(x)),
        lambda x: x[-1],
        lambda x: torch.empty(x.shape).copy_(x),
        lambda x: torch.zeros_like(x),
        lambda x: x.detach().add(1),
        lambda x: torch.where(x > 3, x, 0),
        lambda x: torch.empty(1000, 100).index_copy_(0, torch.arange(1000), x),
        lambda x: torch.nn.functional.linear(torch.ones(2, 100), x),
        lambda x: x.requires_grad_().mul(2).detach(),
    ],
)
def test_a_lazy_tensor_is_a_tensor(path, use):
    result = use(load(path)["big"])
    assert type(result) is torch.Tensor
    assert equal(result, use(torch.arange(100_000.0).view(1000, 100)))


def test_writes_stay_until_released_and_never_reach_the_file(path):
    lazy = load(path)["big"]
    lazy.zero_()
    lazy[5] = 2
    assert lazy.sum() == 200
    assert load(path)["big"].sum() > 200
    lazy.release()
    assert not lazy.is_loaded
    assert equal(lazy.clone(), torch.arange(100_000.0).view(1000, 100))


def test_released_memory_is_given_back(tmp_path):
    save({"a": torch.zeros(16 << 20, dtype=torch.uint8)}, tmp_path / "x.h5")
    lazy = load(tmp_path / "x.h5")["a"]
    lazy.add_(1)
    before = _own_bytes()
    lazy.release()
    assert before - _own_bytes() > 12 << 20


def _own_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


def _descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(tmp_path, assign):
    make = lambda: torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.BatchNorm1d(300))  # noqa: E731
    source, goal = make(), make()
    source[0].bias.requires_grad_(False)
    goal[0].bias.requires_grad_(False)
    save(source.state_dict(), tmp_path / "x.h5")
    state = load(tmp_path / "x.h5")
    goal.load_state_dict(state, assign=assign)
    for name, tensor in [*goal.named_parameters(), *goal.named_buffers()]:
        assert type(tensor) in (torch.nn.Parameter, torch.Tensor)
        assert equal(tensor, source.state_dict()[name])
    assert [p.requires_grad for p in goal.parameters()] == [True, False, True, True]
    assert all(isinstance(value, LazyTensor) for value in state.values())
    goal(torch.randn(4, 200)).sum().backward()
    torch.optim.SGD(goal.parameters(), 0.1).step()
    assert equal(load(tmp_path / "x.h5")["0.weight"].clone(), source[0].weight)


def test_assigned_parameters_are_mapped_not_copied(tmp_path):
    save({"weight": torch.ones(4 << 20)}, tmp_path / "x.h5")
    holder = torch.nn.ParameterDict({"weight": torch.empty(4 << 20, device="meta")})
    before = _own_bytes()
    holder.load_state_dict(load(tmp_path / "x.h5"), assign=True)
    assert holder["weight"].sum() == 4 << 20
    assert _own_bytes() - before < 4 << 20


def test_slices_read_only_their_bytes(path, monkeypatch):
    read = []
    found = load(path, mapped=False)["big"]
    raw = found._stored.file.raw
    original = raw.bytes
    monkeypatch.setattr(
        raw, "bytes", lambda start, size: read.append(size) or original(start, size)
    )
    assert equal(found[10:12], torch.arange(1000.0, 1200).view(2, 100))
    assert equal(found[-1], torch.arange(99_900.0, 100_000))
    assert read == [800, 400]
    assert not found.is_loaded


@pytest.mark.parametrize("mapped", [True, False])
def test_rewritten_in_place_is_noticed(path, mapped):
    found = load(path, mapped=mapped)
    content = bytearray(path.read_bytes())
    before = path.stat().st_mtime_ns
    path.write_bytes(content[::-1])
    os.utime(path, ns=(before + 1, before + 1))
    for name in found:
        with pytest.raises(CorruptError, match="changed while it was open"):
            found[name].clone()


def test_copied_values_outlive_their_file(path):
    plain = load(path, mapped=False)["big"].values()
    os.truncate(path, 0)
    assert equal(plain, torch.arange(100_000.0).view(1000, 100))


def test_many_tensors_need_no_descriptors(tmp_path):
    save({f"w{i}": torch.full((20_000,), float(i)) for i in range(60)}, tmp_path / "x.h5")
    before = _descriptors()
    found = load(tmp_path / "x.h5")
    plain = [tensor.values() for tensor in found.values()]
    assert _descriptors() == before + 1
    del found
    assert [int(tensor[0]) for tensor in plain] == list(range(60))
    assert _descriptors() == before


def test_saving_what_was_loaded(path, tmp_path):
    save(load(path), tmp_path / "y.safetensors")
    save(load(path), path)
    for found in (load(tmp_path / "y.safetensors"), load(path)):
        assert equal(found["big"], torch.arange(100_000.0).view(1000, 100))


@pytest.mark.slow
def test_tensors_that_outlive_the_end_of_the_process(path):
    """Nothing is unmapped, and no callback fails, while the interpreter takes its modules apart."""
    code = f"""
import torch
from ft_ckpt.extensions.tools.objects import load
kept = load({str(path)!r})["big"].values()
torch.kept = kept
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
