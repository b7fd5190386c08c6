"""Training runs that save to a bucket on loopback; a process may be killed at a chosen request."""

import json
from dataclasses import dataclass, field
from typing import Any

from faults import World
from http_server import Fault
from launch import run_python
from places import WORKERS
from s3_server import BUCKET, FAST, S3

from ft_ckpt import verify
from ft_ckpt.storage.places import open_place

BUCKET_RUN, PREFIX = f"s3://{BUCKET}/run", "run/"
TRAIN = (WORKERS / "bucket_life.py").read_text()


@dataclass
class Life:
    """Result of a process: its exit status, its final error, and the loss of each step."""

    status: int = 0
    error: str = ""
    losses: dict[int, str] = field(default_factory=dict)


def live(
    s3: S3, steps: int, world: World | None = None, fault: Fault | None = None, **settings: Any
) -> Life:
    """Train up to `steps`, saving at every step, from the state of the run in the bucket.

    A world can kill the process. `fault` meets the requests after its start. `settings` go to the
    saver.
    """

    def begin_faults(process: int) -> None:
        if world is not None:
            world.begin(process)
        if fault is not None:
            s3.faults = [fault]

    result = run_python(TRAIN, steps, json.dumps(settings, default=str), begun=begin_faults)
    if fault is not None:
        s3.faults = []
    life = Life(result.returncode)
    for line in result.stdout.splitlines():
        if not line.endswith("]"):  # a kill has cut the last one
            continue
        step, text = json.loads(line)
        if step:
            life.losses[step] = text
        else:
            life.error = text
    return life


def committed(s3: S3) -> set[int]:
    """Return the steps of the committed checkpoints, after reading all of their bytes."""
    names = [name.split("/")[1] for name in s3.names(PREFIX) if name.endswith("/ft_ckpt.json")]
    for name in names:
        assert verify(open_place(f"{BUCKET_RUN}/{name}", **FAST)).ok, name
    return {int(name.rpartition("-")[2]) for name in names}
