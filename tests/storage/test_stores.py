"""The contract of stores, on a local folder, two stores of obstore's and S3; and what only one of
them does.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from buckets import new_bucket
from contract_store import StoreContract, put
from s3_server import BUCKET

from ft_ckpt.errors import ConfigError, CorruptError, TargetError
from ft_ckpt.storage import is_inside, local_disk
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path / "store")


class TestStageStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path, syncs=False)


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        pytest.importorskip("obstore")
        return new_bucket()


class TestS3Server(StoreContract):
    @pytest.fixture
    def store(self, s3):
        return open_place(f"s3://{BUCKET}/team/runs").folder


class TestObstoreLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        client = pytest.importorskip("obstore.store")
        from ft_ckpt.extensions.buckets.object_store import ObjectStore

        return ObjectStore(
            client.LocalStore(tmp_path / "bucket", mkdir=True, automatic_cleanup=True),
            f"file://{tmp_path}/bucket",
        )


@pytest.mark.parametrize("place", [None, 2.0, True, -1, b"run", ["run"], object(), "run\0"])
def test_what_is_no_path(place):
    with pytest.raises(ConfigError, match="no path; expected a path, a URL or a Place"):
        open_place(place)


@pytest.fixture
def local(tmp_path):
    return LocalStore(tmp_path / "store")


def test_a_backslash_is_for_local_files_alone(local):
    """Manifests never name one: it separates names on other systems."""
    put(local, "back\\slash", b"x")
    assert local.read("back\\slash") == b"x"
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError):
        open_place("memory:///").folder.write("back\\slash", b"x")
    assert not is_inside("back\\slash")


# Only of a local folder


def test_every_write_is_synced_and_leaves_no_draft(local, monkeypatch):
    synced = []
    monkeypatch.setattr(
        local_disk,
        "fsync",
        lambda handle: synced.append(str(Path(f"/proc/self/fd/{handle}").readlink())),
    )
    local.write("a/small", b"x")
    put(local, "a/large", b"y" * 100)
    folder = str(local.folder / "a")
    assert synced.count(folder) == 2, "the folder, after each file is in place"
    assert len([each for each in synced if each.startswith(f"{folder}/")]) == 2, (
        "and each file before that"
    )
    assert {path.name for path in (local.folder / "a").iterdir()} == {"large", "small"}


def test_what_is_no_regular_file_is_never_waited_for(local):
    local.write("a", b"x")
    os.mkfifo(local.folder / "pipe")
    with pytest.raises(CorruptError, match="pipe: not a regular file"):
        local.read("pipe")
    assert local.stat("pipe") is None
    assert [each.name for each in local.list()] == ["a"]


def test_links_are_read_through_and_deleted_themselves(local):
    local.write("one/a", b"x")
    (local.folder / "two").symlink_to("one")
    (local.folder / "link").symlink_to("one/a")
    assert local.read("link") == local.read("two/a") == b"x"
    found = local.list_folder()
    assert [each.name for each in found.folders] == ["one", "two"], "links come last"
    assert len({each.identity for each in found.folders}) == 1
    assert [each.name for each in local.list()] == ["link", "one/a"]
    local.delete(["link", "two/a"])
    assert local.read("one/a") == b"x"


def test_a_file_that_is_written_to_while_it_is_open(local):
    local.write("a", b"before")
    file = local.open("a")
    (local.folder / "a").write_bytes(b"after, in place")
    with pytest.raises(CorruptError, match="a: changed while it was open"):
        file.check()
    file.close()


def test_a_read_only_folder_is_said(local):
    local.write("a", b"x")
    local.folder.chmod(0o500)
    try:
        if os.access(local.folder, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(TargetError, match="a: cannot be written"):
            local.write("a", b"y")
    finally:
        local.folder.chmod(0o700)


def test_several_write_ranges_of_one_file(local):
    """Each its own, whoever comes first and whoever takes the room; the ends share disk blocks."""
    assert isinstance(local, LocalStore)
    pytest.importorskip("obstore")
    assert not isinstance(new_bucket(), LocalStore)
    data, cuts = os.urandom(40_000), [0, 9_999, 10_001, 40_000]
    for direct_bytes in (None, 0):
        store = replace(local, direct_bytes=direct_bytes)
        writers = [store.share("folder/a", len(data)) for _ in cuts[1:]]
        store.allocate("folder/a", len(data))
        for writer, start, stop in zip(writers, cuts[:-1], cuts[1:], strict=True):
            writer.write(start, memoryview(bytearray(data))[start:stop])
        for writer in writers:
            writer.finish()
        store.share("folder/a", len(data)).abandon()
        assert store.read("folder/a") == data
        store.delete(["folder/a"])


# Opening


def test_a_folder_and_an_unknown_scheme(tmp_path):
    places = [open_place(tmp_path), open_place(str(tmp_path))]
    assert [place.folder for place in places] == [LocalStore(tmp_path)] * 2
    with pytest.raises(ConfigError, match="nowhere://bucket"):
        open_place("nowhere://bucket")


def test_a_url_leads_into_its_bucket(monkeypatch):
    pytest.importorskip("obstore")
    place = open_place("memory://here/runs/sft/")
    assert (str(place), place.name, place.basename) == ("memory://here/runs/sft", "sft", "sft")
    assert place.location == "memory://here/runs/sft"
    place.folder.write("a", b"x")
    assert open_place("memory://here/runs").folder.read("sft/a") == b"x", "a bucket has one client"
    assert str(place.folder.parent.parent) == str(open_place("memory://here").folder)
    assert open_place("memory://here").is_folder
    assert not open_place("memory://there").exists
    monkeypatch.setenv("AWS_REGION", "elsewhere")
    assert not open_place("memory://here").exists, "a client reads its variables when it is made"


def test_paths_have_locations(tmp_path):
    assert open_place(str(tmp_path)).location == tmp_path
    with pytest.raises(ConfigError, match="leave out the scheme"):
        open_place(f"file://{tmp_path}")
    with pytest.raises(ConfigError, match="s3://: not a local path"):
        open_place(Path("s3://bucket/run"))  # which has lost a slash


# An upload


def test_an_upload_that_fails_is_raised_and_leaves_nothing(monkeypatch):
    """Raised by a write or by the end, whichever is first; a writer that waits for room is woken by
    it.
    """
    obstore = pytest.importorskip("obstore")
    store = new_bucket()

    def broken(_client, _name, pieces, **_options):
        next(iter(pieces))
        raise obstore.exceptions.GenericError("the line is cut\nBacktrace: ...")

    monkeypatch.setattr(obstore, "put", broken)
    writing = store.create("a", 200 << 20)

    def write_all():
        for start in range(0, 200 << 20, 1 << 20):
            writing.write(start, memoryview(bytes(1 << 20)))

    with pytest.raises(
        TargetError, match=r"memory://[^:]*/a: cannot be written \(GenericError: the line is cut\)"
    ) as caught:
        write_all()
    assert "Backtrace" not in str(caught.value)
    writing.abandon()
    assert store.list() == []
