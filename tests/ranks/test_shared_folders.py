"""Which ranks see a folder, with ranks that are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from ft_ckpt.errors import RankError
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving.shared_folders import all_ranks_see
from ft_ckpt.storage import LocalStore


def test_a_rank_that_cannot_look_is_named_on_the_other(tmp_path, monkeypatch):
    read = LocalStore.read

    def refuse(store: LocalStore, name: str) -> bytes:
        if threading.current_thread() is threading.main_thread():
            raise PermissionError(13, "not for you", name)
        return read(store, name)

    monkeypatch.setattr(LocalStore, "read", refuse)
    ranks = [Ranks(rank, 2, HashStore(), timeout_seconds=30) for rank in range(2)]
    ranks[1].store = ranks[0].store
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(all_ranks_see, LocalStore(tmp_path), ranks[0])
        with pytest.raises(PermissionError, match="not for you"):
            all_ranks_see(LocalStore(tmp_path), ranks[1])
        with pytest.raises(RankError, match=r"rank 1.*not for you"):
            first.result()
    assert list(tmp_path.iterdir()) == []
