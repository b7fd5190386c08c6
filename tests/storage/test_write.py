"""The durable writer: any sizes, its fall-backs, and what a full disk leaves."""

import ctypes
import errno
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings, strategies as st
from launch import run_python
from seeds import examples
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import IncompleteError, NoSpaceError, TargetError
from ft_ckpt.formats import FilePlan, Layout, Spec, write_file
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.io import (
    BLOCK_BYTES,
    Region,
    WriterPool,
    WriteTuning,
    direct_io,
    region_of,
    tuning_for,
)
from ft_ckpt.storage.local import LocalStore


def plan(sizes, header=b"head", gap=0, trailer=b""):
    specs = tuple(Spec(f"t{index}", (size,), "uint8") for index, size in enumerate(sizes))
    starts, position = [], len(header)
    for size in sizes:
        starts.append(position + gap)
        position += gap + size
    end = position + gap
    if not trailer:
        return FilePlan("file.bin", Layout(header, specs, tuple(starts), end))
    return FilePlan(
        "file.bin",
        Layout(header, specs, tuple(starts), end + len(trailer), end, lambda digests: trailer),
    )


def feed(datas, starts, pieces=1):
    for data, start in zip(datas, starts, strict=True):
        buffer = ctypes.create_string_buffer(data, len(data))
        step = -(-len(data) // pieces) or 1
        for low in range(0, len(data), step):
            yield Region(
                start + low, ctypes.addressof(buffer) + low, min(step, len(data) - low), buffer
            )


def new_file(folder, file_plan, direct_bytes=BLOCK_BYTES):
    """The file of a plan in `folder`, to be written."""
    return LocalStore(folder, direct_bytes).create(file_plan.path, file_plan.layout.size_bytes)


def written(
    tmp_path,
    sizes,
    *,
    direct="auto",
    threads=2,
    pieces=1,
    block_bytes=BLOCK_BYTES,
    alone=False,
    **layout,
):
    """The file's bytes as written and as they should be."""
    datas = [os.urandom(size) for size in sizes]
    one = plan(sizes, **layout)
    tuning = tuning_for(threads, direct, block_bytes)
    with WriterPool(tuning, one.layout.size_bytes if alone else None) as writer:
        regions = feed(datas, one.layout.starts, pieces)
        goal = new_file(tmp_path, one, tuning.direct_bytes)
        record = write_file(one, regions, goal, writer)
    content = (tmp_path / "file.bin").read_bytes()
    expected = bytearray(one.layout.size_bytes)
    expected[: len(one.layout.header)] = one.layout.header
    for data, start in zip(datas, one.layout.starts, strict=True):
        expected[start : start + len(data)] = data
    trailer = layout.get("trailer", b"")
    expected[len(expected) - len(trailer) :] = trailer
    assert (record.size_bytes, record.digest) == (
        len(content),
        f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}",
    )
    return content, bytes(expected)


@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), max_size=12),
    gap=st.sampled_from([0, 1, 4095]),
    trailer=st.sampled_from([b"", b"index"]),
    pieces=st.integers(1, 3),
    direct=st.sampled_from(["on", "off"]),
    block_bytes=st.sampled_from([4096, 8192, BLOCK_BYTES]),
    alone=st.booleans(),
)
def test_any_layout(tmp_path_factory, sizes, gap, trailer, pieces, direct, block_bytes, alone):
    folder = tmp_path_factory.mktemp("layout")
    settings = {"direct": direct, "block_bytes": block_bytes, "alone": alone}
    content, expected = written(folder, sizes, gap=gap, trailer=trailer, pieces=pieces, **settings)
    assert content == expected


@pytest.mark.sample(12)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize(
    "size", [BLOCK_BYTES - 5, BLOCK_BYTES - 4, BLOCK_BYTES, 3 * BLOCK_BYTES + 4097]
)
def test_around_the_block(tmp_path, size, direct, alone):
    """Tails: a file that ends before, at and after a block, a sector and a byte."""
    content, expected = written(tmp_path, [size, 1, 4096], direct=direct, pieces=3, alone=alone)
    assert content == expected


