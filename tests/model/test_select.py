"""Selection: what is refused before anything moves, ties that are declared, dtypes."""

import pytest
import torch
from models import llama, policy_and_value
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import IncompleteError, NotAnAdapterError, SelectionError, UnknownAttributeError


def refused(folder, model, error, words, **asked):
    """The save raises and leaves nothing, not even a stage."""
    with pytest.raises(error, match=words):
        CheckpointSaver().save(model, folder / "out", **asked)
    assert not any(folder.iterdir())


def test_unknown_attribute_names_what_exists(tmp_path):
    model = policy_and_value()
    refused(
        tmp_path,
        model,
        UnknownAttributeError,
        "has no 'polcy'; did you mean policy",
        attribute="polcy",
    )
    refused(tmp_path, model, AttributeError, "LlamaForCausalLM has no 'x'", attribute="policy.x")


def test_attribute_that_is_no_module(tmp_path):
    model = policy_and_value()
    refused(
        tmp_path,
        model,
        SelectionError,
        "'dtype' is a dtype, expected a module",
        attribute="policy.dtype",
    )
    for wrong in (["policy", "policy"], [], 5, b"policy", ["policy", 5], {"policy": 1}):
        refused(tmp_path, model, SelectionError, "attribute=.*each once", attribute=wrong)
        refused(
            tmp_path,
            model,
            SelectionError,
            "attribute=.*each once",
            attribute=wrong,
            adapter_only=False,
        )


def test_attribute_without_tensors(tmp_path):
    """A filter that matches nothing gives `{}`, which others write."""
    model = nn.Module()
    model.empty, model.full = nn.ReLU(), nn.Linear(1, 1)
    refused(tmp_path, model, IncompleteError, "empty: no tensors to save", attribute="empty")


def test_adapter_of_a_model_without(tmp_path):
    refused(
        tmp_path,
        llama(),
        NotAnAdapterError,
        "LlamaForCausalLM has no PEFT adapter",
        adapter_only=True,
    )
    refused(tmp_path, llama(), TypeError, "adapter_only=False", adapter_only=True)


def test_quantised_in_a_form_of_its_own(tmp_path):
    """A quantiser whose weights are no plain tensors is refused by name, before anything is
    written.
    """

    class HfQuantizer:
        def get_state_dict_and_metadata(self, model):
            return None, {}

        def is_serializable(self):
            return True

    class Odd(HfQuantizer):
        def get_state_dict_and_metadata(self, model):
            return {}, {}

    model = llama()
    model.hf_quantizer = Odd()
    refused(tmp_path, model, SelectionError, r"quantised weights \(Odd\) cannot be stored")


def test_declared_tie_that_diverged_is_refused(tmp_path):
    """A tied pair that is two tensors in memory; equal ones are stored once, others are an
    error.
    """
    model = llama()
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    CheckpointSaver().save(model, tmp_path / "equal")
    again = ft_ckpt.load_model(tmp_path / "equal")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(
        IncompleteError,
        match=r"lm_head\.weight and model\.embed_tokens\.weight: the model's config ties",
    ):
        CheckpointSaver().save(model, tmp_path / "diverged")
    assert not (tmp_path / "diverged").exists()


@pytest.mark.parametrize("how", ["shared", "equal", "different"])
def test_weights_that_the_config_does_not_tie_are_in_the_file(how, tmp_path):
    """Transformers ties nothing there, and would fill a head that is in no file with random
    numbers.
    """
    model = llama(tie_word_embeddings=how != "shared")
    weight = model.model.embed_tokens.weight
    model.lm_head.weight = (
        weight if how == "shared" else nn.Parameter(weight.detach() + (how == "different"))
    )
    model.config.tie_word_embeddings = False
    report = CheckpointSaver().save(model, tmp_path / "out")
    read = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in model.state_dict().items())
    again = ft_ckpt.load_model(tmp_path / "out")
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == (how == "shared")
    assert any("lm_head.weight" in note and "config" in note for note in report.notes) == (
        how == "shared"
    )


def test_nonfinite_values_by_policy(tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[0], model.weight[1, 1] = float("nan"), float("inf")
    report = CheckpointSaver().save(model, tmp_path / "kept")
    assert torch.isnan(ft_ckpt.load_model(report.path, into=nn.Linear(2, 2)).bias[0])
    with pytest.raises(IncompleteError, match=r"bias, weight: NaN or infinity in 2 tensor\(s\)"):
        CheckpointSaver(nonfinite="raise").save(model, tmp_path / "refused")
    with torch.no_grad():
        model.bias[0], model.weight[1, 1] = 0.0, 1e6  # finite here, not as it would be stored
    with pytest.raises(IncompleteError, match=r"weight: NaN or infinity in 1 tensor\(s\)"):
        CheckpointSaver(nonfinite="raise", dtype="float16").save(model, tmp_path / "refused")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "complex64"])
def test_nonfinite_values_of_dtypes_that_torch_checks_otherwise(tmp_path, dtype):
    values = torch.tensor([1.0, float("nan")])
    model = nn.ParameterDict(
        {"whole": nn.Parameter(values[:1].to(getattr(torch, dtype)), requires_grad=False)}
    )
    CheckpointSaver(nonfinite="raise").save(model, tmp_path / "whole")
    model["broken"] = nn.Parameter(values.to(getattr(torch, dtype)), requires_grad=False)
    with pytest.raises(IncompleteError, match=r"broken: NaN or infinity in 1 tensor\(s\)"):
        CheckpointSaver(nonfinite="raise").save(model, tmp_path / "refused")


def test_casts_are_counted_and_config_agrees(tmp_path):
    """Float32 masters of a bf16 model double the file while the config says bf16."""
    model = llama()
    model.config.dtype = torch.bfloat16
    report = CheckpointSaver(dtype="config").save(model, tmp_path / "config")
    assert report.casts == {"float32->bfloat16": report.tensors}
    again = ft_ckpt.load_model(report.path)
    assert again.dtype == again.config.dtype == torch.bfloat16
    kept = CheckpointSaver().save(model, tmp_path / "as_is")
    assert kept.casts == {}
    assert ft_ckpt.load_model(kept.path).config.dtype == torch.float32, (
        "what the file holds, not what was configured"
    )
    assert model.config.dtype == torch.bfloat16, "the live config is not touched"


def test_given_state_dict(tmp_path):
    """What the caller gathered is held against the live model before anything is committed."""
    model = llama()
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = CheckpointSaver().save(model, tmp_path / "good", state_dict=good)
    assert ft_ckpt.verify(report.path).ok
    for bad, words in (
        ({}, "model.embed_tokens.weight: missing"),
        ({name: tensor[:0] for name, tensor in good.items()}, r"shape \(0,"),
        ({f"_orig_mod.{name}": tensor for name, tensor in good.items()}, "not in the model"),
    ):
        with pytest.raises(IncompleteError, match=words):
            CheckpointSaver().save(model, tmp_path / "bad", state_dict=bad)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
