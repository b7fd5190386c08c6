"""Adapters merged from files: what PEFT merges of the loaded model, a layer at a time, and only
into the right base.
"""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from architectures import ARCHITECTURES, make
from compare import assert_close_tensors, assert_same_tensors, logits, reference, stored
from launch import run_python
from methods import METHODS, UNMERGEABLE, low_rank, with_adapter
from on_ranks import RANK, on_ranks
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from small_checkpoints import rewrite_manifest
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import ft_ckpt
from ft_ckpt import CheckpointSaver, errors, latest, verify
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.cli import run_command
from ft_ckpt.errors import SelectionError
from ft_ckpt.storage.places import open_place

LINEAR = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture
def base(tmp_path):
    return stored_base(tmp_path, "llama-tied")


def stored_base(folder: Path, architecture: str, **settings: Any) -> Path:
    make(ARCHITECTURES[architecture]).save_pretrained(folder / "base", **settings)
    models.tokenizer().save_pretrained(folder / "base")
    return folder / "base"


def adapted(base: Path, config: Any) -> Any:
    return with_adapter(AutoModelForCausalLM.from_pretrained(base), config)


def merged(adapter: Path, out: Path, **settings: Any) -> Any:
    return ft_ckpt.merge(adapter, out, progress=False, **settings)


def merges_as_peft(architecture: str, config: Any, folder: Path) -> None:
    """From PEFT's own folder, whose base is found by the name in it."""
    model = adapted(stored_base(folder, architecture), config)
    model.save_pretrained(folder / "adapter")
    live = logits(model)
    report = merged(folder / "adapter", folder / "out")
    assert_close_tensors(
        stored(folder / "out"), reference(model.merge_and_unload(), folder / "theirs")
    )
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(folder / "out")), live, rtol=1e-4, atol=1e-4
    )
    assert report.tensors == len(stored(folder / "out"))
    assert read_manifest(open_place(folder / "out")).made_from == ("adapter", "base")
    assert verify(folder / "out").ok


@pytest.mark.parametrize("method", ["bias", "dora", "adalora", "vera-seed", "pissa", "osf"])
def test_as_peft_merges_it(method, tmp_path):
    merges_as_peft("llama-tied", METHODS[method](LINEAR), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_as_peft_merges_it(method, tmp_path):
    merges_as_peft("llama-tied", METHODS[method](LINEAR), tmp_path)


def is_refused_and_kept(method: str, folder: Path) -> None:
    base = stored_base(folder, "llama-tied")
    model = adapted(base, UNMERGEABLE[method](LINEAR))
    model.save_pretrained(folder / "adapter")
    with pytest.raises(errors.SelectionError, match="cannot be merged"):
        merged(folder / "adapter", folder / "out")
    for alone in (True, False):
        CheckpointSaver().save(model, folder / str(alone), adapter_only=alone)
        loaded = ft_ckpt.load_model(folder / str(alone))
        if method not in ("poly", "multitask"):  # whose models want to be told a task
            assert_close_tensors({"": logits(loaded)}, {"": logits(model)})
    assert stored(folder / "False").keys() == stored(base).keys()


def test_a_method_without_a_merge_is_refused_and_kept(tmp_path):
    """An adaption prompt is no layer of PEFT's kind: its attention was taken for the base's, and
    saved as such.
    """
    is_refused_and_kept("adaption-prompt", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", UNMERGEABLE)
def test_every_method_without_a_merge_is_refused_and_kept(method, tmp_path):
    is_refused_and_kept(method, tmp_path)


NO_CONFIG = {"rope_parameters": {"rope_theta": "many", "rope_type": "default"}}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"config": NO_CONFIG}, errors.CorruptError, r"base: its config: .*use another copy"),
        (
            {"fingerprint": {"lm_head.weight": {"first": 0.5}}},
            errors.ManifestError,
            "elements of 'lm_head.weight'",
        ),
        (
            {"fingerprint": {"lm_head.weight": "0.5"}},
            errors.ManifestError,
            "elements of 'lm_head.weight'",
        ),
        (
            {"fingerprint": {"lm_head.weight": {"0": "half"}}},
            errors.ManifestError,
            "elements of 'lm_head.weight'",
        ),
    ],
)
def test_a_record_that_describes_no_base_is_refused(base, changes, error, message, tmp_path):
    CheckpointSaver().save(adapted(base, low_rank(LINEAR)), tmp_path / "adapter", adapter_only=True)
    rewrite_manifest(
        tmp_path / "adapter", lambda document: document["parts"][0]["base"].update(changes)
    )
    with pytest.raises(error, match=message):
        merged(tmp_path / "adapter", tmp_path / "out")


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3-moe"])
def test_experts_that_are_fused_in_memory(architecture, tmp_path):
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    merges_as_peft(
        architecture,
        low_rank(["q_proj"], target_parameters=experts, modules_to_save=["lm_head"]),
        tmp_path,
    )


