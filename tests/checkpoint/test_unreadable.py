"""A file that the system does not read just now may be whole: nothing older is chosen, deleted or
replaced for it.
"""

import errno
import os
import shutil
from types import SimpleNamespace

import models
import pytest
import torch
from http_server import Fault
from s3_server import FAST
from small_checkpoints import contents
from transformers import Trainer, TrainingArguments

from ft_ckpt import (
    CheckpointSaver,
    Keep,
    average,
    best,
    convert,
    latest,
    load_model,
    open_place,
    sync,
    verify,
)
from ft_ckpt.checkpoint.checks import problems
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import TargetError, UnreadableError
from ft_ckpt.integrations.trainer import FtCkptCallback
from ft_ckpt.runs.folder import prune_run

FILES = [MANIFEST_NAME, "model.safetensors", "config.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoint-1, -2 and -3, the last of them the best."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    model, _, saver = begin(folder)
    with saver:
        for step in (1, 2, 3):
            model.get_input_embeddings().weight.data.fill_(step)
            saver.step({"loss": 1 / step}, step=step)
            saver.save_state(metrics={"loss": 1 / step})
    return folder


@pytest.fixture
def run(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "PAUSES_SECONDS", (0.0, 0.0))
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def refuse(monkeypatch):
    """A function that lets the next `times` opens of files below a folder fail."""
    real = os.open

    def begin_refusing(where, times=10**9, code=errno.EIO):
        left = SimpleNamespace(times=times)

        def refusing(path, *args, **more):
            # Readers open files by a descriptor of their folder: /proc/self/fd/7/model.safetensors.
            if (
                left.times
                and isinstance(path, str | os.PathLike)
                and os.path.realpath(path) == str(where)
            ):
                left.times -= 1
                raise OSError(code, os.strerror(code), str(path))
            return real(path, *args, **more)

        monkeypatch.setattr(os, "open", refusing)

    return begin_refusing


def begin(folder):
    torch.manual_seed(0)
    model = models.build("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    saver = CheckpointSaver(None, folder, on_difference="ignore")
    saver.register(model=model, optimizer=optimizer)
    return model, optimizer, saver


def resume(folder):
    with begin(folder)[2] as saver:
        return saver.resume().resumed_from


CHOICES = {
    "latest": latest,
    "best": lambda run: best(run, ("loss", "min")),
    "resume": resume,
    "average": lambda run: average([run], run.parent / "average", last=2).sources[-1],
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("choice", CHOICES)
def test_no_older_one_is_chosen(run, refuse, choice, name, code):
    before = contents(run)
    refuse(run / "checkpoint-3" / name, code=code)
    with pytest.raises(UnreadableError, match=r"checkpoint-3") as caught:
        CHOICES[choice](run)
    # what could be taken instead, by name
    assert choice == "average" or "checkpoint-2" in str(caught.value)
    assert contents(run) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("choice", ["latest", "best", "resume"])
def test_a_fault_that_passes_is_not_noticed(run, refuse, choice, name, recwarn):
    refuse(run / "checkpoint-3" / name, times=2 if choice == "resume" else 1)
    assert CHOICES[choice](run) == run / "checkpoint-3"
    assert not [one for one in recwarn if "checkpoint" in str(one.message)]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_folder_whose_kind_is_not_told(run, monkeypatch, code):
    """A mount may refuse even to say that the checkpoint is a folder."""
    folder, real = run / "checkpoint-3", os.stat

    def refusing(path, *args, **more):
        if path == folder:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "stat", refusing)
    with pytest.raises(UnreadableError, match=r"checkpoint-3: cannot be read"):
        load_model(folder, into=models.build("llama"))


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_run_whose_names_are_not_told(run, monkeypatch, code):
    """A resume looks for leftovers of killed saves first."""
    real = os.listdir

    def refusing(path="."):
        if path == run:
            raise OSError(code, os.strerror(code), str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", refusing)
    with pytest.raises(UnreadableError, match=r"run: cannot be read"):
        resume(run)


def test_damage_is_no_passing_fault(run):
    """What is known to be damaged is passed over, as ever."""
    (run / "checkpoint-3" / "config.json").write_text("{}")
    with pytest.warns(UserWarning, match="checkpoint-3"):
        assert latest(run) == run / "checkpoint-2"
    with pytest.warns(UserWarning, match="checkpoint-3"):
        assert resume(run) == run / "checkpoint-2"


@pytest.mark.parametrize("name", FILES)
def test_pruning_waits(run, refuse, name):
    """It is not invalid, and not to be deleted in place of an older one that is valid."""
    before = contents(run)
    refuse(run / "checkpoint-3" / name)
    assert "checkpoint-3" in prune_run(open_place(run), Keep(last=1)).problems[0]
    assert contents(run) == before


def test_verify_says_that_it_is_not_read(run, refuse):
    refuse(run / "checkpoint-3" / "model.safetensors")
    assert len(verify(run / "checkpoint-3").problems) == 1


def test_a_save_does_not_replace_it(run, refuse):
    """The checkpoint may be of another run."""
    _, _, saver = begin(run)
    saver.resume("never")
    for step in (1, 2, 3):
        saver.step(step=step)
    refuse(run / "checkpoint-3" / MANIFEST_NAME)
    with saver, pytest.raises(UnreadableError, match="checkpoint-3"):
        saver.save_state()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_source_that_is_not_read_is_not_called_damaged(run, monkeypatch, name):
    """A file that opens, and whose bytes do not come."""
    real, refused = os.preadv, run / "checkpoint-3" / name

    def refusing(descriptor, *args):
        if os.path.sameopenfile(descriptor, held):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *args)

    with refused.open("rb") as file:
        held = file.fileno()
        monkeypatch.setattr(
            os.path, "sameopenfile", lambda one, two: os.fstat(one).st_ino == os.fstat(two).st_ino
        )
        monkeypatch.setattr(os, "preadv", refusing)
        with pytest.raises(UnreadableError, match=name):
            convert(run / "checkpoint-3", run.parent / "out")
    assert not (run.parent / "out").exists()


def test_a_staged_checkpoint_that_is_not_read_is_named_and_uploaded_later(
    s3, tmp_path, refuse, monkeypatch
):
    monkeypatch.setattr(problems, "PAUSES_SECONDS", (0.0, 0.0))
    staging = tmp_path / "staging"

    def run():
        torch.manual_seed(0)
        model = models.build("llama")
        settings = {"store_options": FAST, "staging": staging, "on_difference": "ignore"}
        saver = CheckpointSaver(None, "s3://bucket/run", **settings)
        saver.register(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        return saver

    saver = run()
    saver.step(step=1)
    s3.faults.append(Fault("PUT .*checkpoint-1", times=10**6, status=503))
    saver.save_state()
    with pytest.raises(TargetError, match=r"checkpoint-1.*not uploaded.*kept in"):
        saver.close()
    s3.faults.clear()
    refuse(staging / "checkpoint-1" / MANIFEST_NAME)
    again = run()
    again.step(step=2)
    again.save_state()
    with pytest.raises(TargetError, match=r"checkpoint-1.*cannot be read.*kept in"):
        again.close()
    assert latest(open_place("s3://bucket/run", **FAST)) == "s3://bucket/run/checkpoint-2"
    monkeypatch.undo()
    with run() as last:
        assert last.resume() is not None
    assert "run/checkpoint-1/ft_ckpt.json" in s3.names()


def test_sync_does_not_replace_it(run, refuse):
    goal = run.parent / "goal"
    sync(run, goal)
    shutil.rmtree(goal / "checkpoint-2")
    refuse(goal / "checkpoint-3" / MANIFEST_NAME)
    report = sync(run, goal)
    assert ["checkpoint-3" in problem for problem in report.problems] == [True]
    assert [one.path.name for one in report.copied] == ["checkpoint-2"]


def test_the_trainer_takes_no_older_one(tmp_path, refuse, monkeypatch):
    monkeypatch.setattr(problems, "PAUSES_SECONDS", (0.0, 0.0))
    data = [{key: value[0] for key, value in models.batch(seed=at).items()} for at in range(8)]

    def trainer(steps):
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            save_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=99,
        )
        return Trainer(
            models.build("llama"), arguments, train_dataset=data, callbacks=[FtCkptCallback()]
        )

    trainer(2).train()
    refuse(tmp_path / "checkpoint-2" / "model.safetensors")
    with pytest.raises(UnreadableError, match="checkpoint-2"):
        trainer(3).train(resume_from_checkpoint=True)
