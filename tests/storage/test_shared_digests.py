"""Files whose digests are compared by several processes, each some parts of them."""

import random

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from seeds import examples

from ft_ckpt.storage.digests import (
    Cut,
    FileRecord,
    RunningDigest,
    compare_digests,
    digest_problems,
    digest_shares,
    owned_parts,
    rank_parts,
    share_files,
)
from ft_ckpt.storage.local import LocalStore


def write_cut(path, size, cuts, ranks):
    """A file of random bytes, and its record as ranks write it that have these cuts."""
    content = random.Random(size).randbytes(size)
    path.write_bytes(content)
    running = RunningDigest(size, cuts, ranks)
    running.update(memoryview(content))
    return content, FileRecord(path.name, size, running.text(), cuts, ranks)


def problems_of(folder, records, count):
    """What `count` processes find together."""
    store = LocalStore(folder)
    shares = [share_files(records, number, count) for number in range(count)]
    return compare_digests(
        records, [part for share in shares for part in digest_shares(store, share)]
    )


@st.composite
def cut_files(draw):
    """Size, cuts and number of writers of a file."""
    ranks = draw(st.integers(1, 9))
    at, cuts = draw(st.integers(0, 300)), []
    for _ in range(draw(st.integers(0, 5)) if ranks > 1 else 0):
        chunk, owner = draw(st.integers(1, 200)), draw(st.integers(0, ranks - 1))
        lead = draw(st.integers(1, chunk))
        size = draw(st.integers(1, lead + chunk * (ranks - 1 - owner)))
        cuts.append(Cut(at, at + size, chunk, lead, owner))
        at += size + draw(st.integers(0, 100))
    return at + draw(st.integers(0, 60)), tuple(cuts), ranks


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cut_files(), st.data())
def test_owners_have_the_parts_that_they_wrote(file, data):
    size, cuts, ranks = file
    low = data.draw(st.integers(0, ranks))
    owners = range(low, data.draw(st.integers(low, ranks)))
    expected = [part for part in rank_parts(cuts, size) if part[2] in owners]
    assert list(owned_parts(cuts, size, owners)) == expected


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(cut_files(), min_size=1, max_size=4), st.integers(1, 7), st.data())
def test_processes_share_files_and_find_every_flipped_byte(tmp_path_factory, files, count, data):
    folder = tmp_path_factory.mktemp("shared")
    written = [write_cut(folder / str(number), *file) for number, file in enumerate(files)]
    records = [record for _, record in written]
    shares = [share for number in range(count) for share in share_files(records, number, count)]
    shared = sorted((share.record.path, owner) for share in shares for owner in share.owners)
    assert shared == sorted(
        (record.path, owner) for record in records for owner in range(record.ranks)
    ), "each once"
    assert problems_of(folder, records, count) == []
    (content, record), at = data.draw(st.sampled_from(written)), data.draw(st.integers(0, 1 << 20))
    if content:
        flipped = bytearray(content)
        flipped[at % len(content)] ^= 1
        (folder / record.path).write_bytes(flipped)
        (problem,) = problems_of(folder, records, count)
        assert problem.text.startswith(f"{record.path}: digest ")


def test_what_cannot_be_read_is_told_once(tmp_path):
    _, record = write_cut(tmp_path / "there", 50, (), 1)
    gone = FileRecord("gone", 9, "xxh3-128:0", ranks=3)
    (told,) = problems_of(tmp_path, [record, gone], 2)
    assert told.text.startswith("gone: unreadable (")
    (told,) = compare_digests([record], [])
    assert told.text.startswith("there: not all of it was compared")


@pytest.mark.parametrize("size", [20 << 20, (70 << 20) + 13])
def test_a_large_file_is_compared_in_parts(tmp_path, size):
    """Each process reads its parts, and not the file."""
    cuts = (Cut(8, size - 1, (size - 9) // 2 + 1, (size - 9) // 2 + 1, 0),)
    content, record = write_cut(tmp_path / "file", size, cuts, 2)
    parts = [
        owned_parts(cuts, size, share_files([record], number, 2)[0].owners) for number in (0, 1)
    ]
    assert max(sum(stop - start for start, stop, _ in part) for part in parts) < size // 2 + 100
    assert (
        problems_of(tmp_path, [record], 2) == digest_problems(LocalStore(tmp_path), [record]) == []
    )
    flipped = bytearray(content)
    flipped[size - 100] ^= 1
    (tmp_path / "file").write_bytes(flipped)
    (problem,) = problems_of(tmp_path, [record], 2)
    assert problem.text.startswith("file: digest ")