def test_a_base_without_its_prefix(tmp_path):
    """As GPT-2's own files are: names that transformers renames on loading."""
    base = stored_base(tmp_path, "gpt2")
    tensors = load_file(base / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, base / "model.safetensors", {"format": "pt"})
    model = adapted(base, low_rank(["c_attn"], fan_in_fan_out=True))
    model.save_pretrained(tmp_path / "adapter")
    merged(tmp_path / "adapter", tmp_path / "out")
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model)
    )


def test_a_tied_embedding_that_is_adapted(base, tmp_path):
    model = adapted(base, low_rank(["embed_tokens"], lora_alpha=60))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merged(tmp_path / "adapter", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-4)
    assert not again.config.tie_word_embeddings


def test_several_adapters_of_a_checkpoint(base, tmp_path):
    model = adapted(base, low_rank(LINEAR))
    model.add_adapter("other", low_rank(["k_proj"], r=2))
    models.trained(model)
    with CheckpointSaver(tokenizer=models.tokenizer(), format="h5") as saver:
        saver.save(model, tmp_path / "adapters", adapter_only=True)
        for name, choice in {
            "active": True,
            "both": ["default", "other"],
            "part": {"default": 0.5, "other": 2.0},
        }.items():
            saver.save(model, tmp_path / f"live-{name}", merged=choice, format="safetensors")
    merged(tmp_path / "adapters", tmp_path / "active")
    merged(tmp_path / "adapters", tmp_path / "both", adapters=["default", "other"])
    merged(
        tmp_path / "adapters", tmp_path / "part", adapters=["default", "other"], weights=[0.5, 2]
    )
    for name in ("active", "both", "part"):
        assert_close_tensors(stored(tmp_path / name), stored(tmp_path / f"live-{name}"))
    assert (tmp_path / "both" / "tokenizer.json").exists()
    with pytest.raises(
        errors.SelectionError, match=r"adapter third: not in .*adapters, which has default, other"
    ):
        merged(tmp_path / "adapters", tmp_path / "no", adapters=["third"])
    with pytest.raises(errors.SelectionError, match="a number for each of default, other"):
        merged(tmp_path / "adapters", tmp_path / "no", adapters=["default", "other"], weights=[1])


