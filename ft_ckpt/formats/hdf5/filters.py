"""Calls HDF5's filters without the HDF5 library: one chunk through the functions that hdf5plugin's libraries export.

They are called with the arguments the HDF5 library would give them, by as many threads as there are chunks.
"""

import ctypes
import importlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ft_ckpt.errors import ConfigError, CorruptError

METHODS, SHUFFLES = ("zstd", "lz4", "blosc2", "gzip"), ("bit", "byte", None)
INSTALL = "pip install 'ft_ckpt[compression]'"
_SHUFFLE, _DEFLATE = 2, 1  # of HDF5 itself: every reader has them
PLUGINS = {32004: "lz4", 32008: "bshuf", 32015: "zstd", 32026: "blosc2"}
_LEVEL = 1  # of Zstandard: on weights, higher ones take twice the time and more room
_GZIP_LEVEL = 4  # of zlib
_ZSTD = 5  # its number in Blosc2
_BLOCK_BYTES = 1 << 18  # what bitshuffle works on at a time; with its own 8 KB, Zstandard sees too little
_MOST_BLOCK_BYTES = 1 << 26  # that bitshuffle may want to work on at a time
_REVERSE = 0x100  # the flag that makes a filter undo its work
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]

Filters = Sequence[tuple[int, Sequence[int]]]  # number and settings, in the order of compressing


@dataclass(frozen=True)
class Codec:
    """A compression, and the shuffle before it. Raises ConfigError for unknown ones, and without hdf5plugin."""

    method: str
    shuffle: str | None = "bit"

    def __post_init__(self) -> None:
        for name, value, known in (("compression", self.method, METHODS), ("shuffle", self.shuffle, SHUFFLES)):
            if value not in known:
                raise ConfigError(f"{name} {value!r}: one of {', '.join(map(repr, known))} is expected")
        if self.method == "gzip":
            return  # Python has it
        try:
            _plugin_function(next(number for number, _ in reversed(self.filter_chain(2, 2))))
        except ImportError as error:
            raise ConfigError(f"compression {self.method!r}: hdf5plugin is not installed; {INSTALL}") from error

    def filter_chain(self, item_bytes: int, chunk_bytes: int) -> Filters:
        """The HDF5 filters for elements and chunks of these sizes."""
        if self.method == "gzip":  # of bytes shuffled: bits are shuffled by a plugin, and this is for readers without
            shuffled = [(_SHUFFLE, (item_bytes,))] if self.shuffle and item_bytes > 1 else []
            return [*shuffled, (_DEFLATE, (_GZIP_LEVEL,))]
        if self.method == "blosc2":
            return [(32026, (1, 0, item_bytes, chunk_bytes, _LEVEL, SHUFFLES[::-1].index(self.shuffle), _ZSTD))]
        if self.shuffle == "bit":
            block = _BLOCK_BYTES // item_bytes
            return [(32008, (0, 4, item_bytes, block, *((3, _LEVEL) if self.method == "zstd" else (2,))))]
        last = (32015, (_LEVEL,)) if self.method == "zstd" else (32004, (0,))
        return [(_SHUFFLE, (item_bytes,)), last] if self.shuffle and item_bytes > 1 else [last]


class _FilterClass(ctypes.Structure):
    """The description that a filter's library exports (H5Z_class2_t)."""

    _fields_ = (
        ("version", ctypes.c_int), ("id", ctypes.c_int), ("encodes", ctypes.c_uint), ("decodes", ctypes.c_uint),
        ("name", ctypes.c_char_p), ("can_apply", ctypes.c_void_p), ("set_local", ctypes.c_void_p),
        ("filter", ctypes.CFUNCTYPE(
            ctypes.c_size_t, ctypes.c_uint, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint), ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_void_p))),
    )  # fmt: skip


@cache
def _plugin_function(number: int) -> Callable[..., int]:
    """The function of a filter, which leaves Python's lock to others. Raises ImportError without hdf5plugin."""
    plugin = importlib.import_module("hdf5plugin")
    name = PLUGINS[number]
    if name not in plugin.get_config().registered_filters:  # another program's plugin came first
        plugin.register(name, force=True)
    library = ctypes.CDLL(plugin.get_config().registered_filters[name])
    library.H5PLget_plugin_info.restype = ctypes.POINTER(_FilterClass)
    found: Callable[..., int] = library.H5PLget_plugin_info().contents.filter
    return found


