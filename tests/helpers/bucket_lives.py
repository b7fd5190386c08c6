"""Training runs that save to a bucket on loopback, in processes that end or are killed at a chosen
request.
"""

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

    def begun(process: int) -> None:
        if world is not None:
            world.begin(process)
        if fault is not None:
            s3.faults = [fault]

    done = run_python(TRAIN, steps, json.dumps(settings, default=str), begun=begun)
    if fault is not None:
        s3.faults = []
    # a kill may cut the last
    told = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("]")]
    return Life(
        done.returncode,
        "".join(said for step, said in told if not step),
        {n: said for n, said in told if n},
    )


def committed(s3: S3) -> set[int]:
    """Steps of the committed checkpoints; each is verified by reading all of its bytes."""
    names = [name.split("/")[1] for name in s3.names(PREFIX) if name.endswith("/ft_ckpt.json")]
    for name in names:
        assert verify(open_place(f"{BUCKET_RUN}/{name}", **FAST)).ok, name
    return {int(name.rpartition("-")[2]) for name in names}
