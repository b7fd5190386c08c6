"""What is saved under a wrapper is what the bare model would have saved, bit for bit.

A worker trains one step under the wrapper, saves, and writes down the true parameters by torch's own means; here, in
a single process, the bare model is filled with that truth and saved by `save_pretrained`, and the folders compared.
"""

import importlib.util
import json
from pathlib import Path

import h5py
import models
import pytest
import torch
from cases import ADAPTER, GROUPS, MERGED, SAVES, WRAPPED, group_of, wrappers_that_save
from compare import (
    adapter_config,
    assert_agree,
    assert_close_tensors,
    assert_same_tensors,
    base_of,
    logits,
    reference,
    stored,
    true_model,
)
from launch import run_cases, selected
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import ft_ckpt
from ft_ckpt.checkpoint.catalog import read_manifest

pytestmark = pytest.mark.timeout(900)  # the first test of a group waits for its launch, and for one more per crash


QUICK = {  # the others run with `scripts/test --all`
    "none": SAVES,
    "ddp": WRAPPED,
    "fsdp2": (
        *("full", "converted", "experts", "dual", "sharded", "attributes", "adapter", "merged_experts"),
        *("shared_trunk", "adapter_bytes", "streaming", "after_eval"),
    ),
    "zero3": ("full", "sharded", "adapter", "merged"),
}


class Runs:
    """Launches a group of wrappers once, when the first of them is asked for."""

    def __init__(self, root: Path, wrappers: list[str], *, only_quick: bool) -> None:
        self.root, self.wrappers, self.only_quick = root, wrappers, only_quick
        self.errors: dict[str, dict[str, str]] = {}

    def case(self, wrapper: str, what: str) -> Path:
        """The folder of that case; fails with every rank's traceback when the worker had an error."""
        name = group_of(wrapper)
        if "DS_ACCELERATOR" in GROUPS[name].env and importlib.util.find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed")
        if name not in self.errors:
            group = GROUPS[name]
            cases = [one for one in group.cases(self.wrappers) if not self.only_quick or is_quick(*one.split("/"))]
            self.errors[name] = run_cases("saves", cases, self.root / name, group.ranks, 280, group.env)
        error = self.errors[name][f"{wrapper}/{what}"]
        if error:
            pytest.fail(error, pytrace=False)
        return self.root / name / wrapper / what


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    wrappers = [wrapper for group in GROUPS.values() for wrapper in group.wrappers]
    mine = [item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())]
    only_quick = not any(item.get_closest_marker("slow") for item in mine)
    return Runs(tmp_path_factory.mktemp("runs"), selected(request, wrappers), only_quick=only_quick)


def is_quick(wrapper, what):
    return what in QUICK.get(wrapper, ())


def under(*what):
    """Each of the wrappers that any of `what` is saved under; with several, `what` too."""
    cases = [(one, wrapper) for one in what for wrapper in wrappers_that_save(one)]
    marks = [[] if is_quick(wrapper, one) else [pytest.mark.slow] for one, wrapper in cases]
    if len(what) == 1:
        return pytest.mark.parametrize(
            "wrapper", [pytest.param(case[1], marks=m) for case, m in zip(cases, marks, strict=True)]
        )
    return pytest.mark.parametrize(
        ("what", "wrapper"), [pytest.param(*c, marks=m) for c, m in zip(cases, marks, strict=True)]
    )


@under("full")
def test_full_save_is_save_pretrained_of_the_bare_model(runs, wrapper, tmp_path):
    """Empty weights, wrapper prefixes, no usable file from shards, frozen weights lost."""
    folder = runs.case(wrapper, "full")
    model, saved = true_model("partly_frozen", folder), folder / "saved"
    assert_same_tensors(stored(saved), reference(model, tmp_path))
    assert (saved / "config.json").read_text() == (tmp_path / "config.json").read_text()
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(saved)), logits(model))
    assert_agree(logits(ft_ckpt.load_model(saved)), logits(model))
    assert ft_ckpt.verify(saved).ok


@under("full")
def test_tied_weights_are_stored_once_and_tied_on_reload(runs, wrapper):
    """Shared tensors refused or dropped; the pair written twice and untied after reload."""
    saved = runs.case(wrapper, "full") / "saved"
    assert "lm_head.weight" not in stored(saved)
    assert read_manifest(saved).parts[0].ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    for loaded in (AutoModelForCausalLM.from_pretrained(saved), ft_ckpt.load_model(saved)):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@under("full")