def test_the_trailer_has_the_digest_of_every_tensor(tmp_path):
    """Tensors that share a block, span several, are empty, or come in pieces."""
    datas = [os.urandom(size) for size in (5, 0, 2 * BLOCK_BYTES + 77, 4096, 1)]
    told = {}
    one = plan([len(data) for data in datas], gap=3, trailer=b"index")
    layout = replace(one.layout, trailer=lambda found: told.update(found) or b"index")
    with WriterPool(WriteTuning(threads=2)) as writer:
        regions = feed(datas, layout.starts, pieces=3)
        file_plan = FilePlan("file.bin", layout)
        write_file(file_plan, regions, new_file(tmp_path, file_plan), writer)
    assert told == {f"t{index}": xxhash.xxh3_128_digest(data) for index, data in enumerate(datas)}


def test_ten_thousand_small_ones(tmp_path):
    content, expected = written(tmp_path, [7] * 10_000)
    assert content == expected


def test_few_bytes_are_written_by_the_thread_that_has_them(tmp_path, monkeypatch):
    """Starting others takes longer; an error of the disk is told all the same, and nothing is
    left.
    """
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} was started")
    )
    model = nn.Linear(1000, 2500)
    CheckpointSaver().save(model, tmp_path / "out")
    ft_ckpt.save(dict(model.state_dict()), tmp_path / "out.safetensors")
    before = {*tmp_path.iterdir()}
    real = os.pwrite

    def refuses(file, data, offset):
        if len(data) > 100_000:
            raise OSError(errno.EIO, "no")
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", refuses)
    with pytest.raises(TargetError, match="no"):
        CheckpointSaver().save(model, tmp_path / "other")
    assert {*tmp_path.iterdir()} == before


def test_all_paths_are_synced(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(b"1" * 5000)
    synced = []
    monkeypatch.setattr(
        local_disk,
        "sync_open",
        lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink()),
    )
    for few in (4, 3):
        monkeypatch.setattr(local_disk, "_FEW_PATHS", few)
        synced.clear()
        local_disk.sync_all([*paths, tmp_path])
        assert sorted(synced) == sorted([*paths, tmp_path])


def test_file_system_without_unbuffered_writes(tmp_path, monkeypatch):
    """Refused at open: the file goes through the page cache, and is the same."""
    real = os.open
    monkeypatch.setattr(
        direct_io.os,
        "open",
        lambda path, flags, *mode: _refuse(flags) or real(path, flags, *mode),
        raising=True,
    )
    content, expected = written(tmp_path, [BLOCK_BYTES + 3], direct="on")
    assert content == expected


def _refuse(flags):
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no O_DIRECT here")


