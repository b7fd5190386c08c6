"""Upload and download of one object by several clients: time, CPU time, peak memory.

FT_CKPT_BENCH_STORE names a folder in a bucket (s3://bucket/bench), for the client of the AWS_
variables. Each way has a process of its own in every round. If the server is on this machine, it
shares the processors with the client.
"""

import io
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from scripts.bench.common import (
    Row,
    Setting,
    as_child,
    in_child,
    in_turns,
    is_installed,
    peak_bytes,
    seconds,
)

UPLOAD, DOWNLOAD = "from memory into a bucket", "from a bucket into memory"
LIMIT = "limit: obstore"
STORE = "FT_CKPT_BENCH_STORE"
_PART_BYTES, _STREAMS, _NAME = 16 << 20, 4, "object"
_MODULES = {"boto3": "boto3", "s3torchconnector": "s3torchconnector", "torch DCP, s3fs": "s3fs"}


def measure_upload(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each client that writes."""
    return _measure("upload", setting, size_bytes)


def measure_download(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each client that reads."""
    return _measure("download", setting, size_bytes)


def _measure(direction: str, setting: Setting, size_bytes: int) -> list[Row]:
    if STORE not in os.environ:
        return [{"way": "ours", "error": f"{STORE} names no folder in a bucket"}]
    once = replace(setting, rounds=1)
    ways = [name for name in _WAYS if is_installed(_MODULES.get(name, ""))]
    if direction == "download":
        in_child("stores", once, "upload", LIMIT, size_bytes)
    turns = {way: partial(_in_process, once, direction, way, size_bytes) for way in ways}
    return [row | {"tensor_bytes": size_bytes} for row in in_turns(turns, setting)]


def _in_process(once: Setting, direction: str, way: str, size_bytes: int) -> Row:
    return in_child("stores", once, direction, way, size_bytes)[0]


def measure_in_child(_setting: Setting, direction: str, way: str, size_bytes: int) -> list[Row]:
    """Measure one transfer, in the child."""
    memory = mmap.mmap(-1, size_bytes)
    for start in range(0, size_bytes, _PART_BYTES):  # map every page before
        memory[start : start + _PART_BYTES] = os.urandom(min(_PART_BYTES, size_bytes - start))
    make_transfer = _WAYS[way][direction == "download"]
    transfer = make_transfer(os.environ[STORE].rstrip("/"), memory)
    durations: list[float] = []
    cpu_before = time.process_time()
    peak = peak_bytes(lambda: durations.append(seconds(transfer)))
    cpu_seconds = time.process_time() - cpu_before
    return [{"seconds": durations[0], "cpu_seconds": cpu_seconds, "peak_bytes": peak}]


# Each takes the folder's URL and the memory, and returns the action to measure


def _ours_up(folder: str, memory: mmap.mmap) -> Callable[[], Any]:
    from ft_ckpt.storage.io import BLOCK_BYTES
    from ft_ckpt.storage.places.locations import open_store

    store, view = open_store(folder), memoryview(memory)

    def run() -> None:
        writing = store.create(_NAME, len(view))
        for start in range(0, len(view), BLOCK_BYTES):
            writing.write(start, view[start : start + BLOCK_BYTES])
        writing.finish()

    return run


def _ours_down(folder: str, memory: mmap.mmap) -> Callable[[], Any]:
    from ft_ckpt.storage.io.prefetch import read_in_steps
    from ft_ckpt.storage.places.locations import open_store

    store, view = open_store(folder), memoryview(memory)
    return lambda: read_in_steps(store.open(_NAME), view, len(view))


def _client(folder: str) -> tuple[Any, str]:
    """Return a bare client with the same settings, and the object's name in its bucket."""
    from ft_ckpt.storage.places.locations import open_store

    store: Any = open_store(folder)
    return store.client, store.key(_NAME)


def _parts(memory: mmap.mmap) -> list[memoryview]:
    view = memoryview(memory)
    return [view[start : start + _PART_BYTES] for start in range(0, len(view), _PART_BYTES)]


def _obstore_up(folder: str, memory: mmap.mmap) -> Callable[[], Any]:
    import obstore

    client, name = _client(folder)
    how: Any = {"use_multipart": True, "chunk_size": _PART_BYTES, "max_concurrency": _STREAMS}
    return lambda: obstore.put(client, name, iter(_parts(memory)), **how)


def _obstore_down(folder: str, memory: mmap.mmap) -> Callable[[], Any]:
    import obstore

    client, name = _client(folder)

    def fetch(number: int, part: memoryview) -> None:
        start = number * _PART_BYTES
        data = obstore.get_range(client, name, start=start, length=len(part))
        part[:] = memoryview(data).cast("B")

    def run() -> None:
        with ThreadPoolExecutor(_STREAMS) as pool:
            list(pool.map(lambda job: fetch(*job), enumerate(_parts(memory))))

    return run


class _Memory(io.RawIOBase):
    """A file object on this memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory, self.offset = memoryview(memory), 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.offset

    def seek(self, offset: int, whence: int = 0) -> int:
        self.offset = offset + (0, self.offset, len(self.memory))[whence]
        return self.offset

    def readinto(self, buffer: Any) -> int:
        data = self.memory[self.offset : self.offset + len(buffer)]
        buffer[: len(data)] = data
        self.offset += len(data)
        return len(data)

    def write(self, data: Any) -> int:
        self.memory[self.offset : self.offset + len(data)] = data
        self.offset += len(data)
        return len(data)


def _boto(folder: str) -> tuple[Any, str, str, Any]:
    import boto3
    from boto3.s3.transfer import TransferConfig

    bucket, _, prefix = folder.partition("://")[2].partition("/")
    how = TransferConfig(
        multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=_STREAMS
    )
    return boto3.client("s3"), bucket, f"{prefix}/{_NAME}", how


def _boto_up(folder: str, memory: mmap.mmap) -> Callable[[], Any]:
    client, bucket, name, how = _boto(folder)
    return lambda: client.upload_fileobj(_Memory(memory), bucket, name, Config=how)


def _boto_down(folder: str, memory: mmap.mmap) -> Callable[[], Any]:
    client, bucket, name, how = _boto(folder)
    return lambda: client.download_fileobj(bucket, name, _Memory(memory), Config=how)


def _connector(folder: str) -> Any:
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    config = S3ClientConfig(force_path_style=True)
    return S3Checkpoint(
        os.environ["AWS_REGION"],
        endpoint=os.environ.get("AWS_ENDPOINT_URL"),
        s3client_config=config,
    )


def _connector_up(folder: str, memory: mmap.mmap) -> Callable[[], Any]:
    def run() -> None:
        with _connector(folder).writer(f"{folder}/{_NAME}") as writer:
            for part in _parts(memory):
                writer.write(part)

    return run


def _connector_down(folder: str, memory: mmap.mmap) -> Callable[[], Any]:
    def run() -> None:
        with _connector(folder).reader(f"{folder}/{_NAME}") as reader:
            _Memory(memory).write(reader.read())

    return run


def _state(memory: mmap.mmap) -> dict[str, Any]:
    import torch

    return {"weight": torch.frombuffer(memory, dtype=torch.uint8)}


def _dcp_up(folder: str, memory: mmap.mmap) -> Callable[[], Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return lambda: dcp.save(
        _state(memory), storage_writer=FsspecWriter(f"{folder}/dcp"), no_dist=True
    )


def _dcp_down(folder: str, memory: mmap.mmap) -> Callable[[], Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    _dcp_up(folder, memory)()
    return lambda: dcp.load(
        _state(memory), storage_reader=FsspecReader(f"{folder}/dcp"), no_dist=True
    )


_WAYS = {
    LIMIT: (_obstore_up, _obstore_down),
    "ours": (_ours_up, _ours_down),
    "boto3": (_boto_up, _boto_down),
    "s3torchconnector": (_connector_up, _connector_down),
    "torch DCP, s3fs": (_dcp_up, _dcp_down),
}


if __name__ == "__main__":
    as_child("stores", measure_in_child)
