"""Readers on a client of their own while two nodes save, prune and overwrite."""

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import models
import pytest
import torch
from exact_runs import live_model, saver_of
from network_nodes import Nodes, run_on

import ft_ckpt
from ft_ckpt import load_model, verify
from ft_ckpt.errors import CheckpointError

pytestmark = pytest.mark.slow
MODEL = "llama"
LOADS = 500
READ_SECONDS = 1200
RUN_SECONDS = READ_SECONDS + 100
MAX_SAVES = 20_000
# A client whose list of names is a minute old still finds hundreds of deleted checkpoints.
SECONDS_BETWEEN_SAVES = 0.3


def save_until(nodes: Nodes, run: str, name: str | None, signs: Path) -> int:
    """Save a model whose numbers are all equal to the step, until a reader has had enough; the
    last step.

    `name`: of the one checkpoint that is overwritten; None: each step has its own.
    """
    with nodes.joined() as place:
        live = live_model("fsdp2", MODEL)
        path = None if name is None else place / run / name
        with saver_of(live, place / run, each_rank_writes="on", keep=3) as saver:
            for step in range(1, MAX_SAVES):
                set_all(live.model, step)
                saver.save(live.model, path, step=step, overwrite=name is not None)
                (signs / "begun").touch()
                enough = torch.tensor(int((signs / "enough").exists()))
                torch.distributed.all_reduce(enough)
                if enough:
                    return step
                time.sleep(SECONDS_BETWEEN_SAVES)
    return MAX_SAVES


@torch.no_grad()
def set_all(model: torch.nn.Module, value: int) -> None:
    for parameter in model.parameters():
        parameter.fill_(value)


def step_of(model: torch.nn.Module) -> int:
    """The step of which a loaded model is; fails if its numbers are of several."""
    values = {float(value) for tensor in model.parameters() for value in tensor.detach().unique()}
    assert len(values) == 1, f"numbers of several saves: {values}"
    return int(values.pop())


class Reader(threading.Thread):
    """Loads again and again, from the first save until it has done so often enough."""

    def __init__(self, load: Callable[[], None], signs: Path) -> None:
        super().__init__()
        self.load, self.signs = load, signs
        self.loads = 0
        self.refused: Counter[str] = Counter()  # by the kind of error
        self.last_error = self.failure = ""

    def run(self) -> None:
        end = time.monotonic() + READ_SECONDS
        while not (self.signs / "begun").exists() and time.monotonic() < end:
            time.sleep(0.05)
        while self.loads < LOADS and not self.failure and time.monotonic() < end:
            self.load_once()
        (self.signs / "enough").touch()

    def load_once(self) -> None:
        try:
            self.load()
            self.loads += 1
        except CheckpointError as error:
            self.refused[type(error).__name__] += 1
            self.last_error = traceback.format_exc()
        except Exception:
            self.failure = traceback.format_exc()


@contextmanager
def reading(load: Callable[[], None], signs: Path) -> Iterator[Reader]:
    reader = Reader(load, signs)
    reader.start()
    yield reader
    reader.join()
    print(f"{reader.loads} loads, refused: {dict(reader.refused)}")
    assert not reader.failure, reader.failure
    assert reader.loads == LOADS, reader.last_error


def test_the_latest_is_loaded_while_saves_go_on(nodes, tmp_path):
    run = nodes.reader / "latest"
    model, steps = models.build(MODEL), []

    def load() -> None:
        path = ft_ckpt.latest(run)
        steps.append(step_of(load_model(path, into=model)))
        assert path.name == f"checkpoint-{steps[-1]}"

    with reading(load, tmp_path) as reader:
        last_steps = run_on(nodes, 2, save_until, "latest", None, tmp_path, seconds=RUN_SECONDS)
    assert not reader.refused, reader.last_error
    assert steps == sorted(steps)
    assert steps[-1] <= last_steps[0]


def test_a_checkpoint_is_loaded_while_it_is_overwritten(nodes, tmp_path):
    """No load is of two saves. It may be refused: none of these file systems exchanges folders, and
    sshfs shows the size of the file before.
    """
    final = nodes.reader / "overwritten" / "final"
    model, steps = models.build(MODEL), []

    def load() -> None:
        steps.append(step_of(load_model(final, into=model)))

    with reading(load, tmp_path):
        run_on(nodes, 2, save_until, "overwritten", "final", tmp_path, seconds=RUN_SECONDS)
    assert steps == sorted(steps)
    assert verify(final).problems == ()
