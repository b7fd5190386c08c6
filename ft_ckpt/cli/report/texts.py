"""Formats numbers, sizes and times for the page."""

from collections.abc import Iterable

from ft_ckpt.checkpoint.manifest import parse_time


def count_text(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def moment_text(created: str) -> str:
    moment = parse_time(created)
    return created if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def value_text(value: float) -> str:
    return f"{value:#.4g}"


def size_unit(sizes: Iterable[int]) -> tuple[int, str]:
    """Return the unit for a column of sizes: its number of bytes, and its name."""
    largest = max(sizes, default=0)
    units = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
    for scale, name in units:
        if largest >= scale:
            return scale, name
    return 1, "B"
