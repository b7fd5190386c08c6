"""The files beside the weights are those `save_pretrained` writes, and what is live stays as it
was.
"""

import copy
import json
import re
import shutil
import textwrap
from pathlib import Path

import models
import pytest
import torch
from launch import run_python
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoFeatureExtractor,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    GenerationConfig,
    LlamaForCausalLM,
    LlamaTokenizer,
    LlavaProcessor,
    T5Config,
    T5ForConditionalGeneration,
    Wav2Vec2FeatureExtractor,
)

from ft_ckpt import CheckpointSaver, load_model
from ft_ckpt.checkpoint.manifest import BaseRecord
from ft_ckpt.errors import CompanionError
from ft_ckpt.model.sidecars import write_tokenizer
from ft_ckpt.model.sidecars.adapter_files import write_adapter
from ft_ckpt.model.sidecars.generation import generation_config
from ft_ckpt.model.sidecars.model_files import write_model
from ft_ckpt.model.sidecars.tokenizer import check_tokenizer

BASE = BaseRecord(id="org/base", revision="abc", dtype="float32", config_hash="", fingerprint={})
NO_BASE = BaseRecord(id=None, revision=None, dtype="float32", config_hash="", fingerprint={})


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=101, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2)
    )


def bert() -> nn.Module:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    return BertForSequenceClassification(BertConfig(vocab_size=101, num_labels=3, **sizes))


def clip() -> nn.Module:
    text = {"vocab_size": 101, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "image_size": 8,
        "patch_size": 4,
    }
    heads = {"num_attention_heads": 2}
    return CLIPModel(CLIPConfig(text_config={**text, **heads}, vision_config={**vision, **heads}))


MODELS = {
    f.__name__: f
    for f in (models.llama, models.olmo2, models.gpt2, models.qwen3, models.mixtral, t5, bert, clip)
}


def live(model: nn.Module) -> dict[str, object]:
    """Every field of every live object that a careless saver would set."""
    found = {"config": model.config, "generation": getattr(model, "generation_config", None)}
    found |= getattr(model, "peft_config", {})
    return copy.deepcopy(
        {name: deep(vars(value)) for name, value in found.items() if value is not None}
    )


def deep(fields: dict[str, object]) -> dict[str, object]:
    return {
        k: deep(vars(v)) if hasattr(v, "to_dict") and hasattr(v, "__dict__") else v
        for k, v in fields.items()
    }


def files(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, weights left out."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in found.items() if not name.endswith(".safetensors")}


def written(
    folder: Path,
    model: nn.Module,
    dtype: str = "float32",
    tokenizer: object = None,
    **options: object,
) -> Path:
    """A folder with everything but the weights, the live objects checked on the way."""
    folder.mkdir(exist_ok=True)
    before = live(model)
    generation = generation_config(model, tokenizer, options.get("chat_template_name"))
    write_model(folder, model, dtype=dtype, generation=generation)
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer)
    assert live(model) == before
    return folder


def as_fsdp2(model: nn.Module) -> nn.Module:
    """The class that fully_shard would give the model, made where torch makes it."""
    cls = type(model)
    model.__class__ = type(
        f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": FSDPModule.__module__}
    )
    return model


# Whole models


@pytest.mark.parametrize("name", MODELS)
def test_files_equal_save_pretrained(name: str, tmp_path: Path) -> None:
    model, tokenizer = MODELS[name](), models.tokenizer()
    ours = written(tmp_path / "ours", model, tokenizer=tokenizer)
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    assert files(ours) == files(tmp_path / "theirs")


def test_files_equal_those_of_a_model_that_was_loaded(tmp_path: Path) -> None:
    models.llama().to(torch.bfloat16).save_pretrained(tmp_path / "first")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "first")
    ours = written(tmp_path / "ours", model, "bfloat16")
    model.save_pretrained(tmp_path / "theirs")
    assert files(ours) == files(tmp_path / "theirs")
    assert str(tmp_path).encode() not in b"".join(files(ours).values())


def test_no_path_of_this_machine_in_nested_configs(tmp_path: Path) -> None:
    model = clip()
    model.config.text_config._name_or_path = "/scratch/me/text"
    assert b"/scratch" not in files(written(tmp_path / "ours", model))["config.json"]


