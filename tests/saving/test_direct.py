"""Several ranks write one file: the bytes one rank alone would have written, and nothing when one
of them fails.
"""

import errno
import os
import random
import time
from contextlib import nullcontext

import faults
import pytest
import torch.distributed as dist
import xxhash
from faulty_stores import unseen_files
from hypothesis import given, settings, strategies as st
from on_ranks import RANK, on_ranks
from same_bytes import live_model, same_files, saver_of
from seeds import examples
from small_checkpoints import digest_like, save
from tuning import blocks_of

from ft_ckpt import latest, verify
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import CorruptError, NoSpaceError, RankError
from ft_ckpt.ranks.moving import gather
from ft_ckpt.saving import folder_sharing as shared_folders
from ft_ckpt.saving.planning import write_plan
from ft_ckpt.storage.digests import (
    Cut,
    FileRecord,
    digest_problems,
    joined_digest,
    rank_parts,
    read_record,
)
from ft_ckpt.storage.io import MappedBytes, writer
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "model"), [("fsdp2", "llama"), ("ddp", "wide")])
@on_ranks(4)
def test_four_ranks(tmp_path, wrapper, model):
    same_files(wrapper, model, tmp_path, {})


@on_ranks(2)
def test_rank_0_writes_what_others_do_not_see(tmp_path):
    """Rank 1 does not see rank 0's files: rank 0 writes everything."""
    live = live_model("fsdp2", "qwen3")
    saver = saver_of(live, tmp_path, each_rank_writes="on")
    with unseen_files(shared_folders._PROBE) if RANK else nullcontext():
        saver.save(live.model, tmp_path / "saved")
    assert verify(tmp_path / "saved").ok
    assert not any(file.cuts for file in read_manifest(open_place(tmp_path / "saved")).files)


def full_or_slow(full, slow_seconds):
    """Act as a full disk, or as a slow one."""
    if full:
        raise OSError(errno.ENOSPC, "No space left on device")
    time.sleep(slow_seconds)


FULL = [
    ("fsdp2", "wide", 1, "on"),
    ("fsdp2", "wide", 0, "on"),
    ("fsdp2", "mixtral", 1, "on"),  # whose experts are stored otherwise: they come to rank 0
    ("tensor_parallel", "llama", 1, "on"),
    ("fsdp2", "qwen3", 0, "off"),
]


@pytest.mark.sample("fsdp2-wide-1-on")
@pytest.mark.parametrize(("wrapper", "model", "rank", "each"), FULL)
@on_ranks(2)
def test_all_stop_when_one_disk_is_full(tmp_path, wrapper, model, rank, each):
    full_disk(wrapper, model, rank, each, tmp_path)


def full_disk(wrapper, model, rank, each, folder):
    """One rank's disk fills up: the others stop, all raise the same error, nothing is committed,
    old files stay.
    """
    live = live_model(wrapper, model)
    saver = saver_of(live, folder, each_rank_writes=each)
    with blocks_of(1 << 16), faults.writes() as whole:
        saver.save(live.model, step=1)
    with (
        blocks_of(1 << 16),
        faults.writes(lambda: full_or_slow(rank == RANK, 0.1)) as written,
        pytest.raises(NoSpaceError, match="No space left on device"),
    ):
        saver.save(live.model, step=2)
    if model == "wide" and rank != RANK:
        assert sum(written) < sum(whole) / 2, (
            f"{sum(written)} of {sum(whole)} bytes were written all the same"
        )
    dist.barrier()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert verify(latest(folder)).ok
    dist.barrier()
    saver.save(live.model, step=2)
    assert verify(folder / "checkpoint-2").ok


@pytest.mark.slow
@on_ranks(2)
def test_all_stop_who_share_replicated_parameters(tmp_path):
    """Replicated parameters, cut in smaller blocks than usual: the other rank stops as well."""
    write_plan.BLOCK_BYTES, usual = 4096, write_plan.BLOCK_BYTES
    try:
        full_disk("ddp", "wide", 0, "on", tmp_path)
    finally:
        write_plan.BLOCK_BYTES = usual


@pytest.mark.slow
@on_ranks(2)
def test_all_retry_when_one_disk_was_full(tmp_path):
    """A disk that was full for a while on one rank: all ranks retry."""
    live = live_model("fsdp2", "qwen3")
    saver = saver_of(live, tmp_path, each_rank_writes="on", when_full="wait")
    real, tries = LocalStore.allocate, []

    def allocate(*args):
        tries.append(args)
        if len(tries) == 1:
            raise NoSpaceError("no room for the file yet")
        real(*args)

    LocalStore.allocate = allocate
    try:
        saver.save(live.model, tmp_path / "saved")
    finally:
        LocalStore.allocate = real
    assert bool(tries) is (RANK == 0)
    assert verify(tmp_path / "saved").ok


@on_ranks(2)
def test_a_rank_that_fails_before_it_sends(tmp_path):
    """A rank fails before it sends its part: rank 0 does not wait for that."""
    live = live_model("fsdp2", "qwen3")
    saver = saver_of(live, tmp_path, each_rank_writes="off")
    real = gather._BucketCarrier._pack_local
    gather._BucketCarrier._pack_local = lambda *args: 1 / 0
    try:
        with pytest.raises(RankError if RANK == 0 else ZeroDivisionError, match="division by zero"):
            saver.save(live.model, tmp_path / "saved")
    finally:
        gather._BucketCarrier._pack_local = real
    dist.barrier()
    assert not any(tmp_path.iterdir()), list(tmp_path.iterdir())


