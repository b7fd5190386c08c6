"""Pairs of checkpoints with other ties, types, vocabularies or configs, through average, diff and
merge.

The result is that of plain torch, or one of our errors; which of the two is known beforehand for
every pair.
"""

import itertools
import json
import random
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from compare import assert_agree, logits
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from seeds import chosen_seed
from small_checkpoints import edit
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from ft_ckpt import CheckpointSaver, average, merge
from ft_ckpt.errors import CheckpointError, LoadError
from ft_ckpt.extensions.tools import compare_files
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.storage.places import open_place

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_key_value_heads": 2,
}
UNTIED = {"tie_word_embeddings": False}
ROPE = {"rope_theta": 9.0, "rope_type": "default"}
# name: settings of the model, its type, how it is written, the class of those that have an average
FOLDERS = {
    "tied": ({}, "float32", "ours", "plain"),
    "tied sharded": ({}, "float32", "shards", "plain"),
    "tied h5": ({}, "float32", "h5", "plain"),
    "tied hf": ({}, "float32", "hf", "plain"),
    "tied hf 4": ({}, "float32", "hf4", "plain"),
    "tied dropout": ({"attention_dropout": 0.5, "use_cache": False}, "float32", "ours", "plain"),
    "tied tokens": ({}, "float32", "tokenizer", "plain"),
    "tied other tokens": ({}, "float32", "tokenizer2", "tokens"),
    "tied copies": ({}, "float32", "copies", "copies"),
    "tied bfloat16": ({}, "bfloat16", "ours", "bfloat16"),
    "tied vocabulary": ({"vocab_size": 103}, "float32", "ours", "vocabulary"),
    "tied eps": ({"rms_norm_eps": 1e-3}, "float32", "ours", "eps"),
    "untied": (UNTIED, "float32", "ours", "untied"),
    "untied hf": (UNTIED, "float32", "hf", "untied"),
    "untied float16": (UNTIED, "float16", "ours", "float16"),
    "untied float64": (UNTIED, "float64", "hf", "float64"),
    "untied heads": (
        {**UNTIED, "num_attention_heads": 2, "num_key_value_heads": 1},
        "float32",
        "hf",
        "heads",
    ),
    "untied rope": ({**UNTIED, "rope_parameters": ROPE}, "float32", "ours", "rope"),
    "untied act": ({**UNTIED, "hidden_act": "gelu"}, "float32", "ours", "act"),
    "untied mistral": (UNTIED, "float32", "mistral", "mistral"),
    "untied fp8": (UNTIED, "float32", "quantised", "quantised"),
}
FILES = {  # name: settings, type, how it is written
    "tied.pt": ({}, "float32", "aliases"),
    "tied other way.pt": ({}, "float32", "aliases2"),
    "tied copies.safetensors": ({}, "float32", "safetensors"),
    "tied hf.safetensors": ({}, "float32", "no head"),
    "untied.safetensors": (UNTIED, "float32", "safetensors"),
    "untied.h5": (UNTIED, "float32", "h5 file"),
    "untied float8.safetensors": (UNTIED, "float8_e4m3fn", "safetensors"),
    "untied bfloat16.pt": (UNTIED, "bfloat16", "aliases"),
}
KNOWN = [  # these were averaged into something else, or died
    *(
        ("tied", "untied"),
        ("untied", "tied"),
        ("tied", "tied hf"),
        ("tied.pt", "tied copies.safetensors"),
    ),
    *(
        ("tied", "tied eps"),
        ("untied", "untied mistral"),
        ("untied float8.safetensors", "untied float8.safetensors"),
    ),
]
PAIRS = list(itertools.product([*FOLDERS, *FILES], repeat=2))


@dataclass
class Made:
    """A checkpoint, and the tensors that a model has that is read from it: tied names have one
    object.
    """

    path: Path
    state: dict[str, torch.Tensor]
    told: frozenset[str]  # names that its files tell
    stored: frozenset[str]  # names of which they have values
    of: str  # folders of one class have an average
    is_folder: bool


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root, known = tmp_path_factory.mktemp("pairs"), {}

    def make(name: str, seed: int) -> Made:
        if (name, seed) not in known:
            known[name, seed] = write(root / f"{seed} {name}", name, seed)
        return known[name, seed]

    return make


