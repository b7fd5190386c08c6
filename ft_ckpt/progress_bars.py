"""Shows progress bars of bytes on a terminal, for work that lasts longer than a few seconds."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ft_ckpt.messages import printable

if TYPE_CHECKING:
    from rich.progress import Progress

# Work that takes less time than this shows no bar.
MIN_SECONDS = 2.0
_WORTH_SHOWING_BYTES = 64 << 20


class _ByteBar:
    """A bar below the program's own bars, shown after a while and cleared at the end."""

    def __init__(self, total_bytes: int | None, label: str) -> None:
        self._total_bytes = total_bytes
        self._label = label
        self._begun_at = time.monotonic()
        self._done_bytes = 0
        # Reads are counted in several threads.
        self._lock = threading.Lock()
        # the bar of rich and its task, once they are shown
        self._shown: tuple[Progress, Any] | None = None

    def advance(self, size_bytes: int) -> None:
        """Count bytes that are done."""
        with self._lock:
            self._done_bytes += size_bytes
            if self._shown is None:
                if time.monotonic() - self._begun_at < MIN_SECONDS:
                    return
                self._shown = self._show()
            bar, task = self._shown
            bar.update(task, completed=self._done_bytes)

    def close(self) -> None:
        """Clear the bar."""
        with self._lock:
            if self._shown is not None:
                self._shown[0].stop()
                for other in _bars_of_tqdm():
                    other.refresh()

    def _show(self) -> "tuple[Progress, Any]":
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        for other in _bars_of_tqdm():
            other.clear()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        console = Console(stderr=True)

        # stdout and stderr are not redirected, because bars of other libraries write to them.
        bar = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        task = bar.add_task(printable(self._label), total=self._total_bytes)
        bar.start()
        return bar, task


def _bars_of_tqdm() -> list[Any]:
    """Return the open bars of tqdm, if the program uses it; they share the terminal."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return list(getattr(tqdm, "_instances", ()))


@contextmanager
def track_bytes(total_bytes: int | None, label: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts more bytes as done. They are shown in a bar.

    `total_bytes` is None if the total is unknown. With 0 nothing is shown. The bar is shown on a
    terminal only, and only once the block has lasted for some seconds.
    """
    if total_bytes == 0 or sys.stderr is None or not sys.stderr.isatty():
        yield lambda _size_bytes: None
        return
    bar = _ByteBar(total_bytes, label)
    try:
        yield bar.advance
    finally:
        bar.close()


# the counting functions of the running blocks of `track_reads`, the innermost last
_readers: list[Callable[[int], None]] = []


@contextmanager
def track_reads(total_bytes: int | None, label: str) -> Iterator[None]:
    """Show the bytes that `note_read` counts while the block runs, as `track_bytes` does."""
    with track_bytes(total_bytes, label) as advance:
        _readers.append(advance)
        try:
            yield
        finally:
            _readers.remove(advance)


def note_read(size_bytes: int) -> None:
    """Count bytes that were read from a disk or bucket. Any thread may call it."""
    for advance in _readers[-1:]:
        advance(size_bytes)


def is_worth_showing(total_bytes: int) -> bool:
    """Check whether to let another library show its bar: from 64 MiB on, on a terminal."""
    return total_bytes >= _WORTH_SHOWING_BYTES and sys.stderr.isatty()
