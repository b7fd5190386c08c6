"""Reads whole files into private memory, where that is faster than touching a mapped file."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.storage.io.blocks import aligned_size
from ft_ckpt.storage.io.local_file import LocalFile, MappedBytes
from ft_ckpt.storage.io.prefetch import block_size, read_in_steps
from ft_ckpt.storage.libc import cached_bytes
from ft_ckpt.storage.store import Readable

MIN_BYTES = 16 << 20  # smaller files are always mapped
_STEP_BYTES = 32 << 20  # of a local file; for each step a thread may wait 5 ms for the GIL
# of a file, looked up in the page cache: a lookup of 2.5 GB takes 20 ms
_SAMPLES, _SAMPLE_BYTES = 64, 256 << 10


def read_whole(file: Readable, threads: int = 4, direct: str = "auto") -> MappedBytes | None:
    """Read an open object into private memory, at the rate of the disk or network.

    Returns None without enough memory. Raises CorruptError when the object changes meanwhile.
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

    That is so for a large file of which less than half is in memory, if twice its size is
    available.
    """
    if not isinstance(file, LocalFile) or file.size_bytes < MIN_BYTES:
        return False
    if 2 * file.size_bytes > available_bytes():
        return False
    cached = 0
    starts = range(0, file.size_bytes, -(-file.size_bytes // _SAMPLES))
    for start in starts:
        sample = cached_bytes(file.descriptor, start, _SAMPLE_BYTES)
        if sample is None:
            return False
        cached += sample
    return 2 * cached < len(starts) * _SAMPLE_BYTES


_GROUPS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_MEMORY_FACTS = Path("/proc/meminfo")


@dataclass(frozen=True)
class _GroupFiles:
    """The names of the files of a control group, by the version of control groups."""

    limit: str
    usage: str
    reclaimable: str  # in memory.stat: cache that is freed when memory is needed


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
    return max(0, min([machine_bytes, *group_bytes(_GROUPS, _MOUNTED)]))


def group_bytes(groups: Path, mounted: Path) -> Iterator[int]:
    """Return the free bytes of each control group that has a memory limit, parents included.

    `groups` is a file like /proc/self/cgroup, `mounted` a folder like /sys/fs/cgroup. Groups that
    cannot be read are left out.
    """
    for folder, files in _memory_groups(groups, mounted):
        # no limit; or no such group: in a container the path may be the host's
        with suppress(OSError, ValueError):
            limit = int((folder / files.limit).read_text(encoding="ascii"))
            usage = int((folder / files.usage).read_text(encoding="ascii"))
            lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            facts = dict(line.split(maxsplit=1) for line in lines)
            yield limit - usage + int(facts.get(files.reclaimable, 0))


def _available_on_machine() -> int:
    lines = _MEMORY_FACTS.read_text(encoding="ascii").splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    return int(facts["MemAvailable"].split()[0]) << 10


def _memory_groups(groups: Path, mounted: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """Yield the folders of control groups that count memory, inner ones first."""
    lines: list[str] = []
    with suppress(OSError):
        lines = groups.read_text(encoding="utf-8").splitlines()
    for line in lines:
        fields = line.split(":", 2)  # number, controllers, path; no controllers in version 2
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
