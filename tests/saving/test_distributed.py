"""The contract of a wrapper: what is saved under it is what the bare model would have saved, bit
for bit.

Ranks train one step under the wrapper, save, and write down the true parameters by torch's own
means; here, in a single process, the bare model is filled with that truth and saved by
`save_pretrained`, and the folders compared.
"""

import hashlib
import importlib.util
import json
from dataclasses import dataclass, field

import h5py
import models
import pytest
import torch
import torch.distributed as dist
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
from counting import CollectiveBytes
from exact_runs import exact
from on_ranks import RANK, WORLD, call_on_ranks
from peak_memory import peak_memory
from peft import PeftModel
from safetensors.torch import load_file, save_file
from same_bytes import same_after_changes, same_files, same_moment
from transformers import AutoModelForCausalLM, AutoTokenizer
from tuning import buckets_of
from wrappers import ACCELERATE_CPU, WRAPPERS, named_tensors, truth

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.ranks import current_ranks
from ft_ckpt.ranks.moving import stream_chunks
from ft_ckpt.ranks.wrappers import ModelTensors
from ft_ckpt.storage.places import open_place

pytestmark = pytest.mark.timeout(900)

# save -> the model (a function of models.py) and the arguments of `save`
SAVES = {
    "full": ("partly_frozen", {}),
    "converted": ("mixtral", {}),
    "experts": ("experts", {}),
    "hdf5": ("mixtral", {"format": "h5"}),
    "dual": ("partly_frozen", {"format": "dual", "max_shard_size": 30_000}),
    "sharded": ("gpt2", {"max_shard_size": 30_000}),
    "cast": ("olmo2", {"dtype": "bfloat16"}),
    "attribute": ("policy_and_value", {"attribute": "policy"}),
    "attributes": ("policy_and_value", {"attribute": ["policy", "value_head"]}),
    "untouched": ("qwen3", {"chat_template_name": "olmo"}),
    "adapter": ("lora", {"adapter_only": True}),
    "adapter_attribute": ("lora_policy_and_value", {"adapter_only": True, "attribute": "policy"}),
    "merged": ("lora", {"merged": True}),
    "merged_experts": ("lora_experts", {"merged": True}),
    "shared_trunk": ("shared_trunk", {"attribute": ["policy", "value_model"]}),
    "adapter_bytes": ("lora_wide", {"adapter_only": True}),
    "streaming": ("big", {}),
    "after_eval": ("qwen3", {}),
}

# resume -> the model
RESUMES = {
    "resume": "llama",
    "resume_adapter": "lora",
    "resume_frozen": "partly_frozen",
    "resume_converted": "mixtral",
    "resume_experts": "experts",
}

# files that all ranks write -> the model and the settings of the saver
SHARED_FILES = {
    "shared": ("llama", {}),
    "shared_untied": ("qwen3", {}),
    "shared_wide": ("wide", {}),
    "shared_converted": ("mixtral", {}),
    "shared_experts": ("experts", {}),
    "shared_cast": ("qwen3", {"dtype": "bfloat16"}),
}

FULL = ("full", "converted", "sharded", "cast", "attribute", "attributes", "untouched")
ADAPTER = ("adapter", "adapter_attribute")
TRUNK = ("shared_trunk",)
EVAL = ("after_eval",)
FORMATS = ("hdf5", "dual")
BYTES = ("adapter_bytes",)
MERGED = ("merged", "merged_experts")
MESH = ("full", "experts", "untouched")
EVERYTHING = FULL + ADAPTER + TRUNK


@dataclass(frozen=True)
class Group:
    """Wrappers that share a launch."""

    name: str
    ranks: int
    wrappers: dict[str, tuple[str, ...]]  # wrapper -> what is saved under it
    env: dict[str, str] = field(default_factory=dict)


WRAPPED = ("full", "adapter", "attribute", "untouched")
BACKGROUND = ("moment", "changes")

