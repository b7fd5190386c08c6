"""Campaigns on a network file system: faults of two ranks, each on a node with its own client.

A third client checks what there is after a fault. Each campaign is called in a program of its own
(`run_python`) and prints what it counted as JSON.
"""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import network_disks
import torch
import torch.distributed as dist
from network_disks import NetworkDisk
from node_ranks import Ended, Launch, Nodes, note
from torch import Tensor, nn
from training import EPOCHS, QUIET, Trained, learn, prepared

from ft_ckpt import CheckpointSaver, Every, Keep, latest, verify
from ft_ckpt.errors import CheckpointError, NotACheckpointError

ENTER_SECONDS = 5.0  # enter_timeout_seconds: how long a rank waits for another
# Rank 0 may take a minute longer than ENTER_SECONDS for its verdict. So long the other waits for a
# rank 0 that was killed after it had come.
END_SECONDS = 90.0
START_SECONDS = 60.0
MAX_SHOWN = 4
NAMED = re.compile(r"run/\S|\w\.(safetensors|json)")
PAUSE_SECONDS = 0.3  # after a failed save
FULL_BYTES, BLOCK_BYTES = 64 << 20, 1 << 20
_BALLAST = 1 << 18  # so that each rank writes a part of the file
OPTIONS: dict[str, Any] = {
    **QUIET,
    "each_rank_writes": "on",
    "enter_timeout_seconds": ENTER_SECONDS,
}


class Heavy(nn.Module):
    """A model with parameters that weight decay alone changes, so that a save takes a while."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.ballast = nn.Parameter(torch.linspace(0, 1, _BALLAST))

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.model(rows)
        return output + 0.0 * self.ballast.sum()


@dataclass
class Stage:
    """A disk with three clients: two of nodes, and one of this process."""

    disk: NetworkDisk
    nodes: Nodes
    reader: Path
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


@contextmanager
def staged(kind: str, folder: Path, **options: Any) -> Iterator[Stage]:
    """Run a disk of this kind during the block; then print what was counted."""
    disk_class: type[NetworkDisk] = getattr(network_disks, kind)
    with disk_class(folder / "stand", **options) as disk:
        *clients, reader = disk.clients(3)
        nodes = Nodes(clients, folder / "disk", folder / "local")
        stage = Stage(disk, nodes, reader)
        yield stage
        for error in stage.errors[:MAX_SHOWN]:
            print(error)
        print(json.dumps(stage.counts))


# Kills


def train(rank: int, folder: Path, log: Path, settings: Mapping[str, Any]) -> None:
    """Train to the end of the run in `folder` from wherever it is; `log` gets a line a step."""
    run = prepared(wrap=Heavy)
    every, keep = Every(steps=1, signals=()), Keep(last=2)
    options = {**OPTIONS, "every": every, "keep": keep, **settings}
    saver: CheckpointSaver[Any]
    with CheckpointSaver(run.accelerator, folder, **options) as saver:
        saver.resume()
        note("resumed", rank)
        if saver.progress.resumed_from is None:
            torch.manual_seed(5)
        with Path(f"{log}-{rank}").open("a", buffering=1) as lines:
            for batch in saver.remaining(run.loader, epochs=EPOCHS):
                step = saver.progress.step + 1
                first, loss = learn(run, batch[0])
                lines.write(f"{step} {first.hex()} {loss.hex()} {weights_of(run)}\n")
                saver.step()


def weights_of(run: Trained) -> str:
    """Return a number for the weights and the moments of a step, as hexadecimal text."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in run.model.state_dict().values():
        total += tensor.double().square().sum()
    for moments in run.optimizer.state_dict()["state"].values():
        total += moments["exp_avg_sq"].double().sum()
    return float(total).hex()


def logged(log: Path, rank: int) -> dict[int, str]:
    """Return the logged values of each step, which are equal if a step ran more than once."""
    values: dict[int, str] = {}
    for line in Path(f"{log}-{rank}").read_text().splitlines():
        step, _, rest = line.partition(" ")
        if len(rest.split()) == 3 and values.setdefault(int(step), rest) != rest:
            raise AssertionError(f"step {step}: {rest}, before the kill {values[int(step)]}")
    return values


