"""An adapter's base is part of what is saved, loaded and resumed: the same one, or told."""

import json

import models
import peft
import pytest
import torch
from compare import assert_agree, logits
from models import trained
from quantised_weights import pack_linear_layers
from small_checkpoints import edit
from transformers import Qwen3ForCausalLM, TorchAoConfig

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import BaseMismatchError, LoadError, SelectionError


def adapted(init=True, seed=0, **settings):
    if init == "kasa":
        init, settings = True, {"kasa_config": peft.tuners.lora.config.KasaConfig(), **settings}
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init, **settings
    )
    return trained(peft.get_peft_model(models.build("qwen3", seed=seed), config))


def saver_of(model, folder):
    saver = CheckpointSaver(directory=folder, on_difference="ignore")
    saver.register(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
    )
    return saver


# What is saved


def test_a_model_with_adapters_asks_for_a_choice(tmp_path):
    """Every other reader takes the base in the folder for the trained model."""
    model = adapted()
    with pytest.raises(SelectionError, match=r"adapter_only=True.*adapter_only=False"):
        CheckpointSaver().save(model, tmp_path / "out")
    pair = models.PolicyAndValue(model)
    for attribute in ("policy", ["policy", "value_head"]):
        with pytest.raises(SelectionError, match="policy: has PEFT adapters"):
            CheckpointSaver().save(pair, tmp_path / "out", attribute=attribute)
    assert not (tmp_path / "out").exists()
    CheckpointSaver().save(pair, tmp_path / "out", attribute="value_head")


def test_a_merged_model_asks_for_nothing(tmp_path):
    model = adapted()
    expected = logits(model)
    merged = model.merge_and_unload()
    CheckpointSaver().save(merged, tmp_path / "out")
    assert_agree(logits(ft_ckpt.load_model(tmp_path / "out")), expected)


@pytest.mark.parametrize("only", [True, False])
def test_layers_with_a_merged_adapter_are_refused(tmp_path, only):
    """The base of a merged layer is no base: looked for at each save, whatever is known of the
    model.
    """
    model = adapted()
    with saver_of(model, tmp_path) as saver:
        saver.save_state(path=tmp_path / "state")
        saver.save(model, tmp_path / "one", adapter_only=only)
        saver.save(model, tmp_path / "two", adapter_only=only)
        model.merge_adapter()
        for call in (
            lambda: saver.save(model, tmp_path / "out", adapter_only=only),
            lambda: saver.save_state(path=tmp_path / "out", adapter_only=only),
        ):
            with pytest.raises(
                SelectionError, match=r"layers\.0\.self_attn\.q_proj.*unmerge_adapter"
            ):
                call()
        model.unmerge_adapter()
        saver.save(model, tmp_path / "three", adapter_only=only)
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_was_merged_and_taken_out_again_leaves_the_base(tmp_path):
    """As it was, but for what adding and taking away rounds: more, the larger the adapter is beside
    the base.
    """
    for seed in range(12):
        torch.manual_seed(seed)
        model = adapted()
        with saver_of(model, tmp_path / str(seed)) as saver:
            model.merge_adapter()
            model.unmerge_adapter()
            saved = saver.save(model, tmp_path / str(seed) / "out", adapter_only=True)
        loaded = ft_ckpt.load_model(saved.path, base=models.build("qwen3"))
        assert_agree(logits(loaded), logits(model))


@pytest.mark.parametrize("init", [True, "gaussian", "pissa", "olora", "pissa_niter_2", "kasa"])
def test_base_and_adapters_come_back_as_they_were(tmp_path, init):
    """The base that the making of an adapter left is stored, and not decomposed once more by
    whoever loads it.
    """
    model = adapted(init)
    CheckpointSaver().save(model, tmp_path, adapter_only=False)
    assert_agree(logits(ft_ckpt.load_model(tmp_path)), logits(model))
    base = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert_agree(
        logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapters" / "default")),
        logits(model),
    )


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_folders_whose_adapter_says_how_it_began(tmp_path, init):
    """As saved before: load_model takes the base of the checkpoint as it is."""
    model = adapted(init)
    path = CheckpointSaver().save(model, tmp_path, adapter_only=False).path
    name = "adapters/default/adapter_config.json"
    config = json.loads((path / name).read_text())
    assert config["init_lora_weights"] is True
    edit(path, name, json.dumps({**config, "init_lora_weights": init}))
    assert_agree(logits(ft_ckpt.load_model(path)), logits(model))


@pytest.mark.parametrize("init", ["pissa", "olora", "kasa"])
def test_an_adapter_that_changes_its_base(tmp_path, init):
    """The base is compared as it is with the adapter on it: the right one is taken, another
    refused.
    """
    model = adapted(init)
    CheckpointSaver().save(model, tmp_path, adapter_only=True)
    assert_agree(logits(ft_ckpt.load_model(tmp_path, base=models.build("qwen3"))), logits(model))
    with pytest.raises(BaseMismatchError, match="sampled tensors"):
        ft_ckpt.load_model(tmp_path, base=models.build("qwen3", seed=1))


def test_an_adapter_that_fits_no_base_is_refused(tmp_path):
    """A random decomposition comes out otherwise each time: the adapter alone is worth nothing."""
    with pytest.raises(SelectionError, match=r"default \(pissa_niter_2\).*adapter_only=False"):
        CheckpointSaver().save(adapted("pissa_niter_2"), tmp_path / "out", adapter_only=True)


