"""Reads the structure of an HDF5 file in a child process with limits; its source is run as a script.

A damaged file can send the HDF5 library, and the filters it calls, into an endless loop, memory without end or a crash.
So this file is run as a program of its own. It does with the metadata all that `hdf5_walk` will do, says that it is
done, and then reads values on request: what is compressed, or otherwise no plain run of bytes, is never read by the
library in our process. It is ended when it takes too long over one step. Filters print to its standard output what they
think of damaged data, so it is talked to through a socket.
"""

import inspect
import io
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

from ft_ckpt.errors import CorruptError
from ft_ckpt.messages import printable

_STEP_SECONDS = (2, 8)  # of processor time, for the smallest and the largest files; sound ones take less
_STEP_BYTES = 10 << 20  # in a second, by the slowest filter
_STEP_MEMORY = (512 << 20, 8 << 30)  # beside what h5py takes
_STEP_EXPANSION = 16  # times the bytes that it handles
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "BLOSC_NTHREADS": "1"}  # each takes the address space of its stack, 8 MiB
_SILENT_SECONDS = 60  # by the clock, on a machine that may have much else to do
_DONE, _FAILED = b"\n", -1
_NO_MEMORY = 12  # as the system numbers that error
_HEAD = struct.Struct("<q")  # ahead of an answer: its bytes, or _FAILED


