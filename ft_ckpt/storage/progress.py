"""Shows a progress bar on rank 0's terminal for transfers of 64 MiB or more."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ft_ckpt.storage.writer import Region

_WORTH_SHOWING_BYTES = 64 << 20


@contextmanager
def track_progress(
    total_bytes: int, label: str, leads: bool
) -> Iterator[Callable[[Iterable[Region]], Iterator[Region]]]:
    """Yield a function that passes regions on unchanged and shows their bytes in one bar on rank 0's terminal."""
    if not leads or total_bytes < _WORTH_SHOWING_BYTES or not sys.stderr.isatty():
        yield iter
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)

        def track_regions(regions: Iterable[Region]) -> Iterator[Region]:
            for region in regions:
                yield region
                bar.advance(task, region.size_bytes)

        yield track_regions
