"""Ranges of files read ahead into aligned blocks: any ranges, every fall-back, and files that
change meanwhile.
"""

import ctypes
import errno
import itertools
import os
import threading

import pytest
import torch
from hypothesis import given, settings, strategies as st
from launch import run_python
from seeds import examples

import ft_ckpt
from ft_ckpt.errors import CorruptError
from ft_ckpt.formats.files import reading
from ft_ckpt.storage import libc
from ft_ckpt.storage.io import (
    ALIGNMENT,
    ByteRun,
    open_local_file,
    prefetch as blocks,
    read_ahead,
    read_in_place,
)

SIZE = (3 << 20) + 4097
BLOCK = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks") / "x.bin"
    path.write_bytes(os.urandom(SIZE))
    drop(path)
    return path, path.read_bytes()


def drop(path):
    """Out of the page cache with it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path, ranges, **options):
    """The bytes of each range."""
    file = open_local_file(path)
    runs = [ByteRun(str(place), file, start, size) for place, (start, size) in enumerate(ranges)]
    found, newest = [b""] * len(runs), 0
    for part in read_ahead(runs, block_bytes=BLOCK, **options):
        assert int(part.run.name) >= newest, "they come in their order"
        newest = int(part.run.name)
        found[newest] += ctypes.string_at(part.address, part.size_bytes)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(
    cuts=st.lists(st.integers(0, SIZE), max_size=8),
    shuffled=st.randoms(use_true_random=False),
    direct=st.sampled_from(["on", "off", "auto"]),
    threads=st.integers(1, 3),
)
def test_any_ranges_in_any_order(source, cuts, shuffled, direct, threads):
    path, content = source
    edges = [0, *sorted(cuts), SIZE]
    ranges = [(low, high - low) for low, high in itertools.pairwise(edges)]
    shuffled.shuffle(ranges)
    assert read(path, ranges, direct=direct, threads=threads) == [
        content[low : low + size] for low, size in ranges
    ]


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "size", [1, ALIGNMENT - 1, ALIGNMENT, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + ALIGNMENT]
)
@pytest.mark.parametrize("start", [0, 1, ALIGNMENT, BLOCK - 1])
def test_around_the_block(source, start, size):
    path, content = source
    assert read(path, [(start, size)], direct="on") == [content[start : start + size]]


def test_neighbours_share_a_read(source, monkeypatch):
    """Ten thousand small tensors are not ten thousand reads."""
    path, content = source
    calls, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *place: calls.append(place[2]) or real(*place))
    ranges = [(start, 100) for start in range(0, 1_000_000, 100)]
    assert b"".join(read(path, ranges)) == content[:1_000_000]
    assert len(calls) <= 4


def test_what_is_far_away_is_asked_for_six_times_at_once(source):
    """Waiting for one answer after the other would leave the line empty most of the time."""
    _path, content = source
    together = threading.Barrier(6, timeout=60)

    class Far:
        name, where, version, can_map = "far", "far", "1", False
        size_bytes = 6 * BLOCK // 2

        def read_into(self, memory, start=0):
            together.wait()
            memory[:] = content[start : start + len(memory)]

    runs = [ByteRun("far", Far(), 0, Far.size_bytes)]
    parts = [bytes(part.content) for part in read_ahead(runs, block_bytes=BLOCK // 2)]
    assert b"".join(parts) == content[: Far.size_bytes]


def test_file_system_without_unbuffered_reads(source, monkeypatch):
    path, content = source
    real = os.open

    def refuse(name, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    assert read(path, [(5, SIZE - 5)], direct="on") == [content[5:]]


def test_unbuffered_reads_refused_late_and_short_ones(source, monkeypatch):
    path, content = source
    real, refused = os.preadv, []

    def preadv(descriptor, buffers, at):
        if not refused:
            refused.append(at)
            raise OSError(errno.EINVAL, "misaligned, says the device")
        return real(descriptor, [buffers[0][: max(1, len(buffers[0]) // 3)]], at)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(path, [(5, SIZE - 5)], direct="on") == [content[5:]]
    assert refused


def test_what_is_in_the_page_cache_is_taken_from_there(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(SIZE))
    doors, real = [], blocks._open_direct
    monkeypatch.setattr(
        blocks, "_open_direct", lambda *place: doors.append(real(*place)) or doors[-1]
    )
    used, preadv = set(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda *place: used.add(place[0]) or preadv(*place))
    for known in (True, False):
        used.clear()
        monkeypatch.setattr(blocks, "is_cached", lambda *_, known=known: known)
        read(path, [(0, SIZE)])
        assert (doors[-1] in used) is (not known and doors[-1] is not None)


def test_cached_tells(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(1 << 20))
    drop(path)
    with path.open("rb") as file:
        if libc._LIBC.syscall(451, -1, None, None, 0) and ctypes.get_errno() == errno.ENOSYS:
            pytest.skip("this kernel cannot tell")
        if blocks.is_cached(file.fileno(), 0, 1 << 20):
            pytest.skip("this file system drops nothing from memory")
        os.pread(file.fileno(), 1 << 20, 0)
        assert blocks.is_cached(file.fileno(), 1, (1 << 20) - 2)


@pytest.mark.parametrize("direct", ["on", "off"])
def test_a_file_cut_short_or_rewritten_is_an_error(tmp_path, direct):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(SIZE))
    file = open_local_file(path)
    with pytest.raises(
        CorruptError, match=r"x\.bin: ends at byte 3149825, bytes up to 3149826 asked for"
    ):
        list(read_ahead([ByteRun("a", file, 0, SIZE + 1)], direct=direct, block_bytes=BLOCK))
    feed = read_ahead([ByteRun("a", file, 0, SIZE)], direct=direct, block_bytes=BLOCK, threads=1)
    next(feed)
    os.truncate(path, 5000)
    with pytest.raises(CorruptError, match="changed while it was open"):
        list(read_ahead([ByteRun("a", file, 0, SIZE)], direct=direct, block_bytes=BLOCK))
    feed.close()


def in_place(path, ranges):
    """The bytes of each range, read into memory of its own."""
    file = open_local_file(path)
    memory = [ctypes.create_string_buffer(size) for _, size in ranges]
    targets = {}
    for (start, size), buffer in zip(ranges, memory, strict=True):
        targets[ByteRun("x", file, start, size)] = ctypes.addressof(buffer)
    read_in_place(targets)
    return [buffer.raw for buffer in memory]


@pytest.mark.parametrize("ranges", [[(5, 100)], [(0, SIZE)], [(7, 1 << 20), (1, 9), (4096, 3)]])
def test_reading_in_place(source, ranges, monkeypatch):
    path, content = source
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 18)
    assert in_place(path, ranges) == [content[start : start + size] for start, size in ranges]


def test_in_place_too_a_file_cut_short_is_an_error(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(os.urandom(SIZE))
    file = open_local_file(path)
    memory = ctypes.create_string_buffer(SIZE)
    os.truncate(path, SIZE // 2)
    with pytest.raises(CorruptError, match=r"x\.bin"):
        read_in_place({ByteRun("x", file, 0, SIZE): ctypes.addressof(memory)})


def test_a_file_that_is_replaced_stays_whole(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"a" * SIZE)
    file = open_local_file(path)
    (tmp_path / "y.bin").write_bytes(b"b" * SIZE)
    (tmp_path / "y.bin").replace(path)
    (part, *_) = read_ahead([ByteRun("a", file, 0, 10)], direct="on")
    assert ctypes.string_at(part.address, 10) == b"a" * 10


def test_left_early_nothing_stays_open(source):
    path, _ = source
    file = open_local_file(path)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    feed = read_ahead([ByteRun("a", file, 0, SIZE)], direct="on", block_bytes=BLOCK)
    next(feed)
    feed.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_memory_stays_bounded(tmp_path):
    """A file of half a gigabyte goes through a few blocks."""
    path = tmp_path / "x.bin"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 512 << 20)
    code = """
