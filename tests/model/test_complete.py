"""A checkpoint is complete or refused: what differs from the live model is named, and nothing is
committed.
"""

from types import SimpleNamespace

import models
import pytest
import torch
from compare import assert_same_tensors, reference, stored
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver, errors


def spoiled(model, how):
    """A gathered state dict with one of the faults that wrappers leave in it."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = "model.norm.weight"
    return {
        "empty dict": {},
        "zero size": {**state, name: torch.empty(0)},
        "slice": {**state, name: state[name][:12]},
        "missing": {key: tensor for key, tensor in state.items() if key != name},
        "extra": {**state, "model.extra.weight": state[name]},
        "prefixed": {f"_orig_mod.model.{key}": tensor for key, tensor in state.items()},
        "other dtype": {**state, name: state[name].double()},
    }[how]


@pytest.mark.parametrize(
    "how", ["empty dict", "zero size", "slice", "missing", "extra", "prefixed", "other dtype"]
)
def test_a_spoiled_state_dict_is_refused(how, tmp_path):
    """A KB-sized model, a slice, or prefixed names that load to random weights."""
    model = models.build("qwen3")
    with pytest.raises(errors.IncompleteError, match=r"model\."):
        CheckpointSaver().save(model, tmp_path / "out", state_dict=spoiled(model, how))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.iterdir())


def test_a_true_state_dict_is_taken(tmp_path):
    """As scripts pass what `accelerator.get_state_dict` gathered: clones, so that a tied pair is
    two tensors.
    """
    model = models.build("llama")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    CheckpointSaver().save(model, tmp_path / "ours", state_dict=state)
    assert_same_tensors(stored(tmp_path / "ours"), reference(model, tmp_path / "theirs"))


def test_a_partitioned_parameter_nobody_can_gather_is_refused(tmp_path):
    """`Size([0])` weights of a partitioned model, without the engine that could gather them."""
    model = models.build("qwen3")
    weight = model.model.norm.weight
    shape = weight.shape
    weight.data = torch.empty(0)
    weight.ds_shape, weight.ds_numel, weight.ds_id = shape, shape.numel(), 1
    weight.ds_status = SimpleNamespace(name="NOT_AVAILABLE")
    with pytest.raises(errors.IncompleteError, match=r"model\.norm\.weight"):
        CheckpointSaver().save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_views_of_one_buffer_are_separate_tensors(tmp_path):
    """Tensors that share memory, as under ZeRO, are taken for tied ones and dropped."""
    model = models.build("llama")
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    position = 0
    for parameter in parameters:
        parameter.data = flat[position : position + parameter.numel()].view(parameter.shape)
        position += parameter.numel()
    CheckpointSaver().save(model, tmp_path / "ours")
    assert_same_tensors(
        stored(tmp_path / "ours"), reference(models.build("llama"), tmp_path / "theirs")
    )
    assert (tmp_path / "ours" / "model.safetensors").stat().st_size < flat.nbytes + 8192


def test_a_tied_pair_that_has_drifted_apart_is_not_dropped(tmp_path):
    """Dropping one of two different tensors because the config calls them tied."""
    model = models.build("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    with pytest.raises(errors.IncompleteError, match=r"lm_head\.weight"):
        CheckpointSaver().save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["as_is", "config", "bfloat16", "float32"])
def test_dtype_policy(dtype, tmp_path):
    """Float32 masters of a bfloat16 model, written as they are or as the config says."""
    model = models.build("qwen3").to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.float()
    report = CheckpointSaver(dtype=dtype).save(model, tmp_path)
    expected = torch.bfloat16 if dtype in ("config", "bfloat16") else torch.float32
    assert {tensor.dtype for tensor in stored(tmp_path).values()} == {expected}
    assert str(expected) == f"torch.{ft_ckpt.load_model(tmp_path).config.dtype}".replace(
        "torch.torch", "torch"
    )
    assert dict(report.casts) == (
        {"float32->bfloat16": report.tensors} if expected is torch.bfloat16 else {}
    )


def test_a_tensor_that_is_cast_piece_by_piece_is_whole(tmp_path):
    module = nn.Linear(2050, 2050)  # more elements than are cast at a time
    CheckpointSaver(dtype="bfloat16").save(module, tmp_path)
    found = stored(tmp_path)
    for name, tensor in module.state_dict().items():
        assert torch.equal(found[name], tensor.bfloat16()), name


def test_nonfinite_weights_are_refused_when_asked(tmp_path):
    model = models.build("qwen3")
    model.model.norm.weight.data[3] = float("nan")
    CheckpointSaver().save(model, tmp_path / "as they are")
    with pytest.raises(errors.IncompleteError, match=r"model\.norm\.weight"):
        CheckpointSaver(nonfinite="raise").save(model, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


class Quantised(nn.Module):
    """A layer whose state dict has entries beside its parameters, as quantised layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(2)


def test_entries_beside_the_parameters_are_saved(tmp_path):
    """The quantisation state is in no parameter."""
    model = nn.Sequential(Quantised(), nn.Linear(2, 2))
    CheckpointSaver().save(model, tmp_path)
    assert_same_tensors(stored(tmp_path), model.state_dict())
