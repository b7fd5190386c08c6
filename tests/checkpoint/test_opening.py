"""What comes out of a checkpoint that is replaced, damaged or made on purpose while or before it is
read.
"""

import json
import os
import random
import shutil
import signal
import sys
import textwrap
import time
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import models
import peft
import pytest
import torch
from faults import in_child
from launch import run_python
from safetensors import safe_open
from seeds import chosen_seed
from small_checkpoints import edit, leases_in
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoConfig, GPTNeoForCausalLM

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, manifest_to_json, read_manifest
from ft_ckpt.cli import main
from ft_ckpt.errors import CheckpointError, CorruptError, LoadError, Problem, UnreadableError
from ft_ckpt.extensions import tools
from ft_ckpt.extensions.tools.converting import conversion as converting
from ft_ckpt.model.load import models as load_parts
from ft_ckpt.runs.resume import resuming as resume
from ft_ckpt.storage.places import open_place

SEED = chosen_seed()


class Pair(nn.Module):
    """A policy and a value head, every parameter of both the same number."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.policy, self.value_head = nn.Linear(40, 40), nn.Linear(40, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


PARTS = ["policy", "value_head"]


def parts_of_pair(folder: Path, **options: bool) -> dict[str, nn.Module]:
    return ft_ckpt.load_model(folder, into=dict(Pair().named_children()), **options)


def numbers(loaded: dict[str, nn.Module]) -> set[float]:
    return {
        parameter.flatten()[0].item() for part in loaded.values() for parameter in part.parameters()
    }


def test_parts_are_of_one_moment(tmp_path, monkeypatch):
    """A save between the policy and its value head gives neither half of the other's."""
    CheckpointSaver().save(Pair(1), tmp_path / "out", attribute=PARTS)
    real = load_parts._load_model

    def overwritten_after(*asked):
        loaded = real(*asked)
        CheckpointSaver().save(Pair(2), tmp_path / "out", attribute=PARTS)
        return loaded

    monkeypatch.setattr(load_parts, "_load_model", overwritten_after)
    assert numbers(parts_of_pair(tmp_path / "out")) == {1.0}
    monkeypatch.undo()
    assert numbers(parts_of_pair(tmp_path / "out")) == {2.0}


def test_a_checkpoint_that_is_replaced_while_it_is_open_has_no_problems(tmp_path):
    """Its reader goes on with the files that it has opened."""
    CheckpointSaver().save(Pair(1), tmp_path / "out", attribute=PARTS)
    with open_checkpoint(open_place(tmp_path / "out")) as checkpoint:
        CheckpointSaver().save(Pair(2), tmp_path / "out", attribute=PARTS)
        assert checkpoint.find_problems(deep=True) == ()


def overwrite(target: Path, times: int) -> None:
    for number in range(times):
        CheckpointSaver().save(Pair(float(number)), target, attribute=PARTS)


@pytest.mark.parametrize("times", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_readers_against_overwrites(tmp_path, times):
    """Parts read while another process overwrites them are those of one save."""
    CheckpointSaver().save(Pair(0), tmp_path / "out", attribute=PARTS)
    writer = get_context("fork").Process(target=overwrite, args=(tmp_path / "out", times))
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(numbers(parts_of_pair(tmp_path / "out")))
    assert writer.exitcode == 0
    assert all(len(one) == 1 for one in seen), seen
    assert len({*map(tuple, seen)}) > 1


def test_what_is_resumed_is_what_was_compared(tmp_path, monkeypatch):
    """A save after the choice of a checkpoint changes nothing of the resume."""

    def saver(value: float) -> CheckpointSaver:
        model = Pair(value)
        one = CheckpointSaver(directory=tmp_path)
        one.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=value))
        return one

    saver(1).save_state(path=tmp_path / "last")
    real = resume.match_items

    def overwritten_before(*asked):
        saver(2).save_state(path=tmp_path / "last")
        return real(*asked)

    monkeypatch.setattr(resume, "match_items", overwritten_before)
    fresh = saver(3)
    fresh.resume("must")
    assert {p.flatten()[0].item() for p in fresh._run.model.parameters()} == {1.0}
    assert fresh._run.objects.registered["optimizer"].param_groups[0]["lr"] == 1.0


