"""Files whose digests are taken while they are read, the parts of one by many ranks."""

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from ft_ckpt.formats.file_io import read_runs
from ft_ckpt.storage.digests import Cut, FileRecord, RunningDigest, owned_parts, rank_parts
from ft_ckpt.storage.local_file import open_local_file
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.proofs import FileProof, compare_digests, read_late, share_proofs
from ft_ckpt.storage.read_ahead import ByteRun


class Collecting:
    """Where the bytes of a run end up."""

    def __init__(self):
        self.content = b""

    def put(self, data):
        self.content += bytes(data.tolist())


def write_cut(path, size, cuts, ranks):
    """A file of random bytes, and its record as ranks write it that have these cuts."""
    content = random.Random(size).randbytes(size)
    path.write_bytes(content)
    running = RunningDigest(size, cuts, ranks)
    running.update(memoryview(content))
    return content, FileRecord(path.name, size, running.text(), cuts, ranks)


def proof_of(path, record):
    return FileProof(record, partial(LocalStore(path.parent).open, path.name), range(record.ranks))


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


@given(cut_files(), st.data())
def test_owners_have_the_parts_that_they_wrote(file, data):
    size, cuts, ranks = file
    low = data.draw(st.integers(0, ranks))
    owners = range(low, data.draw(st.integers(low, ranks)))
    expected = [part for part in rank_parts(cuts, size) if part[2] in owners]
    assert list(owned_parts(cuts, size, owners)) == expected


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(cut_files(), min_size=1, max_size=4), st.integers(1, 7), st.data())
def test_ranks_share_files_and_find_every_flipped_byte(tmp_path_factory, files, count, data):
    folder = tmp_path_factory.mktemp("shared")
    made = [write_cut(folder / str(number), *file) for number, file in enumerate(files)]
    records = [record for _, record in made]
    proofs = [proof_of(folder / record.path, record) for record in records]
    shares = [share_proofs(proofs, number, count) for number in range(count)]
    made_of = sorted((one.record.path, owner) for share in shares for one in share for owner in one.owners)
    assert made_of == sorted((one.path, owner) for one in records for owner in range(one.ranks)), "each part once"
    whole = [one for share in shares for one in read_late(share)[0]]
    assert compare_digests(records, whole, ()) == []
    (content, record), at = data.draw(st.sampled_from(made)), data.draw(st.integers(0, 1 << 20))
    if content:
        flipped = bytearray(content)
        flipped[at % len(content)] ^= 1
        (folder / record.path).write_bytes(flipped)
        again = [one for number in range(count) for one in read_late(share_proofs(proofs, number, count))[0]]
        (problem,) = compare_digests(records, again, ())
        assert problem.startswith(f"{record.path}: digest ")


@settings(max_examples=examples(60), deadline=None)
@given(cut_files(), st.data())
def test_digests_are_taken_on_the_way_whatever_runs_are_read(tmp_path_factory, file, data):
    """Runs get their own bytes and nothing else, however they overlap each other and the parts."""
    path = tmp_path_factory.mktemp("passing") / "file"
    content, record = write_cut(path, *file)
    opened, size = open_local_file(path), len(content)
    ranges = data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), max_size=6))
    runs = [ByteRun(str(n), opened, min(pair), abs(pair[0] - pair[1])) for n, pair in enumerate(ranges)]
    landings = {run: Collecting() for run in runs if run.size_bytes}
    low = data.draw(st.integers(0, record.ranks - 1))
    proof = FileProof(record, partial(open_local_file, path), range(low, record.ranks))
    rest = FileProof(record, partial(open_local_file, path), range(low))
    if landings:
        read_runs(landings, due={id(opened): proof})
        assert not proof.is_due
    for run, landing in landings.items():
        assert landing.content == content[run.start : run.start + run.size_bytes]
    found, failures = read_late([proof, rest])
    assert compare_digests([record], found, failures) == []
    opened.close()


def test_what_cannot_be_read_is_told_once(tmp_path):
    _, record = write_cut(tmp_path / "there", 50, (), 1)
    proof, gone = proof_of(tmp_path / "there", record), proof_of(tmp_path / "gone", FileRecord("gone", 9, "xxh3-128:0"))
    found, failures = read_late([gone, proof])
    (told,) = compare_digests([record, gone.record], found, failures)
    assert told.startswith("gone: unreadable (")
    (told,) = compare_digests([record, gone.record], found, ())
    assert told.startswith("gone: not all of it was compared")


@pytest.mark.parametrize("size", [20 << 20, (40 << 20) + 13])
def test_a_large_file_is_read_in_parts(tmp_path, size):
    """A rank reads what it is to compare, and not the file."""
    cuts = (Cut(8, size - 1, (size - 9) // 2 + 1, (size - 9) // 2 + 1, 0),)
    _, record = write_cut(tmp_path / "file", size, cuts, 2)
    shares = [share_proofs([proof_of(tmp_path / "file", record)], number, 2) for number in (0, 1)]
    read = [sum(stop - start for start, stop, _ in one.parts) for (one,) in shares]
    assert sum(read) == size
    assert max(read) < size // 2 + 100
    found = [part for share in shares for part in read_late(share)[0]]
    assert compare_digests([record], found, ()) == []
