"""Adapters of classes that transformers renames or converts: after each load and merge they are the
trained ones.
"""

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import peft
import pytest
import torch
import transformers
from model_classes import make_small
from models import trained
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tables import adapter_config, classes_with_tables

import ft_ckpt
from ft_ckpt import CheckpointSaver, errors

SHARES = 16  # of the campaign
KINDS = ("layers", "biases")
State = Mapping[str, torch.Tensor]


def differing(actual: State, expected: State, tolerance: float = 0.0) -> list[str]:
    """Names of expected tensors that are missing, or have other values."""
    wrong = []
    for name, tensor in expected.items():
        if name not in actual or not torch.allclose(
            actual[name], tensor, rtol=0, atol=tolerance, equal_nan=True
        ):
            wrong.append(name)
    return wrong


def differences(name: str, kind: str, folder: Path) -> dict[str, str]:
    """How an adapter on a model of that class, saved in each way, differs from the live one once it
    is loaded.

    A way that is refused by name is one, too: it begins with "refused".
    """
    base = make_small(name)
    if base is None:
        return {}
    cls: Any = type(base)
    base.save_pretrained(folder / "base")
    model = trained(
        get_peft_model(cls.from_pretrained(folder / "base"), adapter_config(base, kind))
    )
    adapted = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    saver = CheckpointSaver()

    def alone() -> Any:
        saver.save(model, folder / "alone", adapter_only=True)
        return ft_ckpt.load_model(folder / "alone")

    def beside_its_base() -> Any:
        saver.save(model, folder / "beside", adapter_only=False)
        return ft_ckpt.load_model(folder / "beside")

    def merged_live() -> Any:
        saver.save(model, folder / "live", merged=True)
        return cls.from_pretrained(folder / "live")

    def merged_files() -> Any:
        ft_ckpt.merge(folder / "alone", folder / "files", progress=False)
        return cls.from_pretrained(folder / "files")

    ways: dict[Callable[[], Any], tuple[State, float]] = {
        alone: (adapted, 0.0),
        beside_its_base: (adapted, 0.0),
        merged_live: (merged, 1e-5),
        merged_files: (merged, 1e-5),
    }
    problems = {}
    for way, (expected, tolerance) in ways.items():
        where = f"{name}, {kind}, {way.__name__}"
        try:
            wrong = differing(way().state_dict(), expected, tolerance)
        except errors.SelectionError as error:
            problems[where] = f"refused: {error}"
            continue
        except Exception as error:  # the campaign lists all that fail
            problems[where] = f"{type(error).__name__}: {error}"
            continue
        if wrong:
            problems[where] = f"{len(wrong)} tensors differ, as {wrong[0]}"
    return problems


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        # names of today that PEFT renames as names of an older layout
        ("LagunaForCausalLM", "layers"),
        # experts whose shapes transformers asks the model for
        ("Qwen3VLMoeForConditionalGeneration", "layers"),
        ("Kimi_K25ForConditionalGeneration", "biases"),  # stored fused, several tensors in memory
        ("AfmoeForCausalLM", "biases"),  # a router that is replaced, whose name PEFT renames
    ],
)
def test_an_adapter_is_the_trained_one_after_each_load_and_merge(name, kind, tmp_path):
    if not hasattr(transformers, name):
        pytest.skip(f"{name}: not in this version of transformers")
    assert make_small(name) is not None
    assert differences(name, kind, tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_adapters_on_every_class_with_a_table(share, tmp_path):
    names = classes_with_tables()[share::SHARES]
    problems: dict[str, str] = {}
    refused: set[str] = set()
    made = 0
    for name in names:
        made += make_small(name) is not None
        for kind in KINDS:
            for where, problem in differences(name, kind, tmp_path / name / kind).items():
                if problem.startswith("refused: "):
                    refused.add(name)
                else:
                    problems[where] = problem
    assert problems == {}
    assert made > len(names) // 4, f"only {made} of {len(names)} classes can be made small"
    assert len(refused) <= made // 5, f"{sorted(refused)} of {made} classes are refused"


def rename_stored(folder: Path, pattern: str, replacement: str) -> None:
    file = folder / "adapter_model.safetensors"
    renamed = {
        re.sub(pattern, replacement, name): tensor for name, tensor in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def test_an_adapter_with_the_names_of_transformers_4(tmp_path):
    """LLaVA's decoder was `language_model.model` there, and is `model.language_model` now."""
    pytest.importorskip("peft.utils.transformers_weight_conversion")
    base = make_small("LlavaForConditionalGeneration")
    cls: Any = type(base)
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=r".*language_model.*(q_proj|down_proj)")
    model = trained(get_peft_model(cls.from_pretrained(tmp_path / "base"), config))
    model.save_pretrained(tmp_path / "adapter")
    rename_stored(
        tmp_path / "adapter", r"model\.language_model\.layers", "language_model.model.layers"
    )
    ft_ckpt.convert(tmp_path / "adapter", tmp_path / "checkpoint", progress=False)
    ft_ckpt.merge(tmp_path / "adapter", tmp_path / "merged", progress=False)
    loaded = ft_ckpt.load_model(tmp_path / "checkpoint")
    assert differing(loaded.state_dict(), model.state_dict()) == []
    merged = cls.from_pretrained(tmp_path / "merged").state_dict()
    assert differing(merged, model.merge_and_unload().state_dict(), 1e-5) == []


def test_an_adapter_of_single_experts(tmp_path):
    """transformers 4 had a linear layer for each matrix of each expert; now they are fused, and so
    is the adapter.
    """
    pytest.importorskip("peft.utils.transformers_weight_conversion")
    base = make_small("MixtralForCausalLM")
    cls: Any = type(base)
    base.save_pretrained(tmp_path / "base")
    tensors = {}
    for name, tensor in load_file(tmp_path / "base" / "model.safetensors").items():
        if ".experts." in name:
            path = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = tensor.shape
            tensors[f"{path}.lora_A.weight"] = torch.randn(2, columns)
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, 2)
    config = LoraConfig(
        r=2, target_modules=["w1", "w2", "w3"], base_model_name_or_path=str(tmp_path / "base")
    )
    config.save_pretrained(tmp_path / "adapter")
    save_file(
        tensors, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"}
    )
    by_peft = PeftModel.from_pretrained(
        cls.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    ft_ckpt.convert(tmp_path / "adapter", tmp_path / "checkpoint", progress=False)
    ft_ckpt.merge(tmp_path / "adapter", tmp_path / "merged", progress=False)
    loaded = ft_ckpt.load_model(tmp_path / "checkpoint")
    assert differing(loaded.state_dict(), by_peft.state_dict()) == []
    merged = cls.from_pretrained(tmp_path / "merged").state_dict()
    assert differing(merged, by_peft.merge_and_unload().state_dict(), 1e-4) == []


def test_what_peft_does_not_load_is_named(tmp_path, monkeypatch):
    """The embeddings of a prompt encoder are computed at the save, so PEFT loads them."""
    config = peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=7
    )
    model = trained(get_peft_model(models.build("qwen3"), config))
    CheckpointSaver().save(model, tmp_path, adapter_only=True)
    monkeypatch.setattr(peft, "set_peft_model_state_dict", lambda *_, **__: None)
    with pytest.raises(
        errors.LoadError, match=r"prompt_embeddings: other values in adapter 'default'"
    ):
        ft_ckpt.load_model(tmp_path, base=models.build("qwen3"))