def test_manifest_knows_what_was_trained_and_the_tokenizer_is_there(runs, wrapper):
    """Frozen parameters told from trained ones; the tokenizer saved beside the weights."""
    saved = runs.case(wrapper, "full") / "saved"
    trained = {name for name, parameter in models.partly_frozen().named_parameters() if parameter.requires_grad}
    assert set(read_manifest(saved).parts[0].trainable) == trained
    assert read_manifest(saved).world["size"] == GROUPS[group_of(wrapper)].ranks
    assert AutoTokenizer.from_pretrained(saved).chat_template == models.CHAT_TEMPLATE


@under("converted", "experts")
def test_fused_experts_get_their_names_on_disk(runs, wrapper, what, tmp_path):
    """Names that only the training framework can read."""
    folder = runs.case(wrapper, what)
    model = true_model(SAVES[what][0], folder)
    assert_same_tensors(stored(folder / "saved"), reference(model, tmp_path))
    assert any(".experts.0.w1." in name for name in stored(folder / "saved"))
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(folder / "saved")), logits(model))


@under("sharded")
def test_small_shards_come_with_an_index(runs, wrapper, tmp_path):
    folder = runs.case(wrapper, "sharded")
    model, saved = true_model("gpt2", folder), folder / "saved"
    assert_same_tensors(stored(saved), reference(model, tmp_path, max_shard_size=30_000))
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored(saved))
    assert set(index["weight_map"].values()) == {path.name for path in saved.glob("*.safetensors")}
    assert len(list(saved.glob("model-0000?-of-0000?.safetensors"))) > 1
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(saved)), logits(model))


@under("cast")
def test_dtype_is_the_one_asked_for_in_file_and_config(runs, wrapper, tmp_path):
    """A bf16 model saved as fp32, or a config that says otherwise."""
    folder = runs.case(wrapper, "cast")
    model, saved = true_model("olmo2", folder).to(torch.bfloat16), folder / "saved"
    assert_same_tensors(stored(saved), reference(model, tmp_path))
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"
    assert read_manifest(saved).parts[0].casts == {"float32->bfloat16": len(stored(saved))}


@under("attribute")
def test_one_attribute_lies_at_the_root(runs, wrapper, tmp_path):
    """The wrapper saved instead of the policy, or a prefix filter that matches nothing."""
    folder = runs.case(wrapper, "attribute")
    model, saved = true_model("policy_and_value", folder).policy, folder / "saved"
    assert_same_tensors(stored(saved), reference(model, tmp_path))
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(saved)), logits(model))


@under(*MERGED)
def test_merged_is_what_peft_merges_of_the_bare_model(runs, wrapper, what, tmp_path):
    folder = runs.case(wrapper, what)
    model, saved = true_model(SAVES[what][0], folder), folder / "saved"
    live = logits(model)
    assert_close_tensors(stored(saved), reference(model.merge_and_unload(), tmp_path))
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(saved)), live)


@under("attributes")
def test_several_attributes_have_a_folder_each(runs, wrapper, tmp_path):
    """The value head missing, the critic never saved."""
    folder = runs.case(wrapper, "attributes")
    model, saved = true_model("policy_and_value", folder), folder / "saved"
    assert_same_tensors(stored(saved / "policy"), reference(model.policy, tmp_path))
    assert_same_tensors(stored(saved / "value_head"), model.value_head.state_dict())
    parts = ft_ckpt.load_model(saved, into={"value_head": models.ValueHead()})
    assert_agree(logits(parts["policy"]), logits(model.policy))
    states = torch.ones(2, 24)
    assert torch.equal(parts["value_head"](states), model.value_head(states))


@under("shared_trunk")
def test_a_shared_trunk_is_shared_again_after_loading(runs, wrapper, tmp_path):
    """Two models on one trunk come back as two trunks."""
    folder = runs.case(wrapper, "shared_trunk")
    model, saved = true_model("shared_trunk", folder), folder / "saved"
    assert_same_tensors(stored(saved / "policy"), reference(model.policy, tmp_path))
    assert any("policy:model.embed_tokens.weight" in group for group in read_manifest(saved).shared)
    value_model = models.build("shared_trunk").value_model
    parts = ft_ckpt.load_model(saved, into={"value_model": value_model})
    assert parts["value_model"] is value_model
    assert parts["policy"].model.embed_tokens.weight is parts["value_model"].trunk.embed_tokens.weight
    ids = models.batch(5)["input_ids"]
    assert_agree(parts["value_model"].eval()(ids), model.value_model(ids))


