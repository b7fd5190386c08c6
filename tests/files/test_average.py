"""Averages of checkpoints: exact to one rounding, streamed, and never taken for a moment of a
run.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import models
import peft
import pytest
import torch
from compare import assert_same_tensors, logits, stored
from launch import run_python
from methods import low_rank, with_adapter
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from small_checkpoints import edit
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep, SaverConfig, average, latest, verify
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import ConfigError, CorruptError, LoadError, SelectionError
from ft_ckpt.extensions.tools.averaging import parse_weights
from ft_ckpt.storage.places import open_place

TARGETS = ["q_proj", "v_proj"]


def saved(folder, seed, **settings):
    model = models.build("llama", seed)
    CheckpointSaver().save(model, folder, tokenizer=models.tokenizer(), **settings)
    return model


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Three checkpoints of one architecture, which no test changes."""
    folder = tmp_path_factory.mktemp("originals")
    for seed in range(3):
        saved(folder / f"c{seed}", seed)
    return [folder / f"c{seed}" for seed in range(3)]


@pytest.fixture
def three(originals, tmp_path):
    """Copies of the three checkpoints, for one test."""
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in originals]


def mean(folders, shares):
    pairs = [(stored(folder), share) for folder, share in zip(folders, shares, strict=True)]
    return {
        name: torch.stack([each[name].double() * share for each, share in pairs]).sum(0)
        for name in pairs[0][0]
    }


