"""Odd sizes down every road to the disk, and what happens where a file system cannot do what is
usual.
"""

import ctypes
import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import models
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save
from seeds import examples
from simulated_ranks import WAYS, planned
from small_checkpoints import digest_like
from torch import nn
from torch.distributed import HashStore
from tuning import blocks_of

from ft_ckpt import CheckpointSaver, verify
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving import regions
from ft_ckpt.saving.planning import write_plan
from ft_ckpt.storage import libc
from ft_ckpt.storage.io import BLOCK_BYTES, WriterPool, new_block, tuning_for
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place

SMALL = 1 << 16  # a block of many, even for small tensors
SIZES = {
    "odd": [(), (0,), (3, 0), (1,), (7, 5), (4096,), (4095,), (1023, 3)],
    "huge": [(5,), (3 * SMALL + 4097,), (SMALL // 8, 4), (1,)],
}


def tensors(shapes):
    draws = torch.Generator().manual_seed(len(shapes))
    return {
        f"t{number:05d}": torch.randn(shape, generator=draws) for number, shape in enumerate(shapes)
    }


class Module(nn.Module):
    """The same as parameters of a module."""

    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))


def by_saver(values, folder, **options):
    saver = CheckpointSaver(None, folder, io_threads=2, direct_io="on", **options)
    with blocks_of(SMALL), saver:
        saver.save(Module(values), folder / "saved")
    assert verify(folder / "saved").ok
    (file,) = (folder / "saved").glob("*.safetensors")
    return file


def by_ranks(values, folder, way="fsdp2", world=2, dtype=None, block_bytes=SMALL, direct_io="on"):
    """The file as `world` ranks write it at once, each what it holds; their threads stand for the
    processes.
    """
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world) as pool:
        patch.setattr(write_plan, "BLOCK_BYTES", 4096)  # in which replicated tensors are shared out
        (share,) = write_plan.divide_files([planned(values, way, world, 0, dtype)], world)
        tuning = tuning_for(2, direct_io, block_bytes)
        store_of_files = LocalStore(folder, tuning.direct_bytes, syncs=False)
        store_of_files.allocate(share.file.path, share.file.layout.size_bytes)
        store = HashStore()

        def write(rank):
            (mine,) = write_plan.divide_files([planned(values, way, world, rank, dtype)], world)
            assert mine.cuts == share.cuts
            ranks = Ranks(rank, world, store)
            with WriterPool(tuning) as writer:
                return regions.write_own_bytes(mine, store_of_files, writer, ranks, regions.live)

        record = share.record(list(pool.map(write, range(world))))
    assert digest_like(folder / share.file.path, record) == record.digest
    return folder / share.file.path


ROADS = {
    "one writer": by_saver,
    "background": lambda values, folder: by_saver(values, folder, background=True),
    **{
        f"direct, {way}": lambda values, folder, way=way: by_ranks(values, folder, way)
        for way in WAYS
    },
}


def assert_holds(file, values):
    found = load_file(file)
    assert found.keys() == values.keys()
    assert all(
        found[name].shape == value.shape and torch.equal(found[name], value)
        for name, value in values.items()
    )


@pytest.mark.parametrize("sizes", ["odd", "huge"])
@pytest.mark.parametrize("road", ROADS)
def test_odd_sizes(tmp_path, road, sizes):
    values = tensors(SIZES[sizes])
    assert_holds(ROADS[road](values, tmp_path), values)


_SLOW = (pytest.param(road, marks=pytest.mark.slow) for road in ("background", "direct, ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("road", ["one writer", "direct, fsdp2", *_SLOW])
def test_twenty_thousand_tiny_ones(tmp_path, road):
    values = tensors([(number % 3 + 1,) for number in range(20_000)])
    assert_holds(ROADS[road](values, tmp_path), values)


@settings(max_examples=examples(60), deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=5),
    way=st.sampled_from(WAYS),
    world=st.integers(2, 6),
    dtype=st.sampled_from([None, torch.bfloat16, torch.float64]),
    block_bytes=st.sampled_from([4096, 12288]),
    direct_io=st.sampled_from(["on", "off"]),
)
def test_ranks_write_what_one_would(
    tmp_path_factory, shapes, way, world, dtype, block_bytes, direct_io
):
    values = tensors(shapes)
    file = by_ranks(
        values, tmp_path_factory.mktemp("ranks"), way, world, dtype, block_bytes, direct_io
    )
    stored = {name: value.to(dtype or value.dtype) for name, value in values.items()}
    assert file.read_bytes() == save(stored, {"format": "pt"})


def test_usual_blocks(tmp_path):
    values = tensors([(3,), (3 * BLOCK_BYTES // 4 + 4097,), (5,)])
    assert_holds(by_ranks(values, tmp_path, block_bytes=BLOCK_BYTES), values)


# What a file system may lack


def no_direct_open(patch):
    """O_DIRECT is refused when a file is opened."""
    real, refused = os.open, []

    def opened(path, flags, *mode, **more):
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode, **more)

    patch.setattr(os, "open", opened)
    return refused


def no_direct_write(patch):
    """It is taken then, and refused at each write."""
    real, refused = os.pwrite, []

    def written(descriptor, data, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data, offset)

    patch.setattr(os, "pwrite", written)
    return refused


def fallocate_refused(patch):
    """The call is there, but not for this file system."""
    refused = []

    def fallocate(*call):
        refused.append(call)
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    patch.setattr(libc, "_LIBC", SimpleNamespace(fallocate=fallocate))
    return refused


def no_fallocate(patch):
    """A C library without it."""
    patch.setattr(libc, "_LIBC", SimpleNamespace())
    return [True]


@pytest.mark.parametrize("lack", [no_direct_open, no_direct_write, fallocate_refused, no_fallocate])
@pytest.mark.parametrize("road", ["one writer", "background", "direct, ddp", "direct, fsdp2"])
def test_the_file_is_the_same_without(tmp_path, monkeypatch, lack, road):
    values = tensors(SIZES["odd"] + SIZES["huge"])
    refused = lack(monkeypatch)
    assert_holds(ROADS[road](values, tmp_path), values)
    assert refused, "nothing was lacking"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_dual_file_has_one_name_without_links(tmp_path, monkeypatch, code):
    def refuse(*_, **_more):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    path = CheckpointSaver().save(models.build("llama"), tmp_path / "out", format="dual").path
    assert verify(path).ok
    assert not (path / "model.h5").exists()
    assert "model.h5" not in {record.path for record in read_manifest(open_place(path)).files}


def test_threads_that_are_refused_at_once_all_go_on(tmp_path, monkeypatch):
    """The second to be refused finds that the first has left O_DIRECT already."""
    together, real = threading.Barrier(2), os.pwrite

    def written(descriptor, data, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            together.wait(10)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", written)
    blocks = [new_block(1 << 16) for _ in range(2)]
    for number, block in enumerate(blocks):
        block[:] = bytes([number + 1]) * len(block)
    writing = LocalStore(tmp_path).create("file", 1 << 17)
    assert writing.direct_descriptor == -1, "small"
    writing.abandon()
    writing = LocalStore(tmp_path, direct_bytes=0).create("file", 1 << 17)
    if writing.direct_descriptor < 0:
        pytest.skip("needs a file system with O_DIRECT")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: writing.write(n << 16, memoryview(blocks[n])), range(2)))
    writing.finish()
    assert (tmp_path / "file").read_bytes() == bytes(blocks[0]) + bytes(blocks[1])
