"""Runs in a bucket: saved and resumed exactly, on ranks that share no disk."""

import importlib.util

import pytest
from launch import run_cases, selected
from s3_server import running_s3
from training import begin, go_on, whole

pytest.importorskip("obstore")

TOGETHER = [
    "exact/ddp/llama",
    "exact/fsdp2/llama",
    "exact/fsdp2/lora",
    "modes",
    "failing",
    "background",
    "requests",
    "unseen",
]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    with running_s3():
        return run_cases("bucket", selected(request, TOGETHER), tmp_path_factory.mktemp("bucket"))


@pytest.mark.sample("exact/fsdp2/lora", "failing", "requests")
@pytest.mark.parametrize("case", TOGETHER)
def test_two_ranks(outcomes, case):
    assert outcomes[case] == ""


GROUPS = [f"parts/{way}/{when}" for way in ("hsdp", "placed", "hybrid") for when in ("foreground", "background")]


@pytest.fixture(scope="module")
def groups(request, tmp_path_factory):
    with running_s3():
        return run_cases("bucket", selected(request, GROUPS), tmp_path_factory.mktemp("groups"), ranks=4)


@pytest.mark.sample("parts/hybrid/background")
@pytest.mark.parametrize("case", GROUPS)
def test_two_groups_of_two_ranks(groups, case):
    assert groups[case] == ""


@pytest.mark.slow
def test_four_ranks(s3, tmp_path):
    cases = ["exact/ddp/llama", "exact/fsdp2/llama"]
    assert run_cases("bucket", cases, tmp_path, ranks=4) == dict.fromkeys(cases, "")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra")
def test_under_zero(s3, tmp_path):
    cases = ["exact/zero1/llama", "exact/zero3/llama"]
    found = run_cases("bucket", cases, tmp_path, timeout=280, env={"DS_ACCELERATOR": "cpu"})
    assert found == dict.fromkeys(cases, "")


def test_one_process(s3, tmp_path):
    """Stopped after some batches, taken up from the bucket: the losses of the run that was not stopped, bit for bit."""
    expected = whole(tmp_path / "whole")
    for stop in (4, 9):
        run = f"s3://bucket/run-{stop}"
        assert begin(run, stop) + go_on(run) == expected, stop
        assert [name for name in s3.names(f"run-{stop}/") if name.endswith("/ft_ckpt.json")]
        assert not [name for name in s3.names() if "/.ft_ckpt" in name]
