"""Large files are digested where they are used: once from the disk, never before all is compared, never stale."""

import ctypes
import os

import models
import pytest
import torch
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import CheckpointError, CorruptError
from ft_ckpt.storage import kept_store
from ft_ckpt.storage.digests import read_record
from ft_ckpt.storage.kept_store import KeptFile, KeptStore, keeping_digest

SIZE = (20 << 20) + 4097  # above what is kept at all
WHAT_IS_THERE = pytest.mark.parametrize("cached", [True, False])


@pytest.fixture
def cache(monkeypatch):
    """Says whether files are in the page cache, in place of the system."""
    return lambda known: monkeypatch.setattr(kept_store, "is_cached", lambda *_: known)


def keep(folder, own=True):
    """A store whose file x.bin was digested to be kept, and its content."""
    content = os.urandom(SIZE)
    (folder / "x.bin").write_bytes(content)
    store = KeptStore(folder)
    record = read_record(store, "x.bin")
    assert keeping_digest(store, frozenset({"x.bin"}), own)(store.open("x.bin"), record) == record.digest
    return store, content


@WHAT_IS_THERE
def test_bytes_are_those_of_the_file(tmp_path, cache, cached):
    cache(cached)
    store, content = keep(tmp_path)
    file, found = store.open("x.bin"), bytearray(5000)
    assert isinstance(file, KeptFile)
    file.read_into(memoryview(found), 12345)
    assert found == content[12345:17345]
    assert file.view(SIZE - 3, 3) == content[-3:]
    assert file.view(SIZE - 3, 4) is None
    assert file.is_own is not cached
    assert (file.map() is None) is file.is_own


@WHAT_IS_THERE
def test_a_file_that_was_written_to_or_replaced_is_never_taken_from_memory(tmp_path, cache, cached):
    cache(cached)
    store, _ = keep(tmp_path)
    file = store.open("x.bin")
    (tmp_path / "x.bin").write_bytes(bytes(SIZE))
    with pytest.raises(CorruptError, match="changed while it was open"):
        file.read_into(memoryview(bytearray(10)))
    later, found = store.open("x.bin"), bytearray(b"a" * 10)
    later.read_into(memoryview(found))
    assert found == bytes(10)


def test_memory_is_given_away_once_and_then_the_file_is_read(tmp_path, cache):
    """Who has it may write to it; nobody reads it any more."""
    cache(False)
    store, content = keep(tmp_path)
    one, other, found = store.open("x.bin"), store.open("x.bin"), bytearray(10)
    given = one.kept.give()
    assert bytes(given.memory[:SIZE]) == content
    given.memory[:10] = bytes(10)
    other.read_into(memoryview(found))
    assert found == content[:10]
    assert other.kept.give() is None
    assert other.view(0, 10) is None


def test_memory_is_taken_only_where_there_is_plenty(tmp_path, cache, monkeypatch):
    cache(False)
    monkeypatch.setattr(kept_store, "available_bytes", lambda: 2 * SIZE - 1)
    assert not keep(tmp_path)[0].kept
    monkeypatch.setattr(kept_store, "available_bytes", lambda: 2 * SIZE)
    assert keep(tmp_path)[0].kept
    assert not keep(tmp_path, own=False)[0].kept


class Wide(nn.Module):
    """20 MB of one value."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.full((5, 1 << 20), float(value)))


def saved_run(folder):
    model = Wide(1)
    with torch.no_grad():
        model.one[3] = torch.arange(1 << 20)
    saver = CheckpointSaver()
    saver.register(model=model)
    saver.save_state(path=folder)
    return model


def resumed(path):
    """With `allow`, all is compared before anything is overwritten."""
    model = Wide()
    saver = CheckpointSaver()
    saver.register(model=model)
    saver.resume(path, allow=["rng"])
    return model


@pytest.fixture
def read_bytes(monkeypatch):
    """Bytes that were read from files, in pieces."""
    sizes, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *asked: sizes.append(real(*asked)) or sizes[-1])
    return sizes


def test_a_resume_uses_what_it_has_compared(tmp_path, cache, read_bytes):
    cache(True)
    model = saved_run(tmp_path / "out")
    read_bytes.clear()
    assert torch.equal(resumed(tmp_path / "out").one, model.one)
    assert sum(read_bytes) < 1 << 20


@WHAT_IS_THERE
def test_a_compared_model_is_read_once(tmp_path, cache, read_bytes, cached):
    cache(cached)
    model = models.build("large_vocabulary")
    CheckpointSaver().save(model, tmp_path / "out")
    size = (tmp_path / "out/model.safetensors").stat().st_size
    read_bytes.clear()
    loaded, report = ft_ckpt.load_model(tmp_path / "out", verify=True, with_report=True)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert report.zero_copy is cached
    assert sum(read_bytes) < (1 << 20) + (0 if cached else size + 4096)


@WHAT_IS_THERE
def test_a_damaged_file_leaves_the_live_model_as_it_was(tmp_path, cache, cached):
    cache(cached)
    saved_run(tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    model = Wide(7)
    saver = CheckpointSaver()
    saver.register(model=model)
    with pytest.raises(CorruptError, match=r"model\.safetensors: digest"):
        saver.resume(tmp_path / "out", allow=True)  # all is compared first
    with pytest.raises(CorruptError, match=r"model\.safetensors: digest"):
        ft_ckpt.load_model(tmp_path / "out", into=model, verify=True)
    assert model.one.eq(7).all()


def test_what_is_written_while_it_is_put_back_is_an_error(tmp_path, cache, monkeypatch):
    """Mapped bytes are the file's: they are used only if it is still as it was when they have been copied."""
    cache(True)
    saved_run(tmp_path / "out")
    path, real = tmp_path / "out" / "model.safetensors", ctypes.memmove

    def written_before(*asked):
        if asked[2] > 1 << 20:
            with path.open("r+b") as file:
                file.seek(-5, os.SEEK_END)
                file.write(b"hello")
        return real(*asked)

    monkeypatch.setattr(ctypes, "memmove", written_before)
    with pytest.raises(CheckpointError, match="changed while it was open"):
        resumed(tmp_path / "out")
