"""Sources and streaming gather under every wrapper, against the state dict before."""

import importlib.util
import time
import warnings
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from full_state import full_state_dict
from on_ranks import RANK, WORLD, on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tuning import buckets_of

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import IncompleteError, RankError, RanksDisagreeError
from ft_ckpt.ranks import Ranks, current_ranks
from ft_ckpt.ranks.moving import are_equal, gather_tensors, sample_elements, stream_chunks
from ft_ckpt.ranks.wrappers import ModelTensors, from_state_dict, unwrap

CPU = torch.device("cpu")


def build():
    """Odd sizes, so that shards are uneven or empty; buffers; a 0-d counter."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 11, bias=False))
    return nn.Sequential(nn.Linear(5, 7), inner, nn.BatchNorm1d(11))


def plain(model):
    return model


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def compiled_ddp(model):
    model[1] = torch.compile(model[1], backend="eager")
    return torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")


def fsdp2(model):
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model, use_orig_params=True):
    model[1] = FullyShardedDataParallel(model[1], use_orig_params=use_orig_params, device_id=CPU)
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=CPU)


def fsdp1_flat(model):
    return fsdp1(model, use_orig_params=False)


def hybrid(model):
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (WORLD,))
    return parallelize_module(model, mesh, {"1.0": ColwiseParallel(), "1.1": RowwiseParallel()})


def two_dimensions(model):
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"1.0": ColwiseParallel(), "1.1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


TWO = (plain, ddp, compiled_ddp, fsdp2, fsdp1, fsdp1_flat, tensor_parallel)


@pytest.mark.parametrize("wrap", TWO, ids=lambda wrap: wrap.__name__)
@on_ranks(2)
def test_two_ranks(wrap):
    gathers(wrap)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [fsdp2, hybrid, two_dimensions], ids=lambda wrap: wrap.__name__)
@on_ranks(4)
def test_four_ranks(wrap):
    gathers(wrap)


def gathers(wrap):
    """Same names, same bits, from the largest bucket to one row at a time, in any order; samples
    are elements.
    """
    truth = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    found = ModelTensors(wrap(build())).sources()
    assert list(found) == list(truth)
    for bucket_bytes, order in (
        (1 << 20, list(found)),
        (1, list(found)),
        (64, list(reversed(found))),
    ):
        with buckets_of(bucket_bytes):
            full = gather_tensors([found[name] for name in order], current_ranks())
        assert set(full) == (set(truth) if RANK == 0 else set())
        assert all(torch.equal(full[name], truth[name]) for name in full)
    samples = {}
    for one in current_ranks().agree("samples", sample_elements(found, RANK), decide=list).result:
        for name, values in one.items():
            assert not set(values) & set(samples.setdefault(name, {})), (
                f"{name}: sampled by two ranks"
            )
            samples[name].update(values)
    for name, values in samples.items():
        assert (
            len(values) == min(8, truth[name].numel())
            or "full_tensor" in name
            or wrap is two_dimensions
        )
        assert all(
            float(truth[name].flatten()[int(index)]) == value for index, value in values.items()
        )


@on_ranks(2)
def test_shards_are_not_copies():
    """After a forward alone, FSDP2's outermost parameters are bf16 copies; what is gathered is the
    float32 shards.
    """
    model = build()[:2]
    truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh, policy = (
        init_device_mesh("cpu", (WORLD,)),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    fully_shard(model[1], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.eval()
    model(torch.randn(4, 5))
    assert model[0].weight.dtype == torch.bfloat16, "the premise of this case"
    full = full_state_dict(model, ["0.weight", "1.0.weight"])
    assert all(torch.equal(full[name], truth[name]) for name in full)
    assert len(full) == (2 if RANK == 0 else 0)


@on_ranks(2)
def test_comparing():
    """`are_equal` finds one changed element, wherever the shards are."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(5, 7))
    model[1].load_state_dict(model[0].state_dict())
    with torch.no_grad():
        model[1].bias[6] += 1
    found = ModelTensors(fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))).sources()
    with buckets_of(64):
        assert are_equal(found["0.weight"], found["1.weight"], current_ranks())
        assert are_equal(found["0.bias"], found["1.bias"], current_ranks()) == (RANK != 0)


@on_ranks(2)
def test_a_chunk_is_bounded():
    """A chunk is never larger than half the bucket, so that the other half can be on its way."""
    model = fully_shard(
        nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 256)),
        mesh=init_device_mesh("cpu", (WORLD,)),
    )
    largest = total = 0
    with buckets_of(64 << 10):
        for chunk in stream_chunks(list(ModelTensors(model).sources().values()), current_ranks()):
            largest, total = max(largest, chunk.data.nbytes), total + chunk.data.nbytes
    assert largest <= 32 << 10
    assert total == (4 * (512 * 512 + 512 + 512 * 256 + 256) if RANK == 0 else 0)


@on_ranks(2)
def test_a_state_dict_that_rank_0_has_gathered(tmp_path):
    """Rank 0 alone has a gathered state dict, the others pass None; None on rank 0 is an error on
    all.
    """
    model = fsdp2(build())
    full = full_state_dict(model)
    report = CheckpointSaver(enter_timeout_seconds=20).save(
        model, tmp_path / "handed", state_dict=full or None
    )
    assert report.tensors == len(build().state_dict())
    with pytest.raises(RanksDisagreeError, match="not on rank 0"):
        CheckpointSaver(enter_timeout_seconds=20).save(
            model, tmp_path / "handed", state_dict=None if RANK == 0 else {}
        )


