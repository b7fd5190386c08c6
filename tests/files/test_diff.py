"""What changed between two checkpoints: the figures, and that anything can be opened, a slice at a
time.
"""

import json
import math
from contextlib import closing

import models
import pytest
import torch
from contract_format import filled
from hypothesis import given, settings, strategies as st
from launch import run_python
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from seeds import examples

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.extensions.tools import by_layer, compare_files, diff as room
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.formats.safetensors import NAMES
from ft_ckpt.storage.places import open_place

RUN = "import sys; from ft_ckpt.cli import main; main()"


def compared(one, other):
    with (
        closing(open_source(open_place(one))) as first,
        closing(open_source(open_place(other))) as second,
    ):
        return compare_files(first, second)


def differ(tmp_path, one, other):
    """The difference of two tensors, through files."""
    save_file({"x": one}, tmp_path / "a.safetensors")
    save_file({"x": other}, tmp_path / "b.safetensors")
    (found,) = compared(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    return found


def diff(*arguments):
    answer = run_python(RUN, "diff", *arguments)
    assert answer.returncode in (0, 1), answer.stderr
    return answer.stdout


# Figures


def test_figures(tmp_path):
    found = differ(
        tmp_path, torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([[3.0, 0.0], [-1.0, 6.0]])
    )
    assert (found.name, found.status, found.changed) == ("x", "changed", 1)
    assert (found.sums.largest, found.mean) == (2.0, 0.75)
    assert math.isclose(found.relative, math.sqrt(5) / 5)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 9),
    st.sampled_from(["float32", "bfloat16", "int64", "complex64"]),
)
def test_figures_are_those_of_the_whole(tmp_path_factory, count, slice_size, dtype):
    """However the tensors are cut; NumPy's arithmetic on all of it is the judge."""
    kind = getattr(torch, dtype)
    random = torch.randn(2, count, dtype=torch.complex64) * 1000
    one, other = (random if kind.is_complex else random.real).to(kind).contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "_SLICE_ELEMENTS", slice_size)
        found = differ(tmp_path_factory.mktemp("whole"), one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = (
        torch.view_as_real(t.to(wide)).numpy() if t.is_complex() else t.to(wide).numpy()
        for t in (one, other)
    )
    change = abs(b - a)
    assert found.sums.largest == change.max()
    assert math.isclose(found.mean, change.mean(), rel_tol=1e-12)
    if a.any():
        assert math.isclose(
            found.relative, math.sqrt((change**2).sum() / (a**2).sum()), rel_tol=1e-12
        )


@pytest.mark.parametrize("dtype", sorted(NAMES))
def test_every_type(tmp_path, dtype):
    one = filled((3, 5), dtype)
    one.view(torch.uint8).flatten()[-one.itemsize :] = 0  # the last is finite, and what comes of it
    assert differ(tmp_path, one, one.clone()).status == "equal"
    other = one.clone()
    other.view(torch.uint8).flatten()[-1] ^= 1
    found = differ(tmp_path, one, other)
    assert (found.status, found.sums.largest + found.sums.unbounded > 0) == ("changed", True)


def test_no_numbers_and_infinities(tmp_path):
    one = torch.tensor([math.nan, math.inf, math.inf, 1.0, math.nan])
    assert differ(tmp_path, one, one.clone()).status == "equal"
    found = differ(tmp_path, one, torch.tensor([math.nan, math.inf, 2.0, 3.0, 0.0]))
    assert (found.status, found.sums.unbounded, found.sums.largest, found.relative) == (
        "changed",
        2,
        2.0,
        math.inf,
    )


def test_signs_of_zero_are_bits(tmp_path):
    found = differ(tmp_path, torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.status, found.sums.largest, found.relative) == ("changed", 0.0, 0.0)


def test_other_types_and_shapes(tmp_path):
    one = torch.tensor([1.0, 2.5])
    found = differ(tmp_path, one, one.bfloat16())
    assert (found.status, found.after.dtype, found.changed) == ("equal", "bfloat16", 0)
    assert differ(tmp_path, one, torch.tensor([1.0, 2.7]).half()).status == "changed"
    assert differ(tmp_path, one, one[None]).status == "shape"
    assert differ(tmp_path, torch.empty(0, 3), torch.empty(0, 3)).status == "equal"


def test_order_and_layers(tmp_path):
    names = [
        "model.embed.weight",
        *(f"model.layers.{n}.{p}.weight" for n in (0, 1, 10) for p in "ab"),
        "top",
    ]
    one = {name: torch.ones(4) for name in names}
    other = {
        **one,
        "model.layers.1.a.weight": torch.full((4,), 1.1),
        "model.layers.10.b.weight": torch.full((4,), 3.0),
    }
    other["new.0.bias"] = other.pop("top")
    save_file(one, tmp_path / "a.safetensors")
    save_file(other, tmp_path / "b.safetensors")
    found = compared(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [(each.name, each.status) for each in found][:4] == [
        ("top", "only in A"),
        ("new.0.bias", "only in B"),
        ("model.layers.10.b.weight", "changed"),
        ("model.layers.1.a.weight", "changed"),
    ]
    layers = by_layer(found)
    assert [(each.name, each.tensors, each.changed) for each in layers] == [
        *(("model.layers.10", 2, 1), ("model.layers.1", 2, 1), ("top", 1, 1), ("new.0", 1, 1)),
        *(("model.embed", 1, 0), ("model.layers.0", 2, 0)),
    ]
    assert math.isclose(layers[0].relative, math.sqrt(16 / 8))


def test_layers_of_names(tmp_path):
    names = {
        "model.layers.3.mlp.experts.7.w": "model.layers.3",
        "lm_head.weight": "lm_head",
        "x": "x",
        "0": "0",
        "conv1.weight": "conv1",
    }
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "a.safetensors")
    save_file({name: torch.ones(2) for name in names}, tmp_path / "b.safetensors")
    found = compared(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert {each.name: by_layer([each])[0].name for each in found} == names


# Anything


def model(**change):
    built = models.build("qwen3", seed=1)
    with torch.no_grad():
        for name, factor in change.items():
            built.get_parameter(name.replace("__", ".")).mul_(factor)
    return built


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same model but for one layer: two checkpoints of ours, one of transformers, and single
    files.
    """
    root = tmp_path_factory.mktemp("diff")
    built = model()
    changed = model(model__layers__1__mlp__up_proj__weight=1.5)
    with CheckpointSaver() as saver:
        saver.save(built, root / "ours")
        saver.save(changed, root / "changed", max_shard_size=8000)
    built.save_pretrained(root / "theirs")
    ft_ckpt.convert(root / "ours", root / "ours.h5")
    torch.save(built.state_dict(), root / "state.pt")
    return root


@pytest.mark.parametrize("other", ["ours", "theirs", "ours.h5", "state.pt"])
def test_the_same_weights_however_they_are_kept(checkpoints, other):
    found = compared(checkpoints / "ours", checkpoints / other)
    assert len(found) > 20
    assert {each.status for each in found} == {"equal"}


@pytest.mark.parametrize("other", ["ours", "theirs", "ours.h5", "state.pt"])
def test_a_layer_that_changed(checkpoints, other):
    found = [
        each for each in compared(checkpoints / other, checkpoints / "changed") if each.changed
    ]
    assert [each.name for each in found] == ["model.layers.1.mlp.up_proj.weight"]
    assert math.isclose(found[0].relative, 0.5, rel_tol=1e-6)


def test_adapters(tmp_path):
    """A fresh adapter's B is zero: it has changed without measure, and stands first."""
    tuned = get_peft_model(
        model(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    with CheckpointSaver() as saver:
        saver.save(tuned, tmp_path / "a", adapter_only=True)
        with torch.no_grad():
            for name, tensor in tuned.named_parameters():
                if "lora_B" in name and ".1." in name:
                    tensor.add_(1.0)
        saver.save(tuned, tmp_path / "b", adapter_only=True)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert [(each.changed, each.relative) for each in found] == [(1, math.inf), *[(0, 0.0)] * 3]
    assert "layers.1." in found[0].name


def test_ties_are_found_by_any_name(tmp_path):
    tied = models.build("gpt2", seed=1)
    tied.save_pretrained(tmp_path / "folder")
    torch.save(
        {name: tensor.clone() for name, tensor in tied.state_dict().items()}, tmp_path / "copies.pt"
    )
    found = compared(tmp_path / "folder", tmp_path / "copies.pt")
    assert {each.status for each in found} <= {"equal", "only in B"}
    assert [each.name for each in found if each.changed] in ([], ["lm_head.weight"])


@pytest.mark.slow
def test_memory_is_that_of_slices(tmp_path):
    """The two files are never in memory, nor one of them."""
    code = """
import sys
from contextlib import closing
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.extensions.tools import compare_files
from ft_ckpt.storage.places import open_place
from peak_memory import peak_memory
one, other = map(open_place, sys.argv[1:])
with closing(open_source(one)) as one, closing(open_source(other)) as other:
    with peak_memory() as peak:
        (found,) = compare_files(one, other)
    assert found.changed == 1 and found.sums.largest == 1.0
    print(peak.mib)
"""
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    big = torch.zeros(60_000_000)
    for path in paths:
        torch.save({"x": big}, path)
        big[-1] += 1.0
    result = run_python(code, *paths)
    assert result.returncode == 0, result.stderr
    peak = float(result.stdout.splitlines()[-1])
    # it compares two slices of 8 MiB, and each file has 240 MB
    assert 8 < peak < 100, f"{peak} MiB"


# The command


def test_the_command(checkpoints):
    lines = diff(checkpoints / "ours", checkpoints / "changed").splitlines()
    count = len(compared(checkpoints / "ours", checkpoints / "changed"))
    assert (
        lines[0]
        == f"{checkpoints / 'ours'} -> {checkpoints / 'changed'}: 1 changed, {count - 1} equal"
    )
    assert lines[2].split() == ["layer", "tensors", "largest", "mean", "relative"]
    assert lines[3].split()[:4] == ["model.layers.1", "1", "of", "11"]
    assert lines[5].split() == ["tensor", "changed", "largest", "mean", "relative"]
    assert lines[6].split()[:3] == ["model.layers.1.mlp.up_proj.weight", "36x24", "float32"]
    assert lines[6].split()[-1] == "0.5"
    assert len(lines) == 7


def test_the_command_on_equal_and_on_foreign(checkpoints, tmp_path):
    lines = diff(checkpoints / "ours", checkpoints / "ours.h5").splitlines()
    assert len(lines) == 1
    save_file({f"x.{n}.w": torch.zeros(2) for n in range(3)}, tmp_path / "x.safetensors")
    lines = diff(checkpoints / "ours", tmp_path / "x.safetensors", "--top", "1").splitlines()
    assert ": " in lines[0]
    assert "only in A, 3 only in B" in lines[0]
    assert lines[-1].endswith("more; see --top")


def test_the_command_as_json(checkpoints):
    found = json.loads(
        diff(checkpoints / "theirs", checkpoints / "changed", "--json", "--top", "2")
    )
    assert found["counts"]["changed"] == 1
    assert len(found["tensors"]) == len(found["layers"]) == 2
    assert found["tensors"][0]["a"] == {"shape": [36, 24], "dtype": "float32"}
    assert found["tensors"][0]["relative"] == pytest.approx(0.5)
    assert found["layers"][0] == found["layers"][0] | {
        "name": "model.layers.1",
        "tensors": 11,
        "changed": 1,
    }
