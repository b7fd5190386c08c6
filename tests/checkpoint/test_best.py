"""Which checkpoint is the newest, and which the best: of which run, and by what."""

import json
import re

import pytest
import torch
from places import ROOT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ft_ckpt
from ft_ckpt import CheckpointSaver, Every, Keep
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import ConfigError, NotACheckpointError, TargetError
from ft_ckpt.storage.places import open_place


def saver_of(folder, **settings):
    saver = CheckpointSaver(None, folder, **settings)
    saver.register(model=nn.Linear(2, 2))
    return saver


def scored(folder, losses, **settings):
    """A run with a checkpoint for each loss."""
    saver = saver_of(folder, **settings)
    for loss in losses:
        saver.step()
        saver.save_state(metrics={"loss": loss, "other": -loss})
    return saver


def test_the_best_by_the_metric_that_the_run_ranks_by(tmp_path):
    scored(tmp_path, (3.0, 1.0, float("nan"), 1.0, 2.0), keep=Keep(last=9, best=("loss", "min")))
    assert ft_ckpt.best(tmp_path).name == ft_ckpt.best(tmp_path, "loss").name == "checkpoint-2"
    assert ft_ckpt.best(tmp_path, ("loss", "max")).name == "checkpoint-1"
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink(missing_ok=True)
    for file in (tmp_path / "checkpoint-2").glob("*.safetensors"):
        file.unlink()
    with pytest.warns(UserWarning, match="checkpoint-2: not valid, using the next best"):
        assert ft_ckpt.best(tmp_path).name == "checkpoint-4"


def test_a_metric_that_nobody_named_is_asked_for(tmp_path):
    scored(tmp_path, (3.0,))
    with pytest.raises(
        ConfigError, match=r"metric=None: expected \(name, 'min' or 'max'\).* have loss, other"
    ):
        ft_ckpt.best(tmp_path)
    assert ft_ckpt.best(tmp_path, ("absent", "min")) is None
    assert ft_ckpt.best(tmp_path / "absent") is None


def test_infinite_metrics_are_standard_json(tmp_path):
    scored(tmp_path, (float("nan"), float("inf"), float("-inf")))
    for step, value in ((1, "nan"), (2, "inf"), (3, "-inf")):
        file = tmp_path / f"checkpoint-{step}" / "ft_ckpt.json"
        json.loads(file.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
        assert str(read_manifest(open_place(file.parent)).metrics["loss"]) == value


def test_a_fresh_run_is_newer_than_one_that_got_further(tmp_path):
    """Auto-resume went on with the other run's checkpoint, whose step was higher."""
    scored(tmp_path, (1.0, 1.0, 1.0))
    fresh = saver_of(tmp_path)
    fresh.step(step=2)
    fresh.save_state(path=tmp_path / "fresh")
    assert [info.path.name for info in discover(open_place(tmp_path))] == [
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-3",
        "fresh",
    ]
    assert ft_ckpt.latest(tmp_path).name == "fresh"
    assert saver_of(tmp_path).resume().step == 2


def test_weights_saved_within_a_run_are_its_newest_and_no_rule_deletes_them(tmp_path):
    """The final weights had no step, no metrics and no run, and an older checkpoint passed for the
    newest.
    """
    saver = saver_of(tmp_path, keep=Keep(last=1, best=("loss", "min")))
    for loss in (1.0, 2.0):
        saver.step({"loss": loss})
        saver.save_state()
    saver.step({"loss": 0.5})
    saver.save(saver._run.model, tmp_path / "final")
    manifest = read_manifest(open_place(tmp_path / "final"))
    assert (manifest.step, manifest.metrics, manifest.run_id) == (
        3,
        {"loss": 0.5},
        saver._run.run_id,
    )
    assert ft_ckpt.latest(tmp_path).name == "final"
    for loss in (3.0, 4.0):
        saver.step({"loss": loss})
        saver.save_state(metrics={"loss": loss})
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        "final",
        "checkpoint-4",
        "checkpoint-5",
    }
    assert saver_of(tmp_path).resume().step == 5
    bare = CheckpointSaver(None, tmp_path / "bare")
    bare.save(nn.Linear(1, 1), tmp_path / "bare" / "final")
    assert (
        read_manifest(open_place(tmp_path / "bare" / "final")).step,
        read_manifest(open_place(tmp_path / "bare" / "final")).run_id,
    ) == (
        None,
        None,
    )


def test_weights_alone_never_replace_a_state(tmp_path):
    saver = scored(tmp_path, (1.0, 2.0))
    for place in ({"step": 2}, {"path": tmp_path / "checkpoint-2"}):
        with pytest.raises(TargetError, match="checkpoint-2: holds training state"):
            saver.save(saver._run.model, **place)
    saver.save(saver._run.model, step=3)
    saver.save(saver._run.model, step=3)
    assert saver_of(tmp_path).resume().step == 2


def test_another_runs_checkpoint_is_not_replaced(tmp_path):
    scored(tmp_path, (1.0, 2.0))
    fresh = saver_of(tmp_path, every=Every(steps=2, signals=()))
    with pytest.warns(UserWarning, match=r"holds another run, \w{6} \(to checkpoint-2\)"):
        fresh.resume("never")
    fresh.step()
    with pytest.raises(
        TargetError, match=r"checkpoint-2: belongs to another run, \w{6}; use another directory"
    ):
        fresh.step()
    fresh.save_state(path=tmp_path / "checkpoint-2")  # who names it means it
    with pytest.warns(UserWarning, match="holds 2 runs, oldest first"):
        assert saver_of(tmp_path).resume().step == 2


