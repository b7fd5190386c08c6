"""Commands in forked processes that are stopped or killed at a chosen call; their parent has all modules loaded.

Run with `faulty.c` preloaded; the arguments are further modules to load. Each line of the input is a command as JSON.
The responses are lines, too: "ready" at first; then, for a command, the process id, "stopped" each time the process
stops, which it does before it begins, and how it ended as JSON.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import torch
from small_checkpoints import make_checkpoint, manifest_of, write_safetensors

import ft_ckpt
from ft_ckpt import Keep
from ft_ckpt.checkpoint.delete import delete_state
from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.checkpoint.prune import prune_run
from ft_ckpt.checkpoint.staging import open_staging
from ft_ckpt.errors import CheckpointError, TargetError
from ft_ckpt.storage import local_disk, object_store, scratch
from ft_ckpt.storage.place import open_place
from ft_ckpt.transfer import copies
from ft_ckpt.transfer.deltas import append_checkpoint, drop_rebuilt, mark_staged

STOP = 9997  # as faulty.c has it
LOADED = ("obstore", "ft_ckpt.model.average", "ft_ckpt.transfer.sync", "ft_ckpt.transfer.buckets")
LARGE_BYTES = 40 << 10  # of a file that is not copied in one call
_shim = ctypes.CDLL(None)
Action = Callable[[Path, str], object]  # given a folder of its own, and the folder or URL to write to


# Initial states


def checkpoint(target: Path, step: int, *, fill: int = 0, **facts: Any) -> None:
    """A checkpoint of a run with a state, and a large file that all of them have."""
    stage = open_staging(target).stage
    (stage / "frozen.bin").write_bytes(b"f" * LARGE_BYTES)
    parts = list(make_checkpoint(stage, step=fill or step).parts)
    (stage / "state").mkdir()
    records = write_safetensors(stage / "state" / "rank-0.safetensors", ["m"], step, "state/rank-0.safetensors")
    parts.append(PartRecord("state", "state", "state", "safetensors", "", tuple(records)))
    facts = {"run_id": "r", "created": f"2026-01-01T00:00:{step:02}+00:00", **facts}
    ft_ckpt.checkpoint.commit.commit_stage(stage, target, replace(manifest_of(stage, parts, step), **facts))


def run_of_two(root: Path, _there: str) -> None:
    for step in (1, 2):
        checkpoint(root / "run" / f"checkpoint-{step}", step)


def two_of_one_model(root: Path, _there: str) -> None:
    """Two steps with equal configs, which have an average; the test's own config holds the step."""
    for step in (1, 2):
        checkpoint(root / "run" / f"checkpoint-{step}", step, fill=1)


def one_model_there(root: Path, there: str) -> None:
    two_of_one_model(root, there)
    ft_ckpt.copy(root / "run" / "checkpoint-1", f"{there}/out")


def four_there(root: Path, there: str) -> None:
    for step in (1, 2, 3, 4):
        checkpoint(root / "four" / f"checkpoint-{step}", step)
    ft_ckpt.sync(root / "four", there)


def some_there(root: Path, there: str) -> None:
    """At the destination: another run, an older save of a checkpoint, a checkpoint too many, and a state too many."""
    for step in (2, 3, 9):
        checkpoint(root / "run" / f"checkpoint-{step}", step, fill=step + 10 * (step == 2))
    ft_ckpt.sync(root / "run", there)
    checkpoint(root / "others" / "other-7", 7, run_id="other")
    ft_ckpt.sync(root / "others", there)
    checkpoint(root / "run" / "checkpoint-2", 2, created="2026-01-02T00:00:00+00:00")
    delete_state(root / "run" / "checkpoint-3")
    (root / "run" / "checkpoint-9").rename(root / "checkpoint-9")


def one_there(root: Path, there: str) -> None:
    """A checkpoint to be overwritten; on a disk, with a foreign file in its folder."""
    run_of_two(root, there)
    ft_ckpt.copy(root / "run" / "checkpoint-1", f"{there}/out")
    if "://" not in there:
        Path(there, "out", "notes.txt").write_text("mine")


def file_there(root: Path, there: str) -> None:
    run_of_two(root, there)
    ft_ckpt.convert(root / "run" / "checkpoint-1", f"{there}/out.safetensors", progress=False)


def run_there(root: Path, there: str) -> None:
    run_of_two(root, there)
    ft_ckpt.sync(root / "run", f"{there}/run")


def adapter(root: Path, there: str) -> None:
    import models

    torch.manual_seed(0)
    base = models.build("qwen3")
    base.save_pretrained(root / "base")
    models.lora(base).save_pretrained(root / "adapter")


def adapter_and_one_there(root: Path, there: str) -> None:
    adapter(root, there)
    one_there(root, there)


def nothing(root: Path, there: str) -> None:
    (root / "mine.txt").write_text("mine")


# Commands


def raise_first(problems: tuple[str, ...]) -> None:
    for problem in problems:
        raise TargetError(problem)


def sync(root: Path, there: str, **more: Any) -> None:
    raise_first(ft_ckpt.sync(root / "run", there, **more).problems)


def prune(root: Path, there: str) -> None:
    raise_first(prune_run(there, Keep(last=2, state=Keep(last=1))).problems)


def copy(root: Path, there: str, **more: Any) -> None:
    ft_ckpt.copy(root / "run" / "checkpoint-2", f"{there}/out", **more)


def convert(root: Path, there: str, name: str = "out", **more: Any) -> None:
    ft_ckpt.convert(root / "run" / "checkpoint-2", f"{there}/{name}", progress=False, **more)


def average(root: Path, there: str, **more: Any) -> None:
    ft_ckpt.average([root / "run" / f"checkpoint-{step}" for step in (1, 2)], f"{there}/out", progress=False, **more)