@pytest.mark.parametrize(
    "weights",
    [
        ["a", 1],
        ["1", "2"],
        [None, 1],
        [[1], [2]],
        [1j, 1],
        [10**400, 1],
        [1, float("inf")],
        1.0,
        "12",
        b"ab",
        {1: 2},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_weights_that_are_no_finite_numbers(weights, base, tmp_path):
    foreign(base, tmp_path / "adapters" / "one")
    foreign(base, tmp_path / "adapters" / "two")
    with pytest.raises(
        errors.ConfigError, match=r"weights=.*expected a finite number for each of one, two"
    ):
        merged(tmp_path / "adapters", tmp_path / "no", adapters=["one", "two"], weights=weights)


@pytest.mark.parametrize("names", [["one", 1], [["one"]], [None], 1, "one", b"one"], ids=repr)
def test_adapters_that_are_no_names(names, base, tmp_path):
    foreign(base, tmp_path / "adapters" / "one")
    with pytest.raises(errors.ConfigError, match=r"adapters=.*expected names of adapters"):
        merged(tmp_path / "adapters", tmp_path / "no", adapters=names)


def test_a_base_beside_its_adapters(base, tmp_path):
    """PiSSA has changed the base, which lies beside; a tokenizer that was trained with goes
    along.
    """
    model = adapted(base, low_rank(LINEAR, init_lora_weights="pissa"))
    CheckpointSaver().save(
        model, tmp_path / "both", adapter_only=False, tokenizer=models.tokenizer()
    )
    merged(tmp_path / "both", tmp_path / "out", dtype="bfloat16", max_shard_size=30_000)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    torch.testing.assert_close(logits(again).float(), logits(model), rtol=0.1, atol=0.1)
    assert sorted(
        path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"
    ) == [
        "chat_template.jinja",
        "config.json",
        "ft_ckpt.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_all_templates_of_the_adapters_tokenizer_are_taken(base, tmp_path):
    """Named templates are in a folder of their own, which was left out."""
    adapted(base, low_rank(LINEAR)).save_pretrained(tmp_path / "adapter")
    tokenizer = models.tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool": "with tools"}
    tokenizer.save_pretrained(tmp_path / "adapter")
    merged(tmp_path / "adapter", tmp_path / "out", base=base)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert ft_ckpt.verify(tmp_path / "out").ok


def test_another_base_is_refused(base, tmp_path):
    CheckpointSaver().save(adapted(base, low_rank(LINEAR)), tmp_path / "adapter", adapter_only=True)
    other = make(ARCHITECTURES["llama-tied"])
    models.fill(other, seed=5)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(errors.BaseMismatchError, match="sampled tensors of this base differ"):
        merged(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "other")
    assert not (tmp_path / "out").exists()
    merged(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "other", check_base=False)


def foreign(base: Path, folder: Path, config: Any = None, **settings: Any) -> Path:
    """PEFT's folder of an adapter, with some of the settings in its config changed."""
    adapted(base, config or low_rank(LINEAR)).save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


LORA_GA = {"init_lora_weights": "lora_ga", "lora_ga_config": {}}
LOFTQ = {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 5}}


@pytest.mark.parametrize("init", ["pissa_niter_4", "corda", LORA_GA, LOFTQ], ids=str)
def test_a_base_that_cannot_be_made_again_is_refused(init, base, tmp_path):
    """PEFT would merge into a residual of its own, another one each time."""
    foreign(
        base,
        tmp_path / "adapter",
        **(init if isinstance(init, dict) else {"init_lora_weights": init}),
    )
    with pytest.raises(
        errors.LoadError, match=r"adapter default \((pissa_niter_4|corda|lora_ga|loftq)\): its init"
    ):
        merged(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def as_torch_file(folder: Path, out: Path, name: str, damages: str = "") -> Path:
    """The folder with its safetensors file as one of torch; with a bit of the tensor `damages`
    flipped.
    """
    out.mkdir()
    (source,) = folder.glob("*.safetensors")
    for path in folder.glob("*.json"):
        (out / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source)
    torch.save(tensors, out / name)
    content = bytearray((out / name).read_bytes())
    if damages:
        value = next(tensor for key, tensor in tensors.items() if damages in key)
        content[content.index(value.numpy().tobytes()) + 3] ^= 1
    (out / name).write_bytes(content)
    return out


def test_checksums_of_torch_files_are_compared(base, tmp_path):
    """torch itself does not compare them."""
    adapter = foreign(base, tmp_path / "adapter")
    whole = as_torch_file(adapter, tmp_path / "whole", "adapter_model.bin")
    damaged = as_torch_file(adapter, tmp_path / "damaged", "adapter_model.bin", "lora_B")
    for name, source in (("one", whole), ("two", adapter)):
        merged(source, tmp_path / name, base=base)
    assert_same_tensors(stored(tmp_path / "one"), stored(tmp_path / "two"))
    with pytest.raises(errors.CorruptError, match=r"adapter_model\.bin"):
        merged(damaged, tmp_path / "no", base=base)
    assert not (tmp_path / "no").exists()
    bad_base = as_torch_file(base, tmp_path / "base-bin", "pytorch_model.bin", "model.norm")
    CheckpointSaver().save(adapted(base, low_rank(LINEAR)), tmp_path / "saved", adapter_only=True)
    with pytest.raises(errors.CorruptError, match=r"pytorch_model\.bin"):
        ft_ckpt.load_model(tmp_path / "saved", base=str(bad_base))


def test_adapters_of_one_folder_that_changed_their_base_are_refused(base, tmp_path):
    """The second one was trained on what the first one had left of the base, or was not."""
    model = adapted(base, low_rank(LINEAR, init_lora_weights="pissa"))
    model.add_adapter("other", low_rank(["k_proj"]))
    model.save_pretrained(tmp_path / "adapters")
    for names in (["default"], ["other"], ["default", "other"]):
        with pytest.raises(
            errors.LoadError, match=r"adapter default: its initialisation changed the base"
        ):
            merged(tmp_path / "adapters", tmp_path / "out", adapters=names)
    # has samples of the base to compare
    CheckpointSaver().save(model, tmp_path / "ours", adapter_only=True)
    live = logits(model)
    merged(tmp_path / "ours", tmp_path / "out")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), live)


def test_adapters_of_several_bases_are_refused(base, tmp_path):
    other = stored_base(tmp_path / "elsewhere", "llama-tied")
    foreign(base, tmp_path / "adapters" / "one")
    foreign(other, tmp_path / "adapters" / "two", low_rank(["k_proj"]))
    both = {"adapters": ["one", "two"]}
    with pytest.raises(
        errors.LoadError,
        match=r"adapter 'one': on '.*'two': on '.*elsewhere.*name the base with base=",
    ):
        merged(tmp_path / "adapters", tmp_path / "out", **both)
    merged(tmp_path / "adapters", tmp_path / "out", base=base, **both)
    merged(tmp_path / "adapters", tmp_path / "alone", adapters=["two"])


def test_what_does_not_fit_is_refused(base, tmp_path):
    model = adapted(base, low_rank(LINEAR))
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = next(iter(tensors))
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"}
    )
    with pytest.raises(errors.LoadError, match=f"{lost}: missing in the files"):
        merged(tmp_path / "adapter", tmp_path / "out")
    save_file(
        {**tensors, "base_model.model.odd.lora_A.weight": torch.ones(2)}, file, {"format": "pt"}
    )
    with pytest.raises(errors.LoadError, match=r"odd\.lora_A\.weight: no place in the model"):
        merged(tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(errors.LoadError, match="expected a folder with an adapter"):
        merged(base, tmp_path / "out")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(base), "nobody/nothing"))
    with pytest.raises(errors.LoadError, match="'nobody/nothing' is neither a folder here"):
        merged(tmp_path / "adapter", tmp_path / "out")
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "base_model_name_or_path": ["odd"], "revision": {}}))
    with pytest.raises(errors.LoadError, match=r"\['odd'\] is neither a folder here"):
        merged(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changed",
    [
        lambda text: {"peft_type": text},
        lambda text: {"bias": text},
        lambda text: {"r": [text]},
        lambda text: {"target_modules": [f"({text}"]},
    ],
    ids=["peft_type", "bias", "r", "target_modules"],
)
def test_errors_of_settings_show_no_secrets(changed, base, tmp_path):
    foreign(base, tmp_path / "adapter", **changed(f"{'a' * 30} https://u:S3CRET@h/p"))
    with pytest.raises(errors.LoadError, match=r"\.\.\.") as found:
        merged(tmp_path / "adapter", tmp_path / "out")
    assert "S3CRET" not in str(found.value)


