"""Reads on a disk that fails at one call: each in a process of its own, forked from one that has imported everything.

Run with `faulty.c` preloaded and a JSON of what to try; prints a JSON of what went wrong.
"""

import ctypes
import json
import logging
import random
import shutil
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

import models
import torch
from faulty import CODES, _shim, arm, forked, state

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint import checks
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.errors import CheckpointError

checks.PAUSES_SECONDS = (0.0, 0.0)  # lasting faults would wait at each trial


def prepare(folder: Path) -> None:
    """A run of two checkpoints, an adapter, and a file of each format."""
    folder.mkdir()
    model, optimizer = fresh()
    with CheckpointSaver(None, folder / "run", every=1, max_shard_size=20_000) as saver:
        saver.register(model=model, optimizer=optimizer)
        for step in (1, 2):
            model(**models.batch(step)).loss.backward()
            optimizer.step()
            saver.step()
    with CheckpointSaver() as saver:
        saver.save(models.lora(), folder / "adapter", adapter_only=True)
    for suffix in (".safetensors", ".pt", ".h5"):
        ft_ckpt.save(state(3), folder / f"out{suffix}")
    ft_ckpt.save(state(3), folder / "packed.h5", compression="gzip")


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = models.llama()
    return model, torch.optim.AdamW(model.parameters())


def said_of(value: object) -> str:
    """A text for a value: equal texts for equal tensors."""
    if isinstance(value, torch.Tensor):
        return (
            f"{value.dtype}{tuple(value.shape)}{value.double().sum().item()!r}{value.double().square().sum().item()!r}"
        )
    if isinstance(value, dict):
        return str({key: said_of(one) for key, one in value.items()})
    return str([said_of(one) for one in value]) if isinstance(value, (list, tuple)) else repr(value)


def read_model(folder: Path, **options: object) -> str:
    return said_of(ft_ckpt.load_model(folder / "run/checkpoint-2", **options).state_dict())


def read_adapter(folder: Path) -> str:
    return said_of(ft_ckpt.load_model(folder / "adapter", base=models.llama(), check_base=False).state_dict())


def read_run(folder: Path) -> str:
    model, optimizer = fresh()
    with CheckpointSaver(None, folder / "run") as saver:
        saver.register(model=model, optimizer=optimizer)
        progress = saver.resume()
        return said_of([progress.step, model.state_dict(), optimizer.state_dict()["state"]])


def read_verdict(folder: Path) -> str:
    report = ft_ckpt.verify(folder / "run/checkpoint-2")
    return "" if report.ok else f"told: {report.problems}"


def read_file(name: str, folder: Path, **options: object) -> str:
    return said_of(dict(ft_ckpt.load(folder / name, **options)))


def read_copy(folder: Path) -> str:
    target = folder.with_name(f"{folder.name}.copy")
    ft_ckpt.copy(folder / "run/checkpoint-2", target)
    return str(ft_ckpt.verify(target).ok)


READS = {
    "load_model": read_model,
    "load_model verified": partial(read_model, verify=True),
    "adapter": read_adapter,
    "resume": read_run,
    "verify": read_verdict,
    "latest": lambda folder: str(ft_ckpt.latest(folder / "run")),
    "discover": lambda folder: str([info.manifest.step for info in discover(folder / "run")]),
    ".safetensors": partial(read_file, "out.safetensors"),
    ".safetensors now": partial(read_file, "out.safetensors", map_location="cpu"),
    ".pt": partial(read_file, "out.pt"),
    ".h5": partial(read_file, "out.h5"),
    ".h5 compressed": partial(read_file, "packed.h5"),
    "copy": read_copy,
}


class Heard(logging.Handler):
    """Collects log messages of level WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        self.lines.append(record.getMessage())


def trial(case: str, folder: Path, number: int, code: int, on: bool) -> str:
    """JSON of a read whose call `number` fails: its value or error, its number of calls, and its warnings."""
    heard = Heard()
    logging.getLogger("ft_ckpt").addHandler(heard)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        arm(folder, number, code, on)
        _shim.faulty_reads(1)
        try:
            found = READS[case](folder)
        except CheckpointError as error:
            found = f"ours: {type(error).__name__}: {error}"
        except BaseException as error:
            found = f"foreign {''.join(traceback.format_exception(error))[-3500:]}"
        finally:
            _shim.faulty_disarm()
    told = [str(one.message) for one in warned] + heard.lines
    return json.dumps(
        [found, _shim.faulty_count(), [one for one in told if str(folder) in one or "checkpoint-" in one]]
    )


def campaign(root: Path, cases: list[str], most: int, seed: int) -> dict[str, object]:
    """Try `most` faults of each case; all of them if it is 0."""
    chances, wrong, tried = random.Random(seed), [], {}
    folder = root / "reads"
    assert not (said := forked(lambda: prepare(folder) or "")), said
    for case in cases:
        expected, calls, told = json.loads(forked(partial(trial, case, folder, 0, 0, False)))
        assert not told, (case, told)
        assert not expected.startswith(("ours", "foreign")), (case, expected)
        faults = [(n, name, on) for n in range(1, calls + 1) for name in CODES for on in (False, True)]
        faults = [each for each in faults if not each[2] or each[1] in ("EMFILE", "EIO", "ESTALE")]
        faults, slowest, refused = chances.sample(faults, min(most, len(faults))) if most else faults, 0.0, 0
        for call, name, on in faults:
            begun = time.monotonic()
            said = forked(partial(trial, case, folder, call, CODES[name], on))
            shutil.rmtree(folder.with_name(f"{folder.name}.copy"), ignore_errors=True)
            slowest = max(slowest, time.monotonic() - begun)
            problem = judged(said, expected)
            refused += said.startswith('["ours')
            if problem:
                wrong.append(f"{name}{' and on' if on else ''} at call {call} of {case}: {problem}")
                print(wrong[-1], file=sys.stderr, flush=True)
        tried[case] = [calls, len(faults), refused]
        print(case, tried[case], len(wrong), f"slowest {slowest:.1f} s", file=sys.stderr, flush=True)
    return {"tried": tried, "wrong": wrong}


def judged(said: str, expected: str) -> str:
    """The problem: an error that is not ours, or wrong values without a warning."""
    if not said.startswith("["):
        return said
    found, _, told = json.loads(said)
    if found == expected or found.startswith(("ours", "told")) or (told and not found.startswith("foreign")):
        return ""
    return f"{_shim.faulty_failed().decode()}: {found[:3000]} instead of {expected[:300]}"


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    _shim.faulty_reads.argtypes = [ctypes.c_int]
    print(json.dumps(campaign(Path(asked["root"]), asked["cases"] or list(READS), asked["most"], asked["seed"])))