@on_ranks(2)
def test_a_rank_that_cannot_finish_its_file(tmp_path):
    live = live_model("ddp", "qwen3")
    real = writer.FileWriter.finish
    writer.FileWriter.finish = lambda file: real(file) if RANK == 0 else 1 / 0
    try:
        saver = saver_of(live, tmp_path, each_rank_writes="on")
        with pytest.raises(RankError if RANK == 0 else ZeroDivisionError):
            saver.save(live.model, tmp_path / "saved")
    finally:
        writer.FileWriter.finish = real
    dist.barrier()
    assert not any(tmp_path.iterdir()), list(tmp_path.iterdir())


@st.composite
def cut_files(draw):
    """A size, and cuts that do not overlap."""
    at, cuts = draw(st.integers(0, 20)), []
    for _ in range(draw(st.integers(0, 4))):
        size, chunk = draw(st.integers(1, 40)), draw(st.integers(1, 15))
        owner = draw(st.integers(0, 3))
        lead = draw(st.integers(1, chunk))
        cuts.append(Cut(at, at + size, chunk, lead, owner))
        at += size + draw(st.integers(0, 10))
    return at + draw(st.integers(0, 5)), tuple(cuts)


@given(cut_files())
def test_the_parts_are_the_whole_file(file):
    size, cuts = file
    found = list(rank_parts(cuts, size))
    assert [start for start, _, _ in found] == [0, *(stop for _, stop, _ in found)][: len(found)]
    assert not size or found[-1][1] == size
    assert all(start < stop for start, stop, _ in found)


def test_every_byte_counts(tmp_path):
    path, cuts = tmp_path / "file", (Cut(3, 17, 5, 2, 1),)
    path.write_bytes(bytes(range(20)))
    record = FileRecord("file", 20, "", cuts, 5)
    whole = digest_like(path, record)
    assert whole.startswith("xxh3-128-of-ranks:")
    for at in range(20):
        content = bytearray(range(20))
        content[at] ^= 1
        path.write_bytes(content)
        assert digest_like(path, record) != whole
    path.write_bytes(bytes(range(19)))
    with pytest.raises(CorruptError, match="truncated: 19 bytes, but the manifest lists 20"):
        digest_like(path, record)
    assert (
        digest_like(path, FileRecord("file", 19, ""))
        == read_record(LocalStore(tmp_path), "file").digest
    )
    assert digest_like(path, FileRecord("file", 19, "", (), 2)).startswith("xxh3-128-of-ranks:")
    assert joined_digest(["a", "b"]) != joined_digest(["b", "a"])


@settings(max_examples=examples(25), deadline=None)
@given(cut_files(), st.integers(1, 3 << 20))
def test_a_digest_is_the_same_however_the_file_is_read(tmp_path_factory, file, scale):
    """A large file is mapped, a small one read; both are what each rank has hashed."""
    size, cuts = (
        file[0] * scale % (40 << 20),
        tuple(
            Cut(cut.start * scale, cut.stop * scale, cut.chunk * scale, cut.lead * scale, cut.owner)
            for cut in file[1]
        ),
    )
    cuts = tuple(cut for cut in cuts if cut.stop <= size)
    path, content = (
        tmp_path_factory.getbasetemp() / "digested",
        random.Random(scale).randbytes(size),
    )
    path.write_bytes(content)
    states = [xxhash.xxh3_128() for _ in range(50)]
    for start, stop, owner in rank_parts(cuts, size):
        states[owner].update(content[start:stop])
    expected = joined_digest(state.hexdigest() for state in states)
    assert digest_like(path, FileRecord("file", size, "", cuts, 50)) == expected
    assert (
        read_record(LocalStore(path.parent), path.name).digest
        == f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"
    )


def test_a_large_file_that_is_cut_short_while_it_is_read_is_told(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(20 << 20))
    real = MappedBytes.read_in

    def cut_short(mapped, start, stop):
        os.truncate(path, 7 << 20)
        return real(mapped, start, stop)

    monkeypatch.setattr(MappedBytes, "read_in", cut_short)
    with pytest.raises(
        CorruptError, match="file: changed while it was open, 20971520 bytes then and 7340032 now"
    ):
        read_record(LocalStore(tmp_path), "file")


def test_a_large_file_that_cannot_be_read_on_is_a_problem_of_its_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "checkpoint")
    large = FileRecord("model.safetensors", 20 << 20, "xxh3-128:" + 32 * "0")
    (tmp_path / "checkpoint" / large.path).write_bytes(bytes(large.size_bytes))

    def broken(descriptor, blocks, at):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    # nor into the page cache
    monkeypatch.setattr(MappedBytes, "read_in", lambda mapped, start, stop: False)
    (problem,) = digest_problems(LocalStore(tmp_path / "checkpoint"), [large])
    assert problem.text.startswith("model.safetensors: cannot be read (")
