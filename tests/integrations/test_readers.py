"""Other people's tools read what is merged, averaged and pulled.

Converters are installed, each in a folder of its own, without what they depend on, so that none of
their pins touches the environment of the tests; what cannot be installed is skipped by name.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from compare import stored
from hub_server import serving_hub, using_hub
from peft import LoraConfig, PeftModel, get_peft_model
from places import ROOT
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ft_ckpt
from ft_ckpt import CheckpointSaver

WAYS = ["merged", "averaged", "pulled"]
HEADS, GROUPS = 4, 2

TRAIN_TOKENIZER = """
import sys
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
text, prefix = sys.argv[1:]
SentencePieceTrainer.train(
    input=text, model_prefix=prefix, vocab_size=400, model_type="bpe", byte_fallback=True
)
print(SentencePieceProcessor(model_file=prefix + ".model").get_piece_size())
"""
READ_GGUF = """
import sys
import numpy as np
from gguf import GGUFReader
np.savez(sys.argv[2], **{one.name: np.array(one.data) for one in GGUFReader(sys.argv[1]).tensors})
"""
RUN_CTRANSLATE2 = """
import json, sys
import ctranslate2, numpy as np
model, out, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
ctranslate2.converters.TransformersConverter(model).convert(out)
words = json.load(open(out + "/vocabulary.json"))
found = ctranslate2.Generator(out, compute_type="float32").forward_batch([[words[i] for i in ids]])
np.savez(out + "/logits.npz", logits=np.array(found))
"""
PASS_THROUGH_MERGEKIT = """
import sys
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
asked = {"merge_method": "passthrough", "models": [{"model": sys.argv[1]}], "dtype": "float32"}
plain = MergeOptions(copy_tokenizer=False, write_model_card=False)
run_merge(MergeConfiguration.model_validate(asked), sys.argv[2], options=plain)
"""
CONVERT_WITH_LITGPT = """
import sys
from pathlib import Path
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
convert_hf_checkpoint(checkpoint_dir=Path(sys.argv[1]), model_name="Llama-2-7b-hf")
"""


def pip(*words):
    """Run pip; the test is skipped with what it says where it cannot have a package."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [""]
        pytest.skip(f"{words[-1]} cannot be installed here: {lines[-1]}")


def installed(folder, *packages):
    """A folder that has the packages, and nothing that they depend on."""
    pip("install", "--no-deps", "--target", folder / "packages", *packages)
    return folder / "packages"