ZERO = {"DS_ACCELERATOR": "cpu"}
EXPERTS = ("experts", "resume_experts")
GROUPS = [
    Group(
        "single",
        1,
        {
            "none": (*EVERYTHING, *FORMATS, *MERGED, *BACKGROUND, "resume_experts"),
            "compiled": (*WRAPPED, "moment"),
            "compiled_in_place": WRAPPED,
            "compiled_blocks": WRAPPED,
            "checkpointed": WRAPPED,
        },
    ),
    Group(
        "ddp",
        2,
        {
            "ddp": (
                *(*EVERYTHING, *FORMATS, *MERGED, *BACKGROUND),
                *("shared", "shared_wide", "shared_converted"),
                *("resume", "resume_frozen", "resume_converted"),
            ),
            "ddp_compiled": (*WRAPPED, "resume"),
            "compiled_ddp": WRAPPED,
            "ddp_compiled_blocks": WRAPPED,
        },
        ACCELERATE_CPU,
    ),
    Group(
        "fsdp1",
        2,
        {
            # PEFT's target_parameters do not train under it
            "fsdp1": (
                *(*FULL, *ADAPTER, *BYTES, *EVAL, *FORMATS, *BACKGROUND),
                *("merged", "shared", "resume", "resume_adapter"),
            ),
            "fsdp1_mixed": ("full", "adapter", *EVAL, "resume"),
            "fsdp1_flat": (*FULL, *BACKGROUND, "shared_untied", "resume"),
            "fsdp1_checkpointed": (*WRAPPED, "merged"),
            "fsdp1_compiled": WRAPPED,
            "fsdp1_accelerate": ("full", "adapter", "attribute"),
        },
        ACCELERATE_CPU,
    ),
    Group(
        "fsdp2",
        2,
        {
            "fsdp2": (
                *(*EVERYTHING, *MERGED, *BYTES, *EVAL, *FORMATS, *BACKGROUND),
                *("shared_untied", "shared_wide", "shared_cast"),
                *("streaming", "resume", "resume_adapter"),
            ),
            "fsdp2_mixed": ("full", "adapter", *EVAL, "resume"),
            "fsdp2_checkpointed": WRAPPED,
            "fsdp2_compiled_blocks": WRAPPED,
            "fsdp2_accelerate": ("full", "adapter", "attribute", "resume"),
            "tensor_parallel": ("full", "attribute", "untouched", "moment", "shared"),
        },
        ACCELERATE_CPU,
    ),
    Group(
        "four",
        4,
        {
            "hsdp": (
                *("full", "converted", "adapter", "attributes", "merged"),
                *("moment", "shared_untied"),
            ),
            "fsdp2_tensor_parallel": ("full", "attribute", "untouched", "moment", "shared"),
            "tensor_parallel_replicas": ("shared",),
        },
    ),
    Group("mesh", 2, {"mesh_tensor": (*MESH, "resume_experts"), "mesh_experts": ("experts",)}),
    Group(
        "mesh_four",
        4,
        {
            "mesh_tensor_fsdp": (*MESH, "shared_experts", "resume_experts"),
            "mesh_hybrid": MESH,
            **dict.fromkeys(
                ("mesh_experts_fsdp", "mesh_experts_hybrid", "mesh_experts_tensor"), EXPERTS
            ),
        },
    ),
    Group(
        "zero12",
        2,
        {
            "zero1": (*WRAPPED, "moment", "resume_frozen"),
            "zero2": (*EVERYTHING, *BACKGROUND, "shared", "resume"),
        },
        ZERO,
    ),
    Group(
        "zero3",
        2,
        {
            "zero3": (
                *EVERYTHING,
                *MERGED,
                *BYTES,
                *EVAL,
                *FORMATS,
                "shared_untied",
                "resume_adapter",
            )
        },
        ZERO,
    ),
    # engines of DeepSpeed that are made without Accelerate
    Group(
        "engines",
        2,
        {
            "zero1_bf16_gradients32": ("moment",),
            "zero2_bf16_offload": ("moment",),
            "zero3_bf16_subgroups_persistent": ("moment",),
        },
        ZERO,
    ),
]

