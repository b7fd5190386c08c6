"""The memory that this process can still allocate: of the machine, and of its control groups."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    """Memory that can be allocated without swapping or exceeding a limit, in bytes.

    0 if unknown.
    """
    try:
        machine_bytes = _available_on_machine()
    except (OSError, ValueError, KeyError):
        return 0
    return max(0, min([machine_bytes, *group_bytes(_GROUPS, _MOUNTED)]))


def group_bytes(groups: Path, mounted: Path) -> Iterator[int]:
    """Free bytes of each control group that has a memory limit: those in `groups` and their
    parents.

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
    """The folders of control groups that count memory, inner ones first."""
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
