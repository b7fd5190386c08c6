"""A run is resumed bit for bit under every wrapper, and on other numbers of ranks under other wrappers."""

import importlib.util

import pytest
from launch import run_cases, selected

WRAPPERS = ("ddp", "fsdp1", "fsdp1_flat", "fsdp1_mixed", "fsdp2", "fsdp2_mixed", "ddp_compiled")
SAME = [f"exact/{wrapper}/llama" for wrapper in WRAPPERS]
OTHERS = [
    "exact/fsdp2/lora",
    "exact/ddp/partly_frozen",
    "exact/fsdp1/lora",
    "exact/ddp/mixtral",
    "exact/fsdp2_accelerate/llama",
]
ELASTIC = [
    ("ddp", 2, "fsdp2", 2),
    ("fsdp2", 2, "none", 1),
    ("none", 1, "fsdp1", 2),
    ("fsdp2", 2, "fsdp2", 4),
    ("fsdp1", 2, "fsdp2_tensor_parallel", 4),
    ("ddp", 2, "hsdp", 4),
]
MESHES = [
    ("mesh_tensor", 2, "none", 1),
    ("mesh_tensor_fsdp", 4, "mesh_experts", 2),
    ("mesh_experts_tensor", 4, "mesh_tensor_fsdp", 4),
    ("none", 1, "mesh_experts_hybrid", 4),
]
MOVED = ["move/ddp/gpt2", "move/fsdp2_accelerate/llama"]
INTO = [
    "into/ddp/llama",
    "into/fsdp1/llama",
    "into/fsdp1_flat/qwen3",
    "into/fsdp2/mixtral",
    "into/tensor_parallel/qwen3",
]
ZERO = {"DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="module")
def exact(request, tmp_path_factory):
    cases = selected(request, SAME + MOVED + INTO + OTHERS)  # the last one turns all later Accelerators to FSDP
    return run_cases("resume", cases, tmp_path_factory.mktemp("exact"), timeout=280)


@pytest.mark.sample("exact/ddp/llama", "exact/fsdp1/llama", "exact/fsdp2/llama")
@pytest.mark.parametrize("case", SAME)
def test_the_next_losses_are_the_same_bits(exact, case):
    assert exact[case] == ""


@pytest.mark.sample("exact/fsdp2/lora")
@pytest.mark.parametrize("case", OTHERS)
def test_adapters_frozen_layers_and_converted_names_too(exact, case):
    assert exact[case] == ""


@pytest.mark.sample("move/ddp/gpt2")
@pytest.mark.parametrize("case", MOVED)
def test_folders_of_save_state_are_resumed_under_ddp(exact, case):
    assert exact[case] == ""


@pytest.mark.sample("into/fsdp2/mixtral")
@pytest.mark.parametrize("case", INTO)
def test_weights_alone_go_into_wrapped_models(exact, case):
    """What FSDP2 has cut could not be filled at all."""
    assert exact[case] == ""


@pytest.mark.sample("fsdp2-2-none-1")
@pytest.mark.parametrize(("before", "ranks", "after", "more"), ELASTIC, ids=lambda value: str(value))
def test_another_number_of_ranks_under_another_wrapper(tmp_path, before, ranks, after, more):
    """A run that can only go on with as many devices as it began with."""
    left = f"leave/{before}/llama"
    assert run_cases("resume", [left], tmp_path / "first", ranks)[left] == ""
    taken = f"take/{after}/llama"
    env = {"LEFT": str(tmp_path / "first" / left)}
    assert run_cases("resume", [taken], tmp_path / "second", more, env=env)[taken] == ""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "ranks", "after", "more"), MESHES, ids=lambda value: str(value))
def test_another_mesh_of_transformers(tmp_path, before, ranks, after, more):
    """Strided shards, packed experts and experts spread over ranks are read by geometry."""
    first = [f"exact/{before}/experts", f"leave/{before}/experts"]
    assert run_cases("resume", first, tmp_path / "first", ranks) == dict.fromkeys(first, "")
    taken = f"take/{after}/experts"
    env = {"LEFT": str(tmp_path / "first" / first[1])}
    assert run_cases("resume", [taken], tmp_path / "second", more, env=env)[taken] == ""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra")
def test_under_zero_and_out_of_it(tmp_path):
    """DeepSpeed refuses another number of ranks."""
    cases = ["exact/zero1/partly_frozen", "exact/zero2/llama", "exact/zero3/lora", "leave/zero3/llama"]
    cases += ["into/zero2/llama", "into/zero3/llama"]
    outcomes = run_cases("resume", cases, tmp_path / "first", timeout=280, env=ZERO)
    assert outcomes == dict.fromkeys(cases, "")
    env = {"LEFT": str(tmp_path / "first" / "leave/zero3/llama")}
    assert run_cases("resume", ["take/none/llama"], tmp_path / "alone", 1, env=env)["take/none/llama"] == ""
