"""Bob Jenkins' lookup3 hash ("hashlittle", 2006, public domain): the checksum of HDF5's metadata and of its names.

Many strings of one length are hashed together, so 20,000 object headers cost as much as one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]  # of uint32
_MANY = 16  # strings of one length from which numpy is faster than plain integers
_MASK = 0xFFFFFFFF


def lookup3(strings: Sequence[bytes]) -> Words:
    """The hash of each string, in order."""
    lengths: dict[int, list[int]] = {}
    for index, data in enumerate(strings):
        lengths.setdefault(len(data), []).append(index)
    sums = np.zeros(len(strings), np.uint32)
    for length, indexes in lengths.items():
        same = [strings[index] for index in indexes]
        sums[indexes] = _hash_together(same, length) if len(same) >= _MANY else [_hash_one(data) for data in same]
    return sums


def _padded_words(strings: Sequence[bytes], length: int) -> Words:
    padding = bytes(-length % 12)
    return np.frombuffer(b"".join(data + padding for data in strings), "<u4").reshape(len(strings), -1)


def _hash_together(strings: Sequence[bytes], length: int) -> Words:
    a: Words = np.full(len(strings), (0xDEADBEEF + length) & _MASK, np.uint32)
    b: Words = a.copy()
    c: Words = a.copy()
    words = _padded_words(strings, length)
    for at in range(0, words.shape[1], 3):
        a, b, c = a + words[:, at], b + words[:, at + 1], c + words[:, at + 2]
        a, b, c = _mix_words(a, b, c) if at + 3 < words.shape[1] else _final_mix(a, b, c)
    return c


def _rotate_left(value: Words, bits: int) -> Words:
    turned: Words = (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))
    return turned


def _mix_words(a: Words, b: Words, c: Words) -> tuple[Words, Words, Words]:
    for bits in (4, 6, 8):
        a = (a - c) ^ _rotate_left(c, bits)
        c = c + b
        a, b, c = b, c, a
    for bits in (16, 19, 4):
        a = (a - c) ^ _rotate_left(c, bits)
        c = c + b
        a, b, c = b, c, a
    return a, b, c


def _final_mix(a: Words, b: Words, c: Words) -> tuple[Words, Words, Words]:
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = (c ^ b) - _rotate_left(b, bits)
        a, b, c = b, c, a
    return c, a, b


def _hash_one(data: bytes) -> int:
    """The hash of one string, in plain integers."""
    a: int
    b: int
    c: int
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    words: list[int] = _padded_words([data], len(data))[0].tolist()
    if not words:
        return c
    for at in range(0, len(words) - 3, 3):
        a, b, c = (a + words[at]) & _MASK, (b + words[at + 1]) & _MASK, (c + words[at + 2]) & _MASK
        a = (a - c & _MASK) ^ (c << 4 & _MASK | c >> 28)
        c = c + b & _MASK
        b = (b - a & _MASK) ^ (a << 6 & _MASK | a >> 26)
        a = a + c & _MASK
        c = (c - b & _MASK) ^ (b << 8 & _MASK | b >> 24)
        b = b + a & _MASK
        a = (a - c & _MASK) ^ (c << 16 & _MASK | c >> 16)
        c = c + b & _MASK
        b = (b - a & _MASK) ^ (a << 19 & _MASK | a >> 13)
        a = a + c & _MASK
        c = (c - b & _MASK) ^ (b << 4 & _MASK | b >> 28)
        b = b + a & _MASK
    a, b, c = a + words[-3] & _MASK, b + words[-2] & _MASK, c + words[-1] & _MASK
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = (c ^ b) - (b << bits & _MASK | b >> 32 - bits) & _MASK
        a, b, c = b, c, a
    return b
