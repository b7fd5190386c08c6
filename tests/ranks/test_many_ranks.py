"""A thousand ranks without their processes: who writes which bytes of a file, and how little is
said of it.
"""

import json
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from on_ranks import on_ranks
from seeds import examples
from simulated_ranks import WAYS, llama_1b, planned
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ft_ckpt.ranks import Ranks
from ft_ckpt.ranks.moving import WantedTensor, fill
from ft_ckpt.ranks.sharding import sharding
from ft_ckpt.ranks.wrappers import ModelTensors, source_of_tensor, tensor_kinds
from ft_ckpt.saving import regions
from ft_ckpt.saving.planning import write_plan
from ft_ckpt.saving.regions import live
from ft_ckpt.storage.digests import rank_parts
from ft_ckpt.storage.io import ByteRun

shapes = st.lists(
    st.lists(st.integers(0, 60) | st.integers(1000, 1100), max_size=2).map(tuple),
    min_size=1,
    max_size=4,
)
worlds = st.sampled_from([2, 8, 1001, 1024]) | st.integers(2, 1024)


def shared(values, way, world, rank):
    (share,) = write_plan.divide_files([planned(values, way, world, rank)], world)
    return share


def spans(share, ranks):
    own = regions._own_regions(share, ranks, live)
    return [(region.start, region.start + region.size_bytes) for region in own]


def joined(spans):
    """Neighbouring spans as one."""
    found = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


@settings(max_examples=examples(150), deadline=None)
@given(shapes, st.sampled_from(WAYS), worlds, st.sampled_from([64, 4096]))
def test_every_byte_has_one_writer(shapes, way, world, block_bytes):
    values = {f"t{number}": torch.zeros(shape) for number, shape in enumerate(shapes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_plan, "BLOCK_BYTES", block_bytes)
        first = shared(values, way, world, 0)
        owners = {owner for _, _, owner in rank_parts(first.all_cuts, first.file.layout.size_bytes)}
        looks = {0, 1, world // 2, world - 1, min(owners), max(owners)}
        found = {rank: shared(values, way, world, rank) for rank in looks}
        written = {
            rank: spans(share, Ranks(rank, world, HashStore())) for rank, share in found.items()
        }
    size = first.file.layout.size_bytes
    pieces = list(rank_parts(first.all_cuts, size))
    assert joined((start, stop) for start, stop, _ in pieces) == [(0, size)], "each byte once"
    assert all(0 <= owner < world for _, _, owner in pieces)
    for rank in looks:
        assert found[rank].cuts == first.cuts, "worked out alike by all"
        assert joined(written[rank]) == joined(
            (start, stop) for start, stop, owner in pieces if owner == rank
        )


@pytest.mark.parametrize("way", WAYS)
def test_the_manifest_does_not_grow_with_the_ranks(way):
    values = llama_1b()
    sizes = {}
    for world in (2, 64, 1024):
        share = shared(values, way, world, 0)
        assert len(share.all_cuts) == len(values)
        record = share.record(["0" * 32] * world)
        sizes[world] = len(json.dumps(record.cuts)) + len(record.digest)
    assert max(sizes.values()) < sizes[2] * 1.1
    assert max(sizes.values()) < 100 * len(values)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [8, 1024])
def test_planning_takes_steps_by_tensors_and_ranks(way, world, monkeypatch):
    """A rank is asked for its box of a tensor once or twice, and no element is looked at."""
    steps, values = [], llama_1b()
    for module, name in ((sharding, "_cut_box"), (sharding.FlatSharding, "local_boxes")):
        real = getattr(module, name)
        counted = lambda *given, real=real: steps.append(1) or real(*given)  # noqa: E731
        monkeypatch.setattr(module, name, counted)
    shared(values, way, world, world - 1)
    assert bool(steps) is (way != "ddp")
    assert len(steps) <= 2 * len(values) * (world + 1)


class PlannedFile:
    """A file that was written as it is planned, as far as a rank asks for what it reads of it."""

    def __init__(self, layout):
        self.specs = {spec.name: spec for spec in layout.specs}
        self._starts = dict(zip(self.specs, layout.starts, strict=True))

    def runs(self, name):
        return [ByteRun(name, self, self._starts[name], self.specs[name].size_bytes)]


@pytest.mark.sample("3-ddp", "3-fsdp1", "3-fsdp2", "3-zero3", "1024-ddp")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [3, 1024])
def test_a_rank_reads_the_bytes_that_it_holds(way, world, monkeypatch):
    """And no others: all ranks together read a file once, or as often as they hold it; in one range
    a tensor.
    """
    shapes = [(1030, 3), (7,), (2049,), (1, 1500), (2, 2, 700), (), (0, 4)]
    values = {f"t{number}": torch.zeros(shape) for number, shape in enumerate(shapes)}
    read = []
    for rank in range(world):
        monkeypatch.setattr(fill, "global_rank", lambda rank=rank: rank)
        share = shared(values, way, world, rank)
        file, sources = PlannedFile(share.file.layout), [entry.source for entry in share.entries]
        wanted = [WantedTensor(source, source.local, file, source.name) for source in sources]
        fill.check_all(wanted)
        runs = [
            run for one in wanted for box in one.in_boxes() for run in fill._landings_of_box(box)
        ]
        assert len(runs) <= len(values)
        held = sum(source.local.nbytes for source in sources if source.local is not None)
        assert sum(run.size_bytes for run in runs) == held
        read += [(run.start, run.start + run.size_bytes) for run in runs]
    layout = shared(values, way, world, 0).file.layout
    assert joined(sorted({*read})) == [(len(layout.header), layout.size_bytes)]
    size_bytes = layout.size_bytes - len(layout.header)
    # what is not cut: FSDP2's scalars
    whole = {"ddp": size_bytes, "fsdp2": values["t5"].nbytes}.get(way, 0)
    assert sum(stop - start for start, stop in read) == size_bytes + (world - 1) * whole


