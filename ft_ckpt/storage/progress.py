"""Shows a progress bar on rank 0's terminal for transfers of 64 MiB or more."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ft_ckpt.messages import printable
from ft_ckpt.storage.writer import Region

_WORTH_SHOWING_BYTES = 64 << 20


@contextmanager
def track_progress(
    total_bytes: int, label: str, leads: bool
) -> Iterator[Callable[[Iterable[Region]], Iterator[Region]]]:
    """Yield a function that passes regions on unchanged and shows their bytes in one bar on rank 0's terminal."""
    with track_bytes(total_bytes if leads else 0, label) as advance:

        def track_regions(regions: Iterable[Region]) -> Iterator[Region]:
            for region in regions:
                yield region
                advance(region.size_bytes)

        yield track_regions


@contextmanager
def track_bytes(total_bytes: int, label: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the bytes which have come, and shows them in a bar where that is worth it."""
    if total_bytes < _WORTH_SHOWING_BYTES or not sys.stderr.isatty():
        yield lambda _size_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(label), total=total_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)
