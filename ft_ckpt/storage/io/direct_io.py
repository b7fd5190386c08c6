"""Writes files with direct I/O (O_DIRECT), bypassing the page cache, where that is possible."""

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

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# no O_DIRECT on this file system, or a read-only file
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES}
_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass
class LocalWriting:
    """A file that is being written at `draft`.

    `finish` moves it to `path`, if that is another path. Whole disk blocks of aligned memory are
    written with direct I/O, through the descriptor `direct`. All other bytes go through the page
    cache, where the kernel merges the bytes of two ranks that share a disk block.
    """

    name: str
    path: Path
    draft: Path
    size_bytes: int
    plain: int
    direct: int  # -1: all goes through the page cache
    is_shared: bool  # other processes write to it, too: this one does not know when it is complete
    syncs: bool  # whether it survives a power cut once `finish` has returned
    is_new: bool = False  # whether an existing file is an error
    written: int = 0
    _lock: Lock = field(default_factory=Lock)

    def write(self, offset: int, memory: memoryview) -> None:
        if offset + len(memory) > self.size_bytes:
            raise IncompleteError(
                f"{self.name}: bytes up to {offset + len(memory)}, expected {self.size_bytes}"
            )
        first, last = (0, 0) if self.direct < 0 else _whole_blocks(offset, memory)
        with explained(self.path):
            _write_all(self.plain, memory[:first], offset)
            _write_all(self.direct, memory[first:last], offset + first)
            _write_all(self.plain, memory[last:], offset + last)
        with self._lock:
            self.written += len(memory)

    def finish(self) -> Stored:
        """Sync the file, unless a commit syncs all files later, and move it into place.

        A shared file is always synced, because no other machine can sync the bytes that this one
        has cached. Raises IncompleteError when bytes are missing, NameTakenError when it must be
        new and is not.
        """
        if self.written != self.size_bytes and not self.is_shared:
            self.abandon()
            raise IncompleteError(
                f"{self.name}: {self.written} of {self.size_bytes} bytes arrived; nothing is kept"
            )
        try:
            with explained(self.path):
                if self.syncs or self.is_shared:
                    local_disk.sync_open(self.plain)
                facts = os.fstat(self.plain)
                self._close()
                if self.draft != self.path:
                    self._take_name()
                if self.syncs:
                    local_disk.sync_path(self.path.parent)
        except BaseException:
            self.abandon()
            raise
        return stored_file(self.name, facts)

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
        """Close each descriptor once, also after an error: its number may be reused at once."""
        plain, direct, self.plain, self.direct = self.plain, self.direct, -1, -1
        try:
            if direct >= 0:
                os.close(direct)
        finally:
            if plain >= 0:
                os.close(plain)


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
    """Create `draft`, which will be moved to `path`.

    The space is allocated, unless the draft is `shared`; see `allocate_file`. The draft gets the
    permissions of the file that it replaces, if there is one, limited by `max_mode`. Raises
    NoSpaceError when there is not enough space, TargetError when `draft` cannot be created, or
    exists and is not `shared`.
    """
    with explained(path):
        replaced = None
        with contextlib.suppress(FileNotFoundError):
            replaced = None if shared else path.stat()
        bits = 0o666 & max_mode if replaced is None else 0o600
        plain = os.open(draft, _FLAGS | os.O_CREAT | (0 if shared else os.O_EXCL), bits)
        try:
            if replaced is not None:
                local_disk.take_mode(draft, replaced, max_mode)
            elif max_mode != 0o777:
                local_disk.warn_if_open(path, os.fstat(plain), bits)
            if not shared:
                allocate_space(plain, size_bytes)
            unbuffered = _open_unbuffered(draft) if direct else -1
        except BaseException:
            os.close(plain)
            if not shared:
                local_disk.unlink(draft)
            raise
    return LocalWriting(name, path, draft, size_bytes, plain, unbuffered, shared, syncs, is_new)


def allocate_file(path: Path, size_bytes: int, max_mode: int = 0o777) -> None:
    """Allocate the space of the file `path`, creating it if it is missing.

    Several processes may write to it. Raises NoSpaceError when there is not enough, TargetError
    when the file cannot be created.
    """
    with explained(path):
        descriptor = os.open(path, _FLAGS | os.O_CREAT, 0o666 & max_mode)
        try:
            allocate_space(descriptor, size_bytes)
            os.ftruncate(descriptor, size_bytes)
        finally:
            os.close(descriptor)


def _open_unbuffered(path: Path) -> int:
    """Open the file `path` again for direct I/O; return -1 if its file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return -1
    try:
        return os.open(path, _FLAGS | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
        return -1


def allocate_space(descriptor: int, size_bytes: int, *, keeps_size: bool = False) -> None:
    """Allocate the space of a file, so that a full disk is noticed before the first write.

    With `keeps_size` the file does not get longer. Raises OSError when the disk is full.
    """
    try:
        if size_bytes:
            libc.fallocate(descriptor, size_bytes, keeps_size=keeps_size)
    except OSError as error:
        if error.errno in _FULL:
            raise


def _whole_blocks(offset: int, memory: memoryview) -> tuple[int, int]:
    """Return the range of `memory` at `offset` that fills whole disk blocks from aligned addresses.

    Returns (0, 0) if there is none.
    """
    first = -offset % ALIGNMENT
    last = len(memory) - (offset + len(memory)) % ALIGNMENT
    if memory.readonly or first >= last or (address_of(memory) + first) % ALIGNMENT:
        return 0, 0
    return first, last


def _write_all(descriptor: int, memory: memoryview, offset: int) -> None:
    """Write `memory` at `offset` of the file; through the page cache if O_DIRECT is refused.

    Raises OSError.
    """
    done = 0
    while done < len(memory):
        # each time: another thread's refused write may change them
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        was_direct = flags & getattr(os, "O_DIRECT", 0)
        try:
            count = os.pwrite(descriptor, memory[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
            # some file systems refuse only at a write
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~was_direct)
            continue
        if not count:
            raise OSError(errno.EIO, "nothing of a block was written")
        done += count
