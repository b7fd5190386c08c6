"""Writes local files, with direct I/O (O_DIRECT, bypassing the page cache) where that is possible.

A file is written at a hidden path, its draft, and moved to its own path when it is complete.
"""

import contextlib
import errno
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from ft_ckpt.errors import IncompleteError, NameTakenError, explained
from ft_ckpt.storage import libc, local_disk
from ft_ckpt.storage.io.blocks import ALIGNMENT, address_of
from ft_ckpt.storage.look_ups import stored_file
from ft_ckpt.storage.store import Stored

_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# The file system has no O_DIRECT, or the file is read-only.
_NO_DIRECT_ERRORS = {errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES}
_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass
class LocalWriting:
    """File that is being written at `draft`. `finish` moves it to `path`.

    Whole disk blocks of aligned memory are written with direct I/O. All other bytes go through the
    page cache, where the kernel merges the bytes of two ranks that share a disk block.

    Attributes:
        name: name of the object in its store.
        path: path of the finished file.
        draft: path of the file while it is written. For a shared file it is `path`.
        size_bytes: size of the complete file.
        buffered_descriptor: writes through the page cache.
        direct_descriptor: writes with direct I/O. -1: all bytes go through the page cache.
        is_shared: True if other processes write to the file, too. Then this one does not know when
            the file is complete.
        syncs: True if the file must survive a power cut once `finish` has returned.
        is_new: True if it is an error when `path` exists already.
        written_bytes: number of bytes that this process has written so far.
    """

    name: str
    path: Path
    draft: Path
    size_bytes: int
    buffered_descriptor: int
    direct_descriptor: int
    is_shared: bool
    syncs: bool
    is_new: bool = False
    written_bytes: int = 0
    _lock: Lock = field(default_factory=Lock)

    def write(self, offset: int, memory: memoryview) -> None:
        if offset + len(memory) > self.size_bytes:
            raise IncompleteError(
                f"{self.name}: bytes up to {offset + len(memory)}, expected {self.size_bytes}"
            )
        first, last = 0, 0
        if self.direct_descriptor >= 0:
            first, last = _whole_blocks(offset, memory)
        with explained(self.path):
            _write_all(self.buffered_descriptor, memory[:first], offset)
            _write_all(self.direct_descriptor, memory[first:last], offset + first)
            _write_all(self.buffered_descriptor, memory[last:], offset + last)
        with self._lock:
            self.written_bytes += len(memory)

    def finish(self) -> Stored:
        """Sync the file and move it to its path.

        If `syncs` is False, a commit syncs all files later, and this one is not synced. But a
        shared file is always synced here, because no other machine can sync the bytes that this one
        has cached. Raises IncompleteError when bytes are missing, NameTakenError when the file must
        be new and its path exists.
        """
        if self.written_bytes != self.size_bytes and not self.is_shared:
            self.abandon()
            raise IncompleteError(
                f"{self.name}: {self.written_bytes} of {self.size_bytes} bytes arrived; "
                "nothing is kept"
            )

        try:
            with explained(self.path):
                if self.syncs or self.is_shared:
                    local_disk.sync_open(self.buffered_descriptor)
                status = os.fstat(self.buffered_descriptor)
                self._close()
                if self.draft != self.path:
                    self._take_name()
                if self.syncs:
                    local_disk.sync_path(self.path.parent)
        except BaseException:
            self.abandon()
            raise

        return stored_file(self.name, status)

    def abandon(self) -> None:
        """Close the draft and delete it, unless it is shared."""
        with contextlib.suppress(OSError):
            self._close()
        if not self.is_shared:
            with contextlib.suppress(OSError):
                local_disk.unlink(self.draft)

    def _take_name(self) -> None:
        if not self.is_new:
            local_disk.move(self.draft, self.path)
            return
        try:
            local_disk.move_new(self.draft, self.path)
        except FileExistsError as error:
            raise NameTakenError(f"{self.path}: exists already; nothing was written") from error

    def _close(self) -> None:
        """Close each descriptor once, even if closing fails.

        The system can give the number of a closed descriptor to another file at once. So the
        numbers are forgotten before they are closed.
        """
        buffered, direct = self.buffered_descriptor, self.direct_descriptor
        self.buffered_descriptor = self.direct_descriptor = -1
        try:
            if direct >= 0:
                os.close(direct)
        finally:
            if buffered >= 0:
                os.close(buffered)


