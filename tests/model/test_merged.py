"""Merged models: what PEFT merges, to the last rounding, and what the live model computes where
PEFT is wrong.
"""

import json
from typing import Any

import models
import peft
import pytest
import torch
import transformers
from architectures import ARCHITECTURES, inputs, make
from compare import assert_close_tensors, logits, reference, stored
from methods import METHODS, low_rank, with_adapter
from peft import inject_adapter_in_model
from transformers import AutoModelForCausalLM

from ft_ckpt import CheckpointSaver, errors, verify
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.extensions.tools.merging import live_merge as merging
from ft_ckpt.storage.places import open_place

LINEAR = ["q_proj", "v_proj", "down_proj"]
TARGETS = {
    "llama": LINEAR,
    "llama-tied": LINEAR,
    "qwen2": [*LINEAR, "k_proj"],
    "gemma2": LINEAR,
    "phi3": ["qkv_proj", "down_proj"],
    "mixtral": ["q_proj", "v_proj"],
    "qwen3-moe": ["q_proj", "o_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "t5": ["q", "v", "wo"],
    "bart": ["q_proj", "fc1"],
    "bert": ["query", "dense"],
}
EMBEDDING = {"llama-tied": "embed_tokens", "gpt2": "wte", "t5": "shared"}


def saved(model: Any, folder: Any, **settings: Any) -> Any:
    """The report of a merged save that leaves the live model as it is."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = CheckpointSaver().save(model, folder, **{"merged": True, **settings})
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return report


@torch.no_grad()
def outputs(model: Any, kind: str = "text") -> torch.Tensor:
    return model.eval()(**inputs(kind)).logits


def loaded(folder: Any) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype="auto")


def merges_as_peft(architecture: str, method: str, folder: Any) -> None:
    if (architecture, method) == ("bert", "tokens"):
        pytest.skip("PEFT's layer of trained tokens leaves out the bias of a head")
    base, kind = make(ARCHITECTURES[architecture]), ARCHITECTURES[architecture].inputs
    try:
        model = with_adapter(base, METHODS[method](TARGETS[architecture]))
        live = outputs(model, kind)
    except (TypeError, ValueError, RuntimeError) as error:
        # what PEFT does not make, or makes so that it cannot run
        pytest.skip(f"PEFT: {error}")
    report = saved(model, folder / "ours")
    assert not any("lora" in name or "base_layer" in name for name in stored(folder / "ours"))
    torch.testing.assert_close(outputs(loaded(folder / "ours"), kind), live, rtol=1e-4, atol=1e-4)
    expected = reference(model.merge_and_unload(), folder / "theirs")
    assert_close_tensors(stored(folder / "ours"), expected)
    assert report.tensors == len(expected)
    assert not (folder / "ours" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    "method", ["bias", "dora", "loha", "adalora", "ia3", "oft", "vera-seed", "shira", "pissa"]
)
def test_as_peft_merges_it(method, tmp_path):
    merges_as_peft("llama-tied", method, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "method"), [("gpt2", "dora"), ("t5", "lokr"), ("mixtral", "rslora")]
)
def test_architectures_of_their_own_kind(architecture, method, tmp_path):
    merges_as_peft(architecture, method, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", TARGETS)
def test_every_method_on_every_architecture(architecture, method, tmp_path):
    merges_as_peft(architecture, method, tmp_path)


# Beside the layers


@pytest.mark.parametrize("architecture", EMBEDDING)
def test_an_adapted_embedding_is_untied_from_the_head(architecture, tmp_path):
    """PEFT's own merge changes the head with it, which the live model does not have."""
    model = with_adapter(
        make(ARCHITECTURES[architecture]), low_rank([EMBEDDING[architecture]], lora_alpha=60)
    )
    kind = ARCHITECTURES[architecture].inputs
    live = outputs(model, kind)
    report = saved(model, tmp_path / "out")
    again = loaded(tmp_path / "out")
    torch.testing.assert_close(outputs(again, kind), live, rtol=1e-4, atol=1e-4)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    assert model.get_base_model().config.tie_word_embeddings
    assert any("tied, merged differently in each place" in note for note in report.notes)
    head = stored(tmp_path / "out")["lm_head.weight"]
    assert torch.equal(head, model.get_base_model().lm_head.weight)


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"trainable_token_indices": [3, 5]},
    ],
)
def test_embeddings_trained_in_both_places_stay_tied(settings, tmp_path):
    model = with_adapter(make(ARCHITECTURES["llama-tied"]), low_rank(LINEAR, **settings))
    live = outputs(model)
    saved(model, tmp_path)
    assert "lm_head.weight" not in stored(tmp_path)
    torch.testing.assert_close(outputs(loaded(tmp_path)), live, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_fused_experts(name, tmp_path):
    """Adapters on parameters that are one tensor for all experts in memory, and one for each on
    disk.
    """
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = low_rank(["q_proj"], target_parameters=experts, modules_to_save=["lm_head"])
    model = with_adapter(make(ARCHITECTURES[name]), config)
    live = outputs(model)
    saved(model, tmp_path / "ours")
    torch.testing.assert_close(outputs(loaded(tmp_path / "ours")), live, rtol=1e-4, atol=1e-4)
    assert_close_tensors(
        stored(tmp_path / "ours"), reference(model.merge_and_unload(), tmp_path / "theirs")
    )


def test_injected_adapters_and_convolutions(tmp_path):
    model = make(ARCHITECTURES["vit"])
    config = low_rank(["projection", "q_proj", "query"], use_dora=True)
    inject_adapter_in_model(config, model)
    trained = models.trained(model)
    with torch.no_grad():
        live = trained(**inputs("image")).logits
    saved(trained, tmp_path)
    torch.testing.assert_close(outputs(loaded(tmp_path), "image"), live, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_once(dtype, tmp_path):
    """The merge of a bfloat16 model is the exact one, rounded: half a unit in the last place, and
    not more.
    """
    model = with_adapter(make(ARCHITECTURES["llama"]).bfloat16(), low_rank(LINEAR))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.to(dtype)
    saved(model, tmp_path)
    exact = model.double().merge_and_unload().state_dict()
    for name, tensor in stored(tmp_path).items():
        assert tensor.dtype == torch.bfloat16
        off = (tensor.double() - exact[name]).abs()
        # the sum is of float32
        assert (off <= exact[name].abs() * 2**-8 * 1.001 + 1e-7).all(), name


# Which adapters


def two_adapters() -> Any:
    model = with_adapter(make(ARCHITECTURES["llama"]), low_rank(LINEAR))
    model.add_adapter("other", low_rank(["q_proj", "k_proj"], r=2))
    return models.trained(model)


def test_adapters_by_name_and_by_weight(tmp_path):
    model = two_adapters()
    model.set_adapter("default")
    report = saved(model, tmp_path / "active")
    assert "adapter other: not merged, left out" in report.notes
    saved(model, tmp_path / "both", merged=["default", "other"])
    saved(model, tmp_path / "weighted", merged={"default": 0.25, "other": -1.5})
    saved(model, tmp_path / "other", merged="other")
    base, first, second = (
        model.get_base_model().state_dict(),
        stored(tmp_path / "active"),
        stored(tmp_path / "other"),
    )
    for name, both in stored(tmp_path / "both").items():
        own = base.get(name, base.get(name.replace(".weight", ".base_layer.weight")))
        torch.testing.assert_close(both, first[name] + second[name] - own, rtol=1e-5, atol=1e-6)
        expected = own + 0.25 * (first[name] - own) - 1.5 * (second[name] - own)
        torch.testing.assert_close(
            stored(tmp_path / "weighted")[name], expected, rtol=1e-5, atol=1e-6
        )
    model.base_model.set_adapter(["default", "other"])
    saved(model, tmp_path / "set")
    assert_close_tensors(stored(tmp_path / "set"), stored(tmp_path / "both"))


# What is refused


def refused(model: Any, folder: Any, **settings: Any) -> str:
    with pytest.raises(errors.CheckpointError) as found:
        CheckpointSaver().save(model, folder, **{"merged": True, **settings})
    assert not folder.exists()
    return str(found.value)


def test_what_cannot_be_merged_is_named(tmp_path):
    out = tmp_path / "out"
    llama = lambda config: with_adapter(make(ARCHITECTURES["llama"]), config)  # noqa: E731
    prompt = llama(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    assert "adapter default: PROMPT_TUNING acts on inputs" in refused(prompt, out)
    lily = refused(llama(peft.LilyConfig(target_modules=["q_proj", "v_proj"])), out)
    assert "layers.0.self_attn.q_proj: " in lily, lily
    assert "layers.1.self_attn.v_proj: " in lily, lily
    assert "adapter_only=True" in lily
    assert "the base layer has no bias" in refused(llama(low_rank(LINEAR, lora_bias=True)), out)
    model = two_adapters()
    assert "adapter none: not on the model, which has default, other" in refused(
        model, out, merged=["none"]
    )
    assert "adapter_only" in refused(model, out, adapter_only=True)
    assert "attribute" in refused(model, out, attribute="base_model")
    for wrong in (
        {"other": None},
        {"other": "a"},
        {"other": 10**400},
        {"other": float("nan")},
        {1: 1},
        [1],
        [],
        1.0,
    ):
        assert "a weight for each name" in refused(model, out, merged=wrong)
    assert "each once" in refused(model, out, merged=["other", "other"])
    assert "no PEFT adapter" in refused(make(ARCHITECTURES["llama"]), out)
    with model.disable_adapter():
        assert "switched off" in refused(model, out)
    model.merge_adapter()
    assert "is merged into" in refused(model, out)


def test_modules_replaced_by_two_adapters_need_weights(tmp_path):
    model = with_adapter(
        make(ARCHITECTURES["llama"]), low_rank(["q_proj"], modules_to_save=["lm_head"])
    )
    model.add_adapter("other", low_rank(["q_proj"], modules_to_save=["lm_head"]))
    models.trained(model)
    assert "lm_head: trained by several adapters (default, other)" in refused(
        model, tmp_path / "no", merged=["default", "other"]
    )
    saved(model, tmp_path / "out", merged={"default": 0.5, "other": 0.5})
    head: Any = model.get_base_model().lm_head
    expected = (head.modules_to_save["default"].weight + head.modules_to_save["other"].weight) / 2
    torch.testing.assert_close(stored(tmp_path / "out")["lm_head.weight"], expected)


def test_a_broken_adapter_is_refused(tmp_path):
    model = with_adapter(make(ARCHITECTURES["llama"]), low_rank(["q_proj"]))
    with torch.no_grad():
        model.get_base_model().model.layers[1].self_attn.q_proj.lora_B["default"].weight[0, 0] = (
            float("nan")
        )
    assert "layers.1.self_attn.q_proj.weight: merging gives NaN" in refused(model, tmp_path / "out")


def test_a_merge_that_only_float32_can_hold_is_refused(tmp_path):
    """The sum is finite, and its rounding to bfloat16 is infinite."""
    model = with_adapter(make(ARCHITECTURES["llama"]).bfloat16(), low_rank(["q_proj"]))
    layer: Any = model.get_base_model().model.layers[1].self_attn.q_proj
    with torch.no_grad():
        layer.base_layer.weight[0, 0] = torch.finfo(torch.bfloat16).max
        layer.lora_A["default"].weight[:, 0] = 0
        layer.lora_A["default"].weight[0, 0] = 1e18
        layer.lora_B["default"].weight[0, 0] = 1e18 / layer.scaling["default"]
    assert "layers.1.self_attn.q_proj.weight: merging gives NaN" in refused(model, tmp_path / "out")


# Beside other ways of saving


def test_compared_by_what_it_computes(tmp_path, monkeypatch):
    model = with_adapter(make(ARCHITECTURES["llama"]), low_rank(LINEAR)).train()
    report = saved(model, tmp_path / "out", check="logits")
    assert model.training
    note = next(note for note in report.notes if note.startswith("logits"))
    assert note.startswith("logits of 2 x 16 tokens differ by ")
    assert note in read_manifest(open_place(tmp_path / "out")).notes
    saved(model, tmp_path / "given", check=models.batch(4))
    right = merging.merge_layer

    def wrong(layer: Any, tensors: Any) -> Any:
        return {name: tensor * 1.01 for name, tensor in right(layer, tensors).items()}

    monkeypatch.setattr(merging, "merge_layer", wrong)
    assert "the merged model is not the live one" in refused(
        model, tmp_path / "wrong", check="logits"
    )


def test_in_the_background_and_within_a_run(tmp_path):
    model = with_adapter(make(ARCHITECTURES["llama"]), low_rank(LINEAR)).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    with CheckpointSaver(directory=tmp_path) as saver:
        saver.register(model=model, optimizer=optimizer)
        saver.step()
        pending = saver.save(model, tmp_path / "later", merged=True, background=True)
        saver.save(model, tmp_path / "now", merged=True)
        saver.save_state()
    assert pending.result().kind == "full"
    assert_close_tensors(stored(tmp_path / "later"), stored(tmp_path / "now"))
    assert read_manifest(open_place(tmp_path / "now")).export
    assert verify(tmp_path / "later").ok
    assert read_manifest(open_place(tmp_path / "checkpoint-1")).parts[0].kind == "adapter"


def test_formats_types_and_shards(tmp_path):
    model = with_adapter(make(ARCHITECTURES["llama"]), low_rank(LINEAR))
    saved(model, tmp_path / "out", dtype="bfloat16", max_shard_size=20_000, format="dual")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    torch.testing.assert_close(logits(again).float(), logits(model), rtol=0.1, atol=0.1)
