"""What follows a save: functions of the script's own, and what trackers are told."""

import sys
import threading
import types
from pathlib import Path

import models
import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from small_checkpoints import leases_in

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.errors import CorruptError
from ft_ckpt.integrations.trackers import (
    log_to_accelerate,
    log_to_mlflow,
    log_to_trackio,
    log_to_wandb,
)


def run(folder, losses, on_saved, **settings):
    """A run with a checkpoint for each loss; the reports."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(models.build("llama", 0))
    settings = {"keep": Keep(best=("eval_loss", "min")), **settings}
    with CheckpointSaver(accelerator, folder, on_saved=on_saved, **settings) as saver:
        saver.register(model=model)
        for step, loss in enumerate(losses, 1):
            saver.step(step=step)
            saver.save_state(metrics={"eval_loss": loss})


@pytest.mark.parametrize("background", [False, True])
def test_functions_are_called_once_a_save_is_committed_and_older_ones_are_gone(
    tmp_path, background
):
    seen, threads = [], set()

    def look(report):
        assert ft_ckpt.verify(report.path).ok
        threads.add(threading.current_thread() is threading.main_thread())
        seen.append((report.step, sorted(path.name for path in tmp_path.glob("checkpoint-*"))))

    run(tmp_path, [3.0, 2.0, 1.0], look, keep=Keep(last=1), background=background)
    assert seen == [(1, ["checkpoint-1"]), (2, ["checkpoint-2"]), (3, ["checkpoint-3"])]
    assert threads == {not background}


def test_a_function_that_fails_is_warned_of_and_the_next_is_called(tmp_path):
    seen = []

    def broken(report):
        raise KeyError(report.step)

    with pytest.warns(
        UserWarning, match="checkpoint-1: saved, but broken of on_saved failed: KeyError: 1"
    ):
        run(tmp_path, [1.0], [broken, seen.append])
    assert [report.path.name for report in seen] == ["checkpoint-1"]
    with CheckpointSaver(on_saved=seen.append) as saver:  # of weights alone, too
        saver.save(models.build("llama", 0), tmp_path / "final")
    assert seen[-1].path == tmp_path / "final"
    assert seen[-1].step is None


def test_the_trackers_of_accelerate_draw_each_save(tmp_path):
    class Rows(GeneralTracker):
        name, requires_logging_directory = "rows", False

        def __init__(self):
            super().__init__()
            self.rows = []

        @property
        def tracker(self):
            return self.rows

        @on_main_process
        def store_init_configuration(self, values):
            pass

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self.rows.append((step, values))

    rows = Rows()
    accelerator = Accelerator(cpu=True, log_with=rows)
    accelerator.init_trackers("run")
    run(tmp_path, [2.0, 1.0, 3.0], log_to_accelerate(accelerator))
    assert [step for step, _ in rows.rows] == [1, 2, 3]
    assert [values["checkpoint/is_best"] for _, values in rows.rows] == [1.0, 1.0, 0.0]
    assert all(
        values["checkpoint/bytes"] > 0 and values["checkpoint/seconds"] > 0
        for _, values in rows.rows
    )


class Artifact:
    """wandb.Artifact, as far as it is used, with its signatures."""

    def __init__(
        self,
        name,
        type,  # noqa: A002
        description=None,
        metadata=None,
        incremental=False,
        use_as=None,
        storage_region=None,
    ):
        self.name, self.type, self.metadata, self.files, self.references = (
            name,
            type,
            metadata,
            {},
            [],
        )

    def add_file(
        self,
        local_path,
        name=None,
        is_tmp=False,
        skip_cache=False,
        policy="mutable",
        overwrite=False,
    ):
        self.files[name] = Path(local_path).read_bytes()

    def add_reference(self, uri, name=None, checksum=True, max_objects=None):
        self.references.append((uri, checksum))


class Run:
    id = "abc"

    def __init__(self):
        self.logged = []

    def log_artifact(self, artifact_or_path, name=None, type=None, aliases=None, tags=None):  # noqa: A002
        self.logged.append((artifact_or_path, aliases))


def test_wandb_gets_a_version_of_an_artifact_for_each_save(tmp_path, monkeypatch):
    wandb = types.SimpleNamespace(Artifact=Artifact, run=None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.warns(UserWarning, match="no W&B run is active"):
        run(tmp_path / "none", [1.0], log_to_wandb())
    wandb.run = Run()
    run(tmp_path / "run", [1.0, 2.0], log_to_wandb())
    (first, names), (second, other_names) = wandb.run.logged
    assert (names, other_names) == (["latest", "step-1", "best"], ["latest", "step-2"])
    assert first.name == "checkpoint-abc"
    assert first.metadata["metrics"] == {"eval_loss": 1.0}
    assert {"model.safetensors", "config.json"} <= set(second.files)
    assert not [name for name in second.files if name.startswith("state/")]
    assert not leases_in(tmp_path / "run" / "checkpoint-1")
    log_to_wandb(mine := Run(), "other", upload=False)(report_of(tmp_path / "run" / "checkpoint-1"))
    assert mine.logged[0][0].references == [((tmp_path / "run" / "checkpoint-1").as_uri(), False)]


def test_damaged_files_are_not_sent(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Artifact=Artifact))
    functions = {
        "log_metrics": lambda *_, **__: None,
        "log_artifact": lambda path, **_: sent.append(path),
    }
    monkeypatch.setitem(
        sys.modules, "mlflow", types.SimpleNamespace(active_run=lambda: None, **functions)
    )
    run(tmp_path, [1.0], ())
    weights = tmp_path / "checkpoint-1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    for log in (log_to_wandb(mine := Run()), log_to_mlflow("r1")):
        with pytest.raises(CorruptError, match=r"model\.safetensors: digest"):
            log(report_of(tmp_path / "checkpoint-1"))
        assert not mine.logged
        assert not sent


def test_mlflow_and_trackio_get_values_and_files(tmp_path, monkeypatch):
    told = []

    def log_metrics(
        metrics,
        step=None,
        synchronous=None,
        run_id=None,
        timestamp=None,
        model_id=None,
        dataset=None,
    ):
        told.append(("metrics", sorted(metrics), step, run_id))

    def log_artifact(local_path, artifact_path=None, run_id=None):
        told.append((artifact_path, local_path.rpartition("/")[2], run_id))

    active = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    functions = {
        "active_run": lambda: active,
        "log_metrics": log_metrics,
        "log_artifact": log_artifact,
    }
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(**functions))
    run(tmp_path, [1.0], log_to_mlflow(state=True))
    names = ["checkpoint_bytes", "checkpoint_is_best", "checkpoint_seconds", "checkpoint_tensors"]
    assert told[0] == ("metrics", names, 1, "r1")
    assert ("checkpoints/checkpoint-1", "model.safetensors", "r1") in told
    assert ("checkpoints/checkpoint-1/state", "training.json", "r1") in told
    rows = []
    trackio = types.SimpleNamespace(
        log=lambda metrics, step=None: rows.append((step, metrics["checkpoint/tensors"]))
    )
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    log_to_trackio()(report_of(tmp_path / "checkpoint-1"))
    assert rows == [(1, 20)]


def report_of(path):
    return ft_ckpt.SaveReport(path, "full", 1, 20, 0.1, {}, (), 1)
