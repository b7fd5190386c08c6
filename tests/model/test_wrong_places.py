"""A place that is no checkpoint of ft_ckpt is described: what it is, and what to do with it."""

import shutil

import models
import pytest
import torch
from accelerate import Accelerator
from small_checkpoints import save
from transformers import TrainerState

import ft_ckpt
from ft_ckpt.checkpoint.manifest import describe_contents
from ft_ckpt.errors import CheckpointError, LoadError, NotACheckpointError
from ft_ckpt.extensions.tools.converting import convert
from ft_ckpt.storage.places import open_place


def described(path):
    contents = describe_contents(open_place(path))
    return contents.kind, contents.sentence(path)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Folders that other programs have written, by their own calls."""
    folder = tmp_path_factory.mktemp("foreign")
    models.build("llama").save_pretrained(folder / "model")
    adapted = models.build("lora")
    adapted.peft_config["default"].base_model_name_or_path = "meta-llama/Llama-3.1-8B"
    adapted.save_pretrained(folder / "adapter")
    for step in (5, 10):
        checkpoint = folder / "output" / f"checkpoint-{step}"
        shutil.copytree(folder / "model", checkpoint)
        TrainerState(global_step=step).save_to_json(str(checkpoint / "trainer_state.json"))
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(folder / "elsewhere/state")
    torch.distributed.checkpoint.save(
        model.state_dict(), checkpoint_id=folder / "dcp", no_dist=True
    )
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (
            "model",
            "model",
            r"a Hugging Face model \(LlamaForCausalLM\) without a manifest .*\.from_pretrained",
        ),
        (
            "adapter",
            "adapter",
            r"a PEFT adapter on meta-llama/Llama-3\.1-8B without .*PeftModel\.from_pretrained",
        ),
        (
            "output",
            "Trainer output",
            r"output_dir with checkpoint-5, checkpoint-10 without a manifest .*resume_from_",
        ),
        (
            "output/checkpoint-5",
            "Trainer checkpoint",
            r"a checkpoint of step 5 of transformers' Trainer",
        ),
        ("elsewhere/state", "Accelerate", r"Accelerate's save_state; `saver\.resume"),
        ("dcp", "torch.distributed.checkpoint", r"`ft-ckpt convert` read"),
        (
            ".",
            "folder of models",
            r"no checkpoints of ft_ckpt in it, but adapter \(adapter\), model \(model\), output",
        ),
        ("modle", "absent", r"modle: no such folder; did you mean model\?"),
        (
            "model/model.safetensors",
            "file",
            r"a safetensors file, expected a folder; `ft-ckpt show`",
        ),
        ("model/config.json", "file", r"a file, expected a folder; give the folder"),
    ],
)
def test_folders_of_other_programs_are_named_by_every_function_that_reads_a_checkpoint(
    foreign, name, kind, words
):
    assert described(foreign / name)[0] == kind
    for read in (ft_ckpt.load_model, ft_ckpt.verify):
        with pytest.raises(NotACheckpointError, match=words):
            read(foreign / name)


@pytest.mark.parametrize("name", ["saved", "saved/global_step3"])
def test_a_folder_of_deepspeed_is_left_to_its_own_script(tmp_path, name):
    step = tmp_path / "saved/global_step3"
    step.mkdir(parents=True)
    (tmp_path / "saved/latest").write_text("global_step3")
    torch.save({"module": {"w": torch.ones(2)}}, step / "mp_rank_00_model_states.pt")
    for read in (
        lambda path: convert(path, tmp_path / "x.h5", progress=False),
        ft_ckpt.load_model,
        ft_ckpt.verify,
    ):
        with pytest.raises(
            (LoadError, NotACheckpointError), match=r"of DeepSpeed; its zero_to_fp32\.py writes"
        ):
            read(tmp_path / name)
    assert not (tmp_path / "x.h5").exists()


def test_runs_and_what_is_beside_their_checkpoints(tmp_path, foreign):
    for run in ("first", "second"):
        for step in (1, 2):
            save(tmp_path / "runs" / run / f"checkpoint-{step}", step=step)
    assert described(tmp_path / "runs")[0] == "folder of runs"
    with pytest.raises(
        NotACheckpointError, match="a folder of runs: first, second; name one of them"
    ):
        ft_ckpt.load_model(tmp_path / "runs")
    shutil.copytree(foreign / "output" / "checkpoint-10", tmp_path / "runs/first/checkpoint-10")
    kind, text = described(tmp_path / "runs/first")
    assert kind == "run"
    assert (
        "holds checkpoint-1, checkpoint-2, and checkpoint-10 without a manifest of ft_ckpt" in text
    )
    assert described(tmp_path / "runs/first/checkpoint-2")[0] == "checkpoint"


def test_calls_that_read_weights_and_runs_name_what_is_there(tmp_path, foreign):
    """Not "no weights found", "no adapter in it" or "no save was completed" alone."""
    save(tmp_path / "run" / "checkpoint-1", step=1)
    run = rf"{tmp_path / 'run'}: the folder of a run, which holds checkpoint-1"
    with pytest.raises(CheckpointError, match=f"{run}; name one"):
        ft_ckpt.convert(tmp_path / "run", tmp_path / "out.h5")
    with pytest.raises(CheckpointError, match=r"no such folder; did you mean run\?"):
        ft_ckpt.convert(tmp_path / "rnu", tmp_path / "out.h5")
    with pytest.raises(CheckpointError, match=f"{run}; expected a folder with an adapter"):
        ft_ckpt.merge(tmp_path / "run", tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"a Hugging Face model .*; expected a folder with an adapter"
    ):
        ft_ckpt.merge(foreign / "model", tmp_path / "out")
    with ft_ckpt.CheckpointSaver(None, tmp_path / "other") as saver:
        with pytest.raises(CheckpointError, match=f"{run}; name one"):
            saver.resume(tmp_path / "run", model=torch.nn.Linear(2, 2))
        with pytest.raises(
            CheckpointError, match=r"a checkpoint of step 5 of transformers' Trainer"
        ):
            saver.resume(foreign / "output/checkpoint-5")


def test_a_file_of_a_checkpoint_names_the_checkpoint(tmp_path):
    save(tmp_path / "checkpoint-1", step=1)
    with pytest.raises(
        NotACheckpointError, match=r"a safetensors file of the checkpoint .*checkpoint-1; give that"
    ):
        ft_ckpt.load_model(tmp_path / "checkpoint-1/model.safetensors")


def test_empty_unfinished_and_other_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "killed/.checkpoint-1.ft_ckpt-stage-1").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/todo.txt").write_text("later")
    assert "an empty folder; no save was completed there" in described(tmp_path / "empty")[1]
    assert "only unfinished saves; no save was completed there" in described(tmp_path / "killed")[1]
    assert "neither checkpoints nor weights in it, but todo.txt" in described(tmp_path / "notes")[1]


def test_damaged_documents_are_described_without_them(tmp_path):
    """Not every folder with a name of transformers is readable: a description does not depend on
    it.
    """
    for name, content in (
        ("config.json", b"\xff{"),
        ("model.safetensors", b""),
        ("deep/config.json", b"[" * 10**5),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "deep/model.safetensors").write_bytes(b"")
    assert described(tmp_path)[0] == described(tmp_path / "deep")[0] == "model"


def test_a_large_tree_is_not_walked(tmp_path):
    """Only so many folders are listed: the newest checkpoints among them."""
    for step in range(100):
        save(tmp_path / f"checkpoint-{step}", step=step)
    contents = describe_contents(open_place(tmp_path))
    assert len(contents.names) < 50
    assert contents.names[-1] == "checkpoint-99"