RANKS = 1024  # of a fake process group in one process


def facts(source):
    local = None if source.local is None or not source.local.numel() else tuple(source.local.shape)
    sharding = source.sharding
    boxes = [sharding.boxes(rank) for rank in (0, 1, 2, 511, 512, 1022, 1023)]
    owners = tuple(rank for rank in sharding.owners if sharding.boxes(rank))
    return (
        sharding.view,
        owners,
        boxes,
        sharding.local_boxes(dist.get_rank()),
        local,
        sharding.is_sharded,
    )


def compare(rank):
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(7, 2001),
            nn.LayerNorm(5),
            nn.Embedding(1030, 3),
            nn.Linear(1, 1024),
            nn.Linear(0, 3),
        )
    values = {name: torch.zeros(value.shape) for name, value in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    real = ModelTensors(model.to_empty(device="cpu")).sources()
    told = {
        entry.name: entry.source for entry in planned(values, "fsdp2", RANKS, rank).part.entries
    }
    for name in values:
        assert facts(told[name]) == facts(real[name]), (
            rank,
            name,
            facts(told[name]),
            facts(real[name]),
        )
    zeros = []
    told = {
        entry.name: entry.source for entry in planned(values, "zero3", RANKS, rank).part.entries
    }
    for name, value in values.items():
        shard = torch.zeros(-(-value.numel() // RANKS))  # as DeepSpeed pads and cuts
        parameter = SimpleNamespace(
            ds_tensor=shard, ds_process_group=dist.group.WORLD, ds_shape=value.shape
        )
        parameter.shape, parameter.dtype, parameter.requires_grad = (0,), value.dtype, True
        source = source_of_tensor(name, name, parameter)
        assert facts(told[name]) == facts(source), (rank, name, facts(told[name]), facts(source))
        zeros.append(parameter)
    frozen = nn.Parameter(next(model.parameters()).data, requires_grad=False)
    plain = [
        torch.zeros(3, 2),
        nn.Parameter(torch.zeros(3, 2)),
        torch.zeros(3, 2).long(),
        torch.zeros(2, 3),
    ]
    compare_in_bulk([*model.parameters(), frozen, *zeros, zeros[0], *plain, *plain, frozen])


def compare_in_bulk(tensors):
    """Layouts computed once per group of similar tensors equal those of each tensor by itself."""
    found = tensor_kinds.layouts_of(tensors)
    assert found == [tensor_kinds.layout_of(tensor) for tensor in tensors]
    assert tensor_kinds.have_data(tensors) == [True] * len(tensors)
    for kind, some in tensor_kinds.by_kind(tensors):
        one = Mock(wraps=kind.layout_of)
        with patch.object(type(kind), "layout_of", one):
            assert kind.layouts_of(some * 100) == kind.layouts_of(some) * 100
        assert one.call_count <= 2 * len(some), "however many there are of a kind"


@pytest.mark.slow
@on_ranks(1, group_seconds=None, alone=True)
def test_layouts_are_those_of_the_engines():
    """Of FSDP2 and ZeRO-3, of a few of the ranks."""
    for rank in (0, 1, 511, 1023):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        compare(rank)
        dist.destroy_process_group()
