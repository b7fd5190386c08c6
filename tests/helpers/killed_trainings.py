"""Training runs in forked processes that are killed and started again until they finish."""

import os
import random
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from training import QUIET, learn, prepared

from ft_ckpt import CheckpointSaver, Every, Keep

MAX_NAMES = 5  # two kept, one new, one being dropped, one stage


def train_with_kills(
    folder: Path, ranks: int, chances: random.Random, max_seconds: float, kills: int
) -> int:
    """Start and kill the run in `folder` up to `kills` times, then let it finish.

    A process is killed after at most `max_seconds`. Returns the number of kills.
    """
    spared = 0  # consecutive kills between a commit and the deletion after it
    for killed in range(kills):
        if _life(folder, ranks, killed, chances.uniform(0, max_seconds)):
            return killed
        spared = spared + 1 if check_folder(folder, spared + 1) > MAX_NAMES else 0
    assert _life(folder, ranks, kills, None)
    return kills


def check_folder(folder: Path, spared: int = 0) -> int:
    """Check that committed checkpoints are valid, and that leftovers do not accumulate.

    That holds at any moment. Each of `spared` kills may leave one more folder until the next
    deletion. Returns the number of names in `folder`.
    """
    from ft_ckpt import verify

    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    for name in names:
        if name.startswith("checkpoint-") and (folder / name / "ft_ckpt.json").exists():
            assert verify(folder / name).ok, name
    assert len(names) <= MAX_NAMES + spared, names
    return len(names)


def _life(folder: Path, ranks: int, number: int, seconds: float | None) -> bool:
    """Start the run, kill it after `seconds`, and return whether it had finished before."""
    children = [_fork(folder, rank, ranks, number) for rank in range(ranks)]
    if seconds is not None:
        time.sleep(seconds)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    codes = [os.waitstatus_to_exitcode(status) for status in statuses]
    assert set(codes) <= {0, -signal.SIGKILL}, codes
    return not any(codes)


def _fork(folder: Path, rank: int, ranks: int, number: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        warnings.simplefilter("ignore")
        if ranks > 1:
            address = {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}
            variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, **address}
            os.environ |= {name: str(value) for name, value in variables.items()}
            store = dist.FileStore(f"{folder}.store-{number}", ranks)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
            )
        _train(folder, rank)
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    os._exit(code)


def _train(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    run = prepared()
    every, keep = Every(steps=1, signals=()), Keep(last=2)
    with CheckpointSaver(run.accelerator, folder, every=every, keep=keep, **QUIET) as saver:
        saver.resume()
        if saver.progress.resumed_from is None:
            torch.manual_seed(5)
        with Path(f"{folder}.log-{rank}").open("a", buffering=1) as log:
            for batch in saver.remaining(run.loader, epochs=3):
                step = saver.progress.step + 1
                first, loss = learn(run, batch[0])
                log.write(f"{step} {first.hex()} {loss.hex()}\n")
                saver.step()


def losses(folder: Path, rank: int) -> dict[int, str]:
    """Return the logged values of each step, which are equal if a step ran more than once."""
    values: dict[int, str] = {}
    for line in Path(f"{folder}.log-{rank}").read_text().splitlines():
        step, _, rest = line.partition(" ")
        if len(rest.split()) == 2 and values.setdefault(int(step), rest) != rest:
            raise AssertionError(f"step {step}: {rest}, before the kill {values[int(step)]}")
    return values