QUICK = {  # the others run with `scripts/test --all`
    "none": (*SAVES, "moment"),
    "compiled": ("moment",),
    "ddp": (*WRAPPED, "resume", "moment", "shared_wide"),
    "fsdp1": ("resume",),
    "fsdp2": (
        *(
            "full",
            "converted",
            "experts",
            "dual",
            "sharded",
            "attributes",
            "adapter",
            "merged_experts",
        ),
        *("shared_trunk", "adapter_bytes", "streaming", "after_eval"),
        *("moment", "shared_untied", "resume", "resume_adapter"),
    ),
    "tensor_parallel": ("shared",),
    "zero2": ("moment",),
    "zero3": ("full", "sharded", "adapter", "merged"),
}


GROUP_OF = {wrapper: group for group in GROUPS for wrapper in group.wrappers}


def under(*what):
    """The wrappers that any of `what` is saved under; with several, `what` too.

    All tests of a wrapper are in turn.
    """
    cases = []
    for name in what:
        for wrapper, group in GROUP_OF.items():
            if name in group.wrappers[wrapper]:
                values = (wrapper,) if len(what) == 1 else (name, wrapper)
                marks = [] if name in QUICK.get(wrapper, ()) else [pytest.mark.slow]
                cases.append(pytest.param(*values, marks=marks))
    names = ("wrapper",) if len(what) == 1 else ("what", "wrapper")
    return pytest.mark.parametrize(names, cases, scope="module")


@pytest.fixture(scope="module")
def saved_under(tmp_path_factory):
    """A function that gives the folder of a save under a wrapper, and saves when it is first asked
    for.
    """
    folders = {}

    def saved_under(wrapper, what):
        if (wrapper, what) not in folders:
            folders[wrapper, what] = tmp_path_factory.mktemp("saved")
            call_under(wrapper, train_and_save, folders[wrapper, what], wrapper, what)
        return folders[wrapper, what]

    return saved_under


def call_under(wrapper, function, *args):
    """Call a function on the ranks of a wrapper."""
    group = GROUP_OF[wrapper]
    if "DS_ACCELERATOR" in group.env and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    seconds = 60 if group.ranks > 1 else None  # one process has no process group
    call_on_ranks(
        group.ranks,
        function,
        *args,
        launch=group.name,
        env=group.env,
        group_seconds=seconds,
        timeout=280,
    )


def live_model(wrapper, model):
    """That model under that wrapper, after one step on data that differs by rank."""
    live = WRAPPERS[wrapper](models.build(model))
    # Tracing takes seconds and changes nothing that is saved: real compilation in one place, its
    # wrappers everywhere.
    real = (wrapper, model) == ("compiled", "partly_frozen")
    torch.compiler.set_stance("default" if real else "force_eager")
    live.step(models.batch(seed=RANK))
    return live


def save_with_truth(live, folder, tokenizer=None, **settings):
    """Save the model, and write the expected parameters beside it."""
    with CheckpointSaver(live.accelerator, tokenizer=tokenizer, enter_timeout_seconds=60) as saver:
        report = saver.save(live.model, folder / "saved", **settings)
    assert report.path == folder / "saved", report
    write_truth(live, folder)


def write_truth(live, folder):
    tensors = truth(live)
    if RANK == 0:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "truth.safetensors",
        )


def plain_save(live, folder, settings):
    """Save twice with a step between: the second save has the tensors of its own moment."""
    with CheckpointSaver(
        live.accelerator, tokenizer=models.tokenizer(), enter_timeout_seconds=60
    ) as saver:
        saver.save(live.model, folder / "saved", **settings)
        live.step(models.batch(seed=20 + RANK))
        report = saver.save(live.model, folder / "saved", **settings)
    assert report.path == folder / "saved", report
    write_truth(live, folder)


