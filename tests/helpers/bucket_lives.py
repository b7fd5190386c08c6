"""Runs into a bucket on loopback, in processes that end, or are killed, at a chosen request."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.forkserver import ensure_running
from typing import Any
from unittest.mock import patch

from nursery import LIBRARIES
from places import python_path
from s3_server import BUCKET, FAST, S3, Asked, Fault

from ft_ckpt import verify
from ft_ckpt.storage.place import Place, open_store

BUCKET_RUN, PREFIX = f"s3://{BUCKET}/run", "run/"
_CONTEXT = multiprocessing.get_context("forkserver")  # its processes are forked from one that has used no client


@dataclass
class Life:
    """What a process did: its status, the error it ended by, and what each of its steps came to."""

    status: int = 0
    error: str = ""
    losses: dict[int, str] = field(default_factory=dict)


def live(s3: S3, steps: int, fault: Callable[[int], Fault] | None = None, **settings: Any) -> Life:
    """Train, saving at every step, up to `steps`, from wherever the run in the bucket is.

    `fault` is given the number of the process, which it may kill. `settings` are of the saver.
    """
    with patch.dict(os.environ, {"PYTHONPATH": python_path()}):
        _CONTEXT.set_forkserver_preload([*LIBRARIES, "training"])
        ensure_running()
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_train, args=(s3.environment(), steps, theirs, settings))
    process.start()
    theirs.close()
    s3.faults = [fault(process.pid or 0)] if fault else []
    life = Life()
    with suppress(EOFError):
        while True:
            step, said = ours.recv()
            if step:
                life.losses[step] = said
            else:
                life.error = said
    process.join()
    s3.faults = []
    life.status = process.exitcode or 0
    return life


def kill_at(number: int, *, acts_first: bool) -> Callable[[int], Fault]:
    """The process is gone when that request comes, or when it has been done."""

    def fault(pid: int) -> Fault:
        def befalls(asked: Asked) -> bool:
            if asked.number == number and not acts_first:
                os.kill(pid, signal.SIGKILL)
            return asked.number == number

        if acts_first:
            return Fault(befalls, cuts="after", then=lambda: os.kill(pid, signal.SIGKILL))
        return Fault(befalls, cuts="before")

    return fault


def committed(s3: S3) -> set[int]:
    """The steps of the checkpoints that readers see, each of which is whole: all bytes of it are read."""
    names = [name.split("/")[1] for name in s3.names(PREFIX) if name.endswith("/ft_ckpt.json")]
    for name in names:
        assert verify(Place(open_store(BUCKET_RUN, **FAST), name)).ok, name
    return {int(name.rpartition("-")[2]) for name in names}


def _train(environment: dict[str, str], steps: int, tell: Any, settings: dict[str, Any]) -> None:
    os.environ.update(environment)
    try:
        _save_each_step(steps, lambda step, said: tell.send((step, said)), settings)
    except Exception as error:
        tell.send((0, f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


def _save_each_step(steps: int, tell: Callable[[int, str], object], settings: dict[str, Any]) -> None:
    import warnings  # here, in the process that trains

    import torch
    from training import QUIET, learn, prepared

    from ft_ckpt import CheckpointSaver, Every, Keep

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run, every, keep = prepared(), Every(steps=1, signals=()), Keep(last=2)
    settings = {"every": every, "keep": keep, "store_options": FAST, **QUIET, **settings}
    with CheckpointSaver(run.accelerator, BUCKET_RUN, **settings) as saver:
        saver.resume()
        if saver.progress.resumed_from is None:
            torch.manual_seed(5)
        for batch in saver.remaining(run.loader, epochs=3):
            if saver.progress.step == steps:
                return
            first, loss = learn(run, batch[0])
            saver.step()
            tell(saver.progress.step, f"{first.hex()} {loss.hex()}")