@pytest.mark.parametrize("weights", [None, (1, 2, 5)])
def test_every_element_is_the_mean(three, tmp_path, weights):
    report = average(three, tmp_path / "out", weights=weights)
    counts = weights or (1, 1, 1)
    expected = mean(three, [count / sum(counts) for count in counts])
    found = stored(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(
        torch.allclose(found[name].double(), value, rtol=1e-6, atol=1e-7)
        for name, value in expected.items()
    )
    assert report.tensors == len(load_file(tmp_path / "out" / "model.safetensors"))
    assert verify(tmp_path / "out").ok


def test_transformers_reads_it(three, tmp_path):
    average(three, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert logits(model).isfinite().all()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert torch.equal(logits(model), logits(ft_ckpt.load_model(tmp_path / "out")))


def test_rounded_once(tmp_path):
    """Half a unit in the last place at most: a sum that is rounded on the way is further off."""
    values = torch.randn(3, 70_001).bfloat16()
    sources = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for source, value in zip(sources, values, strict=True):
        save_file({"w": value}, source)
    average(sources, tmp_path / "out.safetensors")
    average(sources, tmp_path / "wide.h5", dtype="float32")
    exact = values.double().mean(0)
    found = load_file(tmp_path / "out.safetensors")["w"]
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    wide = ft_ckpt.load(tmp_path / "wide.h5")["w"].values()
    assert wide.dtype == torch.float32
    assert torch.allclose(wide.double(), exact, rtol=1e-6, atol=1e-7)


def test_counts_that_differ_are_named(tmp_path):
    for number in range(2):
        save_file(
            {"w": torch.ones(3) * number, "seen": torch.tensor(number), "same": torch.tensor(7)},
            tmp_path / f"{number}.safetensors",
        )
    report = average(
        [tmp_path / "0.safetensors", tmp_path / "1.safetensors"], tmp_path / "out.safetensors"
    )
    found = load_file(tmp_path / "out.safetensors")
    assert (found["seen"], found["same"], found["w"][0]) == (1, 7, 0.5)
    assert report.notes == (
        "seen: no floating-point numbers, and not equal; the last source's were taken",
    )


def test_parts_and_formats(tmp_path):
    parts = ["policy", "value_head"]
    for seed in range(2):
        with CheckpointSaver(format="h5" if seed else "safetensors") as saver:
            saver.save(
                models.build("policy_and_value", seed), tmp_path / f"c{seed}", attribute=parts
            )
    average([tmp_path / "c0", tmp_path / "c1"], tmp_path / "out", format="dual")
    assert [part.path for part in read_manifest(open_place(tmp_path / "out")).parts] == parts
    assert verify(tmp_path / "out").ok
    heads = []
    for name in ("c0", "c1", "out"):
        head = ft_ckpt.load_model(tmp_path / name / "value_head", into=models.ValueHead())
        heads.append(head.state_dict())
    for name, value in heads[2].items():
        assert torch.allclose(value, (heads[0][name] + heads[1][name]) / 2)


def test_adapters_of_one_base(tmp_path):
    for name, base, seed in (("a0", 0, 1), ("a1", 0, 2), ("other", 3, 1)):
        adapted = models.lora(models.build("llama", base))
        CheckpointSaver().save(models.trained(adapted, seed), tmp_path / name, adapter_only=True)
    pair = [tmp_path / "a0", tmp_path / "a1"]
    average(pair, tmp_path / "out")
    files = [
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("a0", "a1", "out")
    ]
    assert all(
        torch.allclose(files[2][name], (files[0][name] + files[1][name]) / 2) for name in files[2]
    )
    assert ft_ckpt.load_model(tmp_path / "out", base=models.build("llama", 0)) is not None
    with pytest.raises(
        LoadError, match=r"other: base is .*; only models of one config, or adapters of one base"
    ):
        average([tmp_path / "a0", tmp_path / "other"], tmp_path / "no")
    config = json.loads((tmp_path / "a1" / "adapter_config.json").read_text())
    edit(tmp_path / "a1", "adapter_config.json", json.dumps({**config, "lora_alpha": 99}))
    with pytest.raises(LoadError, match="lora_alpha is 99"):
        average(pair, tmp_path / "no")
    assert not (tmp_path / "no").exists()


# the field by which two configs of a method compute otherwise, or change their base; the values
ADAPTERS = {
    "trainable_token_indices": (LoraConfig, [{"embed_tokens": [3, 4]}, {"embed_tokens": [7, 8]}]),
    "trainable_token_indices.embed_tokens": (
        LoraConfig,
        [{"embed_tokens": [3, 4]}, {"embed_tokens": [4, 3]}],
    ),
    "alora_invocation_tokens": (LoraConfig, [[5, 6], [6, 5]]),
    "init_lora_weights": (LoraConfig, [True, "pissa"]),
    "init_lora_weights.both": (LoraConfig, ["olora", "pissa"]),
    "init_lora_weights.chance": (LoraConfig, ["pissa_niter_4", "pissa_niter_4"]),
    "projection_prng_key": (partial(peft.VeraConfig, r=4), [0, 1]),
    "random_loc_seed": (partial(peft.FourierFTConfig, n_frequency=20), [0, 1]),
    "scaling": (partial(peft.FourierFTConfig, n_frequency=20), [100.0, 150.0]),
    "apply_GS": (partial(peft.HRAConfig, r=4), [True, False]),
    "use_cayley_neumann": (partial(peft.OFTConfig, r=0, oft_block_size=4), [True, False]),
}


@pytest.fixture
def tuned(tmp_path):
    """A function that saves adapters of these configs on one base, as PEFT does."""

    def save(*configs):
        for number, config in enumerate(configs):
            base = models.qwen3(num_hidden_layers=1)
            models.fill(base)
            with_adapter(base, config, seed=number).save_pretrained(tmp_path / f"t{number}")
        return [tmp_path / f"t{number}" for number in range(len(configs))]

    return save


@pytest.mark.parametrize("field", ADAPTERS)
def test_adapters_that_compute_otherwise(tuned, tmp_path, field):
    (make, values), name = ADAPTERS[field], field.partition(".")[0]
    pair = tuned(*(make(target_modules=TARGETS, **{name: value}) for value in values))
    with pytest.raises(
        LoadError,
        match="cannot be repeated" if field.endswith("chance") else rf"t1: {name}.* is .* in t0",
    ):
        average(pair, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("init", ["pissa", True])
def test_adapters_that_began_otherwise(tuned, tmp_path, init):
    """Of one residual base, or of the base itself: what training did to them is averaged."""
    pair = tuned(
        low_rank(TARGETS, init_lora_weights=init),
        low_rank(
            TARGETS[::-1], lora_dropout=0.5, init_lora_weights="gaussian" if init is True else init
        ),
    )
    assert average(pair, tmp_path / "out").notes == (
        "the adapters do not name their base; it was not compared",
    )
    files = [
        load_file(folder / "adapter_model.safetensors") for folder in (*pair, tmp_path / "out")
    ]
    assert all(
        torch.equal(files[2][name], (files[0][name] + files[1][name]) / 2) for name in files[2]
    )


def test_indices_that_differ(tuned, tmp_path):
    """Where the values of SHiRA are is in tensors beside them."""
    pair = tuned(*(peft.ShiraConfig(target_modules=TARGETS, r=4) for _ in range(2)))
    tensors = load_file(pair[1] / "adapter_model.safetensors")
    indices = {
        name: value.flip(1) for name, value in tensors.items() if name.endswith("shira_indices")
    }
    save_file({**tensors, **indices}, pair[1] / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(
        SelectionError, match=r"shira_indices.*: indices that differ between the sources"
    ):
        average(pair, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "float64"])
def test_types(tmp_path, dtype):
    values = torch.randn(2, 999, dtype=torch.float64).to(getattr(torch, dtype))
    sources = [tmp_path / "0.pt", tmp_path / "1.pt"]
    for source, value in zip(sources, values, strict=True):
        torch.save({"w": value.clone()}, source)
    report = average(sources, tmp_path / "out.pt")
    wide = values.to(torch.float64 if dtype == "float64" else torch.float32)
    found = torch.load(tmp_path / "out.pt")["w"]
    assert torch.equal(found.view(torch.uint8), wide.mean(0).to(found.dtype).view(torch.uint8))
    assert (found.dtype, report.notes) == (values.dtype, ())


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "complex64", "complex128"])
def test_types_without_a_mean(tmp_path, dtype):
    for number in range(2):
        values = torch.full((16,), number, dtype=torch.uint8).view(getattr(torch, dtype))
        torch.save({"w": values}, tmp_path / f"{number}.pt")
    with pytest.raises(SelectionError, match=f"w: {dtype}: no mean of this dtype"):
        average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_values_beyond_their_type_are_named(tmp_path, dtype):
    most = torch.finfo(getattr(torch, dtype)).max
    for number, value in enumerate((most, 0.0)):
        save_file(
            {"w": torch.full((4,), value).to(getattr(torch, dtype))},
            tmp_path / f"{number}.safetensors",
        )
    pair = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    report = average(pair, tmp_path / "out.safetensors", weights=[2, -1])
    assert report.notes == ("w: averages beyond the range of their dtype",)
    assert average(pair, tmp_path / "mean.safetensors").notes == ()


def test_sources_of_one_name_that_lack_tensors(tmp_path):
    for number, names in enumerate(("ab", "a", "ab")):
        (tmp_path / str(number)).mkdir()
        save_file({name: torch.ones(2) for name in names}, tmp_path / str(number) / "x.safetensors")
    with pytest.raises(SelectionError, match=r"x\.safetensors: b: missing"):
        average(
            [tmp_path / str(number) / "x.safetensors" for number in range(3)],
            tmp_path / "out.safetensors",
        )


def test_of_a_run_and_no_moment_of_it(tmp_path):
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    run = tmp_path / "run"
    with CheckpointSaver(None, run, config=SaverConfig(keep=Keep(last=2))) as saver:
        saver.register(model=model, optimizer=optimizer)
        for _ in range(3):
            model(torch.randn(2, 40)).sum().backward()
            optimizer.step()
            saver.step()
            saver.save_state()
        kept = sorted(path.name for path in run.iterdir() if path.name.startswith("checkpoint"))
        report = average([run], run / "averaged", last=2)
        manifest = read_manifest(open_place(run / "averaged"))
        assert (manifest.made_from, manifest.run_id, manifest.step) == (tuple(kept), None, None)
        assert manifest.notes == (f"the average of {kept[0]}, {kept[1]}",)
        assert not (run / "averaged" / "state").exists()
        assert report.tensors == 2
        assert latest(run) == run / kept[1]
        saver.step()
        saver.save_state()
        assert (run / "averaged").exists(), "no rule of the run deletes it"
        assert latest(run).name == "checkpoint-4"
    with CheckpointSaver(None, run) as saver:
        saver.register(model=model, optimizer=optimizer)
        assert saver.resume("must").step == 4


def test_a_source_of_weight_0_has_no_part_in_it(three, tmp_path):
    weights = load_file(three[0] / "model.safetensors")
    save_file(
        {name: tensor.fill_(float("nan")) for name, tensor in weights.items()},
        tmp_path / "nan.safetensors",
    )
    files = [tmp_path / "nan.safetensors", *(folder / "model.safetensors" for folder in three[1:])]
    for order in (1, -1):
        average(
            files[::order], tmp_path / "out.safetensors", weights=[0, 1, 1][::order], overwrite=True
        )
        average(files[1:][::order], tmp_path / "two.safetensors", overwrite=True)
        assert_same_tensors(
            load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "two.safetensors")
        )


