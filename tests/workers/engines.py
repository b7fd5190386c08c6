"""Tensors found and gathered under each engine, compared with the state dict before wrapping."""

import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_state import full_state_dict
from harness import RANK, WORLD, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tuning import buckets_of

from ft_ckpt import CheckpointSaver
from ft_ckpt.distributed.gather import are_equal, gather_tensors, stream_chunks
from ft_ckpt.distributed.ranks import current_ranks
from ft_ckpt.distributed.replicas import sample_elements
from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.errors import IncompleteError, RankError, RanksDisagreeError

CPU = torch.device("cpu")


def build() -> nn.Sequential:
    """Odd sizes, so that shards are uneven or empty; buffers; a 0-d counter."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 11, bias=False))
    return nn.Sequential(nn.Linear(5, 7), inner, nn.BatchNorm1d(11))


def plain(model: nn.Sequential) -> nn.Module:
    return model


def ddp(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def compiled_ddp(model: nn.Sequential) -> nn.Module:
    model[1] = torch.compile(model[1], backend="eager")
    return torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")


def fsdp2(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: nn.Sequential, use_orig_params: bool = True) -> nn.Module:
    model[1] = FullyShardedDataParallel(model[1], use_orig_params=use_orig_params, device_id=CPU)
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=CPU)


def fsdp1_flat(model: nn.Sequential) -> nn.Module:
    return fsdp1(model, use_orig_params=False)


def hybrid(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    return parallelize_module(model, mesh, {"1.0": ColwiseParallel(), "1.1": RowwiseParallel()})


def two_dimensions(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"1.0": ColwiseParallel(), "1.1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def gathers(wrap) -> None:
    """Same names, same bits, from the largest bucket to one row at a time, in any order; samples are elements."""
    truth = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    found = ModelTensors(wrap(build())).sources()
    assert list(found) == list(truth)
    for bucket_bytes, order in ((1 << 20, list(found)), (1, list(found)), (64, list(reversed(found)))):
        with buckets_of(bucket_bytes):
            full = gather_tensors([found[name] for name in order], current_ranks())
        assert set(full) == (set(truth) if RANK == 0 else set())
        assert all(torch.equal(full[name], truth[name]) for name in full)
    samples: dict[str, dict[str, float]] = {}
    for one in current_ranks().agree("samples", sample_elements(found, RANK), decide=list).result:
        for name, values in one.items():
            assert not set(values) & set(samples.setdefault(name, {})), f"{name}: sampled by two ranks"
            samples[name].update(values)
    for name, values in samples.items():
        assert len(values) == min(8, truth[name].numel()) or "full_tensor" in name or wrap is two_dimensions
        assert all(float(truth[name].flatten()[int(index)]) == value for index, value in values.items())


def shards_not_copies() -> None:
    """After a forward alone, FSDP2's outermost parameters are bf16 copies; what is gathered is the float32 shards."""
    model = build()[:2]
    truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh, policy = init_device_mesh("cpu", (WORLD,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model[1], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.eval()
    model(torch.randn(4, 5))
    assert model[0].weight.dtype == torch.bfloat16, "the premise of this case"
    full = full_state_dict(model, ["0.weight", "1.0.weight"])
    assert all(torch.equal(full[name], truth[name]) for name in full)
    assert len(full) == (2 if RANK == 0 else 0)


def comparing() -> None:
    """`are_equal` finds one changed element, wherever the shards are."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(5, 7))
    model[1].load_state_dict(model[0].state_dict())
    with torch.no_grad():
        model[1].bias[6] += 1
    found = ModelTensors(fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))).sources()
    with buckets_of(64):
        assert are_equal(found["0.weight"], found["1.weight"], current_ranks())
        assert are_equal(found["0.bias"], found["1.bias"], current_ranks()) == (RANK != 0)


def bounded() -> None:
    """A chunk is never larger than half the bucket, so that the other half can be on its way."""
    model = fully_shard(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 256)), mesh=init_device_mesh("cpu", (WORLD,)))
    largest = total = 0
    with buckets_of(64 << 10):
        for chunk in stream_chunks(list(ModelTensors(model).sources().values()), current_ranks()):
            largest, total = max(largest, chunk.data.nbytes), total + chunk.data.nbytes
    assert largest <= 32 << 10
    assert total == (4 * (512 * 512 + 512 + 512 * 256 + 256) if RANK == 0 else 0)


def handed_over() -> None:
    """Rank 0 alone has a gathered state dict, the others pass None; None on rank 0 is an error on all."""
    model = fsdp2(build())
    full = full_state_dict(model)
    folder = Path(sys.argv[1]) / "handed"
    report = CheckpointSaver(enter_timeout_seconds=20).save(model, folder, state_dict=full or None)
    assert report.tensors == len(build().state_dict())
    with pytest.raises(RanksDisagreeError, match="not on rank 0"):
        CheckpointSaver(enter_timeout_seconds=20).save(model, folder, state_dict=None if RANK == 0 else {})


def gathering_fails() -> None:
    """Rank 0 fails between two tensors; the others learn of it at once, not at their timeout."""
    begun, ranks = time.monotonic(), current_ranks(60)
    feed = stream_chunks(list(ModelTensors(fsdp2(build())).sources().values()), ranks)
    error: BaseException | None = None
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


def tied_copies() -> None:
    """If tied after sharding, with uneven rows, FSDP2 computes with two copies on the rank that has fewer rows."""
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


def parts_of_deepspeed() -> None:
    """Layers that AutoTP has cut, and experts that its MoE has spread, are refused by name; whole ones are saved."""
    import deepspeed
    from deepspeed.module_inject import layers
    from deepspeed.module_inject.tp_shard import AutoTPMeta
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed("gloo")
    layers.set_autotp_mode(training=True)
    groups: dict[str, Any] = {"tp_meta": AutoTPMeta(num_kv_heads=2)}
    cut = layers.LinearLayer(nn.Linear(4, 6), name="q_proj", mp_group=dist.group.WORLD, **groups)
    model = nn.ModuleDict({"cut": cut, "whole": nn.Linear(4, 2)})
    with pytest.raises(IncompleteError, match=r"cut\.weight, cut\.bias: this rank's part of a larger parameter"):
        CheckpointSaver().save(model, "cut")
    assert not Path("cut").exists()
    spread = nn.ModuleDict({"moe": MoE(4, nn.Linear(4, 4), num_experts=WORLD, ep_size=WORLD)})
    refused = r"moe\.deepspeed_moe\.experts\.deepspeed_experts\.0\.weight.*an expert of this rank alone"
    with pytest.raises(IncompleteError, match=refused):
        ModelTensors(spread).sources()
    alike = nn.ModuleDict({"moe": MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=1)})
    names = ModelTensors(alike).sources()
    assert {"moe.deepspeed_moe.experts.deepspeed_experts.1.weight"} <= names.keys()


WRAPPERS = (plain, ddp, compiled_ddp, fsdp2, fsdp1, fsdp1_flat, hybrid, tensor_parallel, two_dimensions)
CASES = {
    **{wrap.__name__: (lambda wrap=wrap: gathers(wrap)) for wrap in WRAPPERS},
    **{
        case.__name__: case
        for case in (
            shards_not_copies,
            comparing,
            bounded,
            handed_over,
            gathering_fails,
            tied_copies,
            parts_of_deepspeed,
        )
    },
}


def case(name: str, folder: Path) -> None:
    CASES[name]()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(case)
    dist.destroy_process_group()