def killed(kind: str, folder: str, seed: int, kills: int, background: bool) -> None:
    """Kill a rank, or both, at random moments: the run ends as if it had not been killed."""
    chances = random.Random(seed)
    local, settings = Path(folder, "logs"), {"background": background}
    local.mkdir()
    with staged(kind, Path(folder)) as stage:

        def begin(run: str) -> Launch:
            point, log = stage.nodes.point / run, local / run
            return stage.nodes.begin(lambda rank: train(rank, point, log, settings))

        begun_at = time.monotonic()
        refuse_errors(begin("whole").wait(300))
        life_seconds = time.monotonic() - begun_at
        expected = [logged(local / "whole", rank) for rank in (0, 1)]
        assert len(expected[0]) > 4, expected
        while stage.counts["killed"] < kills:
            run = f"run-{stage.counts['runs']}"
            while not _life(stage, begin(run), chances, life_seconds, kills):
                check_whole(stage, stage.reader / run)
            stage.counts["runs"] += 1
            check_whole(stage, stage.reader / run)
            for rank in (0, 1):
                assert logged(local / run, rank) == expected[rank], run


def _life(
    stage: Stage, launch: Launch, chances: random.Random, life_seconds: float, kills: int
) -> bool:
    """Let the ranks train, and kill one or both; return whether they came to the end."""
    launch.await_note("resumed", START_SECONDS)
    if stage.counts["killed"] >= kills:
        refuse_errors(launch.wait(300))
        return True
    time.sleep(chances.uniform(0, life_seconds * 0.7))
    victims = chances.choice([(0,), (1,), (0, 1)])
    for rank in victims:
        launch.kill(rank)
    killed_at = time.monotonic()
    ends = launch.wait(END_SECONDS)
    assert len(ends) == 2, f"a rank hangs after the kill of {victims}: {launch.folder}"
    if all(ended.status == 0 and not ended.error for ended in ends.values()):
        return True
    stage.counts["killed"] += 1
    stage.counts[f"killed {len(victims)}"] += 1
    for ended in ends.values():
        if ended.status == 0 and ended.error:
            stage.counts[f"other rank: {ended.error.partition(':')[0]}"] += 1
            seconds = int(ended.ended_at - killed_at)
            stage.counts["longest wait"] = max(stage.counts["longest wait"], seconds)
    return False


def refuse_errors(ends: Mapping[int, Any]) -> None:
    errors = [ended.error or f"status {ended.status}" for ended in ends.values()]
    assert len(ends) == 2, "a rank did not end"
    assert errors == ["status 0"] * 2, errors


def check_whole(stage: Stage, run: Path) -> None:
    """Check that a third client finds whole checkpoints only, and the newest of them."""
    if not run.exists():
        return
    for path in sorted(run.glob("checkpoint-*")):
        try:
            report = verify(path)
        except NotACheckpointError:  # not yet, or pruned meanwhile
            continue
        assert report.ok, f"{path}: {report.problems}"
        stage.counts["verified"] += 1
    if latest(run) is not None:
        stage.counts["latest"] += 1


# Outages


def save_on(rank: int, folder: Path, settings: Mapping[str, Any], saves: int) -> list[Any]:
    """Save at each of so many steps, or until the note "stop".

    Returns the seconds of each save, and its error or "".
    """
    run = prepared(wrap=Heavy)
    every, keep = Every(steps=1, signals=()), Keep(last=2)
    options = {**OPTIONS, "every": every, "keep": keep, **settings}
    outcomes: list[Any] = []
    saver: CheckpointSaver[Any]
    with CheckpointSaver(run.accelerator, folder, **options) as saver:
        saver.resume()
        rows = torch.ones(2, 3)
        for number in range(saves):
            if agreed(Path("stop").exists()):
                break
            learn(run, rows)
            begun_at, error = time.monotonic(), ""
            try:
                saver.step()
            except CheckpointError as raised:
                error = f"{type(raised).__name__}: {raised}"
                time.sleep(PAUSE_SECONDS)
            outcomes.append([round(time.monotonic() - begun_at, 1), error])
            Path(f"draft-{rank}").write_text(json.dumps(outcomes))
            Path(f"draft-{rank}").rename(f"outcomes-{rank}")
            note(f"saved-{number}", rank)
    return outcomes


def agreed(value: bool) -> bool:
    """Return rank 0's value. Collective."""
    tensor = torch.tensor(float(value))
    dist.broadcast(tensor, 0)
    return bool(tensor)


