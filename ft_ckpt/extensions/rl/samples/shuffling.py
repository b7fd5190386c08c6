"""Computes the order of a shuffled epoch without a list of the samples.

The permutation is a Feistel network on a grid. The samples fill the grid row by row:

    width = 4, count = 10:   0 1 2 3
                             4 5 6 7
                             8 9 . .

Each round moves every column up or down by a random number of its own, and then every row to the
left or right by a random number of its own, so that different cells stay different.
"""

import hashlib
import math
import struct
from functools import lru_cache

_ROUNDS = 4


def shuffled(position: int, count: int, seed: int, epoch: int) -> int:
    """Return the index of the sample at a position of a shuffled epoch.

    The indices of all positions are a permutation of range(count). A result beyond `count`, in the
    last row of the grid, is permuted again.
    """
    width, height, rounds = _random_rounds(count, seed, epoch)
    while True:
        row, column = divmod(position, width)
        for column_shifts, row_shifts in rounds:
            row = (row + column_shifts[column]) % height
            column = (column + row_shifts[row]) % width
        position = row * width + column
        if position < count:
            return position


@lru_cache(maxsize=8)
def _random_rounds(
    count: int, seed: int, epoch: int
) -> tuple[int, int, tuple[tuple[list[int], list[int]], ...]]:
    """Return the width and height of the grid, and for each round the shifts of columns and rows.

    The shifts are SHAKE-256 of "seed/epoch/round". There are about 8 * sqrt(count) of them, 25,000
    for 10 million samples.
    """
    width = math.isqrt(count - 1) + 1
    height = (count + width - 1) // width
    rounds = []
    for number in range(_ROUNDS):
        stream = hashlib.shake_256(f"{seed}/{epoch}/{number}".encode()).digest(8 * (width + height))
        values = struct.unpack(f"<{width + height}Q", stream)
        column_shifts = [value % height for value in values[:width]]
        row_shifts = [value % width for value in values[width:]]
        rounds.append((column_shifts, row_shifts))
    return width, height, tuple(rounds)
