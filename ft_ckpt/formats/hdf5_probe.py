"""Touches every structure of an HDF5 file that is not ours, in a process that may die of it.

A damaged file can send the HDF5 library into an endless loop or a crash. `probe` runs this file as a program of its
own, which does with the metadata all that `hdf5_walk` will do, says that it is alive, and is ended when it is not.
"""

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

SILENT_SECONDS = 10  # no single step of a sound file takes this long
_MOST_MEMORY_BYTES = 8 << 30


def probe(descriptor: int) -> str | None:
    """What the HDF5 library did on the open file `descriptor`; None when it came through."""
    place = Path(f"/proc/self/fd/{descriptor}")
    if not sys.executable or not place.exists():
        return None  # nowhere to run it, or no way to hand the file on
    child = subprocess.Popen(  # noqa: S603 - this file, by this interpreter
        [sys.executable, "-c", Path(__file__).read_text(encoding="utf-8"), str(place)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[descriptor],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, cwd="/",
    )  # fmt: skip
    with child:
        output = child.stdout
        while output is not None:
            if not select.select([output], [], [], SILENT_SECONDS)[0]:
                child.kill()
                return f"the HDF5 library is lost in it (no sign of life for {SILENT_SECONDS} seconds)"
            if not os.read(output.fileno(), 1 << 16):
                break
        code = child.wait()
    return f"the HDF5 library ends with signal {-code} on it" if code < 0 else None


def _touch(item: Any, h5py: Any, seen: set[Any]) -> None:
    """Everything about `item` and what is below it, each object once; errors are for the walk to tell."""
    os.write(1, b".")
    if item.id in seen:
        return
    seen.add(item.id)
    for name in _quietly(lambda: list(item.attrs)) or ():
        _quietly(lambda name=name: item.attrs[name])
    if isinstance(item, h5py.Dataset):
        for fact in (lambda: item.shape, lambda: item.dtype, lambda: item.external, lambda: item.is_virtual,
                     lambda: item._filters, item.id.get_offset, lambda: _chunks(item)):  # fmt: skip
            _quietly(fact)
    elif isinstance(item, h5py.Group):
        for name in _quietly(lambda: list(item)) or ():
            link = _quietly(lambda name=name: item.get(name, getlink=True))
            if not isinstance(link, h5py.ExternalLink):
                below = _quietly(lambda name=name: item[name])
                if below is not None:
                    _touch(below, h5py, seen)


def _chunks(dataset: Any) -> None:
    if dataset.chunks is not None:
        for number in range(dataset.id.get_num_chunks()):
            dataset.id.get_chunk_info(number)
            os.write(1, b".")


def _quietly(ask: Any) -> Any:
    try:
        return ask()
    except Exception:  # noqa: BLE001 - whatever it is, the walk will meet it too
        return None


def main(path: str) -> None:
    """Touch everything in the file at `path`."""
    import resource

    import h5py

    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file = _quietly(lambda: h5py.File(path, "r", locking=False))
    if file is not None:
        _touch(file, h5py, set())


if __name__ == "__main__":
    main(sys.argv[1])
