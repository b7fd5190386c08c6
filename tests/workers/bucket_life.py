"""A run in a bucket that resumes and saves at every step, up to a given one.

Arguments: that step, settings as JSON.

Prints each step and its losses as JSON, or 0 and the error that ends it.
"""

import json
import sys
import warnings
from typing import Any

import torch
from s3_server import FAST
from training import QUIET, learn, prepared

from ft_ckpt import CheckpointSaver, Every, Keep


def tell(step: int, said: str) -> None:
    print(json.dumps([step, said]), flush=True)


def train(steps: int, settings: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    run, every, keep = prepared(), Every(steps=1, signals=()), Keep(last=2)
    settings = {"every": every, "keep": keep, "store_options": FAST, **QUIET, **settings}
    with CheckpointSaver(run.accelerator, "s3://bucket/run", **settings) as saver:
        saver.resume()
        if saver.progress.resumed_from is None:
            torch.manual_seed(5)
        for batch in saver.remaining(run.loader, epochs=3):
            if saver.progress.step == steps:
                return
            first, loss = learn(run, batch[0])
            saver.step()
            tell(saver.progress.step, f"{first.hex()} {loss.hex()}")


if __name__ == "__main__":
    try:
        train(int(sys.argv[1]), json.loads(sys.argv[2]))
    except Exception as error:
        tell(0, f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error