def merge(root: Path, there: str, **more: Any) -> None:
    ft_ckpt.merge(root / "adapter", f"{there}/out", base=root / "base", progress=False, **more)


def push(root: Path, there: str) -> None:
    ft_ckpt.push(root / "run" / "checkpoint-2", f"{there}/out")


def pull(root: Path, there: str) -> None:
    ft_ckpt.pull(f"{there}/run/checkpoint-2", root / "pulled")


def pull_to_cache(root: Path, there: str) -> None:
    os.environ["FT_CKPT_CACHE"] = str(root / "cache")
    ft_ckpt.pull(f"{there}/run/checkpoint-2")


def pull_from_hub(root: Path, there: str, name: str = "base") -> None:
    from hub_server import using_hub

    url: Any = SimpleNamespace(url=os.environ["HUB_OF_TESTS"])
    with using_hub(url):
        ft_ckpt.pull(f"hf://org/{name}", root / "pulled")


def chain_of_one(root: Path, there: str) -> None:
    run_of_two(root, there)
    append(root, there, 1)


def append(root: Path, there: str, step: int = 2) -> None:
    append_checkpoint(open_place(root / "run" / f"checkpoint-{step}"), open_place(f"{there}/chain"), 10)


def chain_of_two(root: Path, there: str) -> None:
    chain_of_one(root, there)
    append(root, there)
    ft_ckpt.pull(open_place(f"{there}/chain/checkpoint-1"), root / "stage/checkpoint-1")


def rebuild(root: Path, there: str) -> None:
    ft_ckpt.pull(open_place(f"{there}/chain/checkpoint-2"), root / "stage/checkpoint-2", overwrite=True)


def two_rebuilt(root: Path, there: str) -> None:
    chain_of_two(root, there)
    rebuild(root, there)
    for step in (1, 2):
        mark_staged(root / f"stage/checkpoint-{step}")


def drop_older(root: Path, there: str) -> None:
    drop_rebuilt(open_place(f"{there}/chain"), root / "stage", keep=1)


def copy_within(root: Path, there: str) -> None:
    ft_ckpt.copy(f"{there}/run/checkpoint-2", f"{there}/out")


COMMANDS: dict[str, tuple[Action, Action]] = {
    "sync": (run_of_two, sync),
    "sync --delete": (some_there, partial(sync, delete=True)),
    "prune": (four_there, prune),
    "cp": (run_of_two, copy),
    "cp --overwrite": (one_there, partial(copy, overwrite=True)),
    "convert": (run_of_two, convert),
    "convert --overwrite": (one_there, partial(convert, overwrite=True, format="h5")),
    "convert to a file": (run_of_two, partial(convert, name="out.pt")),
    "convert over a file": (file_there, partial(convert, name="out.safetensors")),
    "average": (two_of_one_model, average),
    "average --overwrite": (one_model_there, partial(average, overwrite=True)),
    "merge": (adapter, merge),
    "merge --overwrite": (adapter_and_one_there, partial(merge, overwrite=True)),
    "push": (run_of_two, push),
    "pull": (run_there, pull),
    "pull to the cache": (run_there, pull_to_cache),
    "append": (chain_of_one, append),
    "rebuild": (chain_of_two, rebuild),
    "drop rebuilt": (two_rebuilt, drop_older),
    "cp within a bucket": (run_there, copy_within),
    "pull from the Hub": (nothing, pull_from_hub),
    "pull a checkpoint from the Hub": (nothing, partial(pull_from_hub, name="checkpoint")),
}


# The processes


def serve(answers: TextIO) -> None:
    """Run the commands until the input ends."""
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        end, start = os.pipe()
        pid = os.fork()
        if not pid:
            os._exit(_act(start, **asked))
        os.close(start)
        print(pid, file=answers, flush=True)
        while os.WIFSTOPPED(status := os.waitpid(pid, os.WUNTRACED)[1]):
            print("stopped", file=answers, flush=True)
        with os.fdopen(end) as pipe:
            said = pipe.read()
        ended = {"status": os.waitstatus_to_exitcode(status), "said": said, "calls": _shim.faulty_count()}
        print(json.dumps(ended), file=answers, flush=True)


def _act(tell: int, command: str, step: int, root: str, there: str, call: int, environment: dict[str, str]) -> int:
    """Prepare (`step` 0) or run (1) the command; return the exit status."""
    _shim.faulty_arm(b"", ctypes.c_long(0), 0, 0)  # disarms the shim of the last process
    os.environ.update(environment)
    tempfile.tempdir = str(Path(root, "tmp"))
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    os.kill(os.getpid(), signal.SIGSTOP)  # until its id is known
    with ExitStack() as stack:
        stack.callback(_shim.faulty_disarm)
        _shim.faulty_arm(os.fsencode(root), ctypes.c_long(call), STOP, 0)
        try:
            COMMANDS[command][step](Path(root), there)
        except CheckpointError as error:
            os.write(tell, f"{type(error).__name__}: {error}".encode())
            return 1
        except BaseException:
            os.write(tell, traceback.format_exc()[-3000:].encode())
            return 2
    return 0


if __name__ == "__main__":
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is not a response
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for module in (*LOADED, *sys.argv[1:]):
        importlib.import_module(module)
    _shim.faulty_count.restype = ctypes.c_long
    local_disk.fsync = lambda _: None  # no power is cut here: spare the disk
    copies.SMALL_COPY_BYTES = scratch.SMALL_COPY_BYTES = copies._WORTH_LOOKING_BYTES = LARGE_BYTES // 2
    object_store._PART_BYTES = 5 << 20
    serve(stream)
