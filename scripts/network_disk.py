"""Tries checkpoints on a mounted file system: killed runs, a reader and a writer, two ranks.

    scripts/network_disk FOLDER              # any mount
    scripts/network_disk FOLDER0 FOLDER1     # two mounts of one file system on this machine
    scripts/network_disk FOLDER --only read --loads 500

Prints a line for each check and ends with exit code 1 if one of them fails. With two mounts, what
is written through the first is read through the second, and each of two ranks has one. All files
are in a new folder below the first, which is deleted at the end.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ft_ckpt.errors import CheckpointError
from scripts.killed_run import ROOT, compare, compare_weights, run
from scripts.network_reader import KEPT, fill, load_patiently, new_model, read_while_written
from scripts.network_training import train_on_rank, train_until_killed

EPOCHS = 3  # of a run that is killed
OVERWRITES = 8
MAX_CACHE_SECONDS = 90.0  # caches of 60 s, and the time of a look
MAX_READ_SECONDS = 900.0
RANKS = 2
# mounts a folder at a path, in a namespace of its own, and runs the rest of the command
BIND = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'


class CheckError(Exception):
    """A checkpoint, or a run, is not as it should be."""


@dataclass(frozen=True)
class Trial:
    """The folder of all checks, as the writer and as the reader see it, and how much is tried."""

    writing: Path
    reading: Path
    kills: int
    loads: int
    chances: random.Random

    @property
    def has_two_mounts(self) -> bool:
        return self.writing != self.reading


def main() -> None:
    arguments = parse_arguments()
    if arguments.read is not None:
        seen, pruned = arguments.folders
        print(json.dumps(read_while_written(seen, pruned, arguments.read)))
        return
    if arguments.train is not None:
        background = arguments.train == "later"
        train_until_killed(arguments.folders[0], arguments.epochs, background=background)
        return
    if arguments.rank:
        train_on_rank(arguments.folders[0])
        return
    if len(arguments.folders) > 2:
        sys.exit("network_disk: expected one folder, or two mounts of one file system")
    first, last = arguments.folders[0], arguments.folders[-1]
    folder = Path(tempfile.mkdtemp(prefix="ft_ckpt-trial-", dir=first))
    try:
        chances = random.Random(arguments.seed)
        reading = last / folder.name
        trial = Trial(folder, reading, arguments.kills, arguments.loads, chances)
        failed = [name for name in arguments.only if not passes(name, trial)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if failed else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/network_disk", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--kills", type=int, default=4, help="of each run that is killed")
    parser.add_argument("--loads", type=int, default=200, help="of the reader")
    parser.add_argument("--seed", type=int, help="of the moments of the kills")
    parser.add_argument(
        "--only", nargs="+", default=list(CHECKS), choices=CHECKS, metavar="CHECK", help=CHECK_HELP
    )
    # the processes of the checks
    parser.add_argument("--train", choices=("now", "later"), help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def passes(name: str, trial: Trial) -> bool:
    """Run one check and print its line; return whether it has passed."""
    begun_at = time.monotonic()
    try:
        result = CHECKS[name](trial)
    except (CheckError, CheckpointError, SystemExit) as error:
        print(f"FAILED  {name}: {error}", flush=True)
        return False
    print(f"ok      {name}: {result} ({time.monotonic() - begun_at:.0f} s)", flush=True)
    return True


# The checks. Each returns what was done, or raises CheckError or SystemExit.


def check_killed(when: str, trial: Trial) -> str:
    """Kill a run that saves "now", when a step ends, or "later", in the background."""
    folder = trial.writing / f"killed-{when}"
    script = ("-m", "scripts.network_disk", "--train", when)
    with tempfile.TemporaryDirectory(prefix="network-disk-") as name:
        whole_run = Path(name) / "whole"
        with contextlib.redirect_stdout(io.StringIO()):  # a line for each process
            (whole,) = run(whole_run, EPOCHS, 0, trial.chances, script)
            lives = run(folder, EPOCHS, trial.kills, trial.chances, script)
            compare(whole, lives)
            compare_weights(whole_run, folder)
    verify_all(trial.reading / folder.name)
    return f"{trial.kills} kills, all losses and the final weights equal, bit for bit"


def check_reader(trial: Trial) -> str:
    """Load checkpoints in a reader while a writer saves one after the other and prunes."""
    import torch

    from ft_ckpt import CheckpointSaver

    folder, seen = trial.writing / "read", trial.reading / "read"
    folder.mkdir()
    reader = start(seen, folder, "--read", trial.loads)
    model = new_model()
    saves = 0
    end = time.monotonic() + MAX_READ_SECONDS
    with CheckpointSaver(None, folder, every=1, keep=KEPT) as saver:
        saver.register(model=model, optimizer=torch.optim.SGD(model.parameters()))
        while reader.poll() is None and time.monotonic() < end:
            saves += 1
            fill(model, saves)
            saver.step()
    report = json.loads(output_of(reader))
    if report["problems"]:
        raise CheckError("; ".join(report["problems"][:3]))
    names = [path.name for path in folder.glob("checkpoint-*")]
    if len(names) != KEPT:
        raise CheckError(f"keep={KEPT} has left {sorted(names)}")
    verify_all(seen)
    loads = f"{report['loads']} loads of {report['checkpoints']} checkpoints"
    return f"{loads} while {saves} were saved, none wrong"


def check_overwrites(trial: Trial) -> str:
    """Load a checkpoint that is overwritten: the old one or the new one, later the new one."""
    from ft_ckpt import CheckpointSaver

    model = new_model()
    written, seen = trial.writing / "overwritten", trial.reading / "overwritten"
    refused = 0
    with CheckpointSaver(None, overwrite=True) as saver:
        for number in range(1, OVERWRITES + 1):
            fill(model, number)
            saver.save(model, written)
            value, refusals = load_patiently(seen)
            refused += refusals
            if value not in range(1, number + 1):
                raise CheckError(f"after overwrite {number} the reader has {value}")
    end = time.monotonic() + MAX_CACHE_SECONDS
    while value != OVERWRITES:
        if time.monotonic() > end:
            raise CheckError(f"the reader sees the old one for {MAX_CACHE_SECONDS:g} s")
        time.sleep(0.1)
        value, _ = load_patiently(seen)
    verify_all(seen)
    result = f"{OVERWRITES} times, the old one or the new one was read"
    return f"{result}; {refused} loads had to be tried again"


def check_ranks(trial: Trial) -> str:
    """Save under FSDP2 on two ranks, now and in the background, and resume."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    processes = []
    with tempfile.TemporaryDirectory(prefix="network-disk-") as point:
        for rank in range(RANKS):
            prefix: list[str | Path] = []
            folder = trial.writing
            if trial.has_two_mounts:
                mounted = (trial.writing, trial.reading)[rank]
                namespace = ["unshare", "--mount", "--propagation=private", "sh", "-c", BIND, "sh"]
                prefix, folder = [*namespace, mounted, point], Path(point)
            variables = {"RANK": f"{rank}", "WORLD_SIZE": f"{RANKS}", **address}
            processes.append(start(folder / "ranks", "--rank", prefix=prefix, **variables))
        for process in processes:
            output_of(process)
    for when in ("now", "later"):
        verify_all(trial.reading / "ranks" / when)
    clients = "two mounts" if trial.has_two_mounts else "one mount"
    return f"{RANKS} ranks on {clients} saved, now and in the background, and resumed exactly"


CHECKS: dict[str, Callable[[Trial], str]] = {
    "killed": partial(check_killed, "now"),
    "killed-in-background": partial(check_killed, "later"),
    "read": check_reader,
    "overwrite": check_overwrites,
    "ranks": check_ranks,
}
CHECK_HELP = f"of {', '.join(CHECKS)} (default: all; ranks on two mounts needs root)"


def start(
    *words: object, prefix: list[str | Path] | None = None, **variables: str
) -> "subprocess.Popen[str]":
    """Start this script with other arguments, after the command `prefix`."""
    command = [*(prefix or []), sys.executable, "-m", "scripts.network_disk", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: "subprocess.Popen[str]") -> str:
    """Return the output of a process. Raises CheckError with its last line if it fails."""
    output, errors = process.communicate()
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise CheckError(lines[-1])
    return output


def verify_all(path: Path) -> None:
    """Compare the digests of a checkpoint, or of all checkpoints of a run. Raises CheckError."""
    command = [sys.executable, "-m", "ft_ckpt", "verify", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CheckError(f"ft-ckpt verify: {(result.stdout + result.stderr).strip()}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
