"""Smaller buffers, so that small models take many of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from ft_ckpt.ranks.moving import gather
from ft_ckpt.saving import stage


@contextmanager
def buckets_of(size_bytes: int) -> Iterator[None]:
    """Gather and broadcast tensors in buckets of `size_bytes` during the block."""
    with patch.object(gather, "BUCKET_BYTES", size_bytes):
        yield


@contextmanager
def blocks_of(size_bytes: int) -> Iterator[None]:
    """Write blocks of `size_bytes`, a multiple of 4096, during the block."""
    with patch.object(stage, "BLOCK_BYTES", size_bytes):
        yield
