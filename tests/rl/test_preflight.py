"""`check_for`, and what publish refuses before it asks a server: every field of an adapter, every
file of a model.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EngineFiles
from engine_models import base_model, tokenizer, with_adapter
from engine_server import serving
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

from ft_ckpt import CheckpointSaver, check_for, export, publish
from ft_ckpt.errors import ConfigError, LoadError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"r": 32}, "r: 32, expected 1 to 16; start the server with a larger --max-lora-rank"),
    ({"r": 0}, "r: 0, expected 1 to 16"),
    ({"r": None}, "r: None, expected 1 to 16"),
    ({"rank_pattern": {"q_proj": 64}}, r"rank_pattern\['q_proj'\]: 64, expected 1 to 16"),
    (
        {"rank_pattern": {"q_proj": 4}},
        "rank_pattern: set, and read by few versions of vllm.*ft-ckpt export",
    ),
    (
        {"alpha_pattern": {"q_proj": 4}},
        "alpha_pattern: set, and read by few versions of vllm.*ft-ckpt export",
    ),
    ({"alpha_pattern": {"(": 4}}, r"'\(' is no regular expression"),
    ({"lora_alpha": "16"}, "lora_alpha: 16, expected a number"),
    ({"lora_alpha": float("inf")}, "lora_alpha: inf, expected a number"),
    ({"lora_alpha": 10**400}, "lora_alpha: 10.*, expected a number"),
    (
        {"alpha_pattern": {"q_proj": float("-inf")}},
        r"alpha_pattern\['q_proj'\]: -inf, expected a number",
    ),
    ({"rank_pattern": 3}, "rank_pattern: 3, expected layers with numbers"),
    ({"peft_type": "LOHA"}, "peft_type: LOHA, expected LORA; merge it"),
    ({"use_dora": True}, "use_dora: set"),
    ({"lora_bias": True}, "lora_bias: set"),
    ({"use_bdlora": {"target_modules_bd_a": []}}, "use_bdlora: set"),
    ({"use_qalora": True}, "use_qalora: set"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: set"),
    ({"layer_replication": [[0, 2]]}, "layer_replication: set"),
    ({"arrow_config": {"top_k": 2}}, "arrow_config: set"),
    ({"kasa_config": {"beta": 1}}, "kasa_config: set"),
    ({"monteclora_config": {"n": 1}}, "monteclora_config: set"),
    ({"bias": "lora_only"}, "bias: 'lora_only', expected 'none'"),
    ({"modules_to_save": ["embed_tokens"]}, "modules_to_save: .*embed_tokens.*dropped"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices: set"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters: .*fused experts"),
    *(
        ({"init_lora_weights": start}, f"init_lora_weights: '{start}' changed the base")
        for start in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "a new one")
    ),
]
PASSED: list[dict[str, Any]] = [
    {},
    {"use_rslora": True},
    {"lora_dropout": 0.1},
    {"bias": None},
    {"inference_mode": False},
    {"target_modules": "all-linear"},
    {"velora_config": {"rank": 4}},
    *(
        {"init_lora_weights": start}
        for start in (True, False, None, "gaussian", "eva", "orthogonal", "mica")
    ),
]
UNREAD = {  # fields of LoRA that change neither the tensors nor what they do to the output
    *(
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *(
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "fan_in_fan_out",
        "lora_dropout",
    ),
    *(
        "megatron_config",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
    ),
    *("velora_config", "qalora_group_size", "runtime_config", "ensure_weight_tying", "use_rslora"),
}


@pytest.fixture
def adapter(files: EngineFiles, tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of PEFT with other settings."""

    def make(**settings: Any) -> Path:
        folder = shutil.copytree(files.adapters[0], tmp_path / "adapter")
        (folder / "ft_ckpt.json").unlink()
        config = folder / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
        return folder

    return make