def test_sharded_class_is_saved_under_its_own_name(tmp_path: Path) -> None:
    ours = written(tmp_path / "ours", as_fsdp2(models.llama()))
    assert json.loads((ours / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("build", [models.llama, clip])
def test_config_says_the_dtype_given(build, tmp_path: Path) -> None:
    """The config and the file agree, for nested configs too."""
    model = build().to(torch.float32)
    model.config.dtype = "float16"
    for part in (model.config.get_text_config(),):
        part.dtype = "float32"
    config = json.loads((written(tmp_path / "ours", model, "bfloat16") / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config.get("text_config", {"dtype": "bfloat16"})["dtype"] == "bfloat16"


def test_tensors_are_not_read(tmp_path: Path) -> None:
    """Partitioned parameters are empty here; meta parameters have no values at all."""
    model = models.llama()
    model.get_input_embeddings().weight.ds_shape = torch.Size([models.VOCABULARY, 24])
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    options = {"tokenizer": models.tokenizer(), "chat_template_name": "olmo"}
    expected = files(written(tmp_path / "whole", models.llama(), **options))
    assert check_tokenizer(model, models.tokenizer()) == ()
    assert files(written(tmp_path / "empty", model, **options)) == expected
    assert files(written(tmp_path / "meta", models.llama().to("meta"), **options)) == expected


def test_settings_on_the_model_config_move_to_the_generation_config(tmp_path: Path) -> None:
    """`save_pretrained` refuses such a config; it is repaired in the copy."""
    model = models.llama()
    model.config.repetition_penalty = 1.2
    with pytest.raises(ValueError, match="generation parameters"):
        copy.deepcopy(model).save_pretrained(tmp_path / "theirs")
    ours = written(tmp_path / "ours", model)
    assert "repetition_penalty" not in json.loads((ours / "config.json").read_text())
    assert GenerationConfig.from_pretrained(ours).repetition_penalty == 1.2


def test_invalid_config_is_a_companion_error(tmp_path: Path) -> None:
    model = models.llama()
    vars(model.config)["num_attention_heads"] = 5  # does not divide the hidden size
    with pytest.raises(CompanionError, match=r"config\.json: LlamaConfig"):
        write_model(tmp_path, model, dtype="float32")


QUANTISED = {"quant_method": "bitsandbytes", "load_in_4bit": True}


class Linear4bit(nn.Linear):
    """Stands in for bitsandbytes' layer of that name."""


@pytest.mark.parametrize("flag", [True, False])
def test_quantisation_is_said_only_of_quantised_weights(flag: bool, tmp_path: Path) -> None:
    """A merged or dequantised model keeps no word of its quantisation."""
    model = models.llama()
    model.config.quantization_config = dict(QUANTISED)
    model.is_quantized = flag
    merged = json.loads((written(tmp_path / "merged", model) / "config.json").read_text())
    model.model.layers[0].mlp.up_proj = Linear4bit(24, 36)
    packed = json.loads((written(tmp_path / "packed", model) / "config.json").read_text())
    assert "quantization_config" not in merged
    assert packed["quantization_config"] == QUANTISED


def test_other_quantisation_methods_are_taken_at_their_word(tmp_path: Path) -> None:
    model = models.llama()
    model.config.quantization_config = {"quant_method": "torchao"}
    assert b"torchao" not in files(written(tmp_path / "merged", model))["config.json"]
    model.is_quantized = True
    assert b"torchao" in files(written(tmp_path / "kept", model))["config.json"]
    model.is_quantized = False
    model.lm_head.weight = nn.Parameter(torch.zeros(101, 24, dtype=torch.int8), requires_grad=False)
    assert b"torchao" in files(written(tmp_path / "packed", model))["config.json"]


# Generation config


def test_olmo_has_two_stop_tokens_and_no_bos() -> None:
    tokenizer = models.tokenizer()
    found = generation_config(models.olmo2(), tokenizer, "olmo_thinker")
    assert found.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert (found.bos_token_id, found.temperature, found.top_p) == (None, None, None)


def test_other_templates_take_the_tokenizers_tokens() -> None:
    model = models.llama()
    before = live(model)
    found = generation_config(model, models.tokenizer(), "tulu")
    assert (found.eos_token_id, found.bos_token_id, found.temperature) == (1, 0, None)
    assert live(model) == before


def test_tokenizer_without_eos_is_fine() -> None:
    tokenizer = models.tokenizer()
    tokenizer.eos_token = tokenizer.bos_token = None
    found = generation_config(models.llama(), tokenizer, "tulu")
    assert (found.eos_token_id, found.bos_token_id) == (None, None)


def test_stop_token_outside_the_vocabulary() -> None:
    """The unknown token would be written as the one that ends a turn."""
    bare = tokenizer_without("<|im_end|>")
    with pytest.raises(CompanionError, match=r"'<\|im_end\|>' is not in the vocabulary"):
        generation_config(models.olmo2(), bare, "olmo")


def tokenizer_without(token: str) -> object:
    """The tokenizer of the tests as it would be without one of its special tokens."""
    tokenizer = models.tokenizer()
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["added_tokens"] = [
        added for added in document["added_tokens"] if added["content"] != token
    ]
    del document["model"]["vocab"][token]
    core = type(tokenizer.backend_tokenizer).from_str(json.dumps(document))
    return type(tokenizer)(
        tokenizer_object=core, eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


def test_stop_token_past_the_embeddings() -> None:
    tokenizer = models.tokenizer()
    tokenizer.add_tokens([f"new{i}" for i in range(40)])
    tokenizer.add_special_tokens({"eos_token": "<|last|>"})
    with pytest.raises(
        CompanionError, match=r"'<\|last\|>' has id \d+, the model has 101 embedding rows"
    ):
        generation_config(models.llama(), tokenizer, "tulu")


def test_template_without_tokenizer() -> None:
    with pytest.raises(CompanionError, match="takes its tokens from a tokenizer"):
        generation_config(models.llama(), None, "tulu")


@pytest.mark.parametrize("model", [bert(), nn.Linear(2, 2)])
def test_models_that_do_not_generate_have_none(model: nn.Module) -> None:
    assert generation_config(model, models.tokenizer(), "olmo") is None
    assert generation_config(model, models.tokenizer(), None) is None


INVALID = {
    "temperature": {"temperature": 0.7},
    "several": {"temperature": 0.7, "top_p": 0.9, "top_k": 7, "max_new_tokens": -1},
    "beams": {"num_return_sequences": 3, "length_penalty": 2.0, "early_stopping": True},
    "outputs": {"output_scores": True, "pad_token_id": -1},
    "argument": {"streamer": "x"},
}


@pytest.mark.parametrize("name", INVALID)
def test_edited_generation_config_is_repaired(name: str, tmp_path: Path) -> None:
    """An edit that cannot be saved costs the edited fields, not the checkpoint."""
    model = models.llama()
    model.generation_config.repetition_penalty = 1.3
    for field, value in INVALID[name].items():
        setattr(model.generation_config, field, value)
    with pytest.raises(ValueError):
        model.save_pretrained(tmp_path / "theirs")
    saved = json.loads((written(tmp_path / "ours", model) / "generation_config.json").read_text())
    assert not set(saved) & set(INVALID[name])
    assert (saved["repetition_penalty"], saved["eos_token_id"]) == (1.3, 1)


def test_valid_settings_are_kept() -> None:
    model = models.llama()
    edits = {
        "max_new_tokens": -1,
        "temperature": 0.7,
        "length_penalty": 2.0,
        "do_sample": True,
        "num_beams": 2,
    }
    vars(model.generation_config).update(edits)
    saved = generation_config(model, None, None)
    assert (saved.temperature, saved.do_sample, saved.length_penalty) == (0.7, True, 2.0)
    assert saved.max_new_tokens is None


def test_published_generation_config_is_kept_as_it_is(tmp_path: Path) -> None:
    """Well-known models ship a temperature without do_sample; nobody edited it."""
    model = models.llama()
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "eos_token_id": 1})
    )
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert generation_config(loaded, None, None).temperature == 0.6
    assert b"0.6" in files(written(tmp_path / "ours", loaded))["generation_config.json"]


# Tokenizer


def test_chat_template_gives_equal_text_after_reload(tmp_path: Path) -> None:
    """The trained tokenizer and its template are part of the checkpoint."""
    tokenizer = models.tokenizer()
    before = copy.deepcopy(vars(tokenizer)["init_kwargs"])
    reloaded = AutoTokenizer.from_pretrained(
        written(tmp_path / "ours", models.llama(), tokenizer=tokenizer)
    )
    chat = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    assert reloaded.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(
        chat, tokenize=False
    )
    assert (
        reloaded("<|im_start|> w1 w79 <|im_end|>")["input_ids"]
        == tokenizer("<|im_start|> w1 w79 <|im_end|>").input_ids
    )
    assert tokenizer.init_kwargs == before


@pytest.mark.parametrize("build", [models.llama, models.gpt2, t5, bert, clip])
def test_more_tokens_than_embedding_rows(build) -> None:
    """Tokens that no text needs are named; one that ends, starts or pads texts would fail in the
    model.
    """
    model, tokenizer = build(), models.tokenizer()
    assert check_tokenizer(model, tokenizer) == ()
    tokenizer.add_tokens([f"new{i}" for i in range(40)])
    (note,) = check_tokenizer(model, tokenizer)
    assert re.search(
        r"'new14', .* 26 token\(s\) without a row among the model's 101 embedding rows", note
    )
    tokenizer.add_special_tokens({"pad_token": "<|padding|>"})
    with pytest.raises(
        CompanionError, match=r"the pad_token has id 127, the model has 101 embedding rows"
    ):
        check_tokenizer(model, tokenizer)


def tokenizer_beyond(*tokens: str) -> object:
    """The tokenizer of the tests with `tokens` behind the last embedding row of the models."""
    tokenizer = models.tokenizer()
    tokenizer.add_tokens([f"new{i}" for i in range(models.VOCABULARY - len(tokenizer))])
    tokenizer.add_tokens([*tokens])
    return tokenizer


def test_a_special_token_behind_the_last_row_is_refused() -> None:
    tokenizer = tokenizer_beyond("<|end|>")
    tokenizer.eos_token = "<|end|>"
    with pytest.raises(
        CompanionError, match="the eos_token has id 101, the model has 101 embedding rows"
    ):
        check_tokenizer(models.llama(), tokenizer)


def test_a_token_of_the_chat_template_needs_a_row() -> None:
    tokenizer = tokenizer_beyond("<|tool|>", "<|image|>")
    tokenizer.chat_template = models.CHAT_TEMPLATE + "<|tool|>"
    with pytest.raises(
        CompanionError, match=r"'<\|tool\|>' of the chat template has id 101, the model has 101"
    ):
        check_tokenizer(models.llama(), tokenizer)
    tokenizer.chat_template = {"default": models.CHAT_TEMPLATE, "tool_use": "<|tool|>"}
    with pytest.raises(CompanionError, match=r"'<\|tool\|>' of the chat template"):
        check_tokenizer(models.llama(), tokenizer)


@pytest.mark.parametrize("how", ["full", "adapter", "run"])
def test_the_note_on_tokens_is_in_the_checkpoint(how, tmp_path) -> None:
    tokenizer = tokenizer_beyond("<image>")
    with CheckpointSaver(directory=tmp_path, tokenizer=tokenizer) as saver:
        if how == "run":
            report = saver.save_state(models.llama())
        else:
            model = models.lora() if how == "adapter" else models.llama()
            report = saver.save(model, tmp_path / "out", adapter_only=how == "adapter")
    assert [note for note in report.notes if "'<image>': 1 token(s) without a row" in note]


def test_embedding_rows_are_seen_through_adapters() -> None:
    tokenizer = models.tokenizer()
    tokenizer.add_tokens([f"new{i}" for i in range(40)])
    for options in ({"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}):
        model = get_peft_model(
            models.qwen3(), LoraConfig(**{"target_modules": ["q_proj"], **options})
        )
        assert check_tokenizer(model, models.tokenizer()) == ()
        assert "101 embedding rows" in check_tokenizer(model, tokenizer)[0]


def test_resized_embeddings_count() -> None:
    model, tokenizer = models.llama(), models.tokenizer()
    tokenizer.add_tokens([f"new{i}" for i in range(40)])
    model.resize_token_embeddings(len(tokenizer))
    assert check_tokenizer(model, tokenizer) == ()


def test_what_is_for_sound_goes_along(tmp_path) -> None:
    """Given where others give a tokenizer, to a model that has embeddings."""
    with CheckpointSaver(tokenizer=Wav2Vec2FeatureExtractor(sampling_rate=8000)) as saver:
        saver.save(models.llama(), tmp_path / "out")
    assert AutoFeatureExtractor.from_pretrained(tmp_path / "out").sampling_rate == 8000
    with pytest.raises(CompanionError, match="takes its tokens from a tokenizer"):
        generation_config(models.llama(), Wav2Vec2FeatureExtractor(), "tulu")


class ScriptProcessor(LlavaProcessor):
    """A processor class of a training script."""


class ScriptTokenizer(LlamaTokenizer):
    """A tokenizer class of a training script."""


def llava_processor(processor_class: type, tokenizer: object) -> LlavaProcessor:
    return processor_class(image_processor=CLIPImageProcessor(), tokenizer=tokenizer, patch_size=8)


@pytest.mark.parametrize(
    "cls", [ScriptProcessor, type("_Patched_LlavaProcessor", (LlavaProcessor,), {})]
)
def test_a_processor_of_another_class_comes_back_as_transformers_own(
    cls: type, tmp_path: Path
) -> None:
    """AutoProcessor does not find the class and would load a bare tokenizer."""
    processor = llava_processor(cls, models.tokenizer())
    with CheckpointSaver(tokenizer=processor) as saver:
        report = saver.save(models.llama(), tmp_path / "out")
    loaded = AutoProcessor.from_pretrained(tmp_path / "out")
    assert type(loaded) is LlavaProcessor
    assert (loaded.patch_size, type(loaded.image_processor)) == (8, type(processor.image_processor))
    assert type(processor) is cls
    assert [
        note
        for note in report.notes
        if note.startswith(f"{cls.__name__}: ") and "its LlavaProcessor" in note
    ]


def test_a_tokenizer_of_another_class_comes_back_as_transformers_own(tmp_path: Path) -> None:
    tokenizer = ScriptTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, merges=[])
    processor = llava_processor(LlavaProcessor, tokenizer)
    for name, given in (("alone", tokenizer), ("inside", processor)):
        with CheckpointSaver(tokenizer=given) as saver:
            report = saver.save(models.llama(), tmp_path / name)
        assert type(AutoTokenizer.from_pretrained(tmp_path / name)) is LlamaTokenizer
        assert [note for note in report.notes if note.startswith("ScriptTokenizer: ")]
    assert type(tokenizer) is type(processor.tokenizer) is ScriptTokenizer


def test_a_processor_of_transformers_is_stored_without_a_note(tmp_path: Path) -> None:
    with CheckpointSaver(tokenizer=llava_processor(LlavaProcessor, models.tokenizer())) as saver:
        assert saver.save(models.llama(), tmp_path / "out").notes == ()


def test_a_tokenizer_that_no_module_could_load_is_named_in_the_notes(tmp_path: Path) -> None:
    with CheckpointSaver(tokenizer=models.tokenizer()) as saver:
        report = saver.save(nn.Linear(2, 2), tmp_path / "out")
    assert report.notes == ("tokenizer: not written, because no saved module has a config",)


def test_modules_without_embeddings_take_any_tokenizer() -> None:
    assert check_tokenizer(nn.Linear(2, 2), models.tokenizer()) == ()
    assert check_tokenizer(models.llama(), None) == ()


# Custom code

CODE = {
    "configuration_tiny.py": """
        from transformers import PretrainedConfig

        class TinyConfig(PretrainedConfig):
            model_type = "tiny_custom"

            def __init__(self, width=4, **kwargs):
                self.width = width
                super().__init__(**kwargs)
        """,
    "layers_tiny.py": """
        from torch import nn

        class Layer(nn.Linear):
            pass
        """,
    "modeling_tiny.py": """
        import os
        from pathlib import Path
        from transformers import PreTrainedModel
        from .configuration_tiny import TinyConfig
        from .layers_tiny import Layer

        Path(os.environ["TINY_LOG"]).open("a").write("imported ")

        class TinyModel(PreTrainedModel):
            config_class = TinyConfig

            def __init__(self, config):
                super().__init__(config)
                self.layer = Layer(config.width, config.width)
                self.post_init()

        class TinyForCausalLM(TinyModel):
            pass
        """,
}
AUTO_MAP = {
    "AutoConfig": "configuration_tiny.TinyConfig",
    "AutoModel": "modeling_tiny.TinyModel",
    "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
}


@pytest.fixture(scope="module")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all tests: transformers makes a package of it, which Python imports once."""
    return str(tmp_path_factory.mktemp("modules"))


@pytest.fixture
def custom(tmp_path: Path, modules_cache: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model loaded from a folder with code of its own, and the folder gone."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules_cache)
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "log"))
    source = tmp_path / f"source_{tmp_path.name}"
    source.mkdir()
    for name, code in CODE.items():
        (source / name).write_text(textwrap.dedent(code))
    config = {"model_type": "tiny_custom", "auto_map": AUTO_MAP, "width": 4}
    (source / "config.json").write_text(json.dumps(config))
    save_file(
        {"layer.weight": torch.eye(4), "layer.bias": torch.ones(4)},
        source / "model.safetensors",
        {"format": "pt"},
    )
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    shutil.rmtree(source)
    return model


def test_custom_code_travels_with_the_model(custom: nn.Module, tmp_path: Path) -> None:
    """The checkpoint of a custom model loads in a fresh process without the original."""
    log = (tmp_path / "log").read_text()
    custom.config.auto_map = {name: f"org/repo--{entry}" for name, entry in AUTO_MAP.items()}
    target = written(tmp_path / "target", custom)
    assert (tmp_path / "log").read_text() == log  # nothing ran to save it
    assert set(CODE) < set(files(target))
    assert json.loads((target / "config.json").read_text())["auto_map"] == AUTO_MAP
    save_file(dict(custom.state_dict()), target / "model.safetensors", {"format": "pt"})
    reload = (
        "import sys; from transformers import AutoModelForCausalLM as A, dynamic_module_utils\n"
        "dynamic_module_utils.HF_MODULES_CACHE = sys.argv[2]\n"
        "model = A.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(type(model).__name__, model.layer.weight.trace().item())"
    )
    out = run_python(reload, target, tmp_path / "fresh")
    assert out.stdout.strip() == "TinyForCausalLM 4.0", out.stderr


def test_custom_files_equal_save_pretrained(custom: nn.Module, tmp_path: Path) -> None:
    ours = written(tmp_path / "ours", custom)
    custom.save_pretrained(tmp_path / "theirs")
    assert files(ours) == files(tmp_path / "theirs")


def test_custom_code_of_a_sharded_class(custom: nn.Module, tmp_path: Path) -> None:
    ours = written(tmp_path / "ours", as_fsdp2(custom))
    config = json.loads((ours / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_tiny.TinyForCausalLM"
    assert set(CODE) < set(files(ours))


def test_code_that_is_not_here_is_not_claimed(custom: nn.Module, tmp_path: Path) -> None:
    custom.config.auto_map = {
        **AUTO_MAP,
        "AutoTokenizer": ["org/repo--tokenization_tiny.TinyTokenizer", None],
    }
    ours = written(tmp_path / "ours", custom)
    entry = json.loads((ours / "config.json").read_text())["auto_map"]["AutoTokenizer"]
    assert entry == ["org/repo--tokenization_tiny.TinyTokenizer", None]


def test_code_typed_into_a_session_is_warned_about(tmp_path: Path, monkeypatch) -> None:
    model = models.llama()
    model.__class__ = type(
        "Typed", (LlamaForCausalLM,), {"__module__": "__main__", "_auto_class": "AutoModel"}
    )
    with pytest.warns(UserWarning, match="Typed: its code is in __main__"):
        ours = written(tmp_path / "ours", model)
    assert not list(ours.glob("*.py"))


# Adapters


def adapter(build=models.qwen3, name: str = "default", **options: object) -> PeftModel:
    return get_peft_model(
        build(),
        LoraConfig(**{"target_modules": ["q_proj", "v_proj"], **options}),
        adapter_name=name,
    )


ADAPTERS = {
    "causal": lambda: adapter(task_type="CAUSAL_LM"),
    "auto_mapping": adapter,
    "patterns": lambda: adapter(
        rank_pattern={"q_proj": 3}, use_dora=True, modules_to_save=["lm_head"]
    ),
    "prompt": lambda: get_peft_model(
        models.llama(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    ),
    "named_base": lambda: adapter(
        lambda: renamed(models.llama(), "org/model"), task_type="CAUSAL_LM"
    ),
}


def renamed(model: nn.Module, name: str) -> nn.Module:
    model.name_or_path = model.config._name_or_path = name
    return model


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_files_equal_peft(name: str, tmp_path: Path) -> None:
    model = ADAPTERS[name]()
    (tmp_path / "ours").mkdir()
    before = live(model)
    write_adapter(tmp_path / "ours", model, "default", base=NO_BASE)
    assert live(model) == before
    model.save_pretrained(tmp_path / "theirs")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


def test_each_of_two_adapters_equals_peft(tmp_path: Path) -> None:
    model = models.lora()
    model.save_pretrained(tmp_path / "theirs")
    for name, place in (("default", "theirs"), ("second", "theirs/second")):
        (tmp_path / name).mkdir()
        write_adapter(tmp_path / name, model, name, base=NO_BASE)
        assert (tmp_path / name / "adapter_config.json").read_bytes() == (
            tmp_path / place / "adapter_config.json"
        ).read_bytes()


@pytest.mark.parametrize("task", [None, "CAUSAL_LM", "SEQ_CLS"])
def test_card_of_an_adapter_is_what_peft_writes(task: str | None, tmp_path: Path) -> None:
    model = adapter(task_type=task)
    model.create_or_update_model_card(str(tmp_path))
    theirs = (tmp_path / "README.md").read_bytes()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_adapter(tmp_path / name, model, "default", base=NO_BASE)
        assert (tmp_path / name / "README.md").read_bytes() == theirs


def test_base_is_recorded(tmp_path: Path) -> None:
    """The adapter says which model and revision it belongs to."""
    model = adapter(task_type="CAUSAL_LM")
    model.peft_config["default"].base_model_name_or_path = None
    write_adapter(tmp_path, model, "default", base=BASE)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"], config["inference_mode"]) == (
        "org/base",
        "abc",
        True,
    )
    assert model.peft_config["default"].revision is None


def test_injected_adapter_loads_as_a_peft_model(tmp_path: Path) -> None:
    base = models.qwen3()
    model = inject_adapter_in_model(
        LoraConfig(target_modules=["q_proj"]), copy.deepcopy(base), "default"
    )
    before = live(model)
    write_adapter(tmp_path, model, "default", base=BASE)
    assert live(model) == before
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["auto_mapping"] == {
        "base_model_class": "Qwen3ForCausalLM",
        "parent_library": "transformers.models.qwen3.modeling_qwen3",
    }
    assert "base_model:adapter:org/base" in (tmp_path / "README.md").read_text()
    weights = {
        f"base_model.model.{n}".replace(".default", ""): p
        for n, p in model.named_parameters()
        if "lora_" in n
    }
    save_file(
        {n: p.detach().clone() for n, p in weights.items()}, tmp_path / "adapter_model.safetensors"
    )
    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(loaded(**models.batch(1)).logits, model.eval()(**models.batch(1)).logits)


def test_injected_card_is_yaml_for_any_base(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    model = inject_adapter_in_model(
        LoraConfig(target_modules=["q_proj"]), models.qwen3(), "default"
    )
    odd = BaseRecord(
        id='C:\\models\\"a": b', revision=None, dtype="float32", config_hash="", fingerprint={}
    )
    for base in (odd, NO_BASE):
        write_adapter(tmp_path, model, "default", base=base)
        # a path, which the Hub refuses
        assert ModelCard.load(tmp_path / "README.md").data.base_model is None


@pytest.mark.parametrize("how", ["peft", "injected"])
def test_card_names_no_path(how: str, tmp_path: Path) -> None:
    """A base from a folder is named by its id on the Hub, if that is said, or not at all."""
    from huggingface_hub import ModelCard

    models.qwen3().save_pretrained(tmp_path / "base")
    base, config = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(target_modules=["q_proj"]),
    )
    model = get_peft_model(base, config) if how == "peft" else inject_adapter_in_model(config, base)
    for base_id in (None, "org/base"):
        with CheckpointSaver(base_id=base_id) as saver:
            path = saver.save(
                model, tmp_path / str(base_id).replace("/", "-"), adapter_only=True
            ).path
        assert str(tmp_path) not in (path / "README.md").read_text()
        card = ModelCard.load(path / "README.md")
        assert card.data.base_model == base_id
        assert [t for t in card.data.tags if t.startswith("base_model:")] == (
            [f"base_model:adapter:{base_id}"] if base_id else []
        )
        named = json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == base_id or (base_id is None and named in (str(tmp_path / "base"), None))
        assert isinstance(load_model(path), PeftModel)  # the manifest knows the folder


def test_sharded_base_is_mapped_to_its_own_class(tmp_path: Path) -> None:
    model = adapter()
    as_fsdp2(model.base_model.model)
    write_adapter(tmp_path, model, "default", base=NO_BASE)
    mapping = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    assert mapping["base_model_class"] == "Qwen3ForCausalLM"
