"""Reads whole files into private memory, where that is faster than touching a mapped file."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.storage.io.blocks import aligned_size
from ft_ckpt.storage.io.local_file import LocalFile, MappedBytes
from ft_ckpt.storage.io.prefetch import block_size, read_in_steps
from ft_ckpt.storage.libc import cached_bytes
from ft_ckpt.storage.store import Readable

# Smaller files are always mapped.
MIN_BYTES = 16 << 20
# A local file is read in steps of this size. At each step a thread can wait 5 ms for the GIL.
_STEP_BYTES = 32 << 20
# A look-up of 2.5 GB in the page cache takes 20 ms. So only samples of a file are looked up.
_SAMPLES = 64
_SAMPLE_BYTES = 256 << 10


def read_whole(file: Readable, threads: int = 4, direct: str = "auto") -> MappedBytes | None:
    """Read an open object into private memory, at the rate of the disk or network.

    Returns None for an empty object, and if there is not enough memory. Raises CorruptError when
    the object changes meanwhile.
    """
    if not file.size_bytes:
        return None
    mapped = MappedBytes.create(-1, aligned_size(file.size_bytes))
    if mapped is not None:
        step = _STEP_BYTES if file.can_map else block_size(file)
        read_in_steps(
            file, mapped.memory, file.size_bytes, threads=threads, direct=direct, step=step
        )
    return mapped


def is_cold(file: Readable) -> bool:
    """Check whether `read_whole` is faster than touching the mapped file.

    It is faster for a large local file of which less than half is in the page cache. Twice the size
    of the file must be available as memory.
    """
    if not isinstance(file, LocalFile) or file.size_bytes < MIN_BYTES:
        return False
    if 2 * file.size_bytes > available_bytes():
        return False
    cached = 0
    sample_step = math.ceil(file.size_bytes / _SAMPLES)
    starts = range(0, file.size_bytes, sample_step)
    for start in starts:
        sample = cached_bytes(file.descriptor, start, _SAMPLE_BYTES)
        if sample is None:
            return False
        cached += sample
    return 2 * cached < len(starts) * _SAMPLE_BYTES


_GROUPS = Path("/proc/self/cgroup")
_GROUP_FOLDERS = Path("/sys/fs/cgroup")
_MEMORY_INFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class _GroupFiles:
    """Names in the folder of a control group, which differ between the versions of control groups.

    Attributes:
        limit: file with the limit of the group's memory, in bytes.
        usage: file with the memory that the group uses, in bytes.
        reclaimable: field of memory.stat with the cache that is freed when memory is needed.
    """

    limit: str
    usage: str
    reclaimable: str


_VERSION_1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _GroupFiles("memory.max", "memory.current", "inactive_file")


def available_bytes() -> int:
    """Return the memory that can be allocated without swapping or exceeding a limit, in bytes.

    Returns 0 if that is unknown.
    """
    try:
        machine_bytes = _available_on_machine()
    except (OSError, ValueError, KeyError):
        return 0
    return max(0, min([machine_bytes, *group_bytes(_GROUPS, _GROUP_FOLDERS)]))


def group_bytes(groups: Path, mounted: Path) -> Iterator[int]:
    """Yield the free bytes of each control group of this process that has a memory limit.

    The parents of its groups limit it, too. `groups` is a file like /proc/self/cgroup, `mounted` a
    folder like /sys/fs/cgroup. Groups that cannot be read are left out.
    """
    for folder, files in _memory_groups(groups, mounted):
        # A group without a limit has the text "max". In a container the path can be one of the
        # host, which does not exist here.
        with suppress(OSError, ValueError):
            limit = int((folder / files.limit).read_text(encoding="ascii"))
            usage = int((folder / files.usage).read_text(encoding="ascii"))
            lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            fields = dict(line.split(maxsplit=1) for line in lines)
            yield limit - usage + int(fields.get(files.reclaimable, 0))


def _available_on_machine() -> int:
    lines = _MEMORY_INFO.read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10  # from KiB


def _memory_groups(groups: Path, mounted: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """Yield the folders of this process's control groups that limit memory, inner ones first."""
    lines: list[str] = []
    with suppress(OSError):
        lines = groups.read_text(encoding="utf-8").splitlines()
    for line in lines:
        fields = line.split(":", 2)  # "number:controllers:path"; version 2 has no controllers
        if len(fields) < 3:
            continue
        controllers, path = fields[1], fields[2]
        if not controllers:
            root, files = mounted, _VERSION_2
        elif "memory" in controllers.split(","):
            root, files = mounted / "memory", _VERSION_1
        else:
            continue

        innermost = root / path.strip("/")
        for folder in (innermost, *innermost.parents):
            if folder.is_relative_to(root):
                yield folder, files
