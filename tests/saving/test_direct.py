"""Several ranks write one file: the bytes one rank alone would have written, and nothing when one of them fails."""

import errno
import importlib.util
import os
import random

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import run_cases, selected
from seeds import examples
from small_checkpoints import digest_like, save

from ft_ckpt.checkpoint import checks
from ft_ckpt.errors import CorruptError
from ft_ckpt.storage import read_ahead as blocks
from ft_ckpt.storage.digests import Cut, FileRecord, joined_digest, rank_parts, read_record
from ft_ckpt.storage.local_store import LocalStore

CASES = [
    *("ddp/llama", "ddp/wide", "ddp/mixtral", "fsdp1/llama", "fsdp1_flat/qwen3", "fsdp2/qwen3", "fsdp2/qwen3/bfloat16"),
    *("fsdp2/wide", "tensor_parallel/llama", "not_shared", "broken_rank"),
]
FULL = [
    "full_disk/fsdp2/wide/1/on",
    "full_disk/fsdp2/wide/0/on",
    "full_disk/fsdp2/mixtral/1/on",  # whose experts are stored otherwise: they come to rank 0
    "full_disk/tensor_parallel/llama/1/on",
    "full_disk/fsdp2/qwen3/0/off",
    *("shared_out", "waits_for_room", "nothing_to_send"),
]
FOUR = ["hsdp/qwen3", "fsdp2/llama", "ddp/wide"]


@pytest.fixture(scope="module")
def two(request, tmp_path_factory):
    return run_cases("direct", selected(request, CASES), tmp_path_factory.mktemp("two"))


@pytest.mark.sample("ddp/wide", "fsdp2/qwen3", "not_shared", "broken_rank")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(two, case):
    assert two[case] == ""


@pytest.fixture(scope="module")
def failing(request, tmp_path_factory):
    return run_cases("direct", selected(request, FULL), tmp_path_factory.mktemp("full"))


@pytest.mark.sample("full_disk/fsdp2/wide/1/on", "nothing_to_send")
@pytest.mark.parametrize("case", FULL)
def test_all_stop_when_one_fails(failing, case):
    assert failing[case] == ""


@pytest.mark.slow
def test_slabs_of_four_ranks(tmp_path):
    cases = ["tensor_parallel_replicas/llama", "fsdp2_tensor_parallel/llama", "mesh_tensor_fsdp/experts"]
    assert run_cases("direct", cases, tmp_path, 4, timeout=120) == dict.fromkeys(cases, "")


@pytest.mark.slow
def test_four_ranks(tmp_path):
    assert run_cases("direct", FOUR, tmp_path, 4) == dict.fromkeys(FOUR, "")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra")
def test_zero(tmp_path):
    cases = ["zero3/qwen3", "zero2/llama"]
    assert run_cases("direct", cases, tmp_path, env={"DS_ACCELERATOR": "cpu"}, timeout=280) == dict.fromkeys(cases, "")


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
    assert digest_like(path, record) != whole
    assert digest_like(path, FileRecord("file", 19, "")) == read_record(LocalStore(tmp_path), "file").digest
    assert digest_like(path, FileRecord("file", 19, "", (), 2)).startswith("xxh3-128-of-ranks:")
    assert joined_digest(["a", "b"]) != joined_digest(["b", "a"])


@settings(max_examples=examples(25), deadline=None)
@given(cut_files(), st.integers(1, 3 << 20))
def test_a_digest_is_the_same_however_the_file_is_read(tmp_path_factory, file, scale):
    """A large file is read ahead by other threads, a small one at once; both are what each rank has hashed."""
    size, cuts = (
        file[0] * scale % (40 << 20),
        tuple(
            Cut(cut.start * scale, cut.stop * scale, cut.chunk * scale, cut.lead * scale, cut.owner) for cut in file[1]
        ),
    )
    cuts = tuple(cut for cut in cuts if cut.stop <= size)
    path, content = tmp_path_factory.getbasetemp() / "digested", random.Random(scale).randbytes(size)
    path.write_bytes(content)
    states = [xxhash.xxh3_128() for _ in range(50)]
    for start, stop, owner in rank_parts(cuts, size):
        states[owner].update(content[start:stop])
    expected = joined_digest(state.hexdigest() for state in states)
    assert digest_like(path, FileRecord("file", size, "", cuts, 50)) == expected
    assert read_record(LocalStore(path.parent), path.name).digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"


def test_a_large_file_that_is_cut_short_while_it_is_read_is_told(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(20 << 20))
    real = blocks.read_ahead
    monkeypatch.setattr(blocks, "read_ahead", lambda runs: os.truncate(path, 7 << 20) or real(runs))
    with pytest.raises(CorruptError, match="file: changed while it was open, 20971520 bytes then and 7340032 now"):
        read_record(LocalStore(tmp_path), "file")


def test_a_large_file_that_cannot_be_read_on_is_a_problem_of_its_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "checkpoint")
    large = FileRecord("model.safetensors", 20 << 20, "xxh3-128:" + 32 * "0")
    (tmp_path / "checkpoint" / large.path).write_bytes(bytes(large.size_bytes))

    def broken(descriptor, blocks, at):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    (problem,) = checks._digest_problems(LocalStore(tmp_path / "checkpoint"), [large])
    assert problem.startswith("model.safetensors: cannot be read (")
