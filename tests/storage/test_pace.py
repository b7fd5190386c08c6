"""How a store is written: measured where it pays, remembered, and what the caller decides is kept."""

import os
import time
from pathlib import Path

import pytest

from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import ConfigError
from ft_ckpt.storage import write_tuning
from ft_ckpt.storage.write_tuning import LEAST_BYTES, Pace, pace_of

SMALL = 1 << 20


@pytest.fixture(autouse=True)
def small_trials(monkeypatch):
    monkeypatch.setattr(write_tuning, "_known", {})
    monkeypatch.setattr(write_tuning, "_TRIAL_BYTES", SMALL)


def slowed(monkeypatch, is_slow):
    """Writes that `is_slow(direct, threads)` says are slow; how each trial was written."""
    seen, real = [], write_tuning._trial

    def trial(folder, way):
        seen.append(way)
        return real(folder, way) + 10 * is_slow(way)

    monkeypatch.setattr(write_tuning, "_trial", trial)
    return seen


def test_small_saves_try_nothing(tmp_path, monkeypatch):
    seen = slowed(monkeypatch, lambda way: 0)
    assert pace_of(tmp_path, LEAST_BYTES - 1) == Pace()
    assert not seen


def test_a_store_that_is_slow_past_the_page_cache(tmp_path, monkeypatch):
    seen = slowed(monkeypatch, lambda way: way.direct)
    assert not pace_of(tmp_path, LEAST_BYTES).direct
    assert len(seen) == 4
    assert not pace_of(tmp_path, LEAST_BYTES).direct, "once measured, it is known"
    assert not pace_of(tmp_path, 1).direct, "for smaller saves too"
    assert len(seen) == 4
    assert not any(tmp_path.iterdir()), "nothing of the trials stays"


def test_a_store_that_likes_many_writers(tmp_path, monkeypatch):
    slowed(monkeypatch, lambda way: way.threads < 8)
    assert pace_of(tmp_path, LEAST_BYTES).threads == 8


def test_noise_changes_nothing(tmp_path, monkeypatch):
    """What is hardly faster than the usual way is not preferred."""
    monkeypatch.setattr(write_tuning, "_trial", lambda folder, way: 1.0 if way == Pace() else 0.9)
    assert pace_of(tmp_path, LEAST_BYTES) == Pace()


def test_what_the_caller_says_is_done(tmp_path, monkeypatch):
    seen = slowed(monkeypatch, lambda way: 0)
    told = pace_of(tmp_path, LEAST_BYTES, threads=3, direct="off", block_bytes=1 << 16)
    assert (told.threads, told.direct, told.block_bytes) == (3, False, 1 << 16)
    assert not seen, "there was nothing left to find out"
    assert pace_of(tmp_path, LEAST_BYTES, threads=3).threads == 3
    assert {way.direct for way in seen} == {True, False}


def test_the_trial_writes_past_the_page_cache_when_it_says_so(tmp_path, monkeypatch):
    opened, real = [], write_tuning.create_file
    monkeypatch.setattr(write_tuning, "create_file", lambda *given: opened.append(given[2]) or real(*given))
    pace_of(tmp_path, LEAST_BYTES)
    assert sorted(opened) == [False, True, True, True]


def test_a_folder_that_takes_no_trial(tmp_path, monkeypatch):
    """The save itself says what is wrong with the store."""

    def refuses(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_tuning, "create_file", refuses)
    assert pace_of(tmp_path, LEAST_BYTES) == Pace()


def test_stores_are_measured_apart(tmp_path, monkeypatch):
    shm = "/dev/shm"
    if not os.access(shm, os.W_OK) or Path(shm).stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system only")
    seen = slowed(monkeypatch, lambda way: 0)
    pace_of(tmp_path, LEAST_BYTES)
    pace_of(Path(shm), LEAST_BYTES)
    assert len(seen) == 8


def test_two_savers_at_once_try_one_after_the_other(tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    busy, most = [], []

    def trial(folder, way):
        busy.append(way)
        most.append(len(busy))
        time.sleep(0.01)
        busy.pop()
        return 1.0

    monkeypatch.setattr(write_tuning, "_trial", trial)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: pace_of(tmp_path, LEAST_BYTES), range(4)))
    assert most == [1, 1, 1, 1]


def test_settings_that_cannot_work():
    with pytest.raises(ConfigError, match="io_block_bytes=100000: must be a multiple of 4096"):
        SaverConfig(io_block_bytes=100_000)
    with pytest.raises(ConfigError, match="io_threads=0: must be at least 1"):
        SaverConfig(io_threads=0)
    with pytest.raises(ConfigError, match="io_priority='idle': expected one of normal, low"):
        SaverConfig(io_priority="idle")
