"""Reads whole files into private memory, where that is faster than touching a mapped file."""

from ft_ckpt.storage.blocks import aligned_size
from ft_ckpt.storage.free_memory import available_bytes
from ft_ckpt.storage.libc import cached_bytes
from ft_ckpt.storage.local_file import LocalFile, MappedBytes
from ft_ckpt.storage.prefetch import block_size, read_in_steps
from ft_ckpt.storage.store import Readable

MIN_BYTES = 16 << 20  # smaller files are always mapped
_STEP_BYTES = 32 << 20  # of a local file; for each step a thread may wait 5 ms for the GIL
# of a file, looked up in the page cache: a lookup of 2.5 GB takes 20 ms
_SAMPLES, _SAMPLE_BYTES = 64, 256 << 10


def read_whole(file: Readable, threads: int = 4, direct: str = "auto") -> MappedBytes | None:
    """All of an open object in private memory, at the rate of the disk or network.

    None without enough memory. Raises CorruptError when the object changes meanwhile.
    """
    if not file.size_bytes:
        return None
    mapped = MappedBytes.create(-1, aligned_size(file.size_bytes))
    if mapped is not None:
        step = _STEP_BYTES if file.can_map else block_size(file)
        read_in_steps(
            file, mapped.memory, file.size_bytes, threads=threads, direct=direct, step=step
        )
    return mapped


def is_cold(file: Readable) -> bool:
    """True when `read_whole` is faster than touching the mapped file: large, and less than half of
    it in memory.

    False also if unknown, or without twice the memory for it.
    """
    if not isinstance(file, LocalFile) or file.size_bytes < MIN_BYTES:
        return False
    if 2 * file.size_bytes > available_bytes():
        return False
    cached = 0
    starts = range(0, file.size_bytes, -(-file.size_bytes // _SAMPLES))
    for start in starts:
        sample = cached_bytes(file.descriptor, start, _SAMPLE_BYTES)
        if sample is None:
            return False
        cached += sample
    return 2 * cached < len(starts) * _SAMPLE_BYTES