import sys
from pathlib import Path
from ft_ckpt.storage.io import ByteRun, open_local_file, read_ahead
from peak_memory import peak_memory
run = ByteRun("a", open_local_file(Path(sys.argv[1])), 0, 512 << 20)
with peak_memory() as peak:
    print(sum(part.size_bytes for part in read_ahead([run], threads=2)))
print(peak.mib)
"""
    result = run_python(code, path)
    assert result.returncode == 0, result.stderr
    size_bytes, peak = result.stdout.split()
    assert int(size_bytes) == 512 << 20
    assert 8 < float(peak) < 64, f"{peak} MiB; a block has 8"


def test_large_tensors_in_the_page_cache_are_resumed_in_place(tmp_path, monkeypatch):
    model, other = torch.nn.Linear(1024, 300), torch.nn.Linear(1024, 300)
    ft_ckpt.CheckpointSaver().save_state(model, tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").read_bytes()  # it is in the page cache now
    in_place = []
    real = reading.read_in_place

    def noted(targets, threads):
        in_place.extend(run.size_bytes for run in targets)
        real(targets, threads)

    monkeypatch.setattr(reading, "read_in_place", noted)
    version = other.weight._version
    ft_ckpt.CheckpointSaver(on_difference="ignore").resume(tmp_path / "a", model=other)
    assert in_place == [4 * 1024 * 300]
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
    assert other.weight._version > version
