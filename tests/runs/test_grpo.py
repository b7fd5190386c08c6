"""scripts/grpo.py: a trainer of two ranks, a rollout process and a replay buffer, killed anywhere
and resumed.
"""

import json
import os
import random
import shutil
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from accelerate.state import AcceleratorState, GradientState
from places import ROOT

import ft_ckpt

sys.path.insert(0, str(ROOT / "scripts"))
import grpo

WORDS = ["--steps", "12", "--every", "3", "--no-background"]


def live(
    folder: Path, words: list[str], kill_after: float | None = None, victims: int = 0, seed: int = 0
) -> int:
    """One life of the run: its exit code.

    `kill_after` seconds SIGKILL goes to `victims` of its processes (0: all).
    """
    parent = os.fork()
    if not parent:
        sys.stdout = sys.stderr = (folder.parent / "log").open("a", buffering=1)
        AcceleratorState._reset_state(reset_partial_state=True)  # of earlier tests in this process
        GradientState._reset_state()
        try:
            os._exit(grpo.main(["--output-dir", str(folder), *words]))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        with suppress(psutil.NoSuchProcess):
            tree = [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]
            for process in random.Random(seed).sample(tree, min(victims or len(tree), len(tree))):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    return os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1])


def steps_of(folder: Path) -> dict[int, dict[str, object]]:
    """What was done in each step; a step that was done again after a kill counts as it was done
    last.
    """
    return {
        line["step"]: line
        for line in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
    }


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[int, dict[str, object]], float]:
    """Return the steps of a run that was not killed, and its seconds."""
    folder, begun = tmp_path_factory.mktemp("grpo") / "run", time.monotonic()
    assert live(folder, WORDS) == 0, (folder.parent / "log").read_text()
    return steps_of(folder), time.monotonic() - begun


def killed_until_it_ends(
    folder: Path, expected: dict[int, dict[str, object]], seconds: float, kills: int, *more: str
) -> int:
    """The number of kills that met a living run."""
    chances, met = random.Random(f"{os.environ['FT_CKPT_SEED']}/{folder.name}"), 0
    for number in range(kills):
        victims, is_first = chances.choice([1, 1, 2, 0]), not folder.exists()
        begun = time.monotonic()
        code = live(folder, [*WORDS, *more], chances.uniform(0.1, 1.1 * seconds), victims, number)
        met += code != 0
        for manifest in folder.glob("checkpoint-*/ft_ckpt.json"):
            assert ft_ckpt.verify(manifest.parent).ok, manifest
        if code == 0:
            assert steps_of(folder) == expected
            shutil.rmtree(folder)  # once more, from the beginning
            # the machine has less to do now
            seconds = min(seconds, time.monotonic() - begun) if is_first else seconds
    assert live(folder, [*WORDS, *more]) == 0, (folder.parent / "log").read_text()
    assert steps_of(folder) == expected, (
        "the losses bit for bit, and the prompts with their versions"
    )
    return met


@pytest.mark.slow
def test_no_prompt_is_trained_twice_or_left_out(
    undisturbed: tuple[dict[int, dict[str, object]], float],
) -> None:
    steps, _ = undisturbed
    assert list(steps) == list(range(1, 13))
    settled = [key for line in steps.values() for key, _ in line["trained"]]  # type: ignore[attr-defined]  # of JSON
    settled += [key for line in steps.values() for key in line["dropped"]]  # type: ignore[attr-defined]  # of JSON
    assert len(settled) == len({*settled})
    versions = [(step, version) for step, line in steps.items() for _, version in line["trained"]]  # type: ignore[attr-defined]  # of JSON
    assert all(version < step for step, version in versions)
    assert any(version < step - 1 for step, version in versions), "groups wait in the buffer"


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--no-background", "--background"])
def test_killed_and_resumed(
    tmp_path: Path, undisturbed: tuple[dict[int, dict[str, object]], float], more: str
) -> None:
    """The engine's version is the step's, no prompt is lost or trained twice, the losses are those
    of the run above.
    """
    killed_until_it_ends(tmp_path / "run", *undisturbed, 2, more)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--no-background", "--background"])
def test_killed_at_sixty_moments(
    tmp_path: Path, undisturbed: tuple[dict[int, dict[str, object]], float], more: str
) -> None:
    assert killed_until_it_ends(tmp_path / "run", *undisturbed, 60, more) > 30