def untouched(live, folder, settings):
    """Saving changes no local tensor, and the next step still trains."""
    before, flags = digest(live), gradient_flags(live)
    save_with_truth(live, folder, models.tokenizer(), **settings)
    assert digest(live) == before, "saving changed the live model"
    assert gradient_flags(live) == flags, "saving changed which parameters are trained"
    live.step(models.batch(seed=10 + RANK))
    changed = digest(live) != before or WORLD > 1
    assert changed, "the step after saving trained nothing"
    after = truth(live)
    assert any(not torch.equal(after[name], tensor) for name, tensor in saved_truth(folder).items())


def after_eval(live, folder, settings):
    """An evaluation leaves some engines with gathered parameters, in the lower precision of the
    forward pass.
    """
    live.model.eval()
    with torch.no_grad():
        live.model(**models.batch(seed=3))
    save_with_truth(live, folder, **settings)


def digest(live):
    """A hash over the name, type, shape and bytes of every tensor this rank holds."""
    sha = hashlib.sha256()
    for name, tensor in named_tensors(live.model):
        local = getattr(tensor, "ds_tensor", tensor)
        local = local.to_local() if hasattr(local, "to_local") else local
        sha.update(
            f"{name} {type(tensor).__name__} {tuple(tensor.shape)} {tuple(local.shape)}".encode()
        )
        sha.update(local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def gradient_flags(live):
    return [parameter.requires_grad for parameter in live.model.parameters()]


def saved_truth(folder):
    if dist.is_initialized():
        dist.barrier()  # rank 0 has written it by then
    return load_file(folder / "truth.safetensors")


def adapter_bytes(live, folder, settings):
    """An adapter save moves no bytes of the base between ranks, and a full save does (so the
    counter counts).
    """
    named = dict(named_tensors(live.model))
    sizes = {
        name: (getattr(t, "ds_numel", None) or t.numel()) * t.element_size()
        for name, t in named.items()
    }
    adapter = sum(size for name, size in sizes.items() if "lora_" in name)
    with CollectiveBytes() as moved:
        saver_only(live, folder, settings)
    assert moved.bytes <= adapter + 65536, (
        f"moved {moved.bytes} bytes for an adapter of {adapter}: {moved.by_operator}"
    )
    with CollectiveBytes() as moved, CheckpointSaver(live.accelerator) as saver:
        saver.save(live.model, folder / "all", adapter_only=False)
    assert moved.bytes > sum(sizes.values()) / 4, (
        f"the counter saw {moved.bytes} bytes of a full save"
    )
    write_truth(live, folder)


def saver_only(live, folder, settings):
    with CheckpointSaver(live.accelerator) as saver:
        saver.save(live.model, folder / "saved", **settings)


def streaming(live, folder, settings):
    """Rank 0 holds a bucket of 1 MiB, three blocks of 8 MiB to write from, and its own shard, never
    the whole model.
    """
    with buckets_of(1 << 20), CheckpointSaver(live.accelerator, io_threads=1) as saver:
        # whatever is imported on first use is imported here
        saver.save(torch.nn.Linear(3, 3), folder / "warm-up")
        with peak_memory() as peak:
            saver.save(live.model, folder / "saved", **settings)
    whole = sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(live.model))
    assert whole > 110 << 20, whole
    assert peak.mib < (whole >> 20) / 3, (
        f"{peak} more than at rest for a model of {whole >> 20} MiB"
    )
    assert RANK or peak.mib > 8, f"{peak}: a block has 8 MiB"
    saver = CheckpointSaver(live.accelerator, each_rank_writes="off", io_threads=1)
    with buckets_of(48 << 20), saver, peak_memory() as peak:
        saver.save(live.model, folder / "again", **settings)
    assert peak.mib < 48 + 32, f"{peak} more than at rest: a bucket of 48 MiB and 24 of blocks"
    assert RANK or peak.mib > 24, f"{peak}: the bucket and the blocks"
    growing = sorted(
        ModelTensors(live.model).sources().values(), key=lambda source: source.size_bytes
    )  # sorted, so that their buckets grow, too
    with buckets_of(6 << 20):
        places = {
            chunk.data.untyped_storage().data_ptr()
            for chunk in stream_chunks(growing, current_ranks())
        }
    assert len(places) == (RANK == 0), (
        f"{len(places)} buffers: a chunk in use keeps the smaller ones alive"
    )
    write_truth(live, folder)


