"""Finds the file system that a folder or an open file is on, and says what its kind implies.

The mounts come from the tables in /proc, which only Linux has. Elsewhere every mount is unknown.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Only this machine writes to these, so what it has cached of their files is up to date.
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
# The clients of these cache whole pages. They promise only that whoever opens a file sees what was
# written before it was last closed. If two clients write into one page at the same time, one can
# overwrite the bytes of the other.
_CLOSE_TO_OPEN = {"9p", "afs", "cifs", "nfs", "nfs4", "smb3", "smbfs"}
# These mount a bucket as a folder. They upload files later, in any order, and a rename copies every
# object.
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
class Mount:
    """One mounted file system.

    Attributes:
        point: the folder at which it is mounted.
        kind: its type, such as "ext4", "nfs4" or "fuse.s3fs".
        source: what is mounted: a device, a server's export, or a bucket.
    """

    point: str
    kind: str
    source: str

    @property
    def is_local(self) -> bool:
        """True if its kind is one of `LOCAL_FILE_SYSTEMS`, to which only this machine writes."""
        return self.kind in LOCAL_FILE_SYSTEMS

    @property
    def is_close_to_open(self) -> bool:
        """True if two clients must not write into one file at the same time."""
        return self.kind in _CLOSE_TO_OPEN

    @property
    def locks_chunks(self) -> bool:
        """True if a client that writes locks 64 MiB of a file, so that others wait for minutes.

        MooseFS and LizardFS do so. Their mounts are recognised by their source, because their kind
        is a general one of FUSE.
        """
        return self.kind.startswith("fuse") and self.source.startswith("mfs#")

    @property
    def is_bucket(self) -> bool:
        """True if it is a bucket that is mounted as a folder."""
        if not self.kind.startswith("fuse"):
            return False
        names = {self.kind.removeprefix("fuse."), self.source.partition(":")[0]}
        return not names.isdisjoint(_BUCKET_MOUNTS)

    @property
    def warning(self) -> str:
        """Text that warns of saving to a mounted bucket, and names the alternative."""
        return (
            f"{self.point}: a bucket, mounted by {self.kind}: files go up later and "
            "in any order, so the newest checkpoint may be incomplete after a kill; "
            "give its URL (s3://...) instead"
        )


def mount_of(folder: Path) -> Mount | None:
    """Find the mount of `folder`, which need not exist yet. Return None if it is unknown."""
    path = os.path.realpath(folder)
    innermost = None
    for _, mount in _mounts():
        is_inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        # If two mounts have the same point, the later one hides the earlier one.
        if is_inside and (innermost is None or len(mount.point) >= len(innermost.point)):
            innermost = mount
    return innermost


def is_on_local_disk(path: Path) -> bool:
    """Check whether only this machine writes to the file system of `path`.

    If the mount is unknown, the answer is True. A known mount of an unknown kind is not local.
    """
    mount = mount_of(path)
    return mount is None or mount.is_local


def keeps_exact_times(descriptor: int) -> bool:
    """Check whether the modification time of this open file changes only when it is written to.

    On a network file system that is not so. Its client can show a cached time first and the current
    one later. If the mount is unknown, the answer is True.
    """
    mount_id = _mount_id(descriptor)
    for number, mount in _mounts():
        if number == mount_id:
            return mount.is_local
    return True


def _mount_id(descriptor: int) -> int | None:
    """Return the number of the mount of an open file, or None if it is unknown."""
    try:
        descriptor_info = Path(_PROCESS, "fdinfo", str(descriptor)).read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^mnt_id:\s*(\d+)$", descriptor_info, re.MULTILINE)
    return None if match is None else int(match[1])


def _mounts() -> Iterator[tuple[int, Mount]]:
    """Yield the number and description of each mount, from mountinfo of proc(5).

    A line of that table is "36 35 98:0 /root /point options - kind source options". Yields nothing
    if there is no such table.
    """
    try:
        table = Path(_PROCESS, "mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    for line in table.splitlines():
        mount_fields, _, source_fields = line.partition(" - ")
        number, _, _, _, point = mount_fields.split(" ")[:5]
        kind, source = source_fields.split(" ")[:2]
        yield int(number), Mount(_unescaped(point), kind, _unescaped(source))


def _unescaped(text: str) -> str:
    """Replace the octal escapes of the table, such as \\040 for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
