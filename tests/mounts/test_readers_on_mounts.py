"""Readers on a client of their own while two nodes save, prune and overwrite."""

import threading
import time
import traceback
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

pytestmark = pytest.mark.slow
MODEL = "llama"
MIN_LOADS = 250
READ_SECONDS = 1200
MAX_SAVES = 2000


def save_until(nodes: Nodes, run: str, stop: Path, overwrite: bool) -> int:
    """Save a model whose numbers are all equal to the step, until `stop` is there; the steps."""
    with nodes.joined() as place:
        live = live_model("fsdp2", MODEL)
        with saver_of(live, place / run, each_rank_writes="on", keep=3) as saver:
            for step in range(1, MAX_SAVES):
                set_all(live.model, step)
                path = place / run / "final" if overwrite else None
                saver.save(live.model, path, step=step, overwrite=overwrite)
                stopped = torch.tensor(int(stop.exists()))
                torch.distributed.all_reduce(stopped)
                if stopped:
                    return step
    return MAX_SAVES


@torch.no_grad()
def set_all(model: torch.nn.Module, value: int) -> None:
    for parameter in model.parameters():
        parameter.fill_(value % 1000)


def step_of(model: torch.nn.Module) -> int:
    """The step of which a loaded model is; fails if its numbers are of several."""
    values = {float(value) for tensor in model.parameters() for value in tensor.detach().unique()}
    assert len(values) == 1, f"numbers of several saves: {values}"
    return int(values.pop())


class Reader(threading.Thread):
    """Loads again and again until it has done so often enough, then creates `stop`."""

    def __init__(self, load: Callable[[], bool], stop: Path) -> None:
        super().__init__()
        self.load, self.stop = load, stop
        self.loads = 0
        self.errors: list[str] = []

    def run(self) -> None:
        end = time.monotonic() + READ_SECONDS
        while self.loads < MIN_LOADS and time.monotonic() < end:
            self.load_once()
        self.stop.touch()

    def load_once(self) -> None:
        try:
            self.loads += self.load()
        except Exception:
            self.errors.append(traceback.format_exc())


@contextmanager
def reading(load: Callable[[], bool], stop: Path) -> Iterator[Reader]:
    reader = Reader(load, stop)
    reader.start()
    yield reader
    reader.join()
    print(f"{reader.loads} loads, {len(reader.errors)} errors")
    assert not reader.errors, "\n".join([f"{len(reader.errors)} errors", *reader.errors[:3]])
    assert reader.loads == MIN_LOADS


def test_the_latest_is_loaded_while_saves_go_on(nodes, tmp_path):
    run = nodes.reader / "latest"
    model, steps = models.build(MODEL), []

    def load() -> bool:
        path = ft_ckpt.latest(run) if run.exists() else None
        if path is None:
            return False
        steps.append(step_of(load_model(path, into=model)))
        assert path.name == f"checkpoint-{steps[-1]}"
        return True

    with reading(load, tmp_path / "stop"):
        last_step = run_on(nodes, 2, save_until, "latest", tmp_path / "stop", False)[0]
    assert steps == sorted(steps)
    assert last_step > 1


def test_a_checkpoint_is_loaded_while_it_is_overwritten(nodes, tmp_path):
    final = nodes.reader / "overwritten" / "final"
    model, steps = models.build(MODEL), []

    def load() -> bool:
        if not final.exists():
            return False
        steps.append(step_of(load_model(final, into=model)))
        return True

    with reading(load, tmp_path / "stop"):
        run_on(nodes, 2, save_until, "overwritten", tmp_path / "stop", True)
    assert steps == sorted(steps)
    assert verify(final).problems == ()
