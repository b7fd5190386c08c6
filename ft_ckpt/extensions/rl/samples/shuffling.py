"""The order of a shuffled epoch: a permutation that needs no list of the samples."""

import hashlib
import math
import struct
from functools import lru_cache

_ROUNDS = 4


def shuffled(position: int, count: int, seed: int, epoch: int) -> int:
    """Return the index of the sample at a position of a shuffled epoch.

    The indices of all positions are a permutation of range(count), computed without a list: a
    Feistel network on a grid of at least `count` cells. position = high * width + low, and each
    round adds to `high` a random number chosen by `low`, then to `low` one chosen by `high`. A
    result beyond `count` is permuted again.
    """
    width, height, rounds = _random_rounds(count, seed, epoch)
    while True:
        high, low = divmod(position, width)
        for of_low, of_high in rounds:
            high = (high + of_low[low]) % height
            low = (low + of_high[high]) % width
        position = high * width + low
        if position < count:
            return position


@lru_cache(maxsize=8)
def _random_rounds(
    count: int, seed: int, epoch: int
) -> tuple[int, int, tuple[tuple[list[int], list[int]], ...]]:
    """Return width and height of the grid, and the numbers to add in each round.

    The numbers are SHAKE-256 of "seed/epoch/round". Their count is about 8 * sqrt(count): 25,000
    for 10 million samples.
    """
    width = math.isqrt(count - 1) + 1
    height = -(-count // width)
    rounds = []
    for number in range(_ROUNDS):
        stream = hashlib.shake_256(f"{seed}/{epoch}/{number}".encode()).digest(8 * (width + height))
        values = struct.unpack(f"<{width + height}Q", stream)
        of_low = [value % height for value in values[:width]]
        of_high = [value % width for value in values[width:]]
        rounds.append((of_low, of_high))
    return width, height, tuple(rounds)
