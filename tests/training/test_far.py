"""Nodes without a shared disk: a run is saved by rank 0 there, and resumed on all of them."""

import importlib.util

import pytest
from launch import run_cases, selected

TOGETHER = [
    "exact/ddp/llama",
    "exact/fsdp1/llama",
    "exact/fsdp2/llama",
    "exact/fsdp2/lora",
    "other_checkpoints",
    "of_accelerate",
    "copies",
    "unreadable",
    "full",
    "leader_fails",
]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    return run_cases("far", selected(request, TOGETHER), tmp_path_factory.mktemp("far"))


@pytest.mark.sample("exact/fsdp2/llama", "other_checkpoints", "leader_fails")
@pytest.mark.parametrize("case", TOGETHER)
def test_two_ranks(outcomes, case):
    assert outcomes[case] == ""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "ranks", "after", "more"), [("fsdp2", 2, "fsdp1", 4), ("none", 1, "ddp", 2)])
def test_another_number_of_ranks_under_another_wrapper(tmp_path, before, ranks, after, more):
    left = f"leave/{before}/llama"
    assert run_cases("resume", [left], tmp_path / "first", ranks)[left] == ""
    taken = f"take/{after}/llama"
    env = {"LEFT": str(tmp_path / "first" / left)}
    assert run_cases("far", [taken], tmp_path / "second", more, env=env)[taken] == ""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra")
def test_under_zero(tmp_path):
    cases = ["exact/zero1/llama", "exact/zero2/llama", "exact/zero3/lora"]
    assert run_cases("far", cases, tmp_path, timeout=280, env={"DS_ACCELERATOR": "cpu"}) == dict.fromkeys(cases, "")