SPECIAL = {
    "untouched": untouched,
    "after_eval": after_eval,
    "adapter_bytes": adapter_bytes,
    "streaming": streaming,
}


def train_and_save(folder, wrapper, what):
    """Leave `saved/`, by ft_ckpt, and `truth.safetensors`, by torch."""
    model, settings = SAVES[what]
    SPECIAL.get(what, plain_save)(live_model(wrapper, model), folder, dict(settings))


@under("full")
def test_full_save_is_save_pretrained_of_the_bare_model(saved_under, wrapper, tmp_path):
    """Empty weights, wrapper prefixes, no usable file from shards, frozen weights lost."""
    folder = saved_under(wrapper, "full")
    model, saved = true_model("partly_frozen", folder), folder / "saved"
    assert_same_tensors(stored(saved), reference(model, tmp_path))
    assert (saved / "config.json").read_text() == (tmp_path / "config.json").read_text()
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(saved)), logits(model))
    assert_agree(logits(ft_ckpt.load_model(saved)), logits(model))
    assert ft_ckpt.verify(saved).ok


@under("full")
def test_tied_weights_are_stored_once_and_tied_on_reload(saved_under, wrapper):
    """Shared tensors refused or dropped; the pair written twice and untied after reload."""
    saved = saved_under(wrapper, "full") / "saved"
    assert "lm_head.weight" not in stored(saved)
    assert read_manifest(open_place(saved)).parts[0].ties == (
        ("model.embed_tokens.weight", "lm_head.weight"),
    )
    for loaded in (AutoModelForCausalLM.from_pretrained(saved), ft_ckpt.load_model(saved)):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@under("full")
def test_manifest_knows_what_was_trained_and_the_tokenizer_is_there(saved_under, wrapper):
    """Frozen parameters told from trained ones; the tokenizer saved beside the weights."""
    saved = saved_under(wrapper, "full") / "saved"
    trained = {
        name
        for name, parameter in models.partly_frozen().named_parameters()
        if parameter.requires_grad
    }
    assert set(read_manifest(open_place(saved)).parts[0].trainable) == trained
    assert read_manifest(open_place(saved)).world["size"] == GROUP_OF[wrapper].ranks
    assert AutoTokenizer.from_pretrained(saved).chat_template == models.CHAT_TEMPLATE


@under("converted", "experts")
def test_fused_experts_get_their_names_on_disk(saved_under, wrapper, what, tmp_path):
    """Names that only the training framework can read."""
    folder = saved_under(wrapper, what)
    model = true_model(SAVES[what][0], folder)
    assert_same_tensors(stored(folder / "saved"), reference(model, tmp_path))
    assert any(".experts.0.w1." in name for name in stored(folder / "saved"))
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(folder / "saved")), logits(model))


@under("sharded")
def test_small_shards_come_with_an_index(saved_under, wrapper, tmp_path):
    folder = saved_under(wrapper, "sharded")
    model, saved = true_model("gpt2", folder), folder / "saved"
    assert_same_tensors(stored(saved), reference(model, tmp_path, max_shard_size=30_000))
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored(saved))
    assert set(index["weight_map"].values()) == {path.name for path in saved.glob("*.safetensors")}
    assert len(list(saved.glob("model-0000?-of-0000?.safetensors"))) > 1
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(saved)), logits(model))


@under("cast")
def test_dtype_is_the_one_asked_for_in_file_and_config(saved_under, wrapper, tmp_path):
    """A bf16 model saved as fp32, or a config that says otherwise."""
    folder = saved_under(wrapper, "cast")
    model, saved = true_model("olmo2", folder).to(torch.bfloat16), folder / "saved"
    assert_same_tensors(stored(saved), reference(model, tmp_path))
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"
    assert read_manifest(open_place(saved)).parts[0].casts == {
        "float32->bfloat16": len(stored(saved))
    }


