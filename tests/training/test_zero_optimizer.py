"""ZeRO's optimizer state by name, on the same and on other numbers of ranks; the cases are in the worker."""

from types import SimpleNamespace

import pytest
import torch
from launch import run_cases, selected

from ft_ckpt.training import zero_optimizer
from ft_ckpt.training.zero_optimizer import EngineCounters

# Stage 3 comes last: from its first engine on, DeepSpeed adds the bias of linear layers in another way.
TWO = [
    *("whole/zero1", "whole/zero2", "whole/zero1_bf16", "whole/zero2_bf16", "whole/zero1_bf16_gradients32"),
    *("whole/zero2_bf16_robin", "whole/zero2_offload", "young/zero1", "partly/zero2", "refused/zero2", "lifted/zero2"),
    *("weights_alone/zero2_bf16", "scaled/zero2_bf16", "counted/zero2", "unfinished/zero1", "unfinished/zero2"),
    *("unfinished/zero1_bf16_gradients32", "from_plain/zero2", "from_plain/zero2_bf16", "to_plain/zero1"),
    *("leave/zero1", "leave/zero2_bf16", "leave/zero2_bf16_robin", "leave/zero1_bf16_gradients32", "accelerate/zero2"),
    *("grpo/zero2_bf16", "grpo_refused/zero2_bf16"),
    *("whole/zero3", "whole/zero3_bf16", "whole/zero3_bf16_offload", "whole/zero3_bf16_subgroups_persistent"),
    *("young/zero3", "partly/zero3", "refused/zero3", "lifted/zero3", "scaled/zero3_bf16", "unfinished/zero3"),
    *("counted/zero3", "leave/zero3", "leave/zero3_bf16_subgroups_persistent", "from_plain/zero3"),
    *("weights_alone/zero3_bf16", "from_plain/zero3_bf16", "to_plain/zero3", "accelerate/zero3"),
    *("grpo/zero3_bf16", "grpo_refused/zero3_bf16"),
]
ONE = [
    *("whole/zero1", "whole/zero2_bf16", "arrive/zero1:zero2", "arrive/zero2_bf16:zero2_bf16"),
    *("arrive/zero2_bf16_robin:zero2_bf16", "arrive/zero1_bf16_gradients32:zero1_bf16_gradients32"),
    *("leave/zero1", "leave/zero2_bf16", "whole/zero3_bf16", "arrive/zero2_bf16:zero3_bf16", "arrive/zero3:zero3"),
    *("arrive/zero3_bf16_subgroups_persistent:zero3_bf16", "leave/zero3_bf16"),
]
AGAIN = [
    *("arrive/zero1:zero1", "arrive/zero2_bf16:zero2_bf16_robin", "arrive/zero2_bf16:zero1_bf16_gradients32"),
    *("arrive/zero3_bf16:zero2_bf16", "arrive/zero3_bf16:zero3_bf16_subgroups_persistent", "arrive/zero1:zero3"),
]
DEEPSPEED = {"DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("deepspeed")
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def on_two(request, folder):
    """What went wrong in each case on two ranks."""
    return run(folder, "two", 2, to_run(request, TWO))


@pytest.fixture(scope="module")
def on_one(request, folder, on_two):
    """The same on one rank, which goes on from what the two left."""
    return run(folder, "one", 1, to_run(request, ONE))


@pytest.fixture(scope="module")
def again_on_two(request, folder, on_one):
    """The same on two ranks, which go on from what the one left."""
    return run(folder, "again", 2, selected(request, AGAIN))


def to_run(request, cases):
    """The selected cases, and those from which a later launch goes on."""
    chosen = selected(request, cases)
    return [case for case in cases if case in chosen or case.startswith("leave/")]


def run(folder, launch, ranks, cases):
    return run_cases("zero_optimizer", cases, folder / launch, ranks, 280, {**DEEPSPEED, "LEFT": str(folder)})


@pytest.mark.sample("whole/zero1", "unfinished/zero2", "whole/zero3_bf16")
@pytest.mark.parametrize("case", TWO)
def test_on_two_ranks(on_two, case):
    assert on_two[case] == ""


@pytest.mark.sample("arrive/zero3:zero3")
@pytest.mark.parametrize("case", ONE)
def test_on_one_rank_and_from_two(on_one, case):
    assert on_one[case] == ""


@pytest.mark.sample("arrive/zero1:zero3")
@pytest.mark.parametrize("case", AGAIN)
def test_from_one_rank_to_two(again_on_two, case):
    assert again_on_two[case] == ""


def test_the_engine_counts_on():
    def engine(accumulation, **counts):
        return SimpleNamespace(gradient_accumulation_steps=lambda: accumulation, **counts)

    live = engine(4, global_steps=5, global_samples=80, micro_steps=22, skipped_steps=1)
    counters = EngineCounters(live).state_dict()
    assert counters["micro_steps"] == 22
    for accumulation, micro_steps in ((4, 22), (2, 12), (8, 42)):
        again = engine(accumulation)
        EngineCounters(again).load_state_dict(counters)
        assert (again.global_steps, again.global_samples, again.skipped_steps) == (5, 80, 1)
        assert again.micro_steps == micro_steps


def test_an_optimizer_of_another_kind_is_told_apart():
    assert not zero_optimizer.is_zero(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))