# What is resumed


@pytest.mark.parametrize("init", [True, "pissa", "pissa_niter_2"])
def test_resumed_on_its_base(tmp_path, init):
    """What cannot be made again is in the checkpoint; what can is compared."""
    model = adapted(init)
    saver_of(model, tmp_path).save_state(path=tmp_path / "state")
    again = adapted(init)
    report = saver_of(again, tmp_path).resume("must").report
    assert not report.problems
    assert ("base" in [item.name for item in report.items]) == (init != "pissa_niter_2")
    assert_agree(logits(again), logits(model))


def another_seed():
    return adapted(seed=1)


def another_dtype():
    return adapted().to(torch.bfloat16)


def another_layer():
    model = adapted()
    with torch.no_grad():
        model.base_model.model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    return model


@pytest.mark.parametrize("make", [another_seed, another_dtype, another_layer])
def test_resumed_on_another_base(tmp_path, make):
    """A run that goes on on another base has other losses: it is told."""
    model = adapted()
    saver_of(model, tmp_path).save_state(path=tmp_path / "state")
    with pytest.raises(LoadError, match="base: failed: not the base"):
        saver_of(make(), tmp_path).resume("must")
    report = (
        saver_of(make(), tmp_path).resume("must", allow=make is another_dtype or ["base"]).report
    )
    assert any(line.startswith("base: failed") for line in report.problems)


def merged_for_good(model):
    """What ReLoRA does: the adapter goes into the base, and begins anew."""
    with torch.no_grad():
        model.merge_adapter()
        for layer in model.modules():
            if getattr(layer, "merged", False):
                layer.merged_adapters = []
                layer.lora_B["default"].weight.zero_()
    return model


def test_a_base_that_changed_is_saved(tmp_path):
    """The adapter is merged into the base and reset: the base is in the checkpoint from then on,
    and comes back.
    """
    model = adapted()
    saver = saver_of(model, tmp_path)
    assert saver.save_state(path=tmp_path / "before").kind == "adapter"
    trained(merged_for_good(model))
    with pytest.raises(SelectionError, match="base has changed"):
        saver.save_state(path=tmp_path / "alone", adapter_only=True)
    with pytest.raises(SelectionError, match="base has changed"):
        saver.save(model, tmp_path / "alone", adapter_only=True)
    with pytest.warns(UserWarning, match="base has changed"):
        saver.save_state(path=tmp_path / "after")
    again = adapted()
    second = saver_of(again, tmp_path)
    assert not second.resume(tmp_path / "after").report.problems
    assert_agree(logits(again), logits(model))
    with pytest.warns(UserWarning, match="base has changed"):
        assert second.save_state(path=tmp_path / "later").kind == "full"


# Quantised bases whose weights are tensor subclasses


def packed(seed=0):
    base = pack_linear_layers(models.build("qwen3", seed=seed))
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def test_a_base_whose_elements_cannot_be_read_is_known_by_the_others(tmp_path):
    """Quantisers give weights a class that implements what a layer needs, and no access to an
    element.
    """
    model = trained(packed())
    expected = logits(model)
    CheckpointSaver().save(model, tmp_path / "adapter", adapter_only=True)
    again = pack_linear_layers(models.build("qwen3"))
    assert_agree(logits(ft_ckpt.load_model(tmp_path / "adapter", base=again)), expected)
    with pytest.raises(BaseMismatchError, match="sampled tensors"):
        ft_ckpt.load_model(
            tmp_path / "adapter", base=pack_linear_layers(models.build("qwen3", seed=1))
        )


def test_a_run_on_a_base_whose_elements_cannot_be_read(tmp_path):
    model = trained(packed())
    with saver_of(model, tmp_path) as saver:
        saver.save_state()
    again = packed()
    with saver_of(again, tmp_path) as saver:
        saver.resume()
    assert_agree(logits(again), logits(model))
    with (
        saver_of(packed(seed=1), tmp_path) as saver,
        pytest.raises(LoadError, match="not the base"),
    ):
        saver.resume()


@pytest.mark.parametrize(
    "kind",
    ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"],
)
def test_a_base_that_torchao_quantised(tmp_path, kind):
    quantization = pytest.importorskip("torchao.quantization")
    models.build("qwen3").save_pretrained(tmp_path / "base")
    settings = TorchAoConfig(getattr(quantization, kind)())

    def quantised():
        base = Qwen3ForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    model = trained(quantised())
    expected = logits(model)
    with saver_of(model, tmp_path / "run") as saver:
        saver.save(model, tmp_path / "adapter", adapter_only=True)
        saver.save_state()
    base = Qwen3ForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings)
    assert_agree(logits(ft_ckpt.load_model(tmp_path / "adapter", base=base)), expected)
    ft_ckpt.merge(tmp_path / "adapter", tmp_path / "merged", progress=False)
    stored_base = Qwen3ForCausalLM.from_pretrained(tmp_path / "base")
    adapted_base = peft.PeftModel.from_pretrained(stored_base, tmp_path / "adapter")
    merged = Qwen3ForCausalLM.from_pretrained(tmp_path / "merged")
    assert_agree(logits(merged), logits(adapted_base.merge_and_unload()))
    again = quantised()
    with saver_of(again, tmp_path / "run") as saver:
        saver.resume()
    assert_agree(logits(again), expected)