@under("attribute")
def test_one_attribute_lies_at_the_root(saved_under, wrapper, tmp_path):
    """The wrapper saved instead of the policy, or a prefix filter that matches nothing."""
    folder = saved_under(wrapper, "attribute")
    model, saved = true_model("policy_and_value", folder).policy, folder / "saved"
    assert_same_tensors(stored(saved), reference(model, tmp_path))
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(saved)), logits(model))


@under(*MERGED)
def test_merged_is_what_peft_merges_of_the_bare_model(saved_under, wrapper, what, tmp_path):
    folder = saved_under(wrapper, what)
    model, saved = true_model(SAVES[what][0], folder), folder / "saved"
    live = logits(model)
    assert_close_tensors(stored(saved), reference(model.merge_and_unload(), tmp_path))
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(saved)), live)


@under("attributes")
def test_several_attributes_have_a_folder_each(saved_under, wrapper, tmp_path):
    """The value head missing, the critic never saved."""
    folder = saved_under(wrapper, "attributes")
    model, saved = true_model("policy_and_value", folder), folder / "saved"
    assert_same_tensors(stored(saved / "policy"), reference(model.policy, tmp_path))
    assert_same_tensors(stored(saved / "value_head"), model.value_head.state_dict())
    parts = ft_ckpt.load_model(saved, into={"value_head": models.ValueHead()})
    assert_agree(logits(parts["policy"]), logits(model.policy))
    states = torch.ones(2, 24)
    assert torch.equal(parts["value_head"](states), model.value_head(states))


@under("shared_trunk")
def test_a_shared_trunk_is_shared_again_after_loading(saved_under, wrapper, tmp_path):
    """Two models on one trunk come back as two trunks."""
    folder = saved_under(wrapper, "shared_trunk")
    model, saved = true_model("shared_trunk", folder), folder / "saved"
    assert_same_tensors(stored(saved / "policy"), reference(model.policy, tmp_path))
    assert any(
        "policy:model.embed_tokens.weight" in group
        for group in read_manifest(open_place(saved)).shared
    )
    value_model = models.build("shared_trunk").value_model
    parts = ft_ckpt.load_model(saved, into={"value_model": value_model})
    assert parts["value_model"] is value_model
    assert (
        parts["policy"].model.embed_tokens.weight is parts["value_model"].trunk.embed_tokens.weight
    )
    ids = models.batch(5)["input_ids"]
    assert_agree(parts["value_model"].eval()(ids), model.value_model(ids))


@under("untouched")
def test_saving_leaves_the_live_model_as_it_was(saved_under, wrapper, tmp_path):
    """The worker compares hashes before and after, and trains on."""
    folder = saved_under(wrapper, "untouched")
    model, saved = true_model("qwen3", folder), folder / "saved"
    assert_same_tensors(stored(saved), reference(model, tmp_path))
    ends = AutoTokenizer.from_pretrained(saved).convert_tokens_to_ids(
        ["<|im_end|>", "<|endoftext|>"]
    )
    assert json.loads((saved / "generation_config.json").read_text())["eos_token_id"] == ends


@under("after_eval")
def test_saving_after_an_evaluation_saves_the_master_weights(saved_under, wrapper, tmp_path):
    """What lies gathered in bfloat16 after a forward pass is not what is trained."""
    folder = saved_under(wrapper, "after_eval")
    assert_same_tensors(stored(folder / "saved"), reference(true_model("qwen3", folder), tmp_path))


@under(*ADAPTER)
def test_adapters_are_only_adapters_and_all_of_them(saved_under, wrapper, what, tmp_path):
    """Slices, empty files, the whole base, no modules_to_save."""
    folder = saved_under(wrapper, what)
    model, saved = true_peft_model(what, folder), folder / "saved"
    model.save_pretrained(tmp_path)
    assert_same_tensors(stored(saved), stored(tmp_path))
    assert_same_tensors(stored(saved / "second"), stored(tmp_path / "second"))
    assert sum("lm_head" in name for name in stored(saved)) == 1
    assert adapter_config(saved) == adapter_config(tmp_path)
    assert adapter_config(saved / "second") == adapter_config(tmp_path / "second")