def test_a_run_taken_back_is_newer_than_what_it_left(tmp_path):
    """Auto-resume went on with the checkpoint of step 4 that the run had been taken back from."""
    scored(tmp_path, (1.0, 1.0, 1.0, 1.0))
    saver = saver_of(tmp_path)
    assert saver.resume("checkpoint-1").step == 1
    saver.step()
    saver.save_state()  # in place of what the run has left
    again = saver_of(tmp_path)
    assert again.resume().step == 2
    again.step()
    again.save_state()
    assert saver_of(tmp_path).resume().step == 3


@pytest.mark.parametrize("checkpoint", ["auto", "latest", True, None, "True", "checkpoint-2"])
def test_ways_to_ask_for_the_newest(tmp_path, checkpoint):
    fresh = saver_of(tmp_path)
    if checkpoint != "checkpoint-2":
        progress = fresh.resume(checkpoint)
        assert (progress.step, progress.report.items, progress.report.problems) == (0, (), ())
    scored(tmp_path, (1.0, 2.0))
    assert saver_of(tmp_path).resume(checkpoint).step == 2


def test_what_resume_does_not_understand(tmp_path):
    scored(tmp_path, (1.0,))
    assert saver_of(tmp_path).resume(False).step == 0
    for wrong in (7, "", ["auto"]):
        with pytest.raises(
            ConfigError,
            match="expected 'auto', 'must', 'never', a checkpoint's name, its path or its URL",
        ):
            saver_of(tmp_path).resume(wrong)
    with pytest.raises(
        NotACheckpointError, match=r"checkpoint-9: not found; .* has checkpoint-1. Expected 'auto'"
    ):
        saver_of(tmp_path).resume("checkpoint-9")


def test_a_name_is_the_runs_own(tmp_path, monkeypatch):
    """A folder of that name in the working directory was taken."""
    scored(tmp_path / "elsewhere", (1.0, 1.0))
    scored(tmp_path / "run", (1.0,))
    (tmp_path / "elsewhere" / "checkpoint-2").rename(tmp_path / "elsewhere" / "checkpoint-1x")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert saver_of(tmp_path / "run").resume("checkpoint-1").resumed_from.parent == tmp_path / "run"
    # no checkpoint of the run: a path
    assert saver_of(tmp_path / "run").resume("checkpoint-1x").step == 2
    assert (
        saver_of(tmp_path / "run").resume("./checkpoint-1").resumed_from.parent
        == tmp_path / "elsewhere"
    )


PAGE = ROOT / "docs" / "schedule.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
(LOOP,) = [block for block in BLOCKS if "evaluate(model)" in block]


def epochs(folder, losses, stop=None):
    """The page's loop, on a run of two steps an epoch; killed instead of the evaluation of the
    epoch `stop`.
    """
    made = []

    def evaluate(model):
        if len(made) == stop:
            raise KeyboardInterrupt
        made.append(losses.pop(0))
        return made[-1]

    def saver(_accelerator, directory, **settings):
        return saver_of(directory, **settings)

    names = {
        "ft_ckpt": ft_ckpt,
        "CheckpointSaver": saver,
        "Every": Every,
        "Keep": Keep,
        "accelerator": None,
    }
    names |= {
        "loader": DataLoader(TensorDataset(torch.arange(4)), batch_size=2),
        "train": lambda batch: None,
    }
    lines = LOOP.replace('"runs/epochs"', repr(str(folder))).replace(
        "from ft_ckpt import", "# instead of"
    )
    exec(compile(lines, PAGE.name, "exec"), {**names, "evaluate": evaluate, "model": None})


def test_train_evaluate_save_keep_the_best(tmp_path, recwarn):
    epochs(tmp_path, [3.0, 1.0, 2.0])
    assert not [each for each in recwarn if "ranked" in str(each.message)]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    assert ft_ckpt.best(tmp_path).name == "checkpoint-4"
    assert read_manifest(open_place(tmp_path / "checkpoint-4")).metrics == {"eval_loss": 1.0}
    epochs(tmp_path, [])  # finished: nothing is left to do


def test_killed_while_it_evaluates(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        epochs(tmp_path, [3.0, 1.0, 2.0], stop=1)
    assert saver_of(tmp_path).resume().step == 4
    epochs(tmp_path, [1.0, 2.0])  # the evaluation is made up for
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    assert ft_ckpt.best(tmp_path).name == "checkpoint-4"


def test_a_metric_that_never_comes_deletes_nothing_and_is_told_of_at_the_first_save(
    tmp_path, recwarn
):
    saver = saver_of(
        tmp_path, every=Every(steps=1, signals=()), keep=Keep(last=1, best=("eval_los", "min"))
    )
    for step in range(1, 6):
        saver.step({"loss": 1.0, "eval_loss": 1.0 / step})
        told = [str(each.message) for each in recwarn if "ranked" in str(each.message)]
        assert len(told) == 1
    saver.close()
    assert "'eval_los' (did you mean eval_loss? metrics: eval_loss, loss)" in told[0]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
        f"checkpoint-{step}" for step in range(1, 6)
    }


def test_a_run_without_metrics_is_told_of_later(tmp_path, recwarn):
    saver = saver_of(
        tmp_path, every=Every(steps=1, signals=()), keep=Keep(best=("eval_loss", "min"))
    )
    counts = []
    for _ in range(4):
        saver.step()
        counts.append(sum("ranked" in str(each.message) for each in recwarn))
    saver.close()
    assert counts == [0, 0, 1, 1]
    assert len([*tmp_path.glob("checkpoint-*")]) == 4
