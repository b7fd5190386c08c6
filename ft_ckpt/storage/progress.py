"""Shows a progress bar on rank 0's terminal for transfers of 64 MiB or more."""

import sys
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

_WORTH_SHOWING_BYTES = 64 << 20


class Sized(Protocol):
    """Anything of a known size."""

    @property
    def size_bytes(self) -> int:
        """Bytes it counts for."""
        ...


Piece = TypeVar("Piece", bound=Sized)


def track_progress(pieces: Iterable[Piece], total_bytes: int, label: str, leads: bool) -> Iterator[Piece]:
    """Yield `pieces` unchanged and show their bytes in a bar on rank 0's terminal."""
    if not leads or total_bytes < _WORTH_SHOWING_BYTES or not sys.stderr.isatty():
        yield from pieces
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        for piece in pieces:
            yield piece
            bar.advance(task, piece.size_bytes)