@under(*ADAPTER)
def test_adapters_load_on_their_base(saved_under, wrapper, what):
    """An adapter file nothing can be restored from."""
    folder = saved_under(wrapper, what)
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
def test_an_adapter_save_moves_only_the_adapter(saved_under, wrapper, tmp_path):
    """The frozen base gathered, or written, at every save."""
    folder = saved_under(wrapper, "adapter_bytes")
    true_model("lora_wide", folder).save_pretrained(tmp_path)
    assert_same_tensors(stored(folder / "saved"), stored(tmp_path))
    size = sum(path.stat().st_size for path in (folder / "saved").rglob("*") if path.is_file())
    assert size < (tmp_path / "adapter_model.safetensors").stat().st_size + 65536


@under("streaming")
def test_rank_zero_never_holds_the_whole_model(saved_under, wrapper, tmp_path):
    """Out of memory at save; the worker measures how much rank 0 grows."""
    folder = saved_under(wrapper, "streaming")
    assert_same_tensors(stored(folder / "saved"), reference(true_model("big", folder), tmp_path))


def true_peft_model(what, folder):
    model = true_model(
        {"adapter": "lora", "adapter_attribute": "lora_policy_and_value"}[what], folder
    )
    return model if what == "adapter" else model.policy


def true_base(what, folder):
    """The base model alone, from the truth."""
    prefix = {"adapter": "", "adapter_attribute": "policy."}[what]
    truth = load_file(folder / "truth.safetensors")
    return base_of(
        {
            name.removeprefix(prefix): tensor
            for name, tensor in truth.items()
            if name.startswith(prefix)
        }
    )


@under("hdf5")
def test_hdf5_holds_the_true_parameters(saved_under, wrapper, tmp_path):
    """The same bits as the safetensors save, from every engine, for a reader that is not ours."""
    folder = saved_under(wrapper, "hdf5")
    expected = reference(true_model("mixtral", folder), tmp_path)
    with h5py.File(folder / "saved" / "model.h5") as file:
        assert set(expected) <= set(file)
        assert all(
            torch.equal(torch.from_numpy(file[name][()]), tensor)
            for name, tensor in expected.items()
        )
    assert ft_ckpt.verify(folder / "saved").ok


@under("dual")
def test_dual_files_are_save_pretrained_of_the_bare_model(saved_under, wrapper, tmp_path):
    folder = saved_under(wrapper, "dual")
    model, saved = true_model("partly_frozen", folder), folder / "saved"
    assert_agree(logits(AutoModelForCausalLM.from_pretrained(saved)), logits(model))
    assert_agree(logits(ft_ckpt.load_model(saved)), logits(model))
    assert len(list(saved.glob("model-*.h5"))) == len(list(saved.glob("model-*.safetensors"))) > 1


@under(*RESUMES)
def test_a_resumed_run_goes_on_to_the_bit(tmp_path, wrapper, what):
    """Parameters, moments, random numbers and the next losses."""
    call_under(wrapper, exact, wrapper, RESUMES[what], tmp_path)


@under("moment")
def test_a_save_in_the_background_has_the_values_of_the_call(tmp_path, wrapper):
    call_under(wrapper, same_moment, wrapper, tmp_path)


@under("changes")
def test_a_save_in_the_background_follows_what_has_changed(tmp_path, wrapper):
    """Other settings, states and trained parameters, of all ranks or of one."""
    call_under(wrapper, same_after_changes, wrapper, tmp_path)


@under(*SHARED_FILES)
def test_all_ranks_write_the_bytes_that_one_writes_alone(tmp_path, wrapper, what):
    model, settings = SHARED_FILES[what]
    call_under(wrapper, same_files, wrapper, model, tmp_path, settings)