@pytest.mark.parametrize(
    ("settings", "expected"), REFUSED, ids=[str(each)[:40] for each, _ in REFUSED]
)
def test_refused(settings: dict[str, Any], expected: str, adapter: Callable[..., Path]) -> None:
    found = check_for("vllm", adapter(**settings))
    assert any(re.match(f".*{expected}", line) for line in found), found
    assert all("\n" not in line and ";" in line for line in found)


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 takes flags inside of an expression"
)
def test_a_pattern_that_is_an_expression_only_alone(adapter: Callable[..., Path]) -> None:
    found = check_for("vllm", adapter(alpha_pattern={"(?i)Q_PROJ": 4}))
    assert any("'(?i)Q_PROJ' is no regular expression" in line for line in found)


@pytest.mark.parametrize("settings", PASSED, ids=[str(each)[:40] for each in PASSED])
def test_passed(settings: dict[str, Any], adapter: Callable[..., Path]) -> None:
    assert check_for("vllm", adapter(**settings)) == []


def test_every_field_of_peft_is_known() -> None:
    """A field that PEFT adds is one that an engine may not read."""
    named = {name for settings, _ in REFUSED for name in settings}
    assert set(LoraConfig(r=8).to_dict()) - named - UNREAD == set()


def test_the_rank_of_the_server_counts(adapter: Callable[..., Path]) -> None:
    folder = adapter()
    assert [check_for(engine, folder, max_lora_rank=8) for engine in ("vllm", "sglang")] == [[], []]
    assert "r: 8, expected 1 to 4" in check_for("vllm", folder, max_lora_rank=4)[0]


def change_tensors(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], name: str = "adapter_model"
) -> Path:
    tensors = load_file(folder / f"{name}.safetensors")
    change(tensors)
    save_file(tensors, folder / f"{name}.safetensors", {"format": "pt"})
    return folder


PREFIX = "base_model.model.model.layers.0.mlp"


def test_fused_experts_in_2d_and_3d(adapter: Callable[..., Path]) -> None:
    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{PREFIX}.experts.lora_A.weight"] = torch.ones(4, 8, 256)
        tensors[f"{PREFIX}.experts.lora_B.weight"] = torch.ones(4, 256, 8)

    folder = change_tensors(adapter(), fuse)
    (found,) = check_for("vllm", folder)
    assert (
        "layers.0.mlp.experts: shapes [4, 8, 256] and [4, 256, 8], expected two matrices of rank 8"
        in found
    )


def test_tensors_that_would_be_dropped(adapter: Callable[..., Path]) -> None:
    embedding = "base_model.model.model.embed_tokens.weight"
    folder = change_tensors(
        adapter(), lambda tensors: tensors.update({embedding: torch.ones(4, 4)})
    )
    (found,) = check_for("vllm", folder)
    assert found.startswith(f"{embedding}: one of 1 tensors that are no LoRA matrices")


def test_a_matrix_without_the_other(adapter: Callable[..., Path]) -> None:
    folder = change_tensors(
        adapter(), lambda tensors: tensors.pop(f"{PREFIX}.up_proj.lora_B.weight")
    )
    (found,) = check_for("vllm", folder)
    assert re.search(
        r"layers.0.mlp.up_proj: shapes \[8, \d+\] and \[\], expected two matrices", found
    )


def test_elements_that_are_no_numbers(adapter: Callable[..., Path]) -> None:
    name = f"{PREFIX}.up_proj.lora_B.weight"
    folder = change_tensors(adapter(), lambda tensors: tensors[name][0].fill_(float("nan")))
    assert check_for("vllm", folder) == [
        f"{name}: NaN or infinite elements; use an older checkpoint"
    ]


def test_an_unknown_engine(adapter: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="engine='tgi': expected one of vllm, sglang"):
        check_for("tgi", adapter())


MODEL: list[tuple[str, str]] = [
    ("architectures", "config.json: no architectures"),
    ("vocab_size", r"model.embed_tokens.weight: shape \[1024, \d+\], expected vocab_size 7"),
    ("hidden_size", r"model.embed_tokens.weight: shape \[1024, \d+\], expected hidden_size 7"),
    ("num_hidden_layers", "num_hidden_layers 7, and tensors of 4 layers"),
    ("auto_map", "auto_map"),
    ("quantization_config", "quantised weights"),
]