@on_ranks(2)
def test_gathering_fails_on_rank_0():
    """Rank 0 fails between two tensors; the others learn of it at once, not at their timeout."""
    begun, ranks = time.monotonic(), current_ranks(60)
    feed = stream_chunks(list(ModelTensors(fsdp2(build())).sources().values()), ranks)
    error = None
    try:
        with buckets_of(64):
            for _ in feed:
                raise MemoryError("no room for the next one")
    except (MemoryError, RankError) as found:
        error = found
        feed.close()
    with suppress(MemoryError, RankError):
        ranks.agree("the end", error=error)
    assert error is not None
    assert time.monotonic() - begun < 20


@on_ranks(2)
def test_copies_of_a_tie():
    """If tied after sharding, with uneven rows, FSDP2 computes with two copies on the rank that has
    fewer rows.
    """
    for rows, is_apart in ((2 * WORLD, False), (2 * WORLD - 1, RANK == WORLD - 1)):
        model = nn.Sequential(nn.Embedding(rows, 4), nn.Linear(4, rows, bias=False))
        mesh = init_device_mesh("cpu", (WORLD,))
        for part in model:
            fully_shard(part, mesh=mesh)
        model[1].weight = model[0].weight
        for _ in range(2):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                ModelTensors(model).sources()
            told = [one for one in told if "computes with another copy" in str(one.message)]
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            model(torch.arange(rows)).square().sum().backward()
            optimizer.step()
        assert bool(told) == is_apart, (rows, told)
        assert not told or str(told[0].message).startswith("0.weight, 1.weight: tied")


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"
)
@on_ranks(2, env={"DS_ACCELERATOR": "cpu"})
def test_parts_that_deepspeed_marks(tmp_path):
    """Layers that AutoTP has cut, and experts that its MoE has spread, are refused by name; whole
    ones are saved.
    """
    import deepspeed
    from deepspeed.module_inject import layers
    from deepspeed.module_inject.tp_shard import AutoTPMeta
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed("gloo")
    layers.set_autotp_mode(training=True)
    groups = {"tp_meta": AutoTPMeta(num_kv_heads=2)}
    cut = layers.LinearLayer(nn.Linear(4, 6), name="q_proj", mp_group=dist.group.WORLD, **groups)
    model = nn.ModuleDict({"cut": cut, "whole": nn.Linear(4, 2)})
    with pytest.raises(
        IncompleteError, match=r"cut\.weight, cut\.bias: this rank's part of a larger parameter"
    ):
        CheckpointSaver().save(model, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    spread = nn.ModuleDict({"moe": MoE(4, nn.Linear(4, 4), num_experts=WORLD, ep_size=WORLD)})
    refused = (
        r"moe\.deepspeed_moe\.experts\.deepspeed_experts\.0\.weight.*an expert of this rank alone"
    )
    with pytest.raises(IncompleteError, match=refused):
        ModelTensors(spread).sources()
    alike = nn.ModuleDict({"moe": MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=1)})
    names = ModelTensors(alike).sources()
    assert {"moe.deepspeed_moe.experts.deepspeed_experts.1.weight"} <= names.keys()


def test_one_process():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    full = full_state_dict(model)
    assert all(torch.equal(full[name], tensor) for name, tensor in model.state_dict().items())
    assert full["0.weight"].data_ptr() != model[0].weight.data_ptr(), (
        "a copy: the next step must not show in it"
    )


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
    with pytest.raises(
        IncompleteError, match=r"weight, bias: 2 tensor\(s\) of the model have no data"
    ):
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
        IncompleteError,
        match=r"^weight: this rank's part of a larger parameter, cut by DeepSpeed's AutoTP",
    ):
        ModelTensors(model).sources()


def test_given_state_dict_must_be_the_model_s():
    """Empty, partial, prefix-mangled and zero-size dicts name their first offenders."""
    live, ranks = ModelTensors(nn.Linear(3, 2)).sources(), Ranks(0, 1)
    for given, words in (
        ({}, "weight: missing; bias: missing"),
        (
            {"weight": torch.empty(0), "bias": torch.empty(2)},
            r"weight: shape \(0,\), the model has \(2, 3\)",
        ),
        (
            {"_orig_mod.weight": torch.empty(2, 3), "bias": torch.empty(2)},
            "_orig_mod.weight: not in the model",
        ),
    ):
        with pytest.raises(IncompleteError, match=words):
            from_state_dict(given, live, ranks)


def test_names_of_nested_wrappers():
    """Wrapper parts at any depth and order, told from a user's own module of such a name."""
    inner = nn.Linear(2, 2)
    model = nn.ModuleDict(
        {"_orig_mod": nn.ModuleDict({"a": torch.compile(checkpoint_wrapper(inner))})}
    )
    found = ModelTensors(torch.compile(model)).sources()
    assert list(found) == ["_orig_mod.a.weight", "_orig_mod.a.bias"]
    assert (
        found["_orig_mod.a.bias"].raw_name
        == "_orig_mod.a._orig_mod._checkpoint_wrapped_module.bias"
    )
    assert unwrap(torch.compile(inner, backend="eager")) is inner
