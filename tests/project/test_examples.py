"""The example scripts, run as a reader would run them, and their results opened with the usual
libraries.
"""

import argparse
import inspect
import os
import re

import pytest
import torch
from launch import launch, run_python
from peft import PeftModel
from places import ROOT
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from wrappers import ACCELERATE_CPU

import ft_ckpt
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.storage.places import open_place

TINY = ("--batch-size", "8", "--sequence-length", "64")


def forked(script, *arguments, engine="ddp"):
    """What a script prints on two processes, forked from one that has the libraries: scripts/demo
    launches them.
    """
    environment = {"DS_ACCELERATOR": "cpu"} if engine == "zero3" else ACCELERATE_CPU
    result = launch("example", 2, (engine, ROOT / "scripts" / script, *arguments), 300, environment)
    assert result.returncode == 0, result.log
    return result.log


def numbers(name, output):
    return [float(number) for number in re.findall(rf"{name} ([\d.]+)", output)]


def parameters(model):
    return dict(model.named_parameters())


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Some text to learn from: it must not depend on the length of the standard library."""
    path = tmp_path_factory.mktemp("data") / "argparse.txt"
    path.write_text(inspect.getsource(argparse))
    return path


@pytest.fixture(scope="module")
def full(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("full")
    options = (
        "--dataset",
        text,
        "--steps",
        "40",
        "--save-every",
        "20",
        "--chat-template",
        "olmo",
        *TINY,
    )
    return folder, forked("finetune.py", "--output-dir", folder, *options)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("ppo")
    options = ("--dataset", text, "--iterations", "6", "--new-tokens", "8", "--epochs", "4")
    return folder, forked("ppo.py", "--output-dir", folder, *options)


@pytest.mark.slow
def test_full_run_learns_and_says_so_once(full):
    _, output = full
    assert numbers("/40 loss", output)[-1] < numbers("/40 loss", output)[0] - 1
    assert len(numbers("held-out loss", output)) == 1, "each rank believes that it is alone"


@pytest.mark.slow
def test_full_run_is_what_transformers_loads(full, text):
    folder, output = full
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    stream = torch.tensor(
        [*tokenizer(text.read_text(), verbose=False)["input_ids"], tokenizer.eos_token_id]
    )
    held_out = stream[: len(stream) // 64 * 64].view(-1, 64)[19::20]
    with torch.no_grad():
        loss = model(input_ids=held_out, labels=held_out).loss.item()
    assert loss == pytest.approx(numbers("held-out loss", output)[0], abs=0.1)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends


@pytest.mark.slow
def test_full_run_leaves_valid_checkpoints(full):
    folder, _ = full
    steps = {"checkpoint-20": 20, "checkpoint-40": 40, "final": 40}
    for name, step in steps.items():
        assert ft_ckpt.verify(folder / name).ok
        assert read_manifest(open_place(folder / name)).step == step
    assert {path.name for path in folder.glob("checkpoint-*")} == steps.keys() - {"final"}
    assert set(read_manifest(open_place(folder / "checkpoint-20")).metrics) == {"loss"}


@pytest.mark.slow
def test_lora_on_the_full_run_is_what_peft_loads(full, text, tmp_path):
    base = full[0] / "final"
    output = forked(
        *(
            "finetune.py",
            "--output-dir",
            tmp_path,
            "--model",
            base,
            "--lora",
            "--dataset",
            text,
            "--steps",
            "4",
        ),
        *TINY,
    )
    assert len(numbers("held-out loss", output)) == 1
    assert not list((tmp_path / "final").glob("model*"))
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "final"
    )
    trained = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert trained, "no LoRA weights"
    assert all(parameter.abs().sum() > 0 for parameter in trained), "LoRA weights as they were made"


@pytest.mark.slow
def test_ppo_earns_more(ppo):
    rewards = numbers("mean reward", ppo[1])
    assert len(rewards) == 6, "one line for each iteration"
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.05


@pytest.mark.slow
def test_ppo_goes_on_where_it_was(ppo, text, tmp_path):
    options = (
        "--output-dir",
        tmp_path,
        "--dataset",
        text,
        "--new-tokens",
        "8",
        "--epochs",
        "4",
        "--save-every",
        "2",
    )
    forked("ppo.py", *options, "--iterations", "2")
    rest = numbers("mean reward", forked("ppo.py", *options, "--iterations", "6"))
    assert rest == numbers("mean reward", ppo[1])[2:]


@pytest.mark.slow
def test_ppo_saves_both_parts_and_the_policy_alone(ppo):
    folder, _ = ppo
    value_head = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
    parts = ft_ckpt.load_model(folder / "both", into={"value_head": value_head})
    assert set(parts) == {"policy", "value_head"}
    assert parts["value_head"] is value_head
    alone = parameters(AutoModelForCausalLM.from_pretrained(folder / "policy"))
    assert all(
        torch.equal(weight, alone[name]) for name, weight in parameters(parts["policy"]).items()
    )


@pytest.mark.slow
def test_extracted_policy_is_a_plain_folder(ppo, tmp_path):
    source, destination = ppo[0] / "both", tmp_path / "policy"
    script = (ROOT / "scripts" / "extract_policy.py").read_text(encoding="utf-8")
    beside = {"PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])}
    extraction = run_python(script, source, destination, "--prompt", "import", env=beside)
    assert "'import' continues: " in extraction.stdout, extraction.stderr
    extracted = parameters(AutoModelForCausalLM.from_pretrained(destination))
    original = parameters(AutoModelForCausalLM.from_pretrained(source / "policy"))
    assert extracted.keys() == original.keys()
    assert all(torch.equal(weight, extracted[name]) for name, weight in original.items())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_finetune_runs_unchanged_when_sharded(engine, text, tmp_path):
    arguments = ("--output-dir", tmp_path, "--dataset", text, "--steps", "4", *TINY)
    assert len(numbers("held-out loss", forked("finetune.py", *arguments, engine=engine))) == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert all(
        parameter.isfinite().all() and parameter.abs().sum() > 0 for parameter in model.parameters()
    )
