"""Every PEFT method: the adapter PEFT itself would have written, where PEFT is right, and all of it
where it is not.
"""

import json
from collections.abc import Callable
from typing import Any

import models
import peft
import pytest
import torch
import transformers
from compare import assert_agree, assert_same_tensors, files, logits, raw, stored
from models import trained
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import ft_ckpt
from ft_ckpt import CheckpointSaver, errors
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.storage.places import open_place

QKV = ["q_proj", "v_proj"]


def attention(cls: Any, **settings: Any) -> Any:
    return cls(target_modules=QKV, task_type="CAUSAL_LM", **settings)


def low_rank(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": QKV, "task_type": "CAUSAL_LM", **settings})


def virtual_tokens(cls: Any, **settings: Any) -> Any:
    return cls(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings)


# method -> the name of its base in models.py, its configuration
METHODS: dict[str, tuple[str, Callable[[], Any]]] = {
    "lora": ("qwen3", low_rank),
    "lora-tied": ("llama", low_rank),
    "dora": ("qwen3", lambda: low_rank(use_dora=True)),
    "rslora": ("qwen3", lambda: low_rank(use_rslora=True)),
    "lora-rank-pattern": ("qwen3", lambda: low_rank(rank_pattern={"layers.0.self_attn.q_proj": 2})),
    "lora-conv1d": ("gpt2", lambda: low_rank(target_modules=["c_attn"], fan_in_fan_out=True)),
    "ia3": (
        "qwen3",
        lambda: peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
    ),
    "adalora": (
        "qwen3",
        lambda: attention(peft.AdaLoraConfig, init_r=4, target_r=2, total_step=10),
    ),
    "loha": ("qwen3", lambda: attention(peft.LoHaConfig, r=3)),
    "lokr": ("qwen3", lambda: attention(peft.LoKrConfig, r=3)),
    "oft": ("qwen3", lambda: attention(peft.OFTConfig, r=0, oft_block_size=4)),
    "vera": ("qwen3", lambda: peft.VeraConfig(r=4, target_modules=["q_proj"])),
    "prompt": ("qwen3", lambda: virtual_tokens(peft.PromptTuningConfig)),
    "prefix": ("qwen3", lambda: virtual_tokens(peft.PrefixTuningConfig)),
    "prefix-projected": (
        "qwen3",
        lambda: virtual_tokens(
            peft.PrefixTuningConfig, prefix_projection=True, encoder_hidden_size=7
        ),
    ),
    "p-tuning": ("qwen3", lambda: virtual_tokens(peft.PromptEncoderConfig, encoder_hidden_size=7)),
    "trainable-tokens": (
        "qwen3",
        lambda: peft.TrainableTokensConfig(token_indices=[34, 46], task_type="CAUSAL_LM"),
    ),
    "lora-trainable-tokens": ("qwen3", lambda: low_rank(trainable_token_indices=[34, 46])),
    "lora-trainable-tokens-tied": ("llama", lambda: low_rank(trainable_token_indices=[34, 46])),
    "target-parameters": (
        "mixtral",
        lambda: low_rank(target_modules=[], target_parameters=["experts.gate_up_proj"]),
    ),
    "modules-to-save": ("qwen3", lambda: low_rank(modules_to_save=["lm_head", "embed_tokens"])),
    "bias-all": (
        "gpt2",
        lambda: low_rank(target_modules=["c_attn"], fan_in_fan_out=True, bias="all"),
    ),
    "bias-lora-only": (
        "gpt2",
        lambda: low_rank(target_modules=["c_attn"], fan_in_fan_out=True, bias="lora_only"),
    ),
    "embeddings-targeted": ("qwen3", lambda: low_rank(target_modules=["embed_tokens", "q_proj"])),
}


def tuned(method: str) -> PeftModel:
    base, config = METHODS[method]
    return trained(get_peft_model(models.build(base), config()))


def save_adapter(model: Any, folder: Any, **settings: Any) -> Any:
    return CheckpointSaver().save(model, folder, adapter_only=True, **settings)


def has_lora_only_biases() -> bool:
    """Whether this PEFT saves the biases it trains with bias="lora_only"; 0.18 left them out, which
    ours never does.
    """
    return tuple(map(int, peft.__version__.split(".")[:2])) > (0, 18)


@pytest.mark.parametrize("method", METHODS)
def test_adapter_is_the_one_peft_writes(method, tmp_path):
    """What PEFT's own key logic keeps, no tensor less."""
    model = tuned(method)
    save_adapter(model, tmp_path / "ours")
    # PEFT adds the whole frozen embedding when a target of that name is adapted; nothing needs it.
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    kept = stored(tmp_path / "ours")
    if method == "bias-lora-only" and not has_lora_only_biases():
        kept = {
            name: tensor for name, tensor in kept.items() if not name.endswith("base_layer.bias")
        }
    assert_same_tensors(kept, stored(tmp_path / "theirs"))
    ours, theirs = (
        json.loads((tmp_path / side / "adapter_config.json").read_text())
        for side in ("ours", "theirs")
    )
    assert ours == theirs


@pytest.mark.parametrize(
    "settings",
    [
        {"alpha_pattern": {"q_proj": 50, "layers.0.self_attn.q_proj": 3}},
        {"rank_pattern": {"q_proj": 3, "layers.0.self_attn.q_proj": 1}},
        {"alpha_pattern": {r".*\.1\.self_attn\.q_proj": 50, "q_proj": 3, r".*0.*": 7}},
    ],
)
def test_the_first_pattern_that_matches_decides_after_a_load(settings, tmp_path):
    """PEFT takes the first match, and writes patterns sorted."""
    model = trained(get_peft_model(models.build("qwen3"), low_rank(**settings)))
    save_adapter(model, tmp_path / "alone")
    CheckpointSaver().save(model, tmp_path / "whole", adapter_only=False)
    CheckpointSaver().save(model, tmp_path / "merged", merged=True)
    ours = ft_ckpt.load_model(tmp_path / "alone", base=models.build("qwen3"))
    theirs = PeftModel.from_pretrained(models.build("qwen3"), tmp_path / "alone")
    for loaded in (
        ours,
        theirs,
        ft_ckpt.load_model(tmp_path / "whole"),
        ft_ckpt.load_model(tmp_path / "merged"),
    ):
        assert_agree(logits(loaded), logits(model))
    (name, patterns), *_ = settings.items()
    other = trained(
        get_peft_model(models.build("qwen3"), low_rank(**{name: dict(sorted(patterns.items()))}))
    )
    if name == "alpha_pattern":
        with pytest.raises(errors.LoadError, match=f"order of {name}"):
            _resume_from_saved(model, other, tmp_path / "run")


def _resume_from_saved(model, other, folder):
    CheckpointSaver().save_state(model, folder)
    CheckpointSaver().resume(folder, model=other)


@pytest.mark.sample(12)
@pytest.mark.parametrize("method", METHODS)
def test_adapter_loads_on_its_base(method, tmp_path):
    """An adapter that loads in part, without a word."""
    model = tuned(method)
    save_adapter(model, tmp_path)
    base = METHODS[method][0]
    theirs = PeftModel.from_pretrained(models.build(base), tmp_path)
    ours = ft_ckpt.load_model(tmp_path, base=models.build(base))
    for loaded in (theirs, ours):
        assert_agree(logits(loaded), logits(model))
    assert not torch.equal(logits(ours), logits(models.build(base)))


def test_pruned_adalora_keeps_its_rank_pattern(tmp_path):
    model = tuned("adalora")
    masks = {
        name.removesuffix(".default"): [True, False, True, True]
        for name, _ in model.base_model.model.named_parameters()
        if "lora_E" in name
    }
    model.base_model.resize_modules_by_rank_pattern(masks, "default")
    model.peft_config["default"].rank_pattern = masks
    written = {f"{name}.default": kept for name, kept in masks.items()}
    model.peft_config["default"].rank_pattern = dict(written)
    save_adapter(model, tmp_path / "ours")
    # PEFT shortens the names in the live config
    assert model.peft_config["default"].rank_pattern == written
    model.save_pretrained(tmp_path / "theirs")
    assert_same_tensors(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    ours, theirs = (
        json.loads((tmp_path / side / "adapter_config.json").read_text())
        for side in ("ours", "theirs")
    )
    assert ours["rank_pattern"] == theirs["rank_pattern"] == masks
    loaded = ft_ckpt.load_model(tmp_path / "ours", base=models.build("qwen3"))
    assert_agree(logits(loaded), logits(model))


@pytest.mark.parametrize("how", ["peft", "transformers", "inject"])
def test_adapter_is_small_however_it_was_attached(how, tmp_path):
    """The frozen base written at every save, missed adapters that are no PeftModel."""
    base, config = models.lora_wide().unload(), low_rank(r=2, target_modules=["q_proj"])
    model = trained(attach(base, config, how))
    save_adapter(model, tmp_path, tokenizer=models.tokenizer())
    weights = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert weights < 20_000
    assert sum((tmp_path / name).stat().st_size for name in files(tmp_path)) < weights + 65536


@pytest.mark.parametrize("how", ["transformers", "inject"])
def test_injected_adapters_load_as_a_peft_model(how, tmp_path):
    """Adapters attached without PeftModel."""
    model = trained(attach(models.build("qwen3"), low_rank(), how))
    save_adapter(model, tmp_path)
    theirs = PeftModel.from_pretrained(models.build("qwen3"), tmp_path)
    assert_agree(logits(theirs), logits(model))
    assert_agree(logits(ft_ckpt.load_model(tmp_path, base=models.build("qwen3"))), logits(model))


def attach(base: nn.Module, config: LoraConfig, how: str) -> nn.Module:
    """`base` with the adapter, by PEFT or by transformers' method, whatever PEFT that asks for."""
    if how == "peft":
        return get_peft_model(base, config)
    if how == "inject":
        return peft.inject_adapter_in_model(config, base)
    with pytest.MonkeyPatch.context() as patch:
        # 5.24 asks for an unreleased one
        patch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0")
        base.add_adapter(config)
    return base


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_adapters_that_transformers_loaded_are_saved(name, tmp_path, monkeypatch):
    """transformers 5.24 loads an adapter's folder, and then each of its methods for adapters asks
    for PEFT 0.22.

    The model has the conversions of the adapter's file, by which merged models and bases got names
    of an adapter.
    """
    models.build(name).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trained(get_peft_model(base, low_rank())).save_pretrained(tmp_path / "theirs")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99")
    with pytest.raises(ValueError, match="99"):
        model.active_adapters()
    save_adapter(model, tmp_path / "adapter")
    assert_agree(logits(ft_ckpt.load_model(tmp_path / "adapter")), logits(model))
    CheckpointSaver().save(model, tmp_path / "both", adapter_only=False)
    assert_agree(logits(ft_ckpt.load_model(tmp_path / "both")), logits(model))
    CheckpointSaver().save(model, tmp_path / "merged", merged=True)
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(model))
    assert {*stored(tmp_path / "merged")} == {*stored(tmp_path / "base")}


def test_hand_trained_embeddings_are_saved(tmp_path):
    """Embeddings made trainable by hand are silently left out."""
    model = get_peft_model(models.build("qwen3"), low_rank())
    model.get_input_embeddings().weight.requires_grad_(True)
    trained(model)
    report = save_adapter(model, tmp_path)
    kept = stored(tmp_path)["base_model.model.model.embed_tokens.weight"]
    assert raw(kept) == raw(model.get_input_embeddings().weight)
    assert any("embed_tokens" in note for note in report.notes)
    theirs = PeftModel.from_pretrained(models.build("qwen3"), tmp_path)
    assert_agree(logits(theirs), logits(model))
    assert_agree(logits(ft_ckpt.load_model(tmp_path, base=models.build("qwen3"))), logits(model))


def test_what_is_trained_in_float32_on_a_base_in_bfloat16_is_not_rounded(tmp_path):
    """As trainers keep norms and heads: PEFT makes a head in the base's type, and loading rounded
    both.
    """
    model = get_peft_model(models.build("qwen3").bfloat16(), low_rank(modules_to_save=["lm_head"]))
    norm, head = (
        model.base_model.model.model.norm.weight,
        model.base_model.model.lm_head.modules_to_save.default.weight,
    )
    for parameter in (norm, head):
        parameter.requires_grad_(True)
        parameter.data = parameter.data.float() + 1e-6
    save_adapter(model, tmp_path)
    loaded = ft_ckpt.load_model(tmp_path, base=models.build("qwen3").bfloat16()).state_dict()
    for name, tensor in model.state_dict().items():
        assert loaded[name].dtype == tensor.dtype, name
        assert raw(loaded[name]) == raw(tensor), name


@pytest.mark.parametrize("name", ["0", "layers", "q_proj", "lora_A", "a/b"])
def test_adapters_may_have_any_name(name, tmp_path):
    """PEFT leaves out what has another adapter's name anywhere in its own: with "0" beside it, all
    of layer 0.
    """
    model = get_peft_model(models.build("qwen3"), low_rank())
    trained(model)
    model.add_adapter(name, low_rank(r=2))
    model.set_adapter(name)
    trained(model)
    save_adapter(model, tmp_path)
    loaded = ft_ckpt.load_model(tmp_path, base=models.build("qwen3")).state_dict()
    assert all(raw(tensor) == raw(loaded[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("how", ["mixed", "around another"])
def test_models_of_peft_that_it_cannot_read_are_refused(how, tmp_path):
    """Their adapters would have names that PEFT passes over without a word; a run keeps them."""
    model = get_peft_model(models.build("qwen3"), low_rank(), mixed=how == "mixed")
    if how != "mixed":
        model = get_peft_model(model, low_rank(target_modules=["k_proj"]), adapter_name="outer")
    with pytest.raises(
        errors.SelectionError, match=r"Peft\w+: adapters of several methods.*add_adapter"
    ):
        save_adapter(model, tmp_path / "out")
    want = {name: raw(tensor) for name, tensor in trained(model).state_dict().items()}
    CheckpointSaver().save_state(model, tmp_path / "run")
    trained(model)
    CheckpointSaver().resume(tmp_path / "run", model=model)
    assert {name: raw(tensor) for name, tensor in model.state_dict().items()} == want


def test_replaced_embeddings_that_stay_tied_come_back(tmp_path):
    """PEFT keeps one tensor under two names that are no place for it in the modules."""
    model = get_peft_model(
        models.build("llama"), low_rank(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    )
    trained(model)
    save_adapter(model, tmp_path)
    loaded = ft_ckpt.load_model(tmp_path, base=models.build("llama"))
    assert_agree(logits(loaded), logits(model))


@pytest.mark.parametrize("target", ["q_proj", "model.embed_tokens"])
@pytest.mark.parametrize("with_path", [False, True])
def test_resized_embeddings_are_saved(target, with_path, tmp_path):
    """New rows dropped when the base has no path, or when the target is spelled with its path."""
    models.build("qwen3").save_pretrained(tmp_path / "base")
    model = get_peft_model(
        resized(tmp_path, with_path, seed=1), low_rank(target_modules=["q_proj", target])
    )
    trained(model)
    save_adapter(model, tmp_path / "ours")
    theirs = PeftModel.from_pretrained(resized(tmp_path, with_path, seed=2), tmp_path / "ours")
    assert_agree(logits(theirs), logits(model))
    ours = ft_ckpt.load_model(tmp_path / "ours", base=resized(tmp_path, with_path, seed=2))
    assert_agree(logits(ours), logits(model))


@pytest.mark.sample(
    "safetensors-[34, 103]", "safetensors-{'embed_tokens': [103], 'lm_head': [3]}", "h5-[34, 46]"
)
@pytest.mark.parametrize(
    "tokens", [[34, 46], [34, 103], {"embed_tokens": [103], "lm_head": [3]}], ids=str
)
@pytest.mark.parametrize("file_format", ["safetensors", "h5"])
def test_tokens_trained_in_resized_embeddings_are_loaded(tokens, file_format, tmp_path):
    """The rows lie in a layer within a layer: they were stored, and not found again."""
    models.build("qwen3").save_pretrained(tmp_path / "base")
    model = trained(
        get_peft_model(resized(tmp_path, True, seed=1), low_rank(trainable_token_indices=tokens))
    )
    save_adapter(model, tmp_path / "ours", format=file_format)
    text = torch.tensor([[34, 46, 103, 3]])
    live = model.eval()(input_ids=text).logits
    assert_agree(ft_ckpt.load_model(tmp_path / "ours")(input_ids=text).logits, live)
    ft_ckpt.merge(tmp_path / "ours", tmp_path / "merged", progress=False)
    assert_agree(
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=text).logits, live
    )
    CheckpointSaver().save_state(model, tmp_path / "run")
    again = get_peft_model(
        resized(tmp_path, True, seed=2), low_rank(trainable_token_indices=tokens)
    )
    CheckpointSaver().resume(tmp_path / "run", model=again)
    assert_agree(again.eval()(input_ids=text).logits, live)


def molmo2() -> nn.Module:
    """A model whose class makes more embedding rows than its config has words."""
    heads = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
    }
    text = {
        **heads,
        "num_hidden_layers": 1,
        "vocab_size": 101,
        "additional_vocab_size": 8,
        "rope_scaling_layers": [0],
    }
    vision = {
        **heads,
        "num_hidden_layers": 2,
        "image_size": [16, 16],
        "patch_size": 8,
        "num_position_embeddings": 4,
    }
    joint = {**heads, "vision_feature_layer": [1, 0], "text_hidden_size": 32}
    config = transformers.Molmo2Config(text_config=text, vision_config=vision, adapter_config=joint)
    return transformers.Molmo2ForConditionalGeneration(config)


@pytest.mark.skipif(
    not hasattr(transformers, "Molmo2Config"), reason="a transformers without Molmo2"
)
def test_rows_beside_the_vocabulary_are_not_taken_for_resized(tmp_path):
    model, resized = molmo2(), molmo2()
    resized.resize_token_embeddings(120)
    settings = LoraConfig(r=2, target_modules=["down_proj"])
    with CheckpointSaver() as saver:
        plain = saver.save(get_peft_model(model, settings), tmp_path / "plain", adapter_only=True)
        changed = saver.save(
            get_peft_model(resized, settings), tmp_path / "changed", adapter_only=True
        )
    assert plain.notes == ()
    assert [note.partition(":")[0].rpartition("model.")[2] for note in changed.notes] == [
        "embed_tokens.weight",
        "lm_head.weight",
    ]


def test_resized_embeddings_come_with_the_adapter_that_was_active(tmp_path):
    models.build("qwen3").save_pretrained(tmp_path / "base")
    model = get_peft_model(resized(tmp_path, True, seed=1), low_rank())
    model.add_adapter("second", low_rank(target_modules=["k_proj"]))
    model.set_adapter("second")
    save_adapter(trained(model), tmp_path / "ours")
    loaded = ft_ckpt.load_model(tmp_path / "ours")
    assert_agree(logits(loaded), logits(model))


def test_an_adapter_that_peft_cannot_save_is_refused(tmp_path):
    """Its selection fails on layers that another adapter alone is on; PEFT's own save does, too."""
    model = get_peft_model(models.build("qwen3"), low_rank(trainable_token_indices=[34]))
    model.add_adapter("second", low_rank())
    for save in (save_adapter, CheckpointSaver().save_state):
        with pytest.raises(
            errors.SelectionError, match="adapter 'second': PEFT cannot select its tensors"
        ):
            save(model, tmp_path / "out")


class Headless(PreTrainedModel):
    """A model of somebody's own whose class does not say where its embeddings are."""

    config_class = LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first = nn.Linear(4, 4)
        self.post_init()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.first(rows)


def test_an_adapter_of_a_model_that_names_no_embeddings(tmp_path):
    model = trained(
        get_peft_model(Headless(LlamaConfig()), LoraConfig(r=4, target_modules=["first"]))
    )
    save_adapter(model, tmp_path)
    base = Headless(LlamaConfig())
    base.first.load_state_dict(model.get_base_model().first.base_layer.state_dict())
    loaded = ft_ckpt.load_model(tmp_path, base=base)
    rows = torch.randn(3, 4)
    assert torch.equal(loaded(rows), model.eval()(rows))


def resized(folder: Any, with_path: bool, seed: int) -> Any:
    """The base with four more rows of embeddings, which differ by seed."""
    base = (
        AutoModelForCausalLM.from_pretrained(folder / "base")
        if with_path
        else models.build("qwen3")
    )
    base.resize_token_embeddings(105)
    with torch.no_grad():
        for layer in (base.get_input_embeddings(), base.get_output_embeddings()):
            layer.weight[101:] = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))
    return base


def test_the_active_adapter_is_active_again(tmp_path):
    """Only one of several adapters comes back."""
    model = trained(models.lora(models.build("qwen3")))
    model.set_adapter("second")
    save_adapter(model, tmp_path)
    parts = {part.adapter: part for part in read_manifest(open_place(tmp_path)).parts}
    assert {name: part.active for name, part in parts.items()} == {"default": False, "second": True}
    loaded = ft_ckpt.load_model(tmp_path, base=models.build("qwen3"))
    assert set(loaded.peft_config) == {"default", "second"}
    assert loaded.active_adapter == "second"


def test_full_save_of_a_peft_model_has_base_and_adapters(tmp_path):
    model = models.build("lora").eval()
    CheckpointSaver().save(model, tmp_path, adapter_only=False)
    assert {"model.safetensors", "config.json"} <= files(tmp_path)
    assert {f"adapters/{name}/adapter_config.json" for name in ("default", "second")} <= files(
        tmp_path
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with model.disable_adapter():
        assert_agree(logits(plain), logits(model))
    again = PeftModel.from_pretrained(plain, tmp_path / "adapters" / "default")
    assert_agree(logits(again), logits(model))


def test_another_base_is_refused(tmp_path):
    """The adapter reloaded on a base with other weights, silently."""
    save_adapter(tuned("lora"), tmp_path)
    with pytest.raises(errors.BaseMismatchError, match="base"):
        ft_ckpt.load_model(tmp_path, base=models.build("qwen3", seed=1))
    assert isinstance(
        ft_ckpt.load_model(tmp_path, base=models.build("qwen3", seed=1), check_base=False),
        PeftModel,
    )


def test_base_is_found_by_its_recorded_path(tmp_path):
    """The base is named in the checkpoint and used when nothing else is said."""
    models.build("qwen3").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = trained(get_peft_model(base, low_rank()))
    save_adapter(model, tmp_path / "ours")
    assert_agree(logits(ft_ckpt.load_model(tmp_path / "ours")), logits(model))
    models.build("qwen3", seed=1).save_pretrained(tmp_path / "base")
    with pytest.raises(errors.BaseMismatchError, match="base"):
        ft_ckpt.load_model(tmp_path / "ours")


def test_a_renamed_key_is_refused(tmp_path):
    """Keys that do not match are ignored, and the adapter does nothing."""
    save_adapter(tuned("lora"), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = {
        name.replace("layers.0", "layerz.0"): tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(errors.CheckpointError, match=r"layer[sz]\.0"):
        ft_ckpt.load_model(tmp_path, base=models.build("qwen3"))


def test_adapter_only_needs_an_adapter(tmp_path):
    """Adapter-only on a model without adapters must not fall back to the whole model."""
    with pytest.raises(errors.NotAnAdapterError, match="Qwen3ForCausalLM"):
        save_adapter(models.build("qwen3"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def four_bit(folder: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config)


def test_adapter_on_a_quantised_base(tmp_path):
    """Quantised bases crash the save, or leave their state in the adapter."""
    models.qwen3(hidden_size=64, intermediate_size=64, head_dim=16).save_pretrained(
        tmp_path / "base"
    )
    model = trained(get_peft_model(four_bit(tmp_path), low_rank()))
    save_adapter(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert_same_tensors(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    loaded = ft_ckpt.load_model(tmp_path / "ours", base=four_bit(tmp_path))
    assert_agree(logits(loaded), logits(model))


def test_full_save_of_a_quantised_model(tmp_path):
    """The quantisation state lives outside the parameters."""
    models.qwen3(hidden_size=64, intermediate_size=64, head_dim=16).save_pretrained(
        tmp_path / "base"
    )
    model = four_bit(tmp_path)
    CheckpointSaver().save(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert_same_tensors(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")), logits(model))


@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_adapters_on_a_plain_module_are_loaded_with_it(tmp_path, merged, injected):
    def network():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))

    base = network()
    config = LoraConfig(target_modules=["0"], modules_to_save=["2"], init_lora_weights=False)
    model: Any = (
        peft.inject_adapter_in_model(config, base) if injected else get_peft_model(base, config)
    )
    batch = torch.randn(3, 4)
    CheckpointSaver().save(
        model.eval(),
        tmp_path / "whole",
        **({"merged": True} if merged else {"adapter_only": False}),
    )
    loaded = ft_ckpt.load_model(tmp_path / "whole", into=network().eval())
    assert isinstance(loaded, nn.Sequential if merged else PeftModel)
    torch.testing.assert_close(loaded.eval()(batch), model(batch))
