"""What every rank should hold alike is compared: rank 0's is saved and resumed, and differences are named."""

import pytest
import torch
from launch import run_cases, selected
from seeds import chosen_seed
from torch import nn

from ft_ckpt import CheckpointSaver
from ft_ckpt.distributed.tensor_digests import folded_bits

CASES = [
    "mixture",
    "mixture_background",
    "one_element",
    "one_element_background",
    "alike",
    "refused",
    *[f"all/{way}/{when}" for way in ("local", "statistics", "ignoring") for when in ("foreground", "background")],
    "left",
    "again_and_alike",
    "experts",
    "settings",
    "settings_background",
    "one_sided",
]


QUICK = ("mixture", "alike", "refused", "all/statistics/background", "left", "experts", "settings", "one_sided")

PARTS = [
    *[f"parts/{way}/{when}" for way in ("hsdp", "hybrid", "placed") for when in ("foreground", "background")],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def outcomes(request, folder):
    chosen = {*selected(request, CASES), "left"}  # a test without a case uses what it leaves
    return run_cases("replicas", [case for case in CASES if case in chosen], folder)


@pytest.mark.sample(*QUICK)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(outcomes, case):
    assert outcomes[case] == ""


@pytest.fixture(scope="module")
def of_four(request, tmp_path_factory):
    return run_cases("replicas", selected(request, PARTS), tmp_path_factory.mktemp("parts"), 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", PARTS)
def test_parts_that_several_of_four_ranks_hold(of_four, case):
    assert of_four[case] == ""


def test_another_number_of_ranks_has_rank_0s_and_says_so(outcomes, folder):
    assert outcomes["left"] == ""
    model = nn.ModuleDict({"first": nn.Linear(3, 8), "norm": nn.BatchNorm1d(8), "last": nn.Linear(8, 1)})
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointSaver(None, folder, on_difference="ignore") as saver:
        report = saver.resume(folder / "left" / "state", model=model, optimizer=optimizer).report
    assert report.problems == ()
    assert any("first.weight" in line and "rank 0's" in line for line in report.differences), report
    expected = torch.load(folder / "left" / "held.pt")
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
def test_digest_made_on_a_device_tells_every_bit_and_place(dtype):
    """Each single bit, two elements that change places, and zeros in the middle or at the end."""
    draws = torch.Generator().manual_seed(chosen_seed())
    data = torch.randint(0, 2, (131 * dtype.itemsize,), dtype=torch.uint8, generator=draws)
    seen = {int(folded_bits(data.view(dtype)))}
    for place in range(data.numel()):
        for bit in range(1 if dtype is torch.bool else 8):
            other = data.clone()
            other[place] ^= 1 << bit
            seen.add(int(folded_bits(other.view(dtype))))
    assert len(seen) == 1 + data.numel() * (1 if dtype is torch.bool else 8)
    assert int(folded_bits(data.view(dtype))) == int(folded_bits(torch.cat([data, data])[data.numel() :].view(dtype)))
    swapped = torch.arange(32)
    assert int(folded_bits(swapped)) != int(folded_bits(swapped.flip(0)))
    assert int(folded_bits(swapped)) != int(folded_bits(swapped[torch.arange(32) ^ 1]))