class Probe:
    """The program at work on an HDF5 file; no answer of it may be longer than `most_bytes`.

    The file is `part` (first byte, size) of the open one `descriptor`. Raises CorruptError, naming `source`, for what
    the program dies of.
    """

    def __init__(self, descriptor: int, source: str, most_bytes: int, part: tuple[int, int]) -> None:
        self.source, self.most_bytes = source, most_bytes
        self.line, other_end = socket.socketpair()
        number, silent = other_end.fileno(), subprocess.DEVNULL
        try:
            self.child = subprocess.Popen(  # noqa: S603 - this file, by this interpreter
                [sys.executable, "-c", inspect.getsource(sys.modules[__name__]), f"/dev/fd/{descriptor}",
                 *map(str, part), str(number)],
                stdin=silent, stdout=silent, stderr=silent, pass_fds=[descriptor, number], cwd="/",
                env=os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        except OSError as error:
            self.line.close()
            raise CorruptError(
                f"{source}: not opened, since no process could be started to try it ({error})"
            ) from error
        finally:
            other_end.close()
        self._end = weakref.finalize(self, _end_process, self.child, self.line)
        while (said := self._read_some(1 << 16)).strip(b".") == b"":
            pass
        if said.strip(b".") != _DONE:
            raise self._process_error("said what it never says")

    def read(self, path: str, first: int | None = None, last: int | None = None) -> bytearray:
        """The bytes of the dataset at `path`, or of its rows [first, last); of texts, JSON of them all."""
        try:
            self.line.sendall(json.dumps([path, first, last]).encode() + b"\n")
        except OSError as error:
            raise self._process_error("is gone") from error
        size = self._read_size()
        failed = size == _FAILED
        found = self._read_exactly(self._read_size() if failed else size)
        if failed:
            raise CorruptError(f"{self.source}: {path} cannot be read ({found.decode(errors='replace')})")
        return found

    def close(self) -> None:
        self._end()

    def _read_size(self) -> int:
        (size,) = _HEAD.unpack(self._read_exactly(_HEAD.size))
        if size > self.most_bytes:
            raise self._process_error(f"found {size:,} bytes of values, at most {self.most_bytes:,} expected")
        return int(size)

    def _read_exactly(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            data += self._read_some(min(size - len(data), 1 << 20))
        return data

    def _read_some(self, most: int) -> bytes:
        """The next bytes it says."""
        if not select.select([self.line], [], [], _SILENT_SECONDS)[0]:
            raise self._process_error(f"gave no sign of life for {_SILENT_SECONDS} seconds")
        try:
            data = self.line.recv(most)
        except ConnectionResetError:  # it ended with a request unread
            data = b""
        if not data:
            raise self._process_error("")
        return data

    def _process_error(self, found: str) -> CorruptError:
        if not found:
            code = self.child.wait()
            found = f"ended with {f'signal {-code}' if code < 0 else f'code {code}'}"
            found = "asked for more memory than a sound file needs" if code == _NO_MEMORY else found
        self._end()
        return CorruptError(
            f"{self.source}: the process that tries it with the HDF5 library {found}; use another copy of the file"
        )


def _end_process(child: subprocess.Popen[bytes], line: socket.socket) -> None:
    child.kill()
    line.close()
    child.wait()


# All below runs in the other process.


def _limit_step(size_bytes: int, own_bytes: int) -> None:
    """Allow the processor time and the memory of another step, that of handling `size_bytes`.

    The system ends what takes longer, and refuses more memory, beside the `own_bytes` there were at the beginning.
    """
    import resource

    (soonest, latest), (least, most) = _STEP_SECONDS, _STEP_MEMORY
    signal.setitimer(signal.ITIMER_PROF, min(latest, soonest + size_bytes / _STEP_BYTES))
    _limit_resource(resource.RLIMIT_AS, own_bytes + min(most, least + _STEP_EXPANSION * size_bytes))


def _own_bytes() -> int:
    """The address space of this process in bytes; 0 if unknown."""
    try:
        return int(io.FileIO("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _limit_resource(what: int, value: int) -> None:
    import resource

    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _touch_object(item: Any, h5py: Any, seen: set[int], begin_object: Callable[[], None]) -> None:
    """Everything about `item` and what is below it, each object once; errors are for the walk to tell."""
    begin_object()
    place = _ask_quietly(lambda: h5py.h5o.get_info(item.id).addr)  # not the object, which would stay open
    if place in seen:
        return
    if place is not None:
        seen.add(place)
    for name in _ask_quietly(lambda: list(item.attrs)) or ():
        _ask_quietly(lambda name=name: item.attrs[name])
    if isinstance(item, h5py.Dataset):
        for fact in (lambda: item.shape, lambda: item.dtype, lambda: item.external, lambda: item.is_virtual,
                     lambda: item._filters, item.id.get_offset, item.id.get_storage_size,
                     lambda: item.chunks and item.id.get_num_chunks()):  # fmt: skip
            _ask_quietly(fact)
    elif isinstance(item, h5py.Group):
        for name in _ask_quietly(lambda: list(item)) or ():
            link = _ask_quietly(lambda name=name: item.get(name, getlink=True))
            if isinstance(link, h5py.HardLink):  # other links lead anywhere
                below = _ask_quietly(lambda name=name: item[name])
                if below is not None:
                    _touch_object(below, h5py, seen, begin_object)


def _ask_quietly(ask: Any) -> Any:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - whatever it is, the walk will meet it too
        if isinstance(error, MemoryError) or "alloc" in str(error):
            os._exit(_NO_MEMORY)  # but the walk, which has no such limit, must not
        return None


def _answer_request(file: Any, h5py: Any, request: bytes, begin_step: Callable[[int], None]) -> bytes:
    path, first, last = json.loads(request)
    begin_step(0)
    dataset = file[path]
    shape = dataset.shape or ()
    asked = math.prod(shape) if first is None else (last - first) * math.prod(shape[1:])
    begin_step((asked + math.prod(dataset.chunks or ())) * dataset.dtype.itemsize)
    if set(dataset._filters) - {"gzip", "shuffle", "fletcher32", "lzf"}:  # h5py's only way to see filters by number
        _ask_quietly(lambda: __import__("hdf5plugin"))  # which tells the HDF5 library of its filters
    if h5py.check_string_dtype(dataset.dtype) is not None:
        return json.dumps(dataset.asstr(errors="surrogateescape")[()].tolist()
                          if dataset.shape else dataset.asstr(errors="surrogateescape")[()]).encode()  # fmt: skip
    values = dataset[()] if first is None else dataset[first:last]
    found: bytes = values.tobytes()
    return found


def _serve_values(file: Any, h5py: Any, begin_step: Callable[[int], None], line: socket.socket) -> None:
    for request in line.makefile("rb"):
        try:
            found = _answer_request(file, h5py, request, begin_step)
            head = _HEAD.pack(len(found))
        except Exception as error:  # noqa: BLE001 - the answer says it
            found = printable(f"{type(error).__name__}: {error}")[:500].encode(errors="replace")
            head = _HEAD.pack(_FAILED) + _HEAD.pack(len(found))
        line.sendall(head)
        line.sendall(found)


class _FilePart(io.RawIOBase):
    """Bytes [start, start + size_bytes) of a file as a file of its own."""

    def __init__(self, path: str, start: int, size_bytes: int) -> None:
        super().__init__()
        self.file, self.start, self.size_bytes, self.at = io.FileIO(path), start, size_bytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size_bytes)[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.start + self.at)
        found = self.file.read(min(len(buffer), max(0, self.size_bytes - self.at)))
        buffer[: len(found)] = found
        self.at += len(found)
        return len(found)


def serve_file(path: str, start: int, size_bytes: int, line: socket.socket) -> None:
    """Touch everything in the HDF5 file in the file at `path`, then read of it what is asked for through `line`."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    import resource

    import h5py

    _limit_resource(resource.RLIMIT_CORE, 0)
    own_bytes = _own_bytes()

    def begin_step(more_bytes: int) -> None:
        _limit_step(size_bytes + more_bytes, own_bytes)

    def begin_object() -> None:
        line.sendall(b".")
        begin_step(0)

    begin_object()
    place: Any = _FilePart(path, start, size_bytes) if start else path
    file = _ask_quietly(lambda: h5py.File(place, "r", locking=False))
    if file is not None:
        _touch_object(file, h5py, set(), begin_object)
    line.sendall(_DONE)
    if file is not None:
        _serve_values(file, h5py, begin_step, line)


if __name__ == "__main__":
    serve_file(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), socket.socket(fileno=int(sys.argv[4])))
