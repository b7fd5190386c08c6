"""Reads HDF5 files of other programs in a child process with limits; this module's source is its program.

A damaged file can make the HDF5 library, and the filters that it calls, loop forever, allocate unlimited memory or
crash. The child first reads the metadata as the reader in our process will, and reports that it survived. Then it reads
values on request: our process lets the library read nothing that is compressed or not contiguous. The system ends the
child when a step takes too long, and refuses it memory beyond a limit. Parent and child communicate through a socket,
because filters print messages about damaged data to the standard output.
"""

import inspect
import io
import json
import math
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from ft_ckpt.errors import CorruptError
from ft_ckpt.messages import printable

_STEP_SECONDS = (2, 8)  # of processor time, for the smallest and the largest files; intact ones take less
_STEP_BYTES = 10 << 20  # per second, by the slowest filter
_STEP_MEMORY = (512 << 20, 8 << 30)  # for the smallest and the largest files, in addition to h5py's own
_STEP_EXPANSION = 16  # bytes of memory per byte that a step handles
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "BLOSC_NTHREADS": "1"}  # each takes 8 MiB of address space for its stack
_SILENT_SECONDS = 60  # wall-clock time between two messages of the child; the machine may be busy
_BUSY, _DONE = b".", b"done"
_NO_MEMORY = 12  # exit code: ENOMEM


class Probe:
    """The child process of one HDF5 file: `part` (first byte, size) of the open file `descriptor`.

    No answer may be longer than `most_bytes`. Raises CorruptError, naming `source`, when the child dies.
    """

    def __init__(self, descriptor: int, source: str, most_bytes: int, part: tuple[int, int]) -> None:
        self.source, self.most_bytes = source, most_bytes
        self.line, other_end = Pipe()
        descriptors, silent = [descriptor, other_end.fileno()], subprocess.DEVNULL
        try:
            self.child = subprocess.Popen(  # noqa: S603 - this file, by this interpreter
                [sys.executable, "-c", inspect.getsource(sys.modules[__name__]), *map(str, (*descriptors, *part))],
                stdin=silent, stdout=silent, stderr=silent, pass_fds=descriptors, cwd="/",
                env=os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        except OSError as error:
            self.line.close()
            raise CorruptError(f"{source}: not opened, because the process to try it cannot start ({error})") from error
        finally:
            other_end.close()
        self.close = weakref.finalize(self, _end_process, self.child, self.line)
        while self._receive() == _BUSY:
            pass

    def read(self, path: str, first: int | None = None, last: int | None = None) -> bytes:
        """The bytes of the dataset at `path`, or of its rows [first, last); strings as JSON."""
        try:
            self.line.send_bytes(json.dumps([path, first, last]).encode())
        except OSError as error:
            raise self._process_error("is gone") from error
        failure, values = self._receive(), self._receive()
        if failure:
            raise CorruptError(f"{self.source}: {path} cannot be read ({failure.decode(errors='replace')})")
        return values

    def _receive(self) -> bytes:
        """The child's next message."""
        try:
            if self.line.poll(_SILENT_SECONDS):
                return self.line.recv_bytes(self.most_bytes)
            found = f"gave no sign of life for {_SILENT_SECONDS} seconds"
        except (EOFError, ConnectionError):
            code = self.child.wait()
            found = f"ended with {f'signal {-code}' if code < 0 else f'code {code}'}"
            found = "asked for more memory than an intact file needs" if code == _NO_MEMORY else found
        except OSError as error:
            found = f"sent no valid answer of at most {self.most_bytes:,} bytes ({error})"
        raise self._process_error(found)

    def _process_error(self, found: str) -> CorruptError:
        self.close()
        return CorruptError(
            f"{self.source}: the process that tries it with the HDF5 library {found}; use another copy of the file"
        )


def _end_process(child: subprocess.Popen[bytes], line: "Connection[Any, Any]") -> None:
    child.kill()
    line.close()
    child.wait()


# All below runs in the child.


class _FilePart(io.RawIOBase):
    """Bytes [start, start + size_bytes) of an open file as a file object for h5py."""

    def __init__(self, descriptor: int, start: int, size_bytes: int) -> None:
        super().__init__()
        self.descriptor, self.start, self.size_bytes, self.at = descriptor, start, size_bytes, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size_bytes)[whence])
        return self.at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self.size_bytes - self.at)]
        size = os.preadv(self.descriptor, [wanted], self.start + self.at)
        self.at += size
        return size


