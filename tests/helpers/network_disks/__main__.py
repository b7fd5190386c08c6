"""Runs a command with the clients of a network file system.

    PYTHONPATH=tests/helpers python -m network_disks GlusterFS 2 scripts/network_disk {0} {1}

`{0}`, `{1}`, ... in its words are the mount points of the clients, whose caches are at most
FT_CKPT_CACHE_SECONDS (default 1) old.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from network_disks import NETWORK_DISKS


def main() -> int:
    """Run the command of the command line with the clients' folders; return its exit status."""
    name, count, *words = sys.argv[1:]
    kinds = {kind.name: kind for kind in NETWORK_DISKS}
    if name not in kinds:
        sys.exit(f"{name}: expected one of {', '.join(kinds)}")
    kind = kinds[name]
    if reason := kind.why_absent():
        sys.exit(reason)
    cache_seconds = int(os.environ.get("FT_CKPT_CACHE_SECONDS", "1"))
    with (
        tempfile.TemporaryDirectory(prefix="network-disk-") as folder,
        kind(Path(folder, "disk")) as disk,
    ):
        mounts = disk.clients(int(count), cache_seconds)
        command = [word.format(*mounts) for word in words]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
