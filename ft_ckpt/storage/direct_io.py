"""Opens and writes files past the page cache (O_DIRECT) where the file system allows it, else through the cache.

Refused at open or at a write, the same file goes on through the page cache. Space is taken before the first byte.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

from ft_ckpt.errors import explained

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP}  # what a file system without it says
_libc = ctypes.CDLL(None, use_errno=True)


def create_file(path: Path, size_bytes: int, direct: bool, is_shared: bool = False) -> int:
    """A descriptor of the new file `path`, its space taken. One that `is_shared` may have been made by another rank.

    Raises NoSpaceError when there is not enough, TargetError when the file cannot be made, or is there already.
    """
    with explained(path):
        descriptor = open_for_writing(path, os.O_WRONLY | os.O_CREAT | (0 if is_shared else os.O_EXCL), direct)
        refusal = _allocate_space(descriptor, size_bytes)
        if refusal in _FULL:
            os.close(descriptor)
            raise OSError(refusal, os.strerror(refusal))
    return descriptor


def open_for_writing(path: Path, flags: int, direct: bool) -> int:
    """A descriptor of `path`, unbuffered if `direct` and the file system takes that. Raises OSError."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
        if flags & os.O_EXCL:
            path.unlink(missing_ok=True)  # the file system refused it, and may have made an empty file before
    return os.open(path, flags, 0o666)


def _allocate_space(descriptor: int, size_bytes: int) -> int:
    """Allocate the space now, so that a full disk is known before anything is written; an errno, 0 for success.

    Not posix_fallocate: where the file system cannot, the C library would write every block itself.
    """
    if not size_bytes or not hasattr(_libc, "fallocate"):
        return 0
    while _libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)):
        if (refusal := ctypes.get_errno()) != errno.EINTR:
            return refusal
    return 0


def write_all(path: Path, descriptor: int, block: mmap.mmap | memoryview, part: tuple[int, int], offset: int) -> None:
    """Write bytes [first, last) of `block` at `offset` of the file; on through the page cache where it must be.

    Raises NoSpaceError when the disk is full, TargetError when it cannot be written.
    """
    start, stop = part
    with explained(path), memoryview(block) as view:
        while start < stop:
            was_direct = _is_direct(descriptor)
            try:
                done = os.pwrite(descriptor, view[start:stop], offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                _leave_direct(descriptor)
                continue
            if not done:
                raise OSError(errno.EIO, "nothing of a block was written")
            start, offset = start + done, offset + done


def _is_direct(descriptor: int) -> bool:
    """Whether writes go past the page cache. Asked before each: another thread's refused write may end it meanwhile."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def _leave_direct(descriptor: int) -> None:
    """Switch the file to the page cache: some file systems refuse direct writes only when the first comes."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