@under("untouched")
def test_saving_leaves_the_live_model_as_it_was(runs, wrapper, tmp_path):
    """The worker compares hashes before and after, and trains on."""
    folder = runs.case(wrapper, "untouched")
    model, saved = true_model("qwen3", folder), folder / "saved"
    assert_same_tensors(stored(saved), reference(model, tmp_path))
    ends = AutoTokenizer.from_pretrained(saved).convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert json.loads((saved / "generation_config.json").read_text())["eos_token_id"] == ends


@under("after_eval")
def test_saving_after_an_evaluation_saves_the_master_weights(runs, wrapper, tmp_path):
    """What lies gathered in bfloat16 after a forward pass is not what is trained."""
    folder = runs.case(wrapper, "after_eval")
    assert_same_tensors(stored(folder / "saved"), reference(true_model("qwen3", folder), tmp_path))


@under(*ADAPTER)
def test_adapters_are_only_adapters_and_all_of_them(runs, wrapper, what, tmp_path):
    """Slices, empty files, the whole base, no modules_to_save."""
    folder = runs.case(wrapper, what)
    model, saved = true_peft_model(what, folder), folder / "saved"
    model.save_pretrained(tmp_path)
    assert_same_tensors(stored(saved), stored(tmp_path))
    assert_same_tensors(stored(saved / "second"), stored(tmp_path / "second"))
    assert sum("lm_head" in name for name in stored(saved)) == 1
    assert adapter_config(saved) == adapter_config(tmp_path)
    assert adapter_config(saved / "second") == adapter_config(tmp_path / "second")


@under(*ADAPTER)
def test_adapters_load_on_their_base(runs, wrapper, what):
    """An adapter file nothing can be restored from."""
    folder = runs.case(wrapper, what)
    model, saved = true_peft_model(what, folder), folder / "saved"
    theirs = PeftModel.from_pretrained(true_base(what, folder), saved)
    assert_agree(logits(theirs), logits(model))
    ours = ft_ckpt.load_model(saved, base=true_base(what, folder))
    assert_agree(logits(ours), logits(model))
    theirs.load_adapter(saved / "second", "second")
    for loaded in (theirs, ours):
        loaded.set_adapter("second")
    model.set_adapter("second")
    assert_agree(logits(theirs), logits(model))
    assert_agree(logits(ours), logits(model))


@under("adapter_bytes")
def test_an_adapter_save_moves_only_the_adapter(runs, wrapper, tmp_path):
    """The frozen base gathered, or written, at every save."""
    folder = runs.case(wrapper, "adapter_bytes")
    true_model("lora_wide", folder).save_pretrained(tmp_path)
    assert_same_tensors(stored(folder / "saved"), stored(tmp_path))
    size = sum(path.stat().st_size for path in (folder / "saved").rglob("*") if path.is_file())
    assert size < (tmp_path / "adapter_model.safetensors").stat().st_size + 65536


@under("streaming")
def test_rank_zero_never_holds_the_whole_model(runs, wrapper, tmp_path):
    """Out of memory at save; the worker measures how much rank 0 grows."""
    folder = runs.case(wrapper, "streaming")
    assert_same_tensors(stored(folder / "saved"), reference(true_model("big", folder), tmp_path))


def true_peft_model(what: str, folder: Path) -> PeftModel:
    model = true_model({"adapter": "lora", "adapter_attribute": "lora_policy_and_value"}[what], folder)
    return model if what == "adapter" else model.policy


def true_base(what: str, folder: Path) -> nn.Module:
    """The base model alone, from the truth."""
    prefix = {"adapter": "", "adapter_attribute": "policy."}[what]
    truth = load_file(folder / "truth.safetensors")
    return base_of({name.removeprefix(prefix): tensor for name, tensor in truth.items() if name.startswith(prefix)})


@under("hdf5")
def test_hdf5_holds_the_true_parameters(runs, wrapper, tmp_path):
    """The same bits as the safetensors save, from every engine, for a reader that is not ours."""
    folder = runs.case(wrapper, "hdf5")
    expected = reference(true_model("mixtral", folder), tmp_path)
    with h5py.File(folder / "saved" / "model.h5") as file:
        assert set(expected) <= set(file)
        assert all(torch.equal(torch.from_numpy(file[name][()]), tensor) for name, tensor in expected.items())
    assert ft_ckpt.verify(folder / "saved").ok


@under("dual")
def test_dual_files_are_save_pretrained_of_the_bare_model(runs, wrapper, tmp_path):
    folder = runs.case(wrapper, "dual")
    model, saved = true_model("partly_frozen", folder), folder / "saved"
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(saved)), logits(model))
    assert_agree(logits(ft_ckpt.load_model(saved)), logits(model))
    assert len(list(saved.glob("model-*.h5"))) == len(list(saved.glob("model-*.safetensors"))) > 1
