"""The peak of a process's own memory during a block."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PERIOD_SECONDS = 0.002


@dataclass
class Peak:
    """The most MiB above those at the start.

    Pages of mapped files do not count: the system takes them back when others need memory.
    """

    mib: float = 0.0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the peak during the block, complete at its end."""
    peak, ended = Peak(), threading.Event()
    before = _anonymous_mib()

    def watch() -> None:
        while not ended.wait(_PERIOD_SECONDS):
            peak.mib = max(peak.mib, _anonymous_mib() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def _anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text()
    _, _, rest = status.partition("RssAnon:")
    return int(rest.split()[0]) / 1024
