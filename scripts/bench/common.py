"""The base of all measures: rounds in which all ways take turns, files, memory, child processes."""

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]  # one way of a measure: "way", and its figures by name; units end the names
T = TypeVar("T")
# errors of libraries; CheckpointException is not an Exception
PEER_ERRORS = (Exception, CheckpointException)
Way = Callable[[], Row]  # runs once and returns its figures
ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICE = ACCELERATOR or torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """The setting of a measure.

    `rounds`: counted rounds, after an uncounted one. `folder`: an empty one to write in. `ways`:
    those to measure, () for all.
    """

    rounds: int
    folder: Path
    ways: tuple[str, ...] = ()

    def inside(self, folder: Path) -> "Setting":
        """Return this setting with another folder."""
        return replace(self, folder=folder)

    def chosen(self, ways: Mapping[str, T]) -> dict[str, T]:
        """Return the selected ones of `ways`, and the limits."""
        selected = self.ways or ways
        chosen = {}
        for name, way in ways.items():
            if name in selected or name.startswith("limit"):
                chosen[name] = way
        return chosen


def is_installed(module: str) -> bool:
    """Check whether `module` can be imported; "" always can."""
    return not module or find_spec(module.partition(".")[0]) is not None


def in_turns(
    ways: Mapping[str, Way], setting: Setting, before: Callable[[str], Any] = lambda way: os.sync()
) -> list[Row]:
    """Run the ways in rounds, in which all take turns; return a row with the medians of each.

    `before` gets the name of a way and prepares for it. A peer that fails is left out of the
    following rounds, and its row has the error.
    """
    ways = setting.chosen(ways)
    figures: dict[str, list[Row]] = {name: [] for name in ways}
    errors: dict[str, str] = {}
    for _ in range(setting.rounds + 1):
        for name, way in ways.items():
            if name in errors:
                continue
            before(name)
            try:
                figures[name].append(way())
            except PEER_ERRORS as error:
                if name.startswith("ours"):
                    raise
                errors[name] = describe(error)
    rows = []
    for name in ways:
        # the first round is not counted
        result = {"error": errors[name]} if name in errors else medians(figures[name][1:])
        rows.append({"way": name, **result})
    return rows


def describe(error: BaseException) -> str:
    """Describe the error of a peer in one line of at most 200 characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def medians(rows: Iterable[Row]) -> Row:
    """Return the median of each figure over `rows`, and all values of "seconds" as "rounds"."""
    rows = list(rows)
    row_of_medians: Row = {}
    for name in rows[0]:
        row_of_medians[name] = statistics.median([row[name] for row in rows])
    if "seconds" in row_of_medians:
        row_of_medians["rounds"] = [row["seconds"] for row in rows]
    return row_of_medians


def seconds(action: Callable[[], Any]) -> float:
    """Measure the seconds of `action`, with its work on the device's current stream.

    Copies on other streams go on.
    """
    begun_at = time.perf_counter()
    action()
    if ACCELERATOR is not None:
        torch.accelerator.current_stream().synchronize()
    return time.perf_counter() - begun_at


def timed(action: Callable[[], Any]) -> Row:
    """Measure the seconds of `action` as a row."""
    return {"seconds": seconds(action)}


@contextmanager
def scratch(place: Path | None) -> Iterator[Path]:
    """Make a temporary folder for the block."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def files(folder: Path) -> list[Path]:
    """Return all files below `folder`, or the file itself."""
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sync_tree(folder: Path) -> None:
    """Sync everything below `folder`, so that it survives a power cut."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def bytes_of(folder: Path) -> int:
    """Return the bytes of all files below `folder`; those with two names are counted once."""
    sizes = {}
    for path in files(folder):
        status = path.stat()
        sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def drop_cached(folder: Path) -> None:
    """Take the files below `folder` out of the page cache."""
    for path in files(folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def fill_cache(folder: Path) -> None:
    """Bring the files below `folder` into the page cache."""
    for path in files(folder):
        with path.open("rb", buffering=0) as handle:
            while handle.read(1 << 24):
                pass


def touch(loaded: Any) -> None:
    """Read a byte of every page of every tensor: what is only mapped has not been loaded."""
    state = loaded.state_dict() if isinstance(loaded, nn.Module) else loaded
    for tensor in state.values():
        if tensor.numel():
            tensor.detach().reshape(-1).view(torch.uint8)[::4096].sum().item()


def size_of(state: Mapping[str, Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def peak_bytes(action: Callable[[], Any]) -> int:
    """Run `action`; return the peak growth of this process's resident memory meanwhile, in bytes.

    Linux keeps the peak, which is reset first.
    """
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve `action`
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    action()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    """Return a size in the kernel's status of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def in_child(module: str, setting: Setting, *arguments: object, ranks: int = 0) -> list[Row]:
    """Measure the rows of `module` in a child process, or on several ranks.

    The module has `as_child` as its last line. Raises RuntimeError if the process fails.
    """
    launcher: list[str] = []
    environment = dict(os.environ)
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    call = json.dumps([setting.rounds, str(setting.folder), setting.ways, *arguments])
    process = subprocess.run(
        [sys.executable, *launcher, "-m", f"scripts.bench.{module}", call],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    result = setting.folder / f"{module}.json"
    if process.returncode or not result.exists():
        output = process.stdout.decode(errors="replace")
        raise RuntimeError(f"{module}: ended with status {process.returncode}\n{output}")
    rows: list[Row] = json.loads(result.read_text())
    result.unlink()
    return rows


def as_child(module: str, measure: Callable[..., list[Row]]) -> None:
    """Call `measure` with the arguments of `in_child`, in the child; rank 0 writes the rows."""
    rounds, folder, ways, *arguments = json.loads(sys.argv[1])
    rows = measure(Setting(rounds, Path(folder), tuple(ways)), *arguments)
    if os.environ.get("RANK", "0") == "0":
        (Path(folder) / f"{module}.json").write_text(json.dumps(rows))