def run(script, *words, path):
    """Run a script, or the code of one, in a process that finds the packages in the folders of
    `path` first.
    """
    told = [str(script)] if isinstance(script, Path) else ["-c", script]
    found = os.pathsep.join(map(str, [*path, ROOT]))
    done = subprocess.run(
        [sys.executable, *told, *map(str, words)],
        env={**os.environ, "PYTHONPATH": found, "NO_LOCAL_GGUF": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trained(words, seed):
    """A small Llama with adapters."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    heads = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    base = LlamaForCausalLM(LlamaConfig(vocab_size=words, **sizes, **heads))
    return models.trained(
        get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    )


def merged(folder, words, seed, **settings):
    CheckpointSaver().save(trained(words, seed), folder, merged=True, check="logits", **settings)
    return folder


def averaged(folder, words, **settings):
    sources = [
        merged(folder.with_name(f"{folder.name}-{seed}"), words, seed, **settings)
        for seed in (0, 1)
    ]
    ft_ckpt.average(sources, folder, progress=False)
    return folder


def pulled(folder, words, **settings):
    source = merged(folder.with_name(f"{folder.name}-pushed"), words, 0, **settings)
    with serving_hub() as hub, using_hub(hub):
        ft_ckpt.push(source, "user/model")
        ft_ckpt.pull("hf://user/model", folder)
    return folder


def shipped(way, folder, words=models.VOCABULARY, **settings):
    """A model as people get it, in a folder."""
    ways = {
        "merged": lambda *given, **more: merged(*given, 0, **more),
        "averaged": averaged,
        "pulled": pulled,
    }
    return ways[way](folder, words, **settings)


def read_by_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def read_by_accelerate(folder):
    """Dispatched, with half of the layers on the disk until they are used."""
    with init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    return load_checkpoint_and_dispatch(
        model, folder, places, offload_folder=folder.with_name("offload")
    )


@pytest.mark.sample(
    "merged-read_by_transformers",
    "merged-read_by_accelerate",
    "pulled-read_by_transformers",
    "pulled-read_by_accelerate",
)
@pytest.mark.parametrize("read", [read_by_transformers, read_by_accelerate])
@pytest.mark.parametrize("way", WAYS)
def test_a_shipped_model(tmp_path, way, read):
    ids = torch.tensor([[1, 5, 9, 20, 7]])
    folder = shipped(way, tmp_path / "model")
    expected = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    expected.load_state_dict(stored(folder))
    assert torch.equal(read(folder)(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("way", ["saved", "averaged", "pulled"])
def test_a_shipped_adapter(tmp_path, way):
    """PEFT puts it on its base."""
    model, ids = trained(models.VOCABULARY, 0), torch.tensor([[1, 5, 9, 20, 7]])
    CheckpointSaver().save(model, tmp_path / "saved", adapter_only=True)
    if way == "averaged":
        ft_ckpt.average([tmp_path / "saved"] * 2, tmp_path / way, progress=False)
    elif way == "pulled":
        with serving_hub() as hub, using_hub(hub):
            ft_ckpt.push(tmp_path / "saved", "user/adapter")
            ft_ckpt.pull("hf://user/adapter", tmp_path / way)
    found = PeftModel.from_pretrained(
        trained(models.VOCABULARY, 0).get_base_model(), tmp_path / way
    )
    assert torch.equal(found(ids).logits, model(ids).logits)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # pip may have much to fetch
@pytest.mark.parametrize("way", WAYS)
def test_llama_cpp(tmp_path, way):
    """Its converter gives the tensors of the model, with the rows of queries and keys in its own
    order.
    """
    pip(
        "download",
        "--no-deps",
        "--no-binary",
        "llama-cpp-python",
        "-d",
        tmp_path,
        "llama-cpp-python",
    )
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    converter = next((tmp_path / "source").glob("*/vendor/llama.cpp/convert_hf_to_gguf.py"))
    path = [converter.parent / "gguf-py", installed(tmp_path, "sentencepiece")]
    words = int(
        run(TRAIN_TOKENIZER, ROOT / "README.md", tmp_path / "tokenizer", path=path).split()[-1]
    )
    kind = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    files = {
        "tokenizer.model": (tmp_path / "tokenizer.model").read_bytes(),
        "tokenizer_config.json": json.dumps(kind),
    }
    folder = shipped(way, tmp_path / "model", words, extra_files=files)
    run(converter, folder, "--outfile", tmp_path / "model.gguf", "--outtype", "f32", path=path)
    run(READ_GGUF, tmp_path / "model.gguf", tmp_path / "tensors.npz", path=path)
    found, expected = dict(np.load(tmp_path / "tensors.npz")), stored(folder)
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
    }
    names |= {
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    names |= {f"ffn_{kind}": f"mlp.{kind}_proj" for kind in ("gate", "up", "down")}
    pairs = {
        f"blk.{n}.{a}.weight": f"model.layers.{n}.{b}.weight"
        for n in range(2)
        for a, b in names.items()
    }
    pairs |= {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    pairs |= {"output.weight": "lm_head.weight"}
    assert pairs.keys() == found.keys()
    for theirs, ours in pairs.items():
        tensor = expected[ours]
        heads = {"attn_q": HEADS, "attn_k": GROUPS}.get(theirs.split(".")[-2])
        if heads:
            tensor = (
                tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            )
        assert np.array_equal(found[theirs], tensor.numpy()), theirs


@pytest.mark.slow
@pytest.mark.timeout(1800)  # pip may have much to fetch
@pytest.mark.parametrize("way", WAYS)
def test_ctranslate2(tmp_path, way):
    path = [installed(tmp_path, "ctranslate2")]
    folder, ids = shipped(way, tmp_path / "model", tokenizer=models.tokenizer()), [1, 5, 9, 20, 7]
    run(RUN_CTRANSLATE2, folder, tmp_path / "converted", json.dumps(ids), path=path)
    found = np.load(tmp_path / "converted" / "logits.npz")["logits"]
    expected = (
        AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits.detach().numpy()
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # pip may have much to fetch
@pytest.mark.parametrize("way", WAYS)
def test_mergekit(tmp_path, way):
    """A merge of the model alone is the model."""
    path = [installed(tmp_path, "mergekit", "immutables", "sentencepiece")]
    folder = shipped(way, tmp_path / "model")
    run(PASS_THROUGH_MERGEKIT, folder, tmp_path / "out", path=path)
    found, expected = stored(tmp_path / "out"), stored(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # pip may have much to fetch
@pytest.mark.parametrize("way", WAYS)
def test_litgpt(tmp_path, way):
    path = [
        installed(tmp_path, "litgpt", "jsonargparse==4.41.0", "docstring_parser", "typeshed_client")
    ]
    folder = shipped(way, tmp_path / "model")
    run(CONVERT_WITH_LITGPT, folder, path=path)
    found, expected = torch.load(folder / "lit_model.pth", weights_only=True), stored(folder)
    place = "model.layers.1.self_attn"
    whole = torch.cat([expected[f"{place}.{kind}_proj.weight"] for kind in "qkv"])
    assert torch.equal(found["transformer.h.1.attn.qkv.weight"], whole)
    assert torch.equal(
        found["transformer.h.0.mlp.fc_2.weight"], expected["model.layers.0.mlp.up_proj.weight"]
    )
    assert torch.equal(found["lm_head.weight"], expected["lm_head.weight"])
    assert len(found) == len(expected) - 4  # queries, keys and values are one in each of two layers
