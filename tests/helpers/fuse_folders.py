"""A folder of this machine that is mounted through FUSE."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from network_disks.disk import MAY_MOUNT

needs_fuse = pytest.mark.skipif(
    not (MAY_MOUNT and shutil.which("bindfs")), reason="bindfs and the right to mount"
)


@contextmanager
def mounted(real: Path, mount: Path, *options: str) -> Iterator[Path]:
    """Mount the folder `real` at `mount` during the block, with these options of bindfs.

    Skips the test where that is refused.
    """
    real.mkdir()
    mount.mkdir()
    command = ["bindfs", *options, str(real), str(mount)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"nothing can be mounted here: {result.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
