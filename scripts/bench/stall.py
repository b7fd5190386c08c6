"""Costs of a background save for a training loop: its call, steps that wait, and slower steps.

A Llama is trained with AdamW, and its weights and moments are saved. A save begins after the first
step. Steps go on until it is on the disk: writes that a library leaves to the system slow them
down, too. They are compared with steps without a save, right before and after. A copy of the state
in memory is the least that a snapshot can take, if it is not hidden. The first save of each library
is a figure by itself, because it allocates memory that later ones reuse; it is compared with a copy
into new memory.
"""

import os
import shutil
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from scripts.bench import limits
from scripts.bench.background import Background, Training, installed_backgrounds
from scripts.bench.common import ACCELERATOR, DEVICE, Row, Setting, Way, in_turns, seconds, timed
from scripts.bench.models import make_model

TITLE = "a save in the background of a training loop"
# before and after the save each; least and most during it
FREE_STEPS, MIN_STEPS, MAX_STEPS = 2, 4, 60
MAX_TOKENS = 1 << 15  # of a step
MAX_LOGITS = 1 << 30  # of a step, tokens times vocabulary; several copies in float32 must fit
STEP_TO_COPY = 2.5  # a step lasts about so many times as long as the copy


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each way to save `size_bytes` of weights and moments in the background."""
    loop = Loop(make_training(size_bytes))
    makers = installed_backgrounds()
    savers: dict[str, Background] = {}
    firsts = {limits.COPY: loop.first_copy_seconds}

    def run(name: str) -> Row:
        if name not in savers:
            savers[name] = makers[name](loop.training)
        row = _save(loop, savers[name], setting.folder / "target")
        firsts.setdefault(name, row["seconds"])
        return row

    ways: dict[str, Way] = {
        limits.COPY: partial(timed, loop.copy),
        **{name: partial(run, name) for name in makers},
    }
    try:
        rows = in_turns(ways, setting)
    finally:
        for saver in savers.values():
            saver.close()
    copy_seconds = rows[0]["seconds"]
    for row in rows:
        row |= _shares(row, copy_seconds)
        row["first_save_seconds"] = firsts.get(row["way"])
        row["tensor_bytes"] = loop.size_bytes
    return rows


def make_training(size_bytes: int) -> Training:
    """Make weights and both moments in float32, together about `size_bytes`; on a GPU in bf16."""
    dtype = torch.float32 if ACCELERATOR is None else torch.bfloat16
    model = make_model(size_bytes // (3 * dtype.itemsize), dtype).to(DEVICE)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def _shares(row: Row, copy_seconds: float) -> Row:
    """Return the ratios of the stall, and of all time lost, to a copy in memory."""
    figures = {"stall_of_copy": "seconds", "lost_of_copy": "lost_seconds"}
    return {share: row[figure] / copy_seconds for share, figure in figures.items() if figure in row}


class Loop:
    """Steps of training, of about the same length each."""

    def __init__(self, training: Training) -> None:
        self.training = training
        words = training.model.config.vocab_size
        self.tokens = torch.randint(words, (1, 4), device=DEVICE)
        self.step()  # makes the moments
        tensors = dict(training.model.named_parameters())
        for number, state in enumerate(training.optimizer.state.values()):
            tensors |= {f"{number}.{name}": value for name, value in state.items() if value.dim()}

        def copy_into_new_memory() -> list[torch.Tensor]:
            return [tensor.detach().to("cpu", copy=True) for tensor in tensors.values()]

        self.size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.first_copy_seconds = seconds(copy_into_new_memory)
        self.copy: Callable[[], None] = limits.make_copy(tensors)
        self.copy()
        step_seconds = STEP_TO_COPY * seconds(self.copy)
        max_tokens = min(MAX_TOKENS, MAX_LOGITS // words)
        while seconds(self.step) < step_seconds and 2 * self.tokens.numel() <= max_tokens:
            rows, length = self.tokens.shape
            # longer sequences up to 512 tokens, then more of them
            shape = (1, 2 * length) if length < 512 else (2 * rows, 512)
            self.tokens = torch.randint(words, shape, device=DEVICE)

    def step(self, saver: Background | None = None) -> None:
        """Make a step, in which the saver may let the optimizer wait."""
        self.training.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        with nullcontext() if saver is None else saver.stepping():
            self.training.optimizer.step()
        self.training.optimizer.zero_grad()


def _save(loop: Loop, saver: Background, target: Path) -> Row:
    """Train with a save, and compare its steps with those without it.

    "lost_seconds" are above the time of as many steps without a save.
    """
    waited = saver.waited_seconds
    free = [seconds(loop.step) for _ in range(FREE_STEPS)]
    call = seconds(lambda: saver.save(target))
    steps: list[float] = []
    is_durable = False
    while len(steps) < MAX_STEPS and not (len(steps) >= MIN_STEPS and is_durable):
        steps.append(seconds(lambda: loop.step(saver)))
        is_durable = is_durable or saver.is_durable(target)
    rest = seconds(saver.finish)
    os.sync()
    free += [seconds(loop.step) for _ in range(FREE_STEPS)]
    shutil.rmtree(target)
    waited = saver.waited_seconds - waited
    return {
        "seconds": call + waited,
        "call_seconds": call,
        "wait_seconds": waited,
        "lost_seconds": call + sum(steps) - len(steps) * statistics.median(free),
        "free_step_seconds": statistics.median(free),
        "step_seconds": statistics.median(steps),
        "longest_step_seconds": max(steps),
        "rest_seconds": rest,
        "steps": len(steps),
        "syncs": saver.syncs,
    }
