"""Calls functions of Linux that Python's standard library lacks, through ctypes."""

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

# Advices of madvise: MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_READ.
DONTNEED, HUGEPAGE, POPULATE_READ = 4, 14, 22
_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_EXCHANGE = 2  # linux/fs.h
# With this flag, a private mapping of a large file does not count as committed memory.
_MAP_NORESERVE = 0x4000
_KEEP_SIZE = 1  # linux/falloc.h
# The number of the system call cachestat, of Linux 6.5. It is the same on every architecture.
_CACHESTAT = 451
_FAILED = ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def exchange_folders(first: Path, second: Path) -> None:
    """Swap two folders in one step (renameat2).

    Raises OSError, with ENOSYS where the C library has no such call.
    """
    paths = os.fsencode(first), _AT_FDCWD, os.fsencode(second)
    _call("renameat2", _AT_FDCWD, *paths, _RENAME_EXCHANGE, subject=str(second))


def fallocate(descriptor: int, size_bytes: int, *, keeps_size: bool = False) -> None:
    """Allocate the space of the first `size_bytes` of a file.

    With `keeps_size`, the size of the file stays as it is. Raises OSError, with ENOSYS where the C
    library has no such call.

    This is not posix_fallocate, with which the C library writes to every block if the file system
    cannot allocate.
    """
    mode = _KEEP_SIZE if keeps_size else 0
    _call("fallocate", descriptor, mode, ctypes.c_int64(0), ctypes.c_int64(size_bytes))


def _call(name: str, *arguments: object, subject: str | None = None) -> None:
    """Call a function of the C library that returns 0 for success, again if a signal interrupts it.

    Raises OSError with the error that it sets, and with `subject` as its file name.
    """
    if not hasattr(_LIBC, name):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), name)
    function = getattr(_LIBC, name)
    while function(*arguments):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), subject)


def cached_bytes(descriptor: int, start: int, size_bytes: int) -> int | None:
    """Count the bytes of this range of a file that are in the page cache, in whole pages.

    Returns None if the kernel has no cachestat.
    """
    if not sys.platform.startswith("linux"):
        return None  # On other systems the number stands for another call.
    byte_range = (ctypes.c_uint64 * 2)(start, size_bytes)
    page_counts = (ctypes.c_uint64 * 5)()  # struct cachestat, which begins with the cached pages
    if _LIBC.syscall(_CACHESTAT, descriptor, byte_range, page_counts, 0):
        return None
    return int(page_counts[0]) * mmap.PAGESIZE


def map_private(descriptor: int, size_bytes: int) -> int | None:
    """Map an open file, or zeroed memory if `descriptor` is -1, and return the address.

    The mapping is private and writable. Returns None if the system refuses it.
    """
    flags = mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if descriptor < 0 else _MAP_NORESERVE)
    address = _LIBC.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    return None if address in (None, _FAILED) else int(address)


# Both take an address and a size in bytes.
madvise = _LIBC.madvise
munmap = _LIBC.munmap