def _limit_step(size_bytes: int, own_bytes: int) -> None:
    """Allow the processor time and the memory of one more step, which handles `size_bytes`.

    The system kills the process after that time, and refuses memory beyond that and the `own_bytes` of the start.
    """
    (least_seconds, most_seconds), (least, most) = _STEP_SECONDS, _STEP_MEMORY
    signal.setitimer(signal.ITIMER_PROF, min(most_seconds, least_seconds + size_bytes / _STEP_BYTES))
    _limit_resource(resource.RLIMIT_AS, own_bytes + min(most, least + _STEP_EXPANSION * size_bytes))


def _limit_resource(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int:
    """The address space of this process in bytes; 0 if unknown."""
    try:
        return int(io.FileIO("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _touch_object(item: Any, h5py: Any, seen: set[int], begin_object: Callable[[], None]) -> None:
    """Read all metadata of `item` and of everything below it, each object once; the reader reports their errors."""
    begin_object()
    address = _try_quietly(lambda: h5py.h5o.get_info(item.id).addr)  # not the object, which would stay open
    if address in seen:
        return
    if address is not None:
        seen.add(address)
    for name in _try_quietly(lambda: list(item.attrs)) or ():
        _try_quietly(lambda name=name: item.attrs[name])
    if isinstance(item, h5py.Dataset):
        for read in (lambda: item.shape, lambda: item.dtype, lambda: item.external, lambda: item.is_virtual,
                     lambda: item._filters, item.id.get_offset, item.id.get_storage_size,
                     lambda: item.chunks and item.id.get_num_chunks()):  # fmt: skip
            _try_quietly(read)
    elif isinstance(item, h5py.Group):
        for name in _try_quietly(lambda: list(item)) or ():
            link = _try_quietly(lambda name=name: item.get(name, getlink=True))
            if isinstance(link, h5py.HardLink):  # other links may lead to other files
                below = _try_quietly(lambda name=name: item[name])
                if below is not None:
                    _touch_object(below, h5py, seen, begin_object)


def _try_quietly(read: Any) -> Any:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - the reader will get it too
        if isinstance(error, MemoryError) or "alloc" in str(error):
            os._exit(_NO_MEMORY)  # the reader, which has no such limit, must not try the same
        return None


def _read_dataset(file: Any, h5py: Any, request: bytes, begin_step: Callable[[int], None]) -> bytes:
    path, first, last = json.loads(request)
    begin_step(0)
    dataset = file[path]
    shape = dataset.shape or ()
    count = math.prod(shape) if first is None else (last - first) * math.prod(shape[1:])
    begin_step((count + math.prod(dataset.chunks or ())) * dataset.dtype.itemsize)
    if set(dataset._filters) - {"gzip", "shuffle", "fletcher32", "lzf"}:  # h5py's only list of filter numbers
        _try_quietly(lambda: __import__("hdf5plugin"))  # registers its filters with the HDF5 library
    if h5py.check_string_dtype(dataset.dtype) is not None:
        text = dataset.asstr(errors="surrogateescape")[()]
        return json.dumps(text.tolist() if dataset.shape else text).encode()
    values: bytes = (dataset[()] if first is None else dataset[first:last]).tobytes()
    return values


def serve_file(descriptor: int, line_descriptor: int, start: int, size_bytes: int) -> None:
    """Read all metadata of the HDF5 file, then values on request, until the parent closes the line."""
    import h5py

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    _limit_resource(resource.RLIMIT_CORE, 0)
    line: Connection[Any, Any] = Connection(line_descriptor)
    own_bytes = _address_space()

    def begin_step(more_bytes: int) -> None:
        _limit_step(size_bytes + more_bytes, own_bytes)

    def begin_object() -> None:
        line.send_bytes(_BUSY)
        begin_step(0)

    begin_object()
    file = _try_quietly(lambda: h5py.File(_FilePart(descriptor, start, size_bytes), "r"))
    if file is not None:
        _touch_object(file, h5py, set(), begin_object)
    line.send_bytes(_DONE)
    while file is not None:
        try:
            request = line.recv_bytes()
        except EOFError:
            return
        failure, values = b"", b""
        try:
            values = _read_dataset(file, h5py, request, begin_step)
        except Exception as error:  # noqa: BLE001 - sent to the parent
            failure = printable(f"{type(error).__name__}: {error}")[:500].encode(errors="replace")
        line.send_bytes(failure)
        line.send_bytes(values)


if __name__ == "__main__":
    serve_file(*map(int, sys.argv[1:]))
