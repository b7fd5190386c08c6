"""Models at hand that a checkpoint is loaded into: their own memory is filled, block by block."""

import subprocess
import sys

import models
import pytest
import torch
from places import ROOT
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import CorruptError, LoadError

WIDTH, LAYERS, MEGABYTES = 2048, 24, 16  # of a layer
MEMORY = """
import os, sys
import torch
from torch import nn
import ft_ckpt

def memory(what): return int(open("/proc/self/status").read().split(what)[1].split()[0]) / 1024

ft_ckpt.load_model(sys.argv[1], into=nn.Linear(1, 1))  # what is imported on the way
width, layers, kind = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
into = None
if kind != "new":
    into = nn.Sequential(*(nn.Linear(width, width, False, dtype=dtype) for _ in range(layers)))
before = memory("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")  # the peak is that of from here on
model = ft_ckpt.load_model(sys.argv[2], into=into)
for number, layer in enumerate(model):
    assert torch.equal(layer.weight, torch.full_like(layer.weight, number))
print(memory("VmHWM:") - before)
"""


class Counted(nn.Linear):
    """Counts how often it is loaded, by a hook."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.loads = 0
        self.register_load_state_dict_pre_hook(self.count)

    @staticmethod
    def count(module, *_) -> None:
        module.loads += 1


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Counted(6, 6), nn.PReLU())


def same(one, other):
    tensors, others = (
        {name: each.cpu() for name, each in model.state_dict().items()} for model in (one, other)
    )
    return tensors.keys() == others.keys() and all(
        torch.equal(tensors[name], others[name]) for name in tensors
    )


@pytest.fixture
def saved(tmp_path):
    CheckpointSaver().save(network(1), tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def large(s3, tmp_path):
    """A checkpoint of 384 MB in a bucket, and a small one on the disk."""
    layers = [nn.Linear(WIDTH, WIDTH, False) for _ in range(LAYERS)]
    for number, layer in enumerate(layers):
        nn.init.constant_(layer.weight, number)
    CheckpointSaver().save(nn.Sequential(*layers), tmp_path / "large")
    CheckpointSaver().save(nn.Linear(1, 1), tmp_path / "small")
    for file in (tmp_path / "large").iterdir():
        s3.put(f"run/large/{file.name}", file.read_bytes())
    return [str(tmp_path / "small"), "s3://bucket/run/large", str(WIDTH), str(LAYERS)]


@pytest.mark.slow
def test_memory_is_the_models_and_a_few_blocks(large):
    """The whole checkpoint was held once more, beside the model it went into."""
    grown = {}
    for kind in ("float32", "bfloat16", "new"):
        command = [sys.executable, "-c", MEMORY, *large, kind]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stderr
        grown[kind] = float(result.stdout)
    assert grown["new"] > LAYERS * MEGABYTES, grown
    grown["new"] -= LAYERS * MEGABYTES
    assert min(grown.values()) > 0, grown
    assert max(grown.values()) < 300, grown


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_wrapped_models_are_filled(saved, wrap):
    model = network(2)
    wrapped = wrap(model)
    assert ft_ckpt.load_model(saved, into=wrapped) is wrapped
    assert same(model, network(1))


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_adapters_in_wrapped_models_are_filled(tmp_path, wrap):
    """The wrapper was taken for a base that is another one."""
    model, other = models.lora(models.build("llama")), models.lora(models.build("llama"))
    CheckpointSaver().save(models.trained(model), tmp_path / "out", adapter_only=True)
    wrapped = wrap(other)
    assert ft_ckpt.load_model(tmp_path / "out", into=wrapped) is wrapped
    assert same(other, model)
    base = models.build("llama")
    assert same(ft_ckpt.load_model(tmp_path / "out", into=wrap(base)), model)


def test_modules_that_load_in_a_way_of_their_own_are_asked_to(saved):
    model = network(2)
    ft_ckpt.load_model(saved, into=model)
    assert same(model, network(1))
    assert model[2].loads == 1


def test_tensors_stay_where_they_are_and_what_they_are(saved):
    model = network(2).double()
    model[0].weight = nn.Parameter(
        model[0].weight.detach().t().contiguous().t(), requires_grad=False
    )
    model[3].weight = nn.Parameter(torch.zeros((), dtype=torch.float64).expand(1))
    places = {
        name: (id(one), one.data_ptr(), one.stride()) for name, one in model.named_parameters()
    }
    ft_ckpt.load_model(saved, into=model)
    assert {
        name: (id(one), one.data_ptr(), one.stride()) for name, one in model.named_parameters()
    } == places
    assert same(model, network(1).double())
    assert not model[0].weight.requires_grad
    assert model[2].weight.requires_grad


def test_autograd_knows_that_values_were_overwritten(saved):
    model = network(2)
    loss = model[0](torch.ones(1, 6, requires_grad=True)).square().sum()
    ft_ckpt.load_model(saved, into=model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tied_weights_are_filled_through_any_of_their_names(tmp_path):
    tied, tied_too, apart = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(3))
    for model in (tied, tied_too):
        model[1].weight = model[0].weight
    CheckpointSaver().save(tied, tmp_path)
    for model in (tied_too, apart):
        ft_ckpt.load_model(tmp_path, into=model)
        assert same(model, tied)


def test_what_has_no_memory_is_refused(saved):
    with torch.device("meta"):
        model = network(2)
    with pytest.raises(LoadError, match=r"0\.weight.*meta device.*to_empty"):
        ft_ckpt.load_model(saved, into=model)


def test_what_is_damaged_is_refused_before_a_value_is_changed(saved):
    (file,) = saved.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    model = network(2)
    with pytest.raises(CorruptError):
        ft_ckpt.load_model(saved, into=model, verify=True)
    assert same(model, network(2))
