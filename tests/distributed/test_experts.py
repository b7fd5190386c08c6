"""Experts that DeepSpeed has spread over ranks are saved under their numbers, and read by groups of any size."""

import importlib.util

import pytest
from launch import run_cases

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra")
CPU = {"DS_ACCELERATOR": "cpu"}


def left_by(folder, size, ranks, **env):
    cases = ["refuse/2", f"save/{size}"] if ranks == 2 else [f"save/{size}"]
    assert run_cases("experts", cases, folder, ranks, env=CPU | env) == dict.fromkeys(cases, "")
    return {**CPU, "LEFT": str(folder / f"save/{size}")}


def test_two_ranks_and_one(tmp_path):
    env = left_by(tmp_path / "left", 2, 2)
    assert run_cases("experts", ["take/1"], tmp_path / "one", 1, env=env) == {"take/1": ""}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["2", "1bf16"])
def test_partitions_of_zero(tmp_path, stage):
    """Those that have the same experts train parts of each, on any number of ranks."""
    env = left_by(tmp_path / "left", 2, 2, STAGE=stage) | {"STAGE": stage}
    assert run_cases("experts", ["take/1"], tmp_path / "one", 1, env=env) == {"take/1": ""}


@pytest.mark.slow
@pytest.mark.parametrize("writes", ["on", "off"])
@pytest.mark.parametrize("stage", ["0", "1", "1bf16", "2", "2bf16"])
def test_four_ranks_in_groups_of_two_and_of_four(tmp_path, writes, stage):
    """Groups that hold the same again contribute nothing, and read their own; ZeRO's cut it among each other."""
    env = left_by(tmp_path / "left", 2, 4, WRITES=writes, STAGE=stage) | {"STAGE": stage}
    assert run_cases("experts", ["take/2", "take/4"], tmp_path / "again", 4, env=env) == {"take/2": "", "take/4": ""}
    env = left_by(tmp_path / "spread", 4, 4, WRITES=writes, STAGE=stage) | {"STAGE": stage}
    assert run_cases("experts", ["take/2"], tmp_path / "fewer", 2, env=env) == {"take/2": ""}