def test_unbuffered_write_refused_late(tmp_path, monkeypatch):
    real, refused = os.pwrite, []

    def pwrite(descriptor, data, offset):
        if not refused:
            refused.append(offset)
            raise OSError(errno.EINVAL, "misaligned, says the device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(direct_io.os, "pwrite", pwrite)
    content, expected = written(tmp_path, [2 * BLOCK_BYTES + 3], direct="on")
    assert refused
    assert content == expected


def test_short_writes_go_on(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(
        direct_io.os,
        "pwrite",
        lambda fd, data, offset: real(fd, data[: max(1, len(data) // 2)], offset),
    )
    content, expected = written(tmp_path, [100_003], direct="off")
    assert content == expected


def test_memory_may_change_once_appended(tmp_path):
    """A region is copied before `put_region` returns: the bucket it lies in is filled again at
    once.
    """
    buffer = bytearray(os.urandom(3 * BLOCK_BYTES))
    before = bytes(buffer)
    view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    with (
        WriterPool(WriteTuning(threads=1)) as writer,
        writer.fill(LocalStore(tmp_path).create("f", len(buffer))) as file,
    ):
        file.put_region(Region(0, ctypes.addressof(view), len(buffer)))
        ctypes.memset(ctypes.addressof(view), 0, len(buffer))
        file.finish()
    assert (tmp_path / "f").read_bytes() == before


@pytest.mark.parametrize(
    ("datas", "words"),
    [
        ([b"abc"], r"t1: 4 bytes missing when nothing came"),
        ([b"abc", b"defgh"], r"t1: 4 bytes missing when 5 bytes for byte 7 of the file came"),
        ([b"abc", b"de", b"fg"], r"t1: 2 bytes missing when 2 bytes for byte 12 of the file came"),
    ],
)
def test_wrong_feed_is_refused(tmp_path, datas, words):
    """What arrives must be exactly what the live model promised."""
    file_plan = plan([3, 4])
    regions = feed(datas, (4, 7, 12)[: len(datas)])
    with WriterPool() as writer, pytest.raises(IncompleteError, match=words):
        write_file(file_plan, regions, new_file(tmp_path, file_plan), writer)
    assert not list(tmp_path.iterdir())


def test_more_than_planned_is_refused(tmp_path):
    file_plan = plan([3])
    with (
        WriterPool() as writer,
        pytest.raises(IncompleteError, match="1 bytes for byte 7 of the file came after the last"),
    ):
        write_file(file_plan, feed([b"abc", b"d"], [4, 7]), new_file(tmp_path, file_plan), writer)


@pytest.mark.parametrize("direct", ["on", "off"])
def test_full_disk(tmp_path, direct):
    """Known at once, as an OSError of ours, and the writer's threads end."""
    code = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_write import written
from pathlib import Path
from ft_ckpt.errors import NoSpaceError
try:
    written(Path({str(tmp_path)!r}), [9 << 20], direct={direct!r})
except NoSpaceError as error:
    print("refused:", error)
"""
    done = run_python(code)
    assert re.match(
        r"refused: .*file\.bin: no room on its device \(.*File too large", done.stdout
    ), done.stderr


def test_error_in_a_writer_thread_is_raised(tmp_path, monkeypatch):
    def fails(descriptor, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct_io.os, "pwrite", fails)
    with pytest.raises(NoSpaceError, match=r"file\.bin: no room on its device .*No space left"):
        written(tmp_path, [20 * BLOCK_BYTES], direct="off", threads=1)


def test_a_file_without_write_permission_is_written_through_the_page_cache(tmp_path, monkeypatch):
    """The second open of a new file of mode 0444 is refused to everybody but root."""
    real = os.open

    def opened(path, flags, *mode, **more):
        if flags & os.O_DIRECT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", opened)
    writing = LocalStore(tmp_path, direct_bytes=0).create("f", 10)
    assert writing.direct_descriptor == -1
    writing.write(0, memoryview(b"0123456789"))
    writing.finish()
    assert (tmp_path / "f").read_bytes() == b"0123456789"


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("way", ["create", "share"])
def test_only_a_refused_o_direct_is_gone_around(tmp_path, monkeypatch, code, way):
    """Any other failure is told, and a file that is there is not deleted for it."""
    (tmp_path / "f").write_text("another's")
    real = os.open

    def opened(path, flags, *mode, **more):
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(TargetError, match="f: cannot be written") as caught:
        getattr(LocalStore(tmp_path, direct_bytes=0), way)("f", 10)
    assert caught.value.errno == code
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "another's"


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_a_file_is_closed_once_and_the_first_error_stays(tmp_path, monkeypatch, call):
    """A number that was closed may be another thread's file by the time it is closed again."""
    closed, real = [], {"close": os.close, "fsync": local_disk.fsync}

    def failing(name):
        def run(descriptor):
            if name == "close":
                closed.append(descriptor)
                real["close"](descriptor)
            if name == call:
                raise OSError(errno.EIO, f"{name} failed")

        return run

    with WriterPool(WriteTuning(threads=1)) as writer:
        goal = LocalStore(tmp_path, direct_bytes=0).create("f", 3)
        descriptors = [goal.direct_descriptor, goal.buffered_descriptor]
        with writer.fill(goal) as file:
            file.put_region(region_of(0, b"abc"))
            monkeypatch.setattr(os, "close", failing("close"))
            monkeypatch.setattr(local_disk, "fsync", failing("fsync"))
            with pytest.raises(TargetError, match=f"{call} failed"):
                file.finish()
            file.abandon()
        monkeypatch.undo()
    assert closed == [each for each in descriptors if each >= 0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_is_taken_at_its_word(tmp_path, monkeypatch, code):
    def refused(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local_disk, "fsync", refused)
    content, expected = written(tmp_path, [100])
    assert content == expected


def test_memory_stays_bounded(tmp_path):
    """Half a gigabyte goes through a few blocks."""
    code = """
import ctypes, sys
from pathlib import Path
from ft_ckpt.storage.io import Region, WriterPool
from ft_ckpt.storage.local import LocalStore
from peak_memory import peak_memory
block = ctypes.create_string_buffer(1 << 20)
store = LocalStore(Path(sys.argv[1]))
with WriterPool() as writer, writer.fill(store.create("f", 512 << 20)) as file:
    with peak_memory() as peak:
        for number in range(512):
            file.put_region(Region(number << 20, ctypes.addressof(block), 1 << 20))
        file.finish()
print(peak.mib)
"""
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert 8 < float(result.stdout) < 96, f"{result.stdout} MiB; a block has 8"