def _apply_filter(number: int, settings: Sequence[int], data: bytes, flags: int, most: int) -> bytes | None:
    """`data` passed through a filter; None when it gives up, or the result is more than `most` bytes."""
    if number == _SHUFFLE:
        rows = np.frombuffer(data, np.uint8).reshape((settings[0], -1) if flags else (-1, settings[0]))
        shuffled: bytes = rows.T.tobytes()
        return shuffled
    if number == _DEFLATE:
        return _zlib_decompress(data, most) if flags else zlib.compress(data, settings[0])
    held, room = ctypes.c_void_p(_libc.malloc(len(data))), ctypes.c_size_t(len(data))
    values = (ctypes.c_uint * len(settings))(*settings)
    try:
        ctypes.memmove(held, data, len(data))
        size = _plugin_function(number)(flags, len(values), values, len(data), ctypes.byref(room), ctypes.byref(held))
        return ctypes.string_at(held, size) if 0 < size <= min(room.value, most) else None
    finally:
        _libc.free(held)  # a filter frees what it was given when it puts its own in place


def _zlib_decompress(data: bytes, most: int) -> bytes | None:
    """`data` decompressed; None when it is damaged, or more than `most` bytes."""
    stream = zlib.decompressobj()
    try:
        whole = stream.decompress(data, most)
    except zlib.error:
        return None
    return whole if stream.eof else None


# The filters believe what stands at the head of a chunk; so it is compared with what it should be, and with what is
# there, before they are called. Sources: the descriptions of filters 32004 and 32008, RFC 8878 for Zstandard.


def _fits_any(_data: bytes, _settings: Sequence[int], _size_bytes: int) -> bool:
    return True


def _fits_shuffle(data: bytes, settings: Sequence[int], size_bytes: int) -> bool:
    return len(data) == size_bytes and len(settings) > 0 and settings[0] > 0 and size_bytes % settings[0] == 0


def _fits_lz4(data: bytes, _settings: Sequence[int], size_bytes: int) -> bool:
    total, block = struct.unpack_from(">QI", data)
    return total == size_bytes and block > 0 and _adds_up(data, -(-total // block), len(data))


def _fits_bitshuffle(data: bytes, settings: Sequence[int], size_bytes: int) -> bool:
    item = settings[2]
    if item <= 0 or size_bytes % item:
        return False
    if len(settings) < 5 or not settings[4]:  # shuffled only
        return len(data) == size_bytes
    total, block = struct.unpack_from(">QI", data)
    if total != size_bytes or block == 0 or block % (8 * item) or block > _MOST_BLOCK_BYTES:
        return False
    rest = total % block
    left = total % (8 * item)  # stored as they are, at the end
    return _adds_up(data, total // block + (rest >= 8 * item), len(data) - left)


def _adds_up(data: bytes, blocks: int, end: int) -> bool:
    """True when so many blocks, each after its length, take the bytes from the 12th to `end` exactly."""
    at = 12
    for _ in range(blocks):
        if at + 4 > end:
            return False
        at += 4 + int.from_bytes(data[at : at + 4], "big")
    return at == end


def _fits_zstd(data: bytes, _settings: Sequence[int], size_bytes: int) -> bool:
    flags = data[4]
    is_single, width = flags >> 5 & 1, (flags >> 5 & 1, 2, 4, 8)[flags >> 6]
    at = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    known = int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0)
    return data[:4] == b"\x28\xb5\x2f\xfd" and width > 0 and known == size_bytes


_HEADS = {_SHUFFLE: _fits_shuffle, 32004: _fits_lz4, 32008: _fits_bitshuffle, 32015: _fits_zstd}


def encode_chunk(filters: Filters, data: bytes) -> tuple[bytes, int]:
    """The bytes of a chunk in the file, and a bit for each filter that gave up and is left out."""
    mask = 0
    for place, (number, settings) in enumerate(filters):
        done = _apply_filter(number, settings, data, 0, 2 * len(data) + _BLOCK_BYTES)
        mask |= (done is None) << place
        data = data if done is None else done
    return data, mask


def decode_chunk(filters: Filters, data: bytes, mask: int, size_bytes: int, name: str) -> bytes:
    """The bytes of a chunk. Raises CorruptError, naming `name`."""
    for place, (number, settings) in reversed(list(enumerate(filters))):
        if mask >> place & 1:
            continue
        try:
            fits = _HEADS.get(number, _fits_any)(data, settings, size_bytes)
            done = _apply_filter(number, settings, data, _REVERSE, size_bytes) if fits else None
        except ImportError as error:
            raise CorruptError(f"{name}: compressed, and hdf5plugin is not installed; {INSTALL}") from error
        if done is None:
            raise CorruptError(f"{name}: a chunk that filter {number} cannot read; use another copy of the file")
        data = done
    if len(data) != size_bytes:
        raise CorruptError(f"{name}: a chunk of {len(data)} bytes, {size_bytes} expected; use another copy of the file")
    return data