@pytest.mark.parametrize(("field", "expected"), MODEL, ids=[field for field, _ in MODEL])
def test_a_config_that_does_not_fit(
    field: str, expected: str, files: EngineFiles, tmp_path: Path
) -> None:
    folder = shutil.copytree(files.base, tmp_path / "model")
    (folder / "ft_ckpt.json").unlink()
    config = folder / "config.json"
    value = (
        None
        if field == "architectures"
        else {"a": 1}
        if "_size" not in field and "num" not in field
        else 7
    )
    config.write_text(json.dumps({**json.loads(config.read_text()), field: value}))
    (found,) = check_for("vllm", folder)
    assert re.search(expected, found), found


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        (["config.json"], "config.json: missing"),
        (["tokenizer.json", "tokenizer_config.json"], "tokenizer.json: missing"),
    ],
)
def test_files_that_are_missing(
    gone: list[str], expected: str, files: EngineFiles, tmp_path: Path
) -> None:
    folder = shutil.copytree(files.base, tmp_path / "model")
    for name in ["ft_ckpt.json", *gone]:
        (folder / name).unlink()
    (found,) = check_for("vllm", folder)
    assert found.startswith(expected)


def test_a_model_that_fits(files: EngineFiles) -> None:
    for engine in ("vllm", "sglang"):
        assert [check_for(engine, folder) for folder in (files.base, files.qwen)] == [[], []]


def test_a_vision_encoder_may_have_more_layers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    text = {"model_type": "gemma", "vocab_size": 64, "num_hidden_layers": 2, "head_dim": 8, **sizes}
    vision = {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 3,
        "image_size": 28,
        "patch_size": 14,
        **sizes,
    }
    config = PaliGemmaConfig(
        text_config=text, vision_config=vision, projection_dim=16, image_token_index=63
    )
    PaliGemmaForConditionalGeneration(config).save_pretrained(tmp_path)
    (found,) = check_for("vllm", tmp_path)
    assert found.startswith("tokenizer.json: missing")


