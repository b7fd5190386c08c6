"""The mounts of this machine, and what follows from the kind of a file system.

Known on Linux only.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Only this machine writes to them, so that nothing about their files is cached and out of date.
LOCAL_FILE_SYSTEMS = {
    "bcachefs",
    "btrfs",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "overlay",
    "ramfs",
    "tmpfs",
    "xfs",
    "zfs",
}
# Their clients keep whole pages, and promise that a file is as it was when its last writer closed
# it: of two clients that write into one page at the same time, one may undo what the other wrote.
_CLOSE_TO_OPEN = {"9p", "afs", "cifs", "nfs", "nfs4", "smb3", "smbfs"}
# Buckets that are mounted as folders: files are uploaded later, in any order, and a rename copies
# every object.
_BUCKET_MOUNTS = {
    "blobfuse",
    "blobfuse2",
    "catfs",
    "cosfs",
    "gcsfuse",
    "geesefs",
    "goofys",
    "mount-s3",
    "mountpoint-s3",
    "obsfs",
    "ossfs",
    "rclone",
    "s3fs",
    "s3ql",
    "yas3fs",
}
_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class MountedFrom:
    """The file system that a folder is on."""

    point: str
    kind: str  # "ext4", "nfs4", "fuse.s3fs", ...
    source: str

    @property
    def is_local(self) -> bool:
        """Whether only this machine writes to it."""
        return self.kind in LOCAL_FILE_SYSTEMS

    @property
    def is_close_to_open(self) -> bool:
        """Whether several clients of it may not write into one file at the same time."""
        return self.kind in _CLOSE_TO_OPEN

    @property
    def locks_chunks(self) -> bool:
        """Whether one client at a time writes into a piece of a file, and others wait, for minutes.

        MooseFS and LizardFS do so, in pieces of 64 MiB; only the source tells their mounts apart.
        """
        return self.kind.startswith("fuse") and self.source.startswith("mfs#")

    @property
    def is_bucket(self) -> bool:
        """Whether it is a bucket that is mounted as a folder."""
        if not self.kind.startswith("fuse"):
            return False
        names = {self.kind.removeprefix("fuse."), self.source.partition(":")[0]}
        return not names.isdisjoint(_BUCKET_MOUNTS)

    @property
    def warning(self) -> str:
        """Why checkpoints should not be saved to a mounted bucket, and the alternative."""
        return (
            f"{self.point}: a bucket, mounted by {self.kind}: files go up later and "
            "in any order, so the newest checkpoint may be incomplete after a kill; "
            "give its URL (s3://...) instead"
        )


def mount_of(folder: Path) -> MountedFrom | None:
    """Find the file system of `folder`, which need not exist yet; return None if it is unknown."""
    path = os.path.realpath(folder)
    innermost = None
    for _, mount in _mounts():
        is_inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        # Of two mounts at one point the later is on top.
        if is_inside and (innermost is None or len(mount.point) >= len(innermost.point)):
            innermost = mount
    return innermost


def is_on_local_disk(path: Path) -> bool:
    """Check whether only this machine writes to the file system of `path`.

    A file system of unknown kind counts as local.
    """
    mount = mount_of(path)
    return mount is None or mount.is_local


def keeps_exact_times(descriptor: int) -> bool:
    """Check whether the modification time of this open file changes only when it is written to.

    The client of a network file system may show a cached time first and the current one later. A
    file system of unknown kind counts as exact.
    """
    mount_id = _mount_id(descriptor)
    for number, mount in _mounts():
        if number == mount_id:
            return mount.is_local
    return True


def _mount_id(descriptor: int) -> int | None:
    """Return the number of the mount of an open file, or None if it is unknown."""
    try:
        facts = Path(_PROCESS, "fdinfo", str(descriptor)).read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^mnt_id:\s*(\d+)$", facts, re.MULTILINE)
    return None if match is None else int(match[1])


def _mounts() -> Iterator[tuple[int, MountedFrom]]:
    """Yield the mounts with their numbers, from mountinfo of proc(5); none without that table."""
    try:
        table = Path(_PROCESS, "mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    for line in table.splitlines():
        mount_fields, _, source_fields = line.partition(" - ")
        number, _, _, _, point = mount_fields.split(" ")[:5]
        kind, source = source_fields.split(" ")[:2]
        yield int(number), MountedFrom(_unescaped(point), kind, _unescaped(source))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
