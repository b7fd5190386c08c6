"""How files are written: past the page cache or through it, by how many threads, in blocks of which size.

These are settings, and nothing is measured at run time. Trials by 2, 4 and 8 threads and through the page cache, 1 GB
in four rounds in turns, had these medians in MB/s: on ext4 1558, 1550, 1842 and 320, on ext4 in a loop device 2677,
2871, 2620 and 567. No way was a fifth faster than 4 threads on both, which a trial before each run would have to be.
"""

from dataclasses import dataclass

from ft_ckpt.storage.buffers import BLOCK_BYTES


@dataclass(frozen=True)
class WriteTuning:
    """One way to write: `threads` writers of blocks of `block_bytes`."""

    threads: int = 4
    block_bytes: int = BLOCK_BYTES
    direct_bytes: int | None = BLOCK_BYTES  # files from this size on go past the page cache; None: none does


def tuning_for(threads: int | None = None, direct: str = "auto", block_bytes: int = BLOCK_BYTES) -> WriteTuning:
    """The way to write that these settings ask for: None and "auto" are the defaults, "on" is for small files, too."""
    usual = WriteTuning()
    least = {"auto": usual.direct_bytes, "on": 0, "off": None}[direct]
    return WriteTuning(threads or usual.threads, block_bytes, least)