def test_no_name_tells_of_the_descriptor(tmp_path):
    """Libraries read by the path of a descriptor; models and errors have the path of the
    checkpoint.
    """
    CheckpointSaver().save(models.build("mixtral"), tmp_path / "out")
    loaded = ft_ckpt.load_model(tmp_path / "out")
    assert loaded.config._name_or_path == loaded.name_or_path == str(tmp_path / "out")
    (tmp_path / "out" / "generation_config.json").unlink()
    for options in ({}, {"into": nn.Linear(1, 1)}):
        with pytest.raises(CheckpointError) as failed:
            ft_ckpt.load_model(tmp_path / "out", **options)
        assert "/proc/" not in str(failed.value)
        assert str(tmp_path / "out") in str(failed.value)


# Damage


def flipped(file: Path, place: int) -> bytes:
    content = bytearray(file.read_bytes())
    content[place // 8] ^= 1 << place % 8
    return bytes(content)


def made(kind: str, folder: Path) -> nn.Module:
    if kind == "adapters":
        model = models.build("lora").eval()
        CheckpointSaver(tokenizer=models.tokenizer()).save(model, folder, adapter_only=False)
    elif kind == "large":
        model = models.build("wide").eval()
        CheckpointSaver().save(model, folder)
    else:
        model = Pair(1)
        CheckpointSaver().save(
            model, folder, attribute=PARTS, format="h5" if kind == "h5" else "safetensors"
        )
    return model


def content(loaded: object) -> dict[str, torch.Tensor]:
    if isinstance(loaded, dict):
        return {
            f"{part}.{name}": t
            for part, one in loaded.items()
            for name, t in one.state_dict().items()
        }
    return dict(loaded.state_dict())


@pytest.mark.sample("2-large", "2-parts", "2-h5")
@pytest.mark.parametrize("kind", ["adapters", "large", "parts", "h5"])
@pytest.mark.parametrize("times", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_no_flipped_bit_gives_another_model(tmp_path, kind, times):
    """Flips in every file: none gives other values with verify=True, nor in a small file without
    it.
    """
    print(f"FT_CKPT_SEED={SEED}")
    draw, path = random.Random(SEED), tmp_path / "out"
    made(kind, path)
    load_it = parts_of_pair if kind in ("parts", "h5") else ft_ckpt.load_model
    truth = content(load_it(path))
    listed = {file.path for file in read_manifest(open_place(path)).files}
    for file in sorted(listed | {MANIFEST_NAME}):
        whole, limit = (path / file).read_bytes(), 1 << 20
        for _ in range(times):
            (path / file).write_bytes(flipped(path / file, place := draw.randrange(8 * len(whole))))
            for verify in (False, True) if len(whole) < limit else (True,):
                try:
                    found = content(load_it(path, verify=verify))
                except CheckpointError:
                    continue
                # The manifest vouches for the others; people and libraries write the card again
                # after a save.
                assert Path(file).name in (MANIFEST_NAME, "README.md"), (file, place, verify)
                assert found.keys() == truth.keys()
                assert all(torch.equal(found[name], truth[name]) for name in truth)
            (path / file).write_bytes(whole)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"model_type": "nothing"}', '{"model_type": "llama"}', "\xff"]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_configs_that_are_none(tmp_path, file, text):
    """Files that the manifest vouches for and that nothing can be made of are told as ours."""
    CheckpointSaver().save(models.build("qwen3"), tmp_path / "out")
    edit(tmp_path / "out", file, text.encode("latin-1"))
    try:
        loaded = ft_ckpt.load_model(tmp_path / "out")
    except CheckpointError:
        return
    assert file == "generation_config.json"  # of which some fields are as good as others
    assert content(loaded)


def change_config(folder: Path, **fields: object) -> None:
    edit(
        folder,
        "config.json",
        json.dumps({**json.loads((folder / "config.json").read_text()), **fields}),
    )


@pytest.mark.parametrize(
    "fields", [{"num_hidden_layers": 1 << 32}, {"num_hidden_layers": 60_000}], ids=str
)
def test_a_model_without_end_is_refused(tmp_path, fields):
    """A config that asks for more than the tensors can be is refused at once."""
    CheckpointSaver().save(models.build("llama"), tmp_path / "out")
    change_config(tmp_path / "out", **fields)
    begun = time.monotonic()
    with pytest.raises(LoadError, match=r"config\.json"):
        ft_ckpt.load_model(tmp_path / "out")
    assert time.monotonic() - begun < 10


def test_a_buffer_without_end_is_refused(tmp_path):
    """This model makes a mask of its positions squared."""
    sizes = {
        "vocab_size": 101,
        "hidden_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 64,
    }
    model = GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global"], 2]]))
    CheckpointSaver().save(model, tmp_path / "out")
    assert ft_ckpt.load_model(tmp_path / "out").config.max_position_embeddings == 64
    change_config(tmp_path / "out", max_position_embeddings=200_000)
    with pytest.raises(
        LoadError, match=r"config\.json: asks for a buffer of 40,000,000,000 numbers"
    ):
        ft_ckpt.load_model(tmp_path / "out")


# Code


MARKER = "MARKER.txt"
REMOTE = f"""
import pathlib
pathlib.Path({MARKER!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class Own(LlamaForCausalLM):
    pass
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
YES = """
import io, sys, ft_ckpt
from transformers import dynamic_module_utils
from ft_ckpt.errors import LoadError
dynamic_module_utils.HF_MODULES_CACHE = "modules"
sys.stdin = io.StringIO("y\\n" * 20)
for place in sys.argv[1:]:
    try:
        ft_ckpt.load_model(place)
    except LoadError as error:
        print("refused", error)
"""


def test_code_in_a_checkpoint_is_never_asked_about(tmp_path):
    """With "y" on standard input nothing runs: neither beside the weights, nor beside an adapter's
    base.
    """
    base = models.build("llama")
    CheckpointSaver().save(base, tmp_path / "model")
    (tmp_path / "model" / "own.py").write_text(textwrap.dedent(REMOTE))
    mapped = {
        "AutoConfig": "own.OwnConfig",
        "AutoModel": "own.Own",
        "AutoModelForCausalLM": "own.Own",
    }
    change_config(tmp_path / "model", model_type="own_llama", auto_map=mapped)
    base.name_or_path = base.config._name_or_path = str(tmp_path / "model")
    adapter = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    CheckpointSaver().save(adapter, tmp_path / "adapter", adapter_only=True)
    answer = run_python(YES, tmp_path / "model", tmp_path / "adapter", cwd=tmp_path)
    assert answer.stdout.count("refused") == 2, answer.stderr
    assert "[y/N]" not in answer.stdout
    assert not (tmp_path / MARKER).exists()


@pytest.mark.parametrize("file", ["../outside.safetensors", "{outside}"])
def test_an_index_that_leads_outside_is_refused(tmp_path, file):
    """In a folder without a manifest, where the file it names is there and fits."""
    models.build("llama").save_pretrained(tmp_path / "model")
    outside = (tmp_path / "model" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    with safe_open(outside, "pt") as tensors:
        places = dict.fromkeys(tensors.keys(), file.format(outside=outside))
    (tmp_path / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": places})
    )
    with pytest.raises(CorruptError, match=r"outside\.safetensors"):
        ft_ckpt.convert(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["Trainer", "pipeline", "set_seed", "logging", "AutoModel", "utils", "PreTrainedConfig"]
)
def test_no_public_name_of_transformers_is_called_for_a_class(tmp_path, monkeypatch, name):
    """A class name in a manifest is a model's or none at all."""
    import transformers

    called = []
    CheckpointSaver().save(models.build("llama"), tmp_path / "out")
    manifest = read_manifest(open_place(tmp_path / "out"))
    named = replace(
        manifest, parts=tuple(replace(part, class_name=name) for part in manifest.parts)
    )
    (tmp_path / "out" / MANIFEST_NAME).write_text(manifest_to_json(named))
    for one in ("set_seed", "pipeline"):
        monkeypatch.setattr(transformers, one, lambda *asked, **given: called.append(asked))
    with pytest.raises(CheckpointError):
        ft_ckpt.load_model(tmp_path / "out")
    assert not called


def test_a_pipe_among_the_files(tmp_path):
    """A file that is none is refused, not waited for."""
    CheckpointSaver().save(models.build("llama"), tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    os.mkfifo(tmp_path / "out" / "config.json")
    with pytest.raises(CorruptError, match=r"config\.json: not a file"):
        ft_ckpt.load_model(tmp_path / "out")


# Conversion and comparison


def test_a_checkpoint_that_is_replaced_is_converted_as_it_was(tmp_path, monkeypatch):
    """Weights and config are of one save, and nothing may delete it meanwhile."""
    model = models.build("llama").eval()
    CheckpointSaver().save(model, tmp_path / "out")
    real = converting.copy_sidecars

    def overwritten_before(*asked):
        assert leases_in(tmp_path / "out")
        CheckpointSaver().save(models.build("qwen3"), tmp_path / "out")
        return real(*asked)

    monkeypatch.setattr(converting, "copy_sidecars", overwritten_before)
    ft_ckpt.convert(tmp_path / "out", tmp_path / "new", progress=False)
    loaded = ft_ckpt.load_model(tmp_path / "new")
    assert type(loaded) is type(model)
    assert content(loaded).keys() == content(model).keys()
    assert all(
        torch.equal(tensor, content(model)[name]) for name, tensor in content(loaded).items()
    )


@pytest.mark.parametrize("below", ["", "policy", "policy/model.safetensors"])
def test_what_is_compared_is_held_open(tmp_path, monkeypatch, capsys, below):
    """A part of a checkpoint, and a file in one, as well as all of it."""
    for number in (1, 2):
        CheckpointSaver().save(Pair(number), tmp_path / f"{number}", attribute=PARTS)
    real = tools.compare_files

    def overwritten_before(*asked):
        assert leases_in(tmp_path / "1")
        assert leases_in(tmp_path / "2")
        CheckpointSaver().save(Pair(3), tmp_path / "2", attribute=PARTS)
        return real(*asked)

    monkeypatch.setattr(tools, "compare_files", overwritten_before)
    places = [str(tmp_path / number / below) for number in "12"]
    monkeypatch.setattr(sys, "argv", ["ft-ckpt", "diff", *places, "--json"])
    with pytest.raises(SystemExit, match="1"):
        main()
    told = json.loads(capsys.readouterr().out)
    assert {tensor["largest"] for tensor in told["tensors"]} == {1.0}
    assert not leases_in(tmp_path / "1")


# The folder that was opened


def asides(folder: Path) -> list[Path]:
    """What overwrites have moved aside beside the checkpoint `folder`."""
    return [path for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}.")]


def test_libraries_read_the_folder_that_was_opened_by_its_path(tmp_path):
    """After an overwrite in the middle of a read; what it has moved aside is deleted when nobody
    reads it any more.
    """
    path, models_by_name = (
        tmp_path / "out",
        {name: models.build(name).eval() for name in ("llama", "qwen3")},
    )
    CheckpointSaver(tokenizer=models.tokenizer()).save(models_by_name["llama"], path)
    with ExitStack() as first, ExitStack() as second:
        held = first.enter_context(open_checkpoint(open_place(path)))
        other = second.enter_context(open_checkpoint(open_place(path)))
        CheckpointSaver().save(models_by_name["qwen3"], path)
        assert not leases_in(path)
        assert (len(asides(path)), len(leases_in(asides(path)[0]))) == (1, 2)
        loaded = AutoModelForCausalLM.from_pretrained(held.folder)
        assert type(loaded) is type(models_by_name["llama"])
        assert all(
            torch.equal(t, content(models_by_name["llama"])[name])
            for name, t in content(loaded).items()
        )
        assert len(AutoTokenizer.from_pretrained(other.folder)) == len(models.tokenizer())
        with safe_open(held.folder / "model.safetensors", "pt") as tensors:
            assert tensors.keys()
        first.close()
        CheckpointSaver().save(models_by_name["qwen3"], path)
        assert len(asides(path)) == 1, "the second reader still has it"
        other.refuse_damaged()
        second.close()
    assert asides(path) == []
    assert type(ft_ckpt.load_model(path)) is type(models_by_name["qwen3"])


def test_what_readers_that_were_killed_have_kept_goes_with_the_next_save(tmp_path):
    path = tmp_path / "out"
    CheckpointSaver().save(nn.Linear(2, 2), path)

    def read():
        with open_checkpoint(open_place(path)):
            CheckpointSaver().save(nn.Linear(2, 2), path)
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(read) == ""
    assert len(asides(path)) == 1
    CheckpointSaver().save(nn.Linear(2, 2), path)
    assert asides(path) == []


def test_files_of_another_save_are_no_damage(tmp_path):
    """Some clients of network file systems number paths: a new manifest has the old number."""
    path, other = tmp_path / "out", tmp_path / "other"
    CheckpointSaver().save(nn.Linear(2, 2), path)
    CheckpointSaver().save(nn.Linear(3, 3), other)
    with open_checkpoint(open_place(path)) as checkpoint:
        for name in (MANIFEST_NAME, "model.safetensors"):
            (path / name).write_bytes((other / name).read_bytes())
        problems = checkpoint.find_problems(deep=True)
        assert problems == (Problem("replaced while it was read", is_transient=True),)
        with pytest.raises(UnreadableError, match="replaced while it was read; read it again"):
            checkpoint.refuse_damaged()


def test_a_reader_leaves_the_stage_of_a_writer_on_another_machine(tmp_path):
    """It may be about to be put in place; only the next save knows that it is not."""
    path = tmp_path / "out"
    CheckpointSaver().save(nn.Linear(2, 2), path)
    with open_checkpoint(open_place(path)):
        CheckpointSaver().save(nn.Linear(2, 2), path)
        stage = tmp_path / ".out.ft_ckpt-stage-node-7-deadbeef-1-0123abcd"
        shutil.copytree(path, stage)
    assert [stage] == [aside for aside in asides(path) if aside.is_dir()]
    CheckpointSaver().save(nn.Linear(2, 2), path)
    assert asides(path) == []


def test_where_folders_cannot_be_exchanged_a_reader_gets_one_save_or_an_error(
    tmp_path, monkeypatch
):
    """Here it is the working directory: single files are moved, and the manifest tells."""
    path = tmp_path / "out"
    CheckpointSaver().save(Pair(1), path, attribute=PARTS)
    monkeypatch.chdir(path)
    reading = ExitStack()
    held = reading.enter_context(open_checkpoint(open_place(path)))
    held.store.open("policy/model.safetensors").close()
    CheckpointSaver().save(Pair(2), path, attribute=PARTS)
    with pytest.raises(CorruptError, match=rf"{path}: replaced while it was read"):
        held.store.open("value_head/model.safetensors")
    with pytest.raises(CorruptError, match="replaced while it was read"):
        reading.close()  # a library could have read it
    assert numbers(parts_of_pair(path)) == {2.0}
