"""Runs into a bucket on loopback, in processes that end, or are killed, at a chosen request."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launch import run_python
from places import WORKERS
from s3_server import BUCKET, FAST, S3, Asked, Fault

from ft_ckpt import verify
from ft_ckpt.storage.place import Place, open_store

BUCKET_RUN, PREFIX = f"s3://{BUCKET}/run", "run/"
TRAIN = (WORKERS / "bucket_life.py").read_text()


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

    def begun(pid: int) -> None:
        s3.faults = [fault(pid)] if fault else []

    done = run_python(TRAIN, steps, json.dumps(settings, default=str), begun=begun)
    s3.faults = []
    told = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("]")]  # a kill may cut the last
    return Life(done.returncode, "".join(said for step, said in told if not step), {n: said for n, said in told if n})


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
