"""Sources and streaming gather under every wrapper, against the state dict before; the cases are in the worker."""

import importlib.util

import pytest
import torch
from full_state import full_state_dict
from launch import run_cases
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.tensors import ModelTensors, from_state_dict
from ft_ckpt.distributed.wrappers import unwrap
from ft_ckpt.errors import IncompleteError

TWO = [
    *("plain", "ddp", "compiled_ddp", "fsdp2", "fsdp1", "fsdp1_flat", "tensor_parallel"),
    *("shards_not_copies", "comparing", "bounded", "handed_over", "gathering_fails", "tied_copies"),
]
FOUR = ["fsdp2", "hybrid", "two_dimensions"]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    seen: dict[int, dict[str, str]] = {}

    def errors(ranks: int, case: str) -> str:
        if ranks not in seen:
            seen[ranks] = run_cases("engines", TWO if ranks == 2 else FOUR, tmp_path_factory.mktemp("engines"), ranks)
        return seen[ranks][case]

    return errors


@pytest.mark.parametrize("case", TWO)
def test_two_ranks(errors, case):
    assert errors(2, case) == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks(errors, case):
    assert errors(4, case) == ""


def test_one_process():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    full = full_state_dict(model)
    assert all(torch.equal(full[name], tensor) for name, tensor in model.state_dict().items())
    assert full["0.weight"].data_ptr() != model[0].weight.data_ptr(), "a copy: the next step must not show in it"


def test_ties_are_identity_not_storage():
    """Views of one flat buffer look tied to whoever compares storage."""
    flat = torch.randn(12)
    model = nn.Module()
    model.one, model.two = nn.Parameter(flat[:6]), nn.Parameter(flat[6:])
    model.alias = model.one
    found = ModelTensors(model).sources()
    assert found["one"].key == found["alias"].key != found["two"].key


def test_non_contiguous_and_non_persistent():
    model = nn.Linear(3, 2)
    model.register_buffer("table", torch.arange(6).view(2, 3).t())
    model.register_buffer("scratch", torch.ones(1), persistent=False)
    full = full_state_dict(model)
    assert "scratch" not in full
    assert torch.equal(full["table"], model.table)


def test_meta_device_is_refused():
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(IncompleteError, match=r"weight, bias: 2 tensor\(s\) of the model have no data"):
        ModelTensors(model).sources()


def test_partitioned_without_a_trace_is_refused():
    """ZeRO-3 parameters are `Size([0])`; whatever cannot be gathered is named, not written."""
    model = nn.Linear(3, 2)
    model.weight.ds_shape = model.weight.shape
    model.weight.data = torch.empty(0)
    with pytest.raises(IncompleteError, match="weight: 1 tensor"):
        ModelTensors(model).sources()


def test_parts_that_only_their_engine_knows_of_are_refused(monkeypatch):
    """Megatron's are ordinary tensors, and would be taken for replicas."""
    model = nn.Linear(3, 2)
    model.weight.tensor_model_parallel = True
    assert ModelTensors(model).sources(), "one process has all of it"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(
        IncompleteError, match=r"^weight: this rank's part of a larger parameter, cut by DeepSpeed's AutoTP or Megatron"
    ):
        ModelTensors(model).sources()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra")
def test_parts_that_deepspeed_marks(tmp_path):
    environment = {"DS_ACCELERATOR": "cpu"}
    assert run_cases("engines", ["parts_of_deepspeed"], tmp_path, env=environment)["parts_of_deepspeed"] == ""


def test_given_state_dict_must_be_the_model_s():
    """Empty, partial, prefix-mangled and zero-size dicts name their first offenders."""
    live, ranks = ModelTensors(nn.Linear(3, 2)).sources(), Ranks(0, 1)
    for given, words in (
        ({}, "weight: missing; bias: missing"),
        ({"weight": torch.empty(0), "bias": torch.empty(2)}, r"weight: shape \(0,\), the model has \(2, 3\)"),
        ({"_orig_mod.weight": torch.empty(2, 3), "bias": torch.empty(2)}, "_orig_mod.weight: not in the model"),
    ):
        with pytest.raises(IncompleteError, match=words):
            from_state_dict(given, live, ranks)


def test_names_of_nested_wrappers():
    """Wrapper parts at any depth and order, told from a user's own module of such a name."""
    inner = nn.Linear(2, 2)
    model = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"a": torch.compile(checkpoint_wrapper(inner))})})
    found = ModelTensors(torch.compile(model)).sources()
    assert list(found) == ["_orig_mod.a.weight", "_orig_mod.a.bias"]
    assert found["_orig_mod.a.bias"].raw_name == "_orig_mod.a._orig_mod._checkpoint_wrapped_module.bias"
    assert unwrap(torch.compile(inner, backend="eager")) is inner