def build(settings: dict[str, Any], dtype: str, seed: int, kind: str) -> Any:
    if kind == "mistral":
        model: nn.Module = MistralForCausalLM(
            MistralConfig(**{**models.SIZES, **SMALL, "sliding_window": None, **settings})
        )
    else:
        model = models.llama(**{**SMALL, **settings})
    models.fill(model, seed, scale=0.5)
    return model.to(getattr(torch, "float32" if dtype.startswith("float8") else dtype)).eval()


def write(path: Path, name: str, seed: int) -> Made:
    settings, dtype, how, *of = FOLDERS.get(name) or FILES[name]
    model = build(settings, dtype, seed, how)
    state = {key: value.to(getattr(torch, dtype)) for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings and how not in ("copies", "safetensors"):
        state[HEAD] = state[EMBEDDING]
    told = stored = frozenset(state)
    if name in FILES:
        write_file(path, state, how)
        told -= {HEAD} if how == "no head" else set()
    else:
        write_folder(path, model, how)
        told -= {HEAD} if how in ("hf", "hf4") and model.config.tie_word_embeddings else set()
    if state[HEAD] is state[EMBEDDING]:
        stored -= {EMBEDDING if how == "aliases2" else HEAD}
    return Made(path, state, told, stored, *(of or [""]), is_folder=name in FOLDERS)


def write_folder(path: Path, model: Any, how: str) -> None:
    if how in ("hf", "hf4", "copies", "quantised", "mistral"):
        model.save_pretrained(path)
        config = json.loads((path / "config.json").read_text())
        if how == "hf4":  # as transformers 4 wrote it
            config |= {
                "rope_theta": config.pop("rope_parameters")["rope_theta"],
                "rope_scaling": None,
            }
            config |= {
                "torch_dtype": config.pop("dtype"),
                "transformers_version": "4.40.0",
                "pretraining_tp": 1,
            }
            del config["head_dim"]
        if how == "quantised":
            config["quantization_config"] = {"quant_method": "fp8"}
        (path / "config.json").write_text(json.dumps(config))
        if how == "copies":
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            save_file(state, path / "model.safetensors", {"format": "pt"})
        return
    tokenizer = models.tokenizer() if how.startswith("tokenizer") else None
    with CheckpointSaver(format="h5" if how == "h5" else "safetensors") as saver:
        saver.save(
            model, path, tokenizer=tokenizer, max_shard_size=2000 if how == "shards" else None
        )
    if how == "tokenizer2":
        file = path / "tokenizer.json"
        edit(path, "tokenizer.json", file.read_text().replace('"w7"', '"other"'))


def write_file(path: Path, state: dict[str, torch.Tensor], how: str) -> None:
    if how.startswith("aliases"):
        torch.save(state if how == "aliases" else dict(reversed(state.items())), path)
    elif how == "h5 file":
        import ft_ckpt

        ft_ckpt.save(state, path)
    else:
        kept = {
            name: tensor.clone()
            for name, tensor in state.items()
            if how != "no head" or name != HEAD
        }
        save_file(kept, path, {"format": "pt"})


def have_average(one: Made, other: Made, names: tuple[str, str]) -> bool:
    if "quantised" in (one.of, other.of):
        return False
    if one.is_folder and other.is_folder:
        alike = {one.of, other.of} in ({one.of}, {"plain", "tokens"})
        return alike and set(names) != {"tied tokens", "tied other tokens"}
    return one.stored == other.stored and all(
        (one.state[n].shape, one.state[n].dtype) == (other.state[n].shape, other.state[n].dtype)
        for n in one.state
    )


def mean(one: Made, other: Made) -> dict[str, torch.Tensor]:
    wide = torch.float64 if one.state[EMBEDDING].dtype == torch.float64 else torch.float32
    pairs = {name: (one.state[name].to(wide), other.state[name].to(wide)) for name in one.state}
    return {name: ((a + b) / 2).to(one.state[name].dtype) for name, (a, b) in pairs.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [
        name for name in expected if not torch.equal(bits(found[name]), bits(expected[name]))
    ] == []


def judge_average(one: Made, other: Made, names: tuple[str, str], target: Path) -> None:
    in_folder = one.is_folder and other.is_folder
    target = target if in_folder else target.with_suffix(".pt")
    if not have_average(one, other, names):
        with pytest.raises(CheckpointError):
            average([one.path, other.path], target, progress=False)
        assert not target.exists()
        return
    average([one.path, other.path], target, progress=False)
    expected = mean(one, other)
    if not in_folder:
        told = one.told | other.told
        assert_equal(torch.load(target), {name: expected[name] for name in told})
        return
    found = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert_equal(dict(found.state_dict()), expected)
    for source in (one, other):  # whichever config it has, the average is a model of both
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(source.path), dtype=found.dtype
        )
        model.load_state_dict(expected)
        assert_agree(logits(model), logits(found))


def judge_diff(one: Made, other: Made) -> None:
    with (
        closing(open_source(open_place(one.path))) as first,
        closing(open_source(open_place(other.path))) as second,
    ):
        found = {each.name: each for each in compare_files(first, second)}
    seen = [(id(one.state.get(name)), id(other.state.get(name))) for name in found]
    assert len(set(seen)) == len(seen), "a tensor is compared once"
    for name in one.state:
        a, b = one.state[name], other.state[name]
        pair = (id(a), id(b))
        if name not in one.told or name not in other.told:
            told = (
                "equal"
                if pair in seen and name not in found
                else "only in B"
                if name in other.told
                else "only in A"
            )
            assert name not in found or found[name].status == told
            continue
        assert pair in seen, name
        status = next(
            each.status for each, known in zip(found.values(), seen, strict=True) if known == pair
        )
        same = a.shape == b.shape and (
            torch.equal(bits(a), bits(b))
            if a.dtype == b.dtype
            else torch.equal(a.double(), b.double())
        )
        assert status == ("shape" if a.shape != b.shape else "equal" if same else "changed"), name


def judge(made, names: tuple[str, str], target: Path) -> None:
    one, other = made(names[0], 0), made(names[1], 1)
    judge_average(one, other, names, target)
    judge_diff(one, other)
    judge_diff(one, made(names[1], 0))  # many tensors are equal


def test_some_pairs(made, tmp_path):
    for index, names in enumerate(
        [*KNOWN, *random.Random(f"{chosen_seed()} pairs").sample(PAIRS, 4)]
    ):
        judge(made, names, tmp_path / str(index))


@pytest.mark.slow
@pytest.mark.parametrize("names", PAIRS, ids=" with ".join)
def test_every_pair(made, tmp_path, names):
    judge(made, names, tmp_path / "out")


# Adapters of one base merged into others, by `base=`


@pytest.fixture(scope="module")
def adapters(made, tmp_path_factory):
    """One adapter trained on the model "tied": a folder of PEFT's, and a checkpoint of ours that
    knows its base.
    """
    root, base = tmp_path_factory.mktemp("adapters"), made("tied", 0)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    tuned = models.trained(get_peft_model(AutoModelForCausalLM.from_pretrained(base.path), config))
    tuned.save_pretrained(root / "theirs")
    CheckpointSaver().save(tuned, root / "ours", adapter_only=True)
    return {"theirs": root / "theirs", "ours": root / "ours"}


def judge_merge(adapter: Path, base: Made, is_another: bool, target: Path) -> None:
    if base.of in ("quantised", "vocabulary") or is_another:
        with pytest.raises(LoadError):
            merge(adapter, target, base=base.path, progress=False)
        assert not target.exists()
        return
    merge(adapter, target, base=base.path, progress=False)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base.path)).float()
    model.load_state_dict({name: tensor.float() for name, tensor in base.state.items()})
    expected = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    told = expected.state_dict()
    assert found.state_dict().keys() == told.keys()
    is_half = base.state[HEAD].dtype.itemsize == 2
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == base.state[name].dtype
        torch.testing.assert_close(
            tensor, told[name].to(tensor.dtype), rtol=1e-2 if is_half else 1e-6, atol=1e-7
        )
    torch.testing.assert_close(
        logits(found.float()), logits(expected), rtol=0, atol=0.1 if is_half else 1e-5
    )


MERGES = [(kind, name, seed) for kind in ("ours", "theirs") for name in FOLDERS for seed in (0, 1)]


def is_another_base(kind: str, name: str, seed: int) -> bool:
    return kind == "ours" and (seed != 0 or name.startswith("untied"))


def test_some_merges(made, adapters, tmp_path):
    for index, (kind, name, seed) in enumerate(
        random.Random(f"{chosen_seed()} merges").sample(MERGES, 3)
    ):
        judge_merge(
            adapters[kind],
            made(name, seed),
            is_another_base(kind, name, seed),
            tmp_path / str(index),
        )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "seed"), MERGES)
def test_every_merge(made, adapters, tmp_path, kind, name, seed):
    judge_merge(
        adapters[kind], made(name, seed), is_another_base(kind, name, seed), tmp_path / "out"
    )
