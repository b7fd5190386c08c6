"""Saves on a disk that fails at one call: each in a process of its own, forked from one that has imported everything.

Run with `faulty.c` preloaded and a JSON of what to try; prints a JSON of what went wrong.
"""

import ctypes
import errno
import faulthandler
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import models
import torch
from small_checkpoints import contents
from torch import distributed, nn

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.checkpoint.catalog import read_manifest, verify
from ft_ckpt.checkpoint.guards import pin, pin_reason
from ft_ckpt.checkpoint.prune import prune_run
from ft_ckpt.errors import CheckpointError, TargetError

SHORT = 9999  # as in faulty.c: a write takes half of its bytes
CODES = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EINTR", "EMFILE", "ESTALE", "EACCES", "EROFS")} | {
    "short": SHORT
}
_shim = ctypes.CDLL(None)
_shim.faulty_failed.restype = ctypes.c_char_p
_shim.faulty_count.restype = ctypes.c_long


def arm(folder: Path, number: int, code: int, on: bool) -> None:
    """Count the calls below `folder`; let call `number` fail, and with `on` all that come after it."""
    _shim.faulty_arm(os.fsencode(folder), ctypes.c_long(number), code, int(on))


class Two(nn.Module):
    """Two tensors, with different values for each save."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.full((300, 50), float(value)))
        self.two = nn.Parameter(torch.full((7,), float(value)))


def state(value: float) -> dict[str, object]:
    return {"a": torch.full((300, 50), float(value)), "b": torch.full((7,), float(value)), "step": int(value)}


LLAMA = models.llama()


def full(folder: Path, value: int) -> None:
    with CheckpointSaver(max_shard_size=20_000) as saver:
        saver.save(LLAMA if value else Two(1.0), folder / "out", step=value, tokenizer=None)


def hdf5(folder: Path, value: int) -> None:
    with CheckpointSaver(format="h5", compression="gzip" if value % 2 else None) as saver:
        saver.save(Two(value), folder / "out", step=value)


def background(folder: Path, value: int) -> None:
    with CheckpointSaver(background=True) as saver:
        saver.save(Two(value), folder / "out", step=value).result()


def direct(folder: Path, value: int) -> None:
    """Two ranks that each write their share; only calls of rank 0 fail."""
    store = folder.with_name(f"{folder.name}.store-{time.monotonic_ns()}")
    said = in_processes([partial(direct_rank, rank, store, folder, value) for rank in (0, 1)])
    store.unlink(missing_ok=True)
    kinds = {one.partition(":")[0] for one in said}
    if kinds == {"ours"}:
        raise CheckpointError(said[0])
    if kinds != {""}:
        raise AssertionError(f"rank 0: {said[0]}, rank 1: {said[1]}")


def direct_rank(rank: int, store: Path, folder: Path, value: int) -> str:
    if rank:
        _shim.faulty_disarm()
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ |= {name: str(value) for name, value in names.items()}
    group = distributed.FileStore(str(store), 2)
    distributed.init_process_group("gloo", store=group, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    try:
        with CheckpointSaver(each_rank_writes="on") as saver:
            saver.save(nn.parallel.DistributedDataParallel(Two(value)), folder / "out", step=value)
    except CheckpointError as error:
        return f"ours: {error}"
    return ""


def file_of(suffix: str, **options: object):
    def one_file(folder: Path, value: int) -> None:
        ft_ckpt.save(state(value), folder / f"out{suffix}", **options)

    return one_file


def convert(kind: str, name: str):
    def converted(folder: Path, value: int) -> None:
        if not value:
            full(folder.with_name(f"{folder.name}.source"), 1)
        ft_ckpt.convert(folder.with_name(f"{folder.name}.source") / "out", folder / name, format=kind)

    return converted


def prune(folder: Path, value: int) -> None:
    if not value:
        with CheckpointSaver() as saver:
            for step in (3, 4, 5):
                saver.save(Two(step), folder / f"checkpoint-{step}", step=step)
        (folder / "checkpoint-3" / "notes.txt").write_text("mine")
    else:
        for problem in prune_run(folder, Keep(last=1)).problems:
            raise TargetError(problem)


def pinning(folder: Path, value: int) -> None:
    if not value:
        full(folder, 1)
    pin(folder / "out", f"reason {value}")


CASES = {
    "full": full,
    "h5": hdf5,
    "background": background,
    "direct": direct,
    "prune": prune,
    "pin": pinning,
    ".safetensors": file_of(".safetensors"),
    ".pt": file_of(".pt"),
    ".h5 compressed": file_of(".h5", compression="gzip"),
    "convert to h5": convert("h5", "converted"),
    "convert to a file": convert("safetensors", "one.safetensors"),
}


def prepared(case: str, folder: Path) -> None:
    """Set up a trial: the older checkpoint or file, and foreign files beside and inside it."""
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    CASES[case](folder, 0)
    if (folder / "out").is_dir():
        (folder / "out" / "notes.txt").write_text("mine")


def check(case: str, folder: Path, *, left: bool = False) -> str:
    """Damaged and lost files; with `left`, a foreign file may be in a hidden folder until the next save."""
    lost = [
        f"{path}: lost" for path in notes(folder) if not is_mine(path) and not (left and is_kept(folder, path.name))
    ]
    if (folder / "out").is_dir():
        return "; ".join([*lost, *verify(folder / "out").problems])
    if case == "prune":
        found = [folder / "checkpoint-5"]
        return "; ".join([*lost, *(problem for path in found for problem in verify(path).problems)])
    for path in folder.glob("out.*"):
        found = ft_ckpt.load(path, map_location="cpu")
        value = float(found["step"])
        if not all(bool((found[name] == value).all()) for name in "ab"):
            lost.append(f"{path}: mixed")
    return "; ".join(lost)


def is_mine(path: Path) -> bool:
    return path.is_file() and path.read_text() == "mine"


def is_kept(folder: Path, name: str) -> bool:
    return any(is_mine(stage / name) for stage in folder.glob(".*.ft_ckpt-stage-*"))


def notes(folder: Path) -> list[Path]:
    inside = (folder / "out" / "notes.txt", folder / "checkpoint-3" / "notes.txt")
    return [folder / "mine.txt", *(path for path in inside if path.parent.is_dir())]


def listing(folder: Path) -> list[str]:
    return sorted(contents(folder))


def trial(case: str, folder: Path, number: int, code: int, on: bool, expected: list[str]) -> str:
    """Problem of one save whose call `number` fails; "" if there is none."""
    said = run(case, folder, 1, number, code, on)
    where = f"{case}, {_shim.faulty_failed().decode()} {number}"
    if said.startswith("foreign"):
        return f"{where}: {said}"
    if said and not isinstance(folder, str) and "out" not in said and str(folder) not in said:
        return f"{where}: names nothing: {said}"
    if wrong := check(case, folder, left=True):
        return f"{where}: {said or 'no error'}, then {wrong}"
    again = run(case, folder, 2, 0, 0, False)
    if again:
        return f"{where}: {said or 'no error'}, then the next one fails: {again}"
    found = listing(folder)
    if wrong := check(case, folder):
        return f"{where}: after the next one {wrong}"
    if found != expected:
        return f"{where}: {said or 'no error'}, then left: {sorted(set(found) ^ set(expected))}"
    if case == "pin" and "reason 2" not in str(pin_reason(folder / "out")):
        return f"{where}: no pin"
    if (
        (folder / "out").is_dir()
        and case in ("full", "h5", "background", "direct")
        and read_manifest(folder / "out").step != 2
    ):
        return f"{where}: step {read_manifest(folder / 'out').step}"
    return ""


def run(case: str, folder: Path, value: int, number: int, code: int, on: bool) -> str:
    arm(folder, number, code, on)
    try:
        CASES[case](folder, value)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        _shim.faulty_disarm()
        return f"foreign {''.join(traceback.format_exception(error))[-1500:]}"
    finally:
        _shim.faulty_disarm()
    return ""


def forked(work: Callable[[], str], seconds: int = 150) -> str:
    """The result of `work` in its own process, or how that ended; ranks that it starts have a shorter timeout."""
    return in_processes([work], seconds)[0]


def in_processes(works: list[Callable[[], str]], seconds: int = 60) -> list[str]:
    """The results of `works`, each in its own process at the same time, or how that ended and its stacks."""
    ended = []
    with tempfile.TemporaryFile() as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        for child, pipe in [start(work) for work in works]:
            waits = ""
            if not select.select([pipe], [], [], seconds)[0]:
                waits = waiting_of(child)
                os.kill(child, signal.SIGUSR1)
                time.sleep(1)
                os.kill(child, signal.SIGKILL)
            with os.fdopen(pipe, "rb") as stream:
                said = stream.read().decode()
            status = os.waitpid(child, 0)[1]
            stacks.seek(0)
            where = f"ended by signal {os.WTERMSIG(status)}, after {seconds} s if 9; {waits}\n{stacks.read().decode()}"
            ended.append(said if os.WIFEXITED(status) else where)
    return ended


def waiting_of(process: int) -> str:
    """Kernel wait of each thread of a process, and the load of the machine: they tell a slow disk from a hang."""
    threads = sorted(Path(f"/proc/{process}/task").iterdir())
    told = [f"{one.name}: {(one / 'stat').read_text().split()[2]} {(one / 'wchan').read_text()}" for one in threads]
    pressure = [one.read_text().splitlines()[0] for one in Path("/proc/pressure").glob("io")]  # not on every machine
    return f"{', '.join(told)}; load {os.getloadavg()[0]:.0f}; {pressure}"


def start(work: Callable[[], str]) -> tuple[int, int]:
    """Fork a process that does `work`; return its id, and the read end of a pipe for its result."""
    end, into = os.pipe()
    child = os.fork()
    if child:
        os.close(into)
        return child, end
    try:
        warnings.simplefilter("ignore")
        said = work()
    except BaseException:
        said = f"broke: {traceback.format_exc()[-1500:]}"
    os.write(into, said.encode()[:60_000])
    os._exit(0)


def measured(case: str, folder: Path) -> tuple[int, list[str]]:
    """The number of calls of a save, and the files after it and another one."""

    def count() -> str:
        said = run(case, folder, 1, 0, 0, False)
        calls = _shim.faulty_count()
        said = said or run(case, folder, 2, 0, 0, False) or check(case, folder)
        return json.dumps([calls, listing(folder), said])

    calls, expected, said = json.loads(forked(count))
    assert not said, said
    return calls, expected


def campaign(root: Path, cases: list[str], most: int, seed: int) -> dict[str, object]:
    """Try `most` faults of each case; all of them if it is 0."""
    chances, wrong, tried = random.Random(seed), [], {}
    for case in cases:
        origin = root / "origin"
        assert not (said := forked(lambda case=case, origin=origin: prepared(case, origin) or "")), said
        calls, expected = measured(case, copied(origin, root / "count"))
        faults = [(n, name, on) for n in range(1, calls + 1) for name in CODES for on in (False, True)]
        faults = [each for each in faults if not each[2] or each[1] in ("ENOSPC", "EIO", "EROFS")]
        faults, slowest = chances.sample(faults, min(most, len(faults))) if most else faults, 0.0
        for number, (call, name, on) in enumerate(faults):
            folder = copied(origin, root / f"trial-{number}")
            begun = time.monotonic()
            said = forked(partial(trial, case, folder, call, CODES[name], on, expected))
            slowest = max(slowest, time.monotonic() - begun)
            if said:
                wrong.append(f"{name}{' and on' if on else ''} at call {call} of {case}: {said}")
                print(wrong[-1], file=sys.stderr, flush=True)
            removed(folder)
        tried[case] = [calls, len(faults)]
        print(case, tried[case], len(wrong), f"slowest {slowest:.1f} s", file=sys.stderr, flush=True)
        for path in root.iterdir():
            removed(path) if path.is_dir() else path.unlink()
    return {"tried": tried, "wrong": wrong}


def copied(origin: Path, folder: Path) -> Path:
    for one, other in ((origin, folder), (with_source(origin), with_source(folder))):
        if one.exists():
            shutil.copytree(one, other, symlinks=True)
    return folder


def removed(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(with_source(folder), ignore_errors=True)


def with_source(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.source")


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps(campaign(Path(asked["root"]), asked["cases"] or list(CASES), asked["most"], asked["seed"])))