def create_file(
    name: str,
    path: Path,
    draft: Path,
    size_bytes: int,
    max_mode: int = 0o777,
    *,
    direct: bool = False,
    shared: bool = False,
    syncs: bool = True,
    is_new: bool = False,
) -> LocalWriting:
    """Create the file `draft`, which will be moved to `path`.

    If `path` exists, the draft gets its permissions, limited by `max_mode`. The space of the draft
    is allocated, unless several processes write to it (`shared`). `allocate_file` allocates the
    space of such a file. Raises NoSpaceError when there is not enough space, TargetError when
    `draft` cannot be created, or exists and is not `shared`.
    """
    with explained(path):
        replaced = None
        flags = _FLAGS | os.O_CREAT
        if not shared:
            flags |= os.O_EXCL
            with contextlib.suppress(FileNotFoundError):
                replaced = path.stat()

        mode = 0o666 & max_mode if replaced is None else 0o600
        buffered = os.open(draft, flags, mode)
        try:
            if replaced is not None:
                local_disk.take_mode(draft, replaced, max_mode)
            elif max_mode != 0o777:
                local_disk.warn_if_open(path, os.fstat(buffered), mode)
            if not shared:
                allocate_space(buffered, size_bytes)
            unbuffered = _open_unbuffered(draft) if direct else -1
        except BaseException:
            os.close(buffered)
            if not shared:
                local_disk.unlink(draft)
            raise

    return LocalWriting(name, path, draft, size_bytes, buffered, unbuffered, shared, syncs, is_new)


def allocate_file(path: Path, size_bytes: int, max_mode: int = 0o777) -> None:
    """Allocate the space of the file `path`, to which several processes will write.

    Creates the file if it is missing. Raises NoSpaceError when there is not enough space,
    TargetError when the file cannot be created.
    """
    with explained(path):
        descriptor = os.open(path, _FLAGS | os.O_CREAT, 0o666 & max_mode)
        try:
            allocate_space(descriptor, size_bytes)
            os.ftruncate(descriptor, size_bytes)
        finally:
            os.close(descriptor)


def _open_unbuffered(path: Path) -> int:
    """Open the file `path` again for direct I/O. Return -1 if its file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return -1
    try:
        return os.open(path, _FLAGS | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno not in _NO_DIRECT_ERRORS:
            raise
        return -1


def allocate_space(descriptor: int, size_bytes: int, *, keeps_size: bool = False) -> None:
    """Allocate the space of a file, so that a full disk is noticed before the first write.

    If `keeps_size` is True, the file does not get longer. Raises OSError when the disk is full.
    Other errors are ignored, because some file systems cannot allocate.
    """
    try:
        if size_bytes:
            libc.fallocate(descriptor, size_bytes, keeps_size=keeps_size)
    except OSError as error:
        if error.errno in _FULL_ERRORS:
            raise


def _whole_blocks(offset: int, memory: memoryview) -> tuple[int, int]:
    """Return which bytes [first, last) of `memory` can be written with direct I/O.

    `memory` goes to byte `offset` of the file. The bytes fill whole disk blocks, and their address
    is aligned. For example, 10,000 bytes for offset 4000 have [96, 8288), which fill the blocks
    from 4096 to 12288. Returns (0, 0) if there are none.
    """
    first = -offset % ALIGNMENT
    last = len(memory) - (offset + len(memory)) % ALIGNMENT
    if memory.readonly or first >= last or (address_of(memory) + first) % ALIGNMENT:
        return 0, 0
    return first, last


def _write_all(descriptor: int, memory: memoryview, offset: int) -> None:
    """Write `memory` at `offset` of the file. Raises OSError.

    If the file system refuses a direct write, this descriptor writes through the page cache from
    then on.
    """
    done = 0
    while done < len(memory):
        # They are read each time, because another thread changes them if its write is refused.
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        was_direct = flags & getattr(os, "O_DIRECT", 0)
        try:
            count = os.pwrite(descriptor, memory[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
            # Some file systems refuse direct I/O only at a write.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~was_direct)
            continue
        if not count:
            raise OSError(errno.EIO, "nothing of a block was written")
        done += count