def test_embeddings_may_be_projected(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_attention_heads": 2}
    OPTForCausalLM(OPTConfig(vocab_size=64, num_hidden_layers=2, **sizes)).save_pretrained(tmp_path)
    (found,) = check_for("vllm", tmp_path)
    assert found.startswith("tokenizer.json: missing")


@pytest.mark.parametrize("layers", [3, 4])
def test_layers_that_predict_further_tokens_may_be_stored(
    layers: int, files: EngineFiles, tmp_path: Path
) -> None:
    folder = shutil.copytree(files.base, tmp_path / "model")
    (folder / "ft_ckpt.json").unlink()
    config = folder / "config.json"
    changed = {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    assert check_for("vllm", folder) == []


# The base of an adapter


def test_an_adapter_of_another_base_is_refused(files: EngineFiles, tmp_path: Path) -> None:
    other = tmp_path / "other"
    base_model("llama", 9).save_pretrained(other)
    with serving(other) as engine:
        with pytest.raises(
            LoadError,
            match=f"sampled tensors of the base that the server holds, {other}, differ from",
        ):
            publish(files.adapters[0], engine.url)
        assert engine.changes == []


@pytest.mark.parametrize("folder", ["base", "another copy", "elsewhere", "seen as another path"])
def test_an_adapter_of_this_base_is_published(
    folder: str, files: EngineFiles, tmp_path: Path
) -> None:
    base, options = files.base, dict[str, Any]()
    if folder == "another copy":
        base = tmp_path / "copy"
        base_model("llama").float().save_pretrained(base)  # in another type
    with serving(base) as engine:
        if folder == "elsewhere":
            engine.base = Path("/no/such/folder")
        if folder == "seen as another path":
            (tmp_path / "seen").symlink_to(files.root)
            engine.base = tmp_path / "seen/base"
            options["visible_at"] = {str(files.root): str(tmp_path / "seen")}
        (server,) = publish(files.adapters[0], engine.url, **options).servers
        assert server.is_new
        why = "; its base was not compared: /no/such/folder is not a folder here; see visible_at="
        assert server.checked.endswith(why) == (folder == "elsewhere")
        assert ("not compared" in server.checked) == (folder == "elsewhere")


def test_a_base_under_another_path_is_compared_too(files: EngineFiles, tmp_path: Path) -> None:
    base_model("llama", 9).save_pretrained(tmp_path / "here/other")
    shutil.copytree(files.adapters[0], tmp_path / "here/run/checkpoint-100")
    with serving(tmp_path / "here/other") as engine:
        engine.base = Path("/data/other")
        with pytest.raises(LoadError, match="sampled tensors of the base"):
            publish(
                tmp_path / "here/run/checkpoint-100",
                engine.url,
                visible_at={str(tmp_path / "here"): "/data"},
            )


# Initialisations of LoRA: those that change the base, by PEFT itself


STARTS = [
    "gaussian",
    "orthogonal",
    "mica",
    "pissa",
    "pissa_niter_2",
    "olora",
    "lora_ga",
    "eva",
    "corda",
]  # loftq needs CUDA


@pytest.mark.sample("lora_ga", "eva")
@pytest.mark.parametrize("start", STARTS)
def test_an_initialisation_that_changes_the_base_is_found(start: str, tmp_path: Path) -> None:
    base = base_model("llama").float()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = started(base, start)
    layers = {
        name.replace(".base_layer", "")
        for name, tensor in model.get_base_model().state_dict().items()
        if "lora" not in name and not torch.equal(tensor, before[name.replace(".base_layer", "")])
    }
    model.save_pretrained(tmp_path / "adapter")
    has_finding = any(
        line.startswith("init_lora_weights") for line in check_for("vllm", tmp_path / "adapter")
    )
    assert has_finding == bool(layers)


def started(base: Any, start: str) -> Any:
    """An adapter on the base, initialised by PEFT, with data where it needs some."""
    from peft import EvaConfig, get_peft_model, initialize_lora_eva_weights
    from peft.tuners.lora.config import CordaConfig, LoraGAConfig
    from peft.tuners.lora.corda import preprocess_corda
    from peft.tuners.lora.loraga import preprocess_loraga

    ids = torch.arange(1, 19).view(2, 9)
    more: dict[str, Any] = {
        "lora_ga": {"lora_ga_config": LoraGAConfig()},
        "eva": {"eva_config": EvaConfig()},
        "corda": {"corda_config": CordaConfig(corda_method="kpm")},
    }.get(start, {})
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=start,
        **more,
    )
    if start == "lora_ga":
        preprocess_loraga(base, config, lambda: base(input_ids=ids, labels=ids).loss.backward())
    if start == "corda":
        preprocess_corda(base, config, run_model=lambda: base(input_ids=ids[:1]))
    model = get_peft_model(base, config)
    if start == "eva":
        initialize_lora_eva_weights(
            model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
        )
    return model


def test_sglang_reads_no_rslora(tmp_path: Path) -> None:
    adapter = saved(tmp_path, use_rslora=True)
    assert check_for("vllm", adapter) == []
    (line,) = check_for("sglang", adapter)
    assert line.startswith("use_rslora: set, and not read by sglang")
    assert "ft-ckpt export ADAPTER OUT --for sglang" in line
    export(adapter, tmp_path / "plain", "sglang")
    assert check_for("sglang", tmp_path / "plain") == []
    with serving(tmp_path / "base", "sglang") as engine:
        with pytest.raises(LoadError, match="use_rslora"):
            publish(adapter, engine.url)
        publish(adapter, engine.url, stage=tmp_path / "stage")
        (loaded,) = engine.adapters.values()
        assert Path(loaded.path).parent == tmp_path / "stage"


def saved(folder: Path, **settings: Any) -> Path:
    """An adapter with these settings, beside its base."""
    with CheckpointSaver(None) as saver:
        saver.save(base_model("llama"), folder / "base", tokenizer=tokenizer())
        model = with_adapter(base_model("llama"), 1, **settings)
        saver.save(model, folder / "run/checkpoint-1", step=1, adapter_only=True)
    return folder / "run/checkpoint-1"
