"""Processes that save one step into one bucket at once: one of them makes it, and readers never see
a mixture.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from places import WORKERS, python_path

from ft_ckpt import verify
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, read_manifest
from ft_ckpt.storage.places import open_place

pytest.importorskip("obstore")
NAMES, STEPS = ("a", "b"), 50


def race(way):
    """How each step ended in each process, by the name of the process."""
    command = [sys.executable, str(WORKERS / "racing.py")]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    racers = {name: subprocess.Popen([*command, name, way, str(STEPS)], **pipes) for name in NAMES}
    try:
        assert [racer.stdout.readline() for racer in racers.values()] == ["ready\n"] * len(NAMES)
        ended = []
        for _ in range(STEPS):
            for racer in racers.values():
                racer.stdin.write("\n")
                racer.stdin.flush()
            ended.append(
                {name: json.loads(racer.stdout.readline()) for name, racer in racers.items()}
            )
        return ended
    finally:
        for racer in racers.values():
            racer.kill()
            racer.communicate()


@pytest.mark.slow
def test_one_run_wins_each_step(s3):
    for step, ended in enumerate(race("stranger")):
        winners = [name for name, (outcome, _) in ended.items() if outcome == "won"]
        assert len(winners) == 1, ended
        assert all(
            outcome in ("won", "TargetError", "NameTakenError") for outcome, _ in ended.values()
        ), ended
        there = f"s3://bucket/stranger/checkpoint-{step}"
        assert verify(there).ok
        assert read_manifest(open_place(there)).run_id == winners[0]
    assert not [name for name in s3.names() if ".ft_ckpt-" in name]


def test_one_commit_wins_each_step(s3):
    """The last request, without the marks before it."""
    for step, ended in enumerate(race("commit")):
        assert Counter(outcome for outcome, _ in ended.values()) == {
            "won": 1,
            "NameTakenError": 1,
        }, ended
        winner = next(name for name, (outcome, _) in ended.items() if outcome == "won")
        assert s3.content(f"commit/checkpoint-{step}/{MANIFEST_NAME}") == winner.encode()
        assert any(
            "another save committed to this name at the same time" in text
            for _, text in ended.values()
        )


@pytest.mark.slow
def test_what_writers_that_were_thought_dead_mix_is_damage_and_never_a_checkpoint(s3):
    """Each takes over what the other has begun: a checkpoint that is found whole is of one of them
    alone.
    """
    won = 0
    for step, ended in enumerate(race("zombie")):
        winners = [name for name, (outcome, _) in ended.items() if outcome == "won"]
        there = f"s3://bucket/zombie/checkpoint-{step}"
        committed = f"zombie/checkpoint-{step}/{MANIFEST_NAME}" in s3.names()
        assert len(winners) <= 1, ended
        assert committed == bool(winners), ended
        if committed and verify(there, deep=False).ok:
            won += 1
            assert verify(there).ok
            owner = read_manifest(open_place(there)).run_id
            contents = {
                s3.content(f"zombie/checkpoint-{step}/{name}")[:1]
                for name in ("model.bin", "config.json")
            }
            assert contents == {owner.encode()}, ended
    assert won > STEPS // 4
