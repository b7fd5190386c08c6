"""Network file systems on loopback: a server of each, and clients that are mounted through FUSE.

Every stand has the shape of `NetworkDisk`, and `tests/mounts/test_stands.py` is its contract.
"""

from network_disks.cephfs import CephFS
from network_disks.disk import NetworkDisk
from network_disks.glusterfs import GlusterFS
from network_disks.moosefs import MooseFS
from network_disks.mounted_bucket import MountedBucket, Rclone, S3fs
from network_disks.sshfs import Sshfs

NETWORK_DISKS: tuple[type[NetworkDisk], ...] = (GlusterFS, Sshfs, CephFS, MooseFS)
MOUNTED_BUCKETS: tuple[type[MountedBucket], ...] = (S3fs, Rclone)

__all__ = [
    "MOUNTED_BUCKETS",
    "NETWORK_DISKS",
    "CephFS",
    "GlusterFS",
    "MooseFS",
    "MountedBucket",
    "NetworkDisk",
    "Rclone",
    "S3fs",
    "Sshfs",
]
