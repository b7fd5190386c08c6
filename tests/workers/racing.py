"""One of several processes that save the same steps of a run into a bucket: python racing.py NAME
WAY STEPS.

A line of its standard input begins each step; a line of its output says how it ended. WAY:
"stranger", a run of its own; "zombie", the same run as the others, so that each takes the others
for dead; "commit", the last request alone.
"""

import json
import sys
from dataclasses import replace

from ft_ckpt.checkpoint.commit import open_object_staging, put_manifest
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.errors import CheckpointError
from ft_ckpt.storage.digests import record_of
from ft_ckpt.storage.places import open_place

FILE, SIZE_BYTES = "model.bin", 2 << 20


def save(name: str, way: str, step: int) -> None:
    run = open_place(f"s3://bucket/{way}").folder
    if way == "commit":
        put_manifest(run.within(f"checkpoint-{step}"), name.encode())
        return
    staging = open_object_staging(
        run, f"checkpoint-{step}", run_id=name if way == "stranger" else "one"
    )
    try:
        content = (name * SIZE_BYTES).encode()[:SIZE_BYTES]
        writing = staging.store.create(FILE, SIZE_BYTES)
        writing.write(0, memoryview(content))
        weights = replace(record_of(FILE, content), etag=writing.finish().etag)
        staging.store.write("config.json", name.encode())
        files = (weights, record_of("config.json", name.encode()))
        staging.commit(Manifest((), files, "full", "2026-11-22T00:00:00Z", step=step, run_id=name))
    finally:
        staging.discard()


def main() -> None:
    name, way, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    print("ready", flush=True)
    for step in range(steps):
        sys.stdin.readline()
        try:
            save(name, way, step)
            print(json.dumps(["won", name]), flush=True)
        except CheckpointError as error:
            print(json.dumps([type(error).__name__, str(error)]), flush=True)


if __name__ == "__main__":
    main()