def test_tensors_that_the_base_lacks_are_named(base, tmp_path):
    adapted(base, low_rank(LINEAR)).save_pretrained(tmp_path / "adapter")
    tensors = load_file(base / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file(
        {n: t for n, t in tensors.items() if n != lost} | {"extra": torch.ones(1)},
        base / "model.safetensors",
    )
    with pytest.raises(errors.LoadError, match=f"{lost}: not in the files"):
        merged(tmp_path / "adapter", tmp_path / "out")
    save_file(tensors | {"extra": torch.ones(1)}, base / "model.safetensors")
    assert (
        "extra: the base's model has no place for it, left out"
        in merged(tmp_path / "adapter", tmp_path / "out").notes
    )


def test_checked_by_logits_and_no_moment_of_a_run(tmp_path):
    base = stored_base(tmp_path, "mixtral")
    adapted(base, low_rank(["q_proj"])).save_pretrained(tmp_path / "adapter")
    report = merged(tmp_path / "adapter", tmp_path / "runs" / "merged", check="logits")
    assert any(note.startswith("logits of 2 x 16 tokens") for note in report.notes)
    assert read_manifest(open_place(tmp_path / "runs" / "merged")).export
    assert latest(tmp_path / "runs") is None


@pytest.mark.sample("4")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base(bits, tmp_path):
    """The adapter is saved alone, and merged into the model that was quantised."""
    pytest.importorskip("bitsandbytes")
    wide = dataclasses.replace(
        ARCHITECTURES["llama"],
        settings={**ARCHITECTURES["llama"].settings, "hidden_size": 64, "intermediate_size": 128},
    )
    make(wide).bfloat16().save_pretrained(tmp_path / "base")
    settings = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    live = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=settings, device_map="cpu"
    )
    live.save_pretrained(tmp_path / "quantised")
    model = models.trained(get_peft_model(live, low_rank(LINEAR)))
    with pytest.raises(
        errors.SelectionError, match=r"adapter_only=True, then merge it .* base=\.\.\."
    ):
        CheckpointSaver().save(model, tmp_path / "no", merged=True)
    CheckpointSaver().save(model, tmp_path / "adapter", adapter_only=True)
    with pytest.raises(
        errors.LoadError, match=r"its weights are quantised, expected .* with base="
    ):
        merged(tmp_path / "adapter", tmp_path / "no", base=tmp_path / "quantised")
    assert not (tmp_path / "no").exists()
    merged(tmp_path / "adapter", tmp_path / "named")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(
        errors.LoadError, match=r"nor in the Hub's cache; name its folder with base="
    ):
        merged(tmp_path / "adapter", tmp_path / "no")
    report = merged(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "moved", check="logits")
    assert any(note.startswith("logits of 2 x 16 tokens") for note in report.notes)
    assert_same_tensors(stored(tmp_path / "out"), stored(tmp_path / "named"))
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    delta = (
        factors[f"{place}.lora_B.weight"].float()
        @ factors[f"{place}.lora_A.weight"].float()
        * 7
        / 3
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    exact = stored(tmp_path / "moved")[name].float() + delta
    torch.testing.assert_close(stored(tmp_path / "out")[name].float(), exact, rtol=2**-8, atol=1e-6)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (logits(plain).float() - logits(model).float()).norm() < 0.3 * logits(
        model
    ).float().norm()


def test_at_the_command_line(base, tmp_path):
    adapted(base, low_rank(LINEAR)).save_pretrained(tmp_path / "adapter")
    command = ["merge", str(tmp_path / "adapter"), str(tmp_path / "out")]
    done = run_python(
        "from ft_ckpt.cli import main; main()", *command, "--dtype", "bfloat16", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"] == len(stored(tmp_path / "out"))
    with pytest.raises(errors.TargetError, match="exists already; give --force"):
        run_command([*command, "--adapter", "second"])


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@on_ranks(2)
def test_a_quantised_base_on_two_ranks(tmp_path):
    """A merge of the live model is refused on all ranks; its adapter is merged into the model that
    was quantised.
    """
    accelerator = Accelerator(cpu=True)
    base, out = tmp_path / "base", tmp_path / "out"
    if RANK == 0:
        make(ARCHITECTURES["llama"]).bfloat16().save_pretrained(base)
    dist.barrier()
    settings = BitsAndBytesConfig(load_in_8bit=True)
    live = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=settings, device_map="cpu"
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(
        get_peft_model(live, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    )
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)
    for seed in (RANK, RANK + 2):
        model(**models.batch(seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with CheckpointSaver(accelerator, enter_timeout_seconds=60) as saver:
        with pytest.raises(SelectionError, match="its weights are quantised"):
            saver.save(model, out, merged=True)
        assert not out.exists()
        saver.save(model, tmp_path / "adapter", adapter_only=True)
    if RANK == 0:
        ft_ckpt.merge(tmp_path / "adapter", out, base=base)
        merged, original = (load_file(path / "model.safetensors") for path in (out, base))
        place = "model.layers.0.self_attn.q_proj.weight"
        assert not torch.equal(merged[place], original[place])
        del merged[place], original[place]
        assert merged.keys() == original.keys()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_an_adapter_with_one_tensor_of_another_dtype(base, tmp_path, dtype, factor):
    """A layer is merged in the widest dtype of its tensors."""
    model = adapted(base, low_rank(LINEAR))
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if factor in name)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    merged(tmp_path / "adapter", tmp_path / "out")
    with torch.no_grad():
        live = dict(model.named_parameters())[name.replace(".weight", ".default.weight")]
        live.copy_(tensors[name].to(live.dtype))
    expected = reference(model.merge_and_unload(), tmp_path / "theirs")
    assert_close_tensors(stored(tmp_path / "out"), expected)
