"""Several ranks write one file: the bytes one rank alone would have written, and nothing when one of them fails."""

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import run_cases

from ft_ckpt.digests import digest_like, digest_of, parts, together
from ft_ckpt.manifest import Cut, FileRecord

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
def two(tmp_path_factory):
    return run_cases("direct", CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(two, case):
    assert two[case] == ""


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    return run_cases("direct", FULL, tmp_path_factory.mktemp("full"))


@pytest.mark.parametrize("case", FULL)
def test_all_stop_when_one_fails(failing, case):
    assert failing[case] == ""


def test_four_ranks(tmp_path):
    assert run_cases("direct", FOUR, tmp_path, 4) == dict.fromkeys(FOUR, "")


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
    found = list(parts(cuts, size))
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
    assert digest_like(path, FileRecord("file", 19, "")) == digest_of(path)
    assert digest_like(path, FileRecord("file", 19, "", (), 2)).startswith("xxh3-128-of-ranks:")
    assert together(["a", "b"]) != together(["b", "a"])
