"""A store whose calls end, whatever becomes of the network."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from ft_ckpt.errors import RankError
from ft_ckpt.ranks import key_value
from ft_ckpt.ranks.key_value import AnsweringStore


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch):
    monkeypatch.setattr(key_value, "_MIN_SILENT_SECONDS", 0.1)


class LostStore(HashStore):
    """One that stops answering, as torch's client does when the network goes."""

    def __init__(self):
        super().__init__()
        self.comes_back = threading.Event()

    def check(self, keys):
        self.comes_back.wait()
        return super().check(keys)


def test_what_the_store_says_and_raises():
    store = AnsweringStore(HashStore(), 30.0)
    store.set("key", "value")
    assert (store.get("key"), store.check(["key"]), store.check(["other"])) == (
        b"value",
        True,
        False,
    )
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        store.wait(["other"], timedelta(seconds=0.2))
    assert 0.2 <= time.monotonic() - begun < 10
    with pytest.raises(TypeError):
        store.set()
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(lambda number: store.add("count", 1), range(40))) == [*range(1, 41)]


def test_a_store_that_does_not_answer():
    """The first call is given up after that time, later ones at once, even if it should come
    back.
    """
    lost = LostStore()
    store = AnsweringStore(lost, 0.5)
    begun = time.monotonic()
    with pytest.raises(RankError, match=r"has not answered for 0\.5 s"):
        store.check(["key"])
    assert 0.5 <= time.monotonic() - begun < 10
    lost.comes_back.set()
    begun = time.monotonic()
    with pytest.raises(RankError):
        store.set("key", "value")
    assert time.monotonic() - begun < 0.4


def test_a_call_may_wait_as_long_as_it_says():
    """And those of other threads behind it."""
    plain = HashStore()
    store = AnsweringStore(plain, 0.1)
    threading.Timer(1.0, plain.set, ("key", "value")).start()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(store.wait, ["key"], timedelta(seconds=30))
        assert pool.submit(store.check, ["key"]).result() is True
        waiting.result()


def test_a_clone_has_a_thread_of_its_own():
    lost = LostStore()
    lost.clone = HashStore
    store = AnsweringStore(lost, 0.2)
    other = store.clone()
    with pytest.raises(RankError):
        store.check(["key"])
    assert not other.check(["key"])
    lost.comes_back.set()