@pytest.mark.parametrize(
    ("sources", "settings", "words"),
    [
        (1, {}, r"^1 source given, expected two or more"),
        (0, {}, r"^0 sources given"),
        (2, {"weights": [1]}, "expected 2 finite numbers"),
        (2, {"weights": [1, -1]}, "whose sum is not 0"),
        (2, {"weights": [1, float("nan")]}, "finite"),
        (2, {"weights": [1e308, 1e308]}, "finite"),
        (3, {"weights": [1e300, -1e300, 1e-300]}, "finite"),
        (2, {"weights": ["a", 1]}, r"weights=\['a', 1\]: expected 2 finite numbers"),
        (2, {"weights": ["1", "1"]}, "finite"),
        (2, {"weights": "11"}, "finite"),
        (2, {"weights": b"11"}, "finite"),
        (2, {"weights": {1, 2}}, "finite"),  # in which order?
        (2, {"weights": {1: 2, 3: 4}}, "finite"),
        (2, {"weights": [None, 1]}, r"weights=\[None, 1\]: expected 2 finite numbers"),
        (2, {"weights": [10**400, 1]}, "finite"),
        (2, {"weights": 2}, "finite"),
        (2, {"weights": [torch.ones(2), 1]}, "finite"),
        (2, {"last": 2}, "last=2 with 2 sources: expected one run's folder"),
        (1, {"last": 4}, "1 valid checkpoint"),
        (1, {"last": "2"}, "last='2' with 1 source: expected one run's folder"),
    ],
)
def test_what_cannot_be_asked_for(three, tmp_path, sources, settings, words):
    with pytest.raises(ConfigError, match=words):
        average(three[:sources], tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("made", ["nothing", "an average"])
def test_a_run_without_checkpoints_says_so(three, tmp_path, made):
    (tmp_path / "run").mkdir()
    if made == "an average":
        average(three, tmp_path / "run" / "averaged", progress=False)
    with pytest.raises(
        ConfigError,
        match=r"run: no checkpoints of a run in it, 2 are wanted; give the folder that a",
    ):
        average([tmp_path / "run"], tmp_path / "out", last=2)


@pytest.mark.parametrize("text", ["1,two", "", "1,,2", "1;2"])
def test_weights_that_are_no_numbers(text):
    with pytest.raises(ConfigError, match="expected numbers separated by commas, as in '1,2,1'"):
        parse_weights(text)
    assert (parse_weights(None), parse_weights("1,2.5")) == (None, [1.0, 2.5])


def test_a_type_that_was_asked_for_is_reported(three, tmp_path):
    report = average(three, tmp_path / "out", dtype="bfloat16", progress=False)
    assert report.casts == {"float32->bfloat16": report.tensors}
    assert read_manifest(open_place(tmp_path / "out")).parts[0].casts == report.casts
    assert average(three, tmp_path / "plain", dtype="float32", progress=False).casts == {}


@pytest.mark.parametrize("text", [None, "{", "[]", "\xff"])
def test_settings_of_adapters_that_are_none(tmp_path, text):
    adapted = models.lora(models.build("llama"))
    for name in ("a0", "a1"):
        adapted.save_pretrained(tmp_path / name)
    if text is None:
        (tmp_path / "a1" / "adapter_config.json").unlink()
    else:
        (tmp_path / "a1" / "adapter_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptError, match=r"a1/adapter_config\.json: "):
        average([tmp_path / "a0", tmp_path / "a1"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_models_are_named(three, tmp_path):
    CheckpointSaver().save(models.build("gpt2"), tmp_path / "other")
    with pytest.raises(
        SelectionError, match=r"other: model\.layers\.0\.input_layernorm\.weight: missing"
    ):
        average([three[0], tmp_path / "other"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_modules_of_two_classes_have_no_average(tmp_path):
    """They have no settings file: the manifest has the name of the class."""

    class Scaled(nn.Linear):
        """Computes something else with the same tensors."""

    for name, module in (("one", nn.Linear(2, 2)), ("two", Scaled(2, 2))):
        CheckpointSaver().save(module, tmp_path / name)
    with pytest.raises(LoadError, match="two: class is Scaled, Linear in one"):
        average([tmp_path / "one", tmp_path / "two"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(three, tmp_path):
    def run(*options):
        return run_python(
            "from ft_ckpt.cli import main; main()", "average", *three, tmp_path / "out", *options
        )

    done = run("--weights", "1,1,2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["notes"] == []
    assert read_manifest(open_place(tmp_path / "out")).notes == (
        "the average of c0 (0.25), c1 (0.25), c2 (0.5)",
    )
    again = run()
    assert (again.returncode, "exists already; give --force" in again.stderr) == (2, True)


def test_an_average_made_while_training_is_the_plain_model(tmp_path):
    model = models.build("llama", 0)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ema.update_parameters(model)
    models.fill(model, 5)
    ema.update_parameters(model)
    CheckpointSaver().save(ema, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(found), logits(ema.module))
    assert not torch.equal(logits(found), logits(model))


def test_folders_of_one_config_that_tie_otherwise_have_no_average(tmp_path):
    """A model of transformers ties whatever its config says; the files of others may not."""
    model = models.build("llama")
    for name, copies in (("tied", False), ("untied", True)):
        model.config.save_pretrained(tmp_path / name)
        state = dict(model.state_dict())
        state["lm_head.weight"] = (
            state["model.embed_tokens.weight"].clone() if copies else state["lm_head.weight"]
        )
        torch.save(state, tmp_path / name / "pytorch_model.bin")
    with pytest.raises(
        SelectionError, match=r"untied: lm_head\.weight: unexpected: not as in tied"
    ):
        average([tmp_path / "tied", tmp_path / "untied"], tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_files_that_tie_otherwise_have_no_average(tmp_path):
    one, two = torch.ones(2), torch.zeros(2)
    torch.save({"a": one, "b": two, "c": one}, tmp_path / "a.pt")
    torch.save({"a": one, "b": two, "c": two}, tmp_path / "b.pt")
    with pytest.raises(SelectionError, match=r"b\.pt: c: tied to b, expected a"):
        average([tmp_path / "a.pt", tmp_path / "b.pt"], tmp_path / "out.pt", progress=False)
    save_file({"a": one, "b": two}, tmp_path / "c.safetensors")
    report = average(
        [tmp_path / "a.pt", tmp_path / "c.safetensors"], tmp_path / "out.pt", progress=False
    )
    assert report.notes == (
        "c: not in c.safetensors; taken to be tied to a, as in the other sources",
    )
    assert torch.load(tmp_path / "out.pt").keys() == {"a", "b", "c"}
