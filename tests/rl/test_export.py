"""`export`: an adapter with patterns or rsLoRA becomes one with one rank and one scale, and gives
the same logits.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EngineFiles
from engine_models import LAYERS, base_model, with_adapter
from engine_server import serving
from peft import PeftModel
from safetensors.torch import load_file, save_file

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    EngineError,
    LoadError,
    SelectionError,
    TargetError,
)

PATTERNS = [
    {"rank_pattern": {"q_proj": 4, "layers.1.self_attn.v_proj": 16}},
    {"alpha_pattern": {"o_proj": 4, r"layers\.[02]\.mlp\.up_proj": 32}},
    {
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"q_proj": 8, "^model.layers.3.mlp.down_proj": 5},
    },
    {"use_rslora": True},
    {
        "use_rslora": True,
        "rank_pattern": {"gate_proj": 2, "k_proj": 3},
        "alpha_pattern": {"v_proj": 7},
    },
    {"r": 3, "lora_alpha": 7, "rank_pattern": {"q_proj": 5}},
]


@pytest.fixture(scope="module")
def base() -> Any:
    return base_model("llama").float()


def save_adapter(folder: Path, **settings: Any) -> Path:
    with CheckpointSaver(None) as saver:
        saver.save(
            with_adapter(base_model("llama"), 7, **settings), folder, adapter_only=True, step=7
        )
    return folder


@torch.no_grad()
def logits(base: Any, adapter: Path) -> torch.Tensor:
    model = PeftModel.from_pretrained(base, str(adapter))
    found: torch.Tensor = model(input_ids=torch.tensor([[3, 5, 7, 11, 13]])).logits
    model.unload()
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("settings", PATTERNS, ids=[" ".join(each) for each in PATTERNS])
def test_the_logits_are_those_of_the_adapter(
    settings: dict[str, Any], base: Any, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", **settings)
    report = ft_ckpt.export(adapter, tmp_path / "plain")
    found = json.loads((tmp_path / "plain/adapter_config.json").read_text())
    assert (found["rank_pattern"], found["alpha_pattern"], found["use_rslora"]) == ({}, {}, False)
    assert {
        tensor.shape[0]
        for name, tensor in load_file(tmp_path / "plain/adapter_model.safetensors").items()
        if "lora_A" in name
    } == {found["r"]}
    assert ft_ckpt.check_for("vllm", tmp_path / "plain") == []
    assert ft_ckpt.verify(report.path).ok
    expected, plain = logits(base, adapter), logits(base, tmp_path / "plain")
    assert not torch.allclose(
        expected, base(input_ids=torch.tensor([[3, 5, 7, 11, 13]])).logits, atol=1e-2
    )
    torch.testing.assert_close(plain, expected, atol=2e-5, rtol=1e-5)


def test_scales_that_are_powers_of_two_apart_change_no_bit(tmp_path: Path) -> None:
    adapter = save_adapter(
        tmp_path / "adapter", rank_pattern={"q_proj": 4}, alpha_pattern={"o_proj": 4}
    )
    report = ft_ckpt.export(adapter, tmp_path / "plain")
    assert [note for note in report.notes if "rounded" in note] == []
    before, after = (
        load_file(path / "adapter_model.safetensors") for path in (adapter, tmp_path / "plain")
    )
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        layer = name.split(".")[-3]
        factor = {"q_proj": 2.0, "o_proj": 0.25}.get(layer, 1.0) if "lora_B" in name else 1.0
        rank = before[name].shape[0 if "lora_A" in name else 1]
        kept, padding = tensor.split([rank, 8 - rank], dim=0 if "lora_A" in name else 1)
        assert tensor.dtype == before[name].dtype
        assert torch.equal(kept, before[name] * factor)
        assert not padding.any()


def test_other_scales_are_counted(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", alpha_pattern={"o_proj": 5})
    report = ft_ckpt.export(adapter, tmp_path / "plain")
    assert "rank 8 and scale 2 for all 28 layers" in report.notes
    assert "4 of 28 layers: lora_B is scaled and rounded in float32" in report.notes


def test_a_scale_that_overflows_is_refused(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", alpha_pattern={"o_proj": 1e42})
    with pytest.raises(
        SelectionError, match=r"o_proj\.lora_B\.weight: not finite in float32, scaled by 6.*; merge"
    ):
        ft_ckpt.export(adapter, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_the_manifest_names_the_source(tmp_path: Path, files: EngineFiles) -> None:
    ft_ckpt.export(files.adapters[0], tmp_path / "run/plain")
    found = json.loads((tmp_path / "run/plain/ft_ckpt.json").read_text())
    assert (found["step"], found["made_from"], found["export"]) == (100, ["checkpoint-100"], True)
    assert found["notes"][-1] == "converted for vllm from checkpoint-100"
    assert found["parts"][0]["base"]["fingerprint"]
    assert ft_ckpt.latest(tmp_path / "run") is None  # no run goes on from it


def test_a_folder_of_peft_is_exported_too(tmp_path: Path) -> None:
    with_adapter(base_model("llama"), 1, rank_pattern={"q_proj": 4}).save_pretrained(
        tmp_path / "peft"
    )
    ft_ckpt.export(tmp_path / "peft", tmp_path / "plain", "sglang")
    assert ft_ckpt.check_for("sglang", tmp_path / "plain") == []


def test_what_has_no_exact_conversion_is_refused_with_all_reasons(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", use_dora=True, rank_pattern={"q_proj": 4})
    with pytest.raises(
        SelectionError,
        match=r"use_dora: set.*ft-ckpt merge.*lora_magnitude_vector.*no LoRA matrices",
    ):
        ft_ckpt.export(adapter, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_matrices_of_another_rank_than_the_settings_are_refused(tmp_path: Path) -> None:
    with_adapter(base_model("llama"), 1).save_pretrained(tmp_path / "peft")
    config = tmp_path / "peft/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rank_pattern": {"q_proj": 4}}))
    with pytest.raises(
        SelectionError,
        match=r"q_proj: shapes \[8, \d+\] and \[\d+, 8\], expected two matrices of rank 4",
    ):
        ft_ckpt.export(tmp_path / "peft", tmp_path / "plain")


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "bool", "complex64", None]
)
def test_matrices_that_are_no_floats_of_an_engine_are_refused(
    dtype: str | None, tmp_path: Path
) -> None:
    with_adapter(base_model("llama"), 1, alpha_pattern={"q_proj": 4}).save_pretrained(
        tmp_path / "peft"
    )
    file, changed = tmp_path / "peft/adapter_model.safetensors", dict[str, torch.Tensor]()
    if dtype is not None:
        changed = {
            name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()
        }
    save_file(changed, file)
    expected = (
        f"lora_A.weight: {dtype}.* expected one of float64" if dtype else "no LoRA matrices in it"
    )
    with pytest.raises(SelectionError, match=expected):
        ft_ckpt.export(tmp_path / "peft", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("patterns", [{}, {"alpha_pattern": {"q_proj": 4}}], ids=str)
def test_layers_scaled_by_nothing(patterns: dict[str, Any], base: Any, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", lora_alpha=0, **patterns)
    ft_ckpt.export(adapter, tmp_path / "plain")
    torch.testing.assert_close(
        logits(base, tmp_path / "plain"), logits(base, adapter), atol=2e-5, rtol=1e-5
    )


def test_a_damaged_source_leaves_nothing(tmp_path: Path, files: EngineFiles) -> None:
    adapter = shutil.copytree(files.adapters[0], tmp_path / "checkpoint-1")
    weights = adapter / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CorruptError):
        ft_ckpt.export(adapter, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_what_is_no_adapter_is_refused(tmp_path: Path, files: EngineFiles) -> None:
    with pytest.raises(LoadError, match="expected a folder with an adapter"):
        ft_ckpt.export(files.base, tmp_path / "plain")
    with pytest.raises(ConfigError, match="engine='tgi': expected one of vllm, sglang"):
        ft_ckpt.export(files.adapters[0], tmp_path / "plain", "tgi")


def test_several_adapters_are_named(tmp_path: Path) -> None:
    model = with_adapter(base_model("llama"), 1)
    with CheckpointSaver(None) as saver:
        saver.save(model, tmp_path / "both", adapter_only=False)
    with pytest.raises(
        SelectionError, match=r"several parts .*adapters/default.*give the folder of one adapter"
    ):
        ft_ckpt.export(tmp_path / "both", tmp_path / "plain")
    ft_ckpt.export(tmp_path / "both/adapters/default", tmp_path / "plain")
    assert ft_ckpt.check_for("vllm", tmp_path / "plain") == []


def test_a_file_in_the_way_is_refused(tmp_path: Path, files: EngineFiles) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "plain")
    with pytest.raises(TargetError, match="a file, expected a folder"):
        ft_ckpt.export(files.adapters[0], tmp_path / "plain")


def test_publish_exports_into_the_stage(tmp_path: Path, files: EngineFiles) -> None:
    adapter = save_adapter(tmp_path / "run/checkpoint-7", rank_pattern={"q_proj": 4})
    with serving(files.base) as engine:
        with pytest.raises(LoadError, match=r"rank_pattern: set.*ft-ckpt export"):
            ft_ckpt.publish(adapter, engine.url)
        reports = [ft_ckpt.publish(adapter, engine.url, stage=tmp_path / "seen") for _ in range(2)]
        assert [report.servers[0].is_new for report in reports] == [True, False]
        (loaded,) = engine.requests_to("/v1/load_lora_adapter")
        assert loaded.body["lora_name"] == reports[0].name
        assert reports[0].name.startswith("run@7-")
        assert Path(loaded.body["lora_path"]).parent == tmp_path / "seen"
        assert ft_ckpt.check_for("vllm", loaded.body["lora_path"]) == []


def test_each_part_has_its_own_export_and_name(tmp_path: Path, files: EngineFiles) -> None:
    model = with_adapter(base_model("llama"), 1, rank_pattern={"q_proj": 4})
    for name in ("one", "two"):
        model.add_adapter(name, model.peft_config["default"])
    model.delete_adapter("default")
    with CheckpointSaver(None) as saver:
        saver.save(model, tmp_path / "run/checkpoint-7", adapter_only=True, step=7)
    options = {"stage": tmp_path / "seen", "check": "listed"}
    with serving(files.base) as engine:
        for part in ("one", "two"):
            report = ft_ckpt.publish(
                tmp_path / "run/checkpoint-7", engine.url, part=part, **options
            )
            assert report.name.startswith(f"run-{part}@7-")
        ft_ckpt.publish(
            tmp_path / "run/checkpoint-7", engine.url, part="one", name="policy", **options
        )
        with pytest.raises(
            EngineError, match=r"loaded from .*-one, expected .*-two; give another version="
        ):
            ft_ckpt.publish(
                tmp_path / "run/checkpoint-7", engine.url, part="two", name="policy", **options
            )


def test_the_adapter_in_the_root_has_the_name_of_the_run(
    tmp_path: Path, files: EngineFiles
) -> None:
    model = with_adapter(base_model("llama"), 1)
    model.add_adapter("other", model.peft_config["default"])
    with CheckpointSaver(None) as saver:
        saver.save(model, tmp_path / "run/checkpoint-7", adapter_only=True, step=7)
    with serving(files.base) as engine:
        for part, name in (("", "run"), ("other", "run-other")):
            report = ft_ckpt.publish(
                tmp_path / "run/checkpoint-7", engine.url, part=part, check="listed"
            )
            assert report.name.startswith(f"{name}@7-")


def test_all_layers_are_in_the_models() -> None:
    assert len(LAYERS) * 4 == 28  # the counts above