def check_errors(
    stage: Stage, ends: Mapping[int, Ended], limit_seconds: float, *, node: str = "node-"
) -> None:
    """Check that both ranks have ended, and that each save failed on both or on none.

    A save failed within the limit, and its errors name a file and a node.
    """
    assert len(ends) == 2, "a rank hangs"
    results = [ends[rank].result for rank in (0, 1)]
    assert None not in results, [ended.error for ended in ends.values()]
    for outcomes in zip(*results, strict=True):
        seconds, errors = zip(*outcomes, strict=True)
        stage.counts["saves"] += 1
        if any(errors):
            stage.counts["failed"] += 1
            stage.counts["longest"] = max(stage.counts["longest"], *map(int, seconds))
            stage.errors += errors
            assert all(errors), f"an error on one rank alone: {errors}"
            assert max(seconds) < limit_seconds, (seconds, errors)
            for error in errors:
                assert NAMED.search(error), f"names no file: {error}"
                assert node in error, f"names no node: {error}"


def outages(
    kind: str, folder: str, seed: int, count: int, background: bool, limit_seconds: float
) -> None:
    """Kill the server in mid-save and start it again: saves fail meanwhile, and then work."""
    chances = random.Random(seed)
    with staged(kind, Path(folder)) as stage:
        point = stage.nodes.point / "run"
        settings = {"background": background}
        launch = stage.nodes.begin(lambda rank: save_on(rank, point, settings, 10_000))
        launch.await_note("saved-1", START_SECONDS)
        for _ in range(count):
            time.sleep(chances.uniform(0, 2))
            with stage.disk.server_away(chances.choice([signal.SIGTERM, signal.SIGKILL])):
                time.sleep(chances.uniform(0, 3))
            stage.counts["outages"] += 1
            stage.disk.await_true(lambda: [*(stage.reader / "run").iterdir()], "folder")
            check_whole(stage, stage.reader / "run")
            launch.await_outcome(limit_seconds, is_good=True)
        (launch.folder / "stop").touch()
        check_errors(stage, launch.wait(limit_seconds), limit_seconds)
        check_whole(stage, stage.reader / "run")


def client_killed(kind: str, folder: str, seed: int, victim: int) -> None:
    """Kill the client of one node: an error on both ranks names the node; a new one resumes."""
    chances = random.Random(seed)
    with staged(kind, Path(folder)) as stage:
        point = stage.nodes.point / "run"
        launch = stage.nodes.begin(lambda rank: save_on(rank, point, {}, 10_000))
        launch.await_note("saved-1", START_SECONDS)
        time.sleep(chances.uniform(0, 2))
        stage.disk.kill_client(victim)
        launch.await_outcome(END_SECONDS, is_good=False)
        (launch.folder / "stop").touch()
        check_errors(stage, launch.wait(END_SECONDS), END_SECONDS, node=f"node-{victim}")
        check_whole(stage, stage.reader / "run")
        stage.nodes.clients[victim] = stage.disk.clients(1)[0]
        ends = stage.nodes.begin(lambda rank: save_on(rank, point, {}, 2)).wait(START_SECONDS)
        errors: list[str] = []
        for ended in ends.values():
            errors += [error for _, error in ended.result]
        assert errors == [""] * 4, ends
        check_whole(stage, stage.reader / "run")


def server_gone(kind: str, folder: str, seed: int, number: int, limit_seconds: float) -> None:
    """Kill or stop the server for good: an error on both ranks within the limit."""
    chances = random.Random(seed)
    with staged(kind, Path(folder)) as stage:
        point = stage.nodes.point / "run"
        launch = stage.nodes.begin(lambda rank: save_on(rank, point, {}, 10_000))
        launch.await_note("saved-1", START_SECONDS)
        time.sleep(chances.uniform(0, 2))
        for pid in stage.disk.server_pids:
            os.kill(pid, number)
        launch.await_outcome(limit_seconds, is_good=False)
        (launch.folder / "stop").touch()
        check_errors(stage, launch.wait(2 * limit_seconds), limit_seconds)


def full(kind: str, folder: str, background: bool) -> None:
    """Fill the server, so that a checkpoint has no room, and empty it again."""
    with staged(kind, Path(folder), size_bytes=FULL_BYTES) as stage:
        point = stage.nodes.point / "run"
        settings = {"background": background}
        launch = stage.nodes.begin(lambda rank: save_on(rank, point, settings, 10_000))
        launch.await_note("saved-1", START_SECONDS)
        filler = stage.reader / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            for _ in range(2 * FULL_BYTES // BLOCK_BYTES):
                file.write(bytes(BLOCK_BYTES))
        launch.await_outcome(END_SECONDS, is_good=False)
        check_whole(stage, stage.reader / "run")
        filler.unlink()
        launch.await_outcome(END_SECONDS, is_good=True)
        (launch.folder / "stop").touch()
        check_errors(stage, launch.wait(END_SECONDS), END_SECONDS)
        check_whole(stage, stage.reader / "run")
