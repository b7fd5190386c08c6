"""`--follow`, and the saver's own publishing: each new checkpoint once, the newest first, whatever
goes wrong.
"""

import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainers
from buckets import in_bucket, new_bucket
from conftest import EngineFiles
from engine_models import base_model, tokenizer, with_adapter
from engine_server import Engine, serving
from on_ranks import RANK, on_ranks

import ft_ckpt
from ft_ckpt import CheckpointSaver, ServerOptions
from ft_ckpt.checkpoint.manifest import manifest_to_json, read_manifest
from ft_ckpt.errors import ConfigError, EngineError, NotACheckpointError, RankError
from ft_ckpt.extensions.rl.publishing import Publisher, PublishReport, follow_run
from ft_ckpt.integrations.trainer import FtCkptCallback
from ft_ckpt.storage.places import Place, open_place

QUICK = {"name": "policy", "keep": 9, "timeout_seconds": 5}


class Following:
    """What a follower did."""

    def __init__(
        self, run: Path | Place, *urls: str, idle_seconds: float = 0.5, **options: Any
    ) -> None:
        self.steps: list[int] = []
        self.troubles: list[str] = []
        self.actions: list[Callable[[], object]] = []  # done one after each publish

        def note(report: PublishReport) -> None:
            self.steps.append(int(Path(report.path).name.partition("-")[2]))
            if self.actions:
                self.actions.pop(0)()

        self.go = lambda: follow_run(
            open_place(run),
            ServerOptions(url=urls, **options.pop("how", QUICK)),
            idle_seconds=idle_seconds,
            poll_seconds=0.02,
            on_published=note,
            on_trouble=self.trouble,
            **options,
        )
        self.on_trouble: Callable[[], object] = lambda: None

    def trouble(self, text: str) -> None:
        self.troubles.append(text)
        self.on_trouble()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def put(files: EngineFiles, run: Path, step: int, seed: int = 0) -> Path:
    """A checkpoint of the run, with the adapter of another one."""
    part = shutil.copytree(files.adapters[seed], run / f".{step}")
    created = f"2026-01-01T00:00:00.{step:06}+00:00"
    manifest = replace(read_manifest(open_place(part)), step=step, created=created, run_id="a")
    (part / "ft_ckpt.json").write_text(manifest_to_json(manifest))
    return part.rename(run / f"checkpoint-{step}")


def damage(checkpoint: Path) -> None:
    weights = checkpoint / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


@pytest.mark.slow
def test_each_new_checkpoint_is_published_once_and_the_newest_first(
    files: EngineFiles, run: Path
) -> None:
    put(files, run, 1)
    put(files, run, 2)
    with serving(files.base) as engine:
        following = Following(run, engine.url)
        following.actions = [
            lambda: put(files, run, 3),
            lambda: (put(files, run, 4), put(files, run, 5)),
        ]
        assert following.go() == 3
        assert (following.steps, following.troubles) == ([2, 3, 5], [])
        assert [name.partition("-")[0] for name in engine.adapters] == [
            "policy@2",
            "policy@3",
            "policy@5",
        ]


def test_a_checkpoint_that_comes_in_a_long_visit_is_published(
    files: EngineFiles, run: Path
) -> None:
    put(files, run, 1)
    damage(put(files, run, 2))
    with serving(files.base) as engine:
        following = Following(run, engine.url)
        # longer than idle_seconds
        following.actions = [lambda: (put(files, run, 3), time.sleep(0.6))]
        following.go()
        assert following.steps == [1, 3]


def test_the_run_may_begin_later(files: EngineFiles, run: Path) -> None:
    with serving(files.base) as engine:
        following = Following(run, engine.url, idle_seconds=3)
        timer = threading.Timer(0.2, lambda: put(files, run, 1))
        timer.start()
        following.actions = [lambda: os.kill(os.getpid(), signal.SIGTERM)]
        following.go()
        assert following.steps == [1]


def test_deleting_the_newest_publishes_no_older_one(files: EngineFiles, run: Path) -> None:
    put(files, run, 1)
    newest = put(files, run, 2)
    with serving(files.base) as engine:
        following = Following(run, engine.url)
        following.actions = [lambda: shutil.rmtree(newest)]
        following.go()
        assert following.steps == [2]


def test_an_older_one_that_comes_later_is_not_published(files: EngineFiles, run: Path) -> None:
    newest = put(files, run, 3)
    with serving(files.base) as engine:
        following = Following(run, engine.url)
        following.actions = [
            lambda: (
                put(files, run, 1),
                shutil.rmtree(newest),
                damage(put(files, run, 4)),
                put(files, run, 5),
            ),
            lambda: put(files, run, 2),
        ]
        following.go()
        assert following.steps == [3, 5]


def test_older_ones_that_come_while_the_newest_is_damaged_are_not_published(
    files: EngineFiles, run: Path
) -> None:
    put(files, run, 3)
    with serving(files.base) as engine:
        following = Following(run, engine.url)
        following.actions = [lambda: (put(files, run, 2), damage(put(files, run, 4)))]
        with pytest.raises(ft_ckpt.errors.CorruptError, match="checkpoint-4"):
            following.go()
        assert following.steps == [3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(number: int, files: EngineFiles, run: Path) -> None:
    put(files, run, 1)
    before = signal.getsignal(number)
    with serving(files.base) as engine:
        following = Following(run, engine.url, idle_seconds=60)
        following.actions = [lambda: os.kill(os.getpid(), number)]
        assert following.go() == 1
    assert signal.getsignal(number) is before


def test_a_lost_connection_is_said_once_and_tried_again(files: EngineFiles, run: Path) -> None:
    put(files, run, 1)
    with serving(files.base) as engine:
        fault = engine.fail(cuts="before", times=10_000)
        following = Following(run, engine.url, idle_seconds=60)
        threading.Timer(0.5, lambda: engine.faults.remove(fault)).start()
        following.actions = [lambda: os.kill(os.getpid(), signal.SIGINT)]
        following.go()
        assert following.steps == [1]
        (trouble,) = following.troubles
        assert "no answer" in trouble
        assert trouble.endswith("trying again")


def test_a_server_that_never_answers_is_an_error_at_the_end(files: EngineFiles, run: Path) -> None:
    put(files, run, 1)
    with serving(files.base) as engine:
        engine.fail(cuts="before", times=10_000)
        with pytest.raises(EngineError, match="no answer"):
            Following(run, engine.url, idle_seconds=0.2).go()


def test_a_damaged_checkpoint_is_skipped(files: EngineFiles, run: Path) -> None:
    put(files, run, 1)
    damage(put(files, run, 2))
    with serving(files.base) as engine:
        following = Following(run, engine.url)
        following.actions = [lambda: put(files, run, 3)]
        following.go()
        assert following.steps == [1, 3]
        (trouble,) = following.troubles
        assert "checkpoint-2: skipped" in trouble
        assert "adapter_model.safetensors" in trouble


def test_a_damaged_manifest_is_skipped(files: EngineFiles, run: Path) -> None:
    (put(files, run, 1) / "ft_ckpt.json").write_text("{")
    put(files, run, 2)
    with serving(files.base) as engine:
        following = Following(run, engine.url)
        following.go()
        assert following.steps == [2]
        (trouble,) = following.troubles
        assert "checkpoint-1/ft_ckpt.json: not an ft_ckpt manifest" in trouble


def test_a_misread_checkpoint_is_skipped(files: EngineFiles, run: Path) -> None:
    run.mkdir()
    with CheckpointSaver(None) as saver:
        saver.save(
            with_adapter(base_model("llama"), 1, use_dora=True),
            run / "checkpoint-1",
            step=1,
            adapter_only=True,
        )
    with serving(files.base) as engine:
        following = Following(run, engine.url)
        with pytest.raises(ft_ckpt.errors.LoadError, match="use_dora"):
            following.go()
        assert len(following.troubles) == 1
        assert engine.changes == []


def test_what_a_server_refuses_twice_is_skipped(files: EngineFiles, run: Path) -> None:
    put(files, run, 1)
    with serving(files.base, max_rank=4) as engine:
        following = Following(run, engine.url, idle_seconds=0.5)
        with pytest.raises(EngineError, match="greater than max_lora_rank"):
            following.go()
        assert len(engine.requests_to("/v1/load_lora_adapter")) == 2
        assert len(following.troubles) == 2
        assert "skipped" in following.troubles[1]


def test_what_cannot_be_is_an_error_at_once(files: EngineFiles, run: Path) -> None:
    put(files, run, 1)
    with (
        serving(files.base) as engine,
        pytest.raises(ConfigError, match="below no folder of visible_at"),
    ):
        Following(run, engine.url, how={"visible_at": {"/elsewhere": "/data"}}).go()


def test_a_run_in_a_bucket_is_followed(files: EngineFiles, tmp_path: Path) -> None:
    bucket = new_bucket("team/policy")
    put(files, tmp_path / "run", 1)
    in_bucket(tmp_path / "run/checkpoint-1", bucket)
    with serving(files.base) as engine:
        how = {"stage": tmp_path / "seen", "timeout_seconds": 5}
        following = Following(Place(bucket), engine.url, how=how)
        following.actions = [lambda: in_bucket(put(files, tmp_path / "run", 2), bucket)]
        following.go()
        assert (following.steps, following.troubles) == ([1, 2], [])
        assert [name.partition("-")[0] for name in engine.adapters] == ["policy@1", "policy@2"]
        paths = [
            Path(each.body["lora_path"]) for each in engine.requests_to("/v1/load_lora_adapter")
        ]
        assert paths == [tmp_path / f"seen/policy/checkpoint-{step}" for step in (1, 2)]


def test_full_weights_are_followed(files: EngineFiles, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(files.weights[0], run / "checkpoint-1")
    with serving(files.base) as engine:
        following = Following(run, engine.url)
        following.actions = [
            lambda: shutil.copytree(files.weights[1], run / "checkpoint-2") and None
        ]
        following.go()
        assert following.steps == [1, 2]
        assert engine.weight_version.startswith("run/checkpoint-2#")
        assert not engine.is_paused


# In the background of a training process


def test_of_those_that_wait_the_newest_is_published(files: EngineFiles, run: Path) -> None:
    places = [open_place(put(files, run, step)) for step in (1, 2, 3)]
    with serving(files.base) as engine:
        engine.delay_seconds = 0.1
        publisher = Publisher(ServerOptions(url=engine.url, **QUICK))
        first = publisher.begin(places[0])
        while not engine.requests:  # it has begun
            time.sleep(0.01)
        later = [publisher.begin(place) for place in places[1:]]
        publisher.end(wait_for=True)
        assert first.done
        assert all(each.done for each in later)
        assert later[0].result() is None
        report = later[1].result()
        assert report is not None
        assert report.version.startswith("3-")
        assert [name.partition("-")[0] for name in engine.adapters] == ["policy@1", "policy@3"]


def test_one_that_cannot_be_opened_stops_no_other(files: EngineFiles, run: Path) -> None:
    with serving(files.base) as engine:
        publisher = Publisher(ServerOptions(url=engine.url, **QUICK))
        good = publisher.begin(open_place(put(files, run, 1)))
        with pytest.warns(UserWarning, match=r"not published: .*no such folder"):
            gone = publisher.begin(open_place(run / "checkpoint-2"))
        publisher.end(wait_for=True)
        assert good.result() is not None
        with pytest.raises(NotACheckpointError):
            gone.result()


def test_goals_of_the_setting() -> None:
    goals = [
        "http://a:1",
        ["http://a:1", "http://b:1"],
        {"url": "http://a:1", "headers": None, "stage": "/data"},
    ]
    for goal in goals:
        CheckpointSaver(None, publish=goal).close()
    for wrong in (
        {"url": "http://a:1", "nam": "policy"},
        {"name": "policy"},
        "http://user:word@a:1",
        {"url": []},
        {"url": "http://a:1", 3: "policy"},
    ):
        with pytest.raises(ConfigError):
            CheckpointSaver(None, publish=wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        "localhost:8000",
        [],
        5,
        {"name": "policy"},
        ["http://a:1", "b"],
        {"url": "http://a:1", "after_resume": "x"},
    ],
)
def test_settings_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"publish=.*a server's URL, several, or a mapping"):
        CheckpointSaver(None, publish=wrong)


def test_a_header_in_the_settings_is_not_shown() -> None:
    config = ft_ckpt.SaverConfig(
        publish={"url": "http://a:1", "headers": {"Authorization": "Bearer sk-SECRET"}}
    )
    assert "SECRET" not in repr(config)


class Job:
    """A run that trains an adapter."""

    def __init__(self, run: Path, engine: Engine, **settings: Any) -> None:
        self.model = with_adapter(base_model("llama").float(), 1)
        self.optimizer = torch.optim.SGD(
            [each for each in self.model.parameters() if each.requires_grad], lr=0.1
        )
        goal = {
            "url": engine.url,
            "name": "policy",
            "timeout_seconds": 20,
            **settings.pop("goal", {}),
        }
        self.saver = CheckpointSaver(None, run, publish=goal, **settings)
        self.saver.register(model=self.model, optimizer=self.optimizer)

    def train(self, steps: int) -> list[Any]:
        reports = []
        for _ in range(steps):
            self.model(
                input_ids=torch.tensor([[3, 5, 7]]), labels=torch.tensor([[3, 5, 7]])
            ).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            reports.append(self.saver.step())
        return reports


def test_a_saver_publishes_what_it_saves_and_again_after_a_restart(
    files: EngineFiles, run: Path
) -> None:
    with serving(files.base) as engine:
        job = Job(run, engine, every=2, keep=2)
        reports = [report for report in job.train(2) if report is not None]
        first = reports[0].publish.result()
        reports += [report for report in job.train(2) if report is not None]
        job.saver.close()
        assert [report.publish.done for report in reports] == [True, True]
        assert reports[-1].publish.result().name.startswith("policy@4-")
        assert [name.partition("-")[0] for name in engine.adapters][-1] == "policy@4"

        engine.start()  # the server has lost everything
        again = Job(run, engine)
        progress = again.saver.resume()
        assert (progress.step, progress.published) == (4, first.version), (
            "the one that the rollouts had"
        )
        # before the first step
        assert [name.partition("-")[0] for name in engine.adapters] == ["policy@4"]
        loads = len(engine.requests_to("/v1/load_lora_adapter"))
        again.saver.close()

        third = Job(run, engine)
        third.saver.resume()
        assert third.saver.progress.report.notes == ()
        assert len(engine.requests_to("/v1/load_lora_adapter")) == loads  # it holds it
        third.saver.close()


def test_the_version_of_the_rollouts_is_published_after_a_resume(
    files: EngineFiles, run: Path
) -> None:
    """If the setting asks for it, and as long as its checkpoint is there and whole."""
    goal = {"after_resume": "published"}
    with serving(files.base) as engine:
        job = Job(run, engine, every=1, goal=goal)
        versions = [job.train(1)[0].publish.result().version for _ in range(2)]
        job.saver.close()

        def resume() -> list[str]:
            engine.start()  # the server has lost everything
            again = Job(run, engine, goal=goal)
            progress = again.saver.resume()
            again.saver.close()
            assert (progress.step, progress.published) == (2, versions[0])
            return [*engine.adapters, *progress.report.notes]

        older, newer = f"policy@{versions[0]}", f"policy@{versions[1]}"
        note = "publishing checkpoint-1: engines had it when checkpoint-2 was saved"
        assert resume() == [older, note]
        damage(run / "checkpoint-1")
        published, note = resume()
        assert published == newer
        assert re.match("publishing checkpoint-2: checkpoint-1, .* is damaged: adapter", note), note
        shutil.rmtree(run / "checkpoint-1")
        note = f"publishing checkpoint-2: the run has no checkpoint of the version {versions[0]}"
        assert resume() == [newer, note]


def test_an_error_of_a_server_never_fails_training(files: EngineFiles, run: Path) -> None:
    with serving(files.base) as engine:
        engine.fail(cuts="before", times=10_000)
        job = Job(run, engine, every=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (report,) = job.train(1)
            job.saver.close()
        assert ft_ckpt.verify(report.path).ok
        assert any(
            "not published" in str(each.message) and "training goes on" in str(each.message)
            for each in caught
        )
        with pytest.raises(EngineError):
            report.publish.result()


def test_a_background_save_is_published_too(files: EngineFiles, run: Path) -> None:
    with serving(files.base) as engine:
        job = Job(run, engine, every=1, background=True)
        job.train(1)
        job.saver.close()
        assert [name.partition("-")[0] for name in engine.adapters] == ["policy@1"]


def test_a_trainer_publishes_through_its_callback(files: EngineFiles, run: Path) -> None:
    with serving(files.base) as engine:
        model = with_adapter(base_model("llama").float(), 1)
        args = trainers.TrainingArguments(str(run), max_steps=2, save_steps=2, **trainers.SILENT)
        callback = FtCkptCallback(
            publish={"url": engine.url, "name": "policy"}, on_saved=(reports := []).append
        )
        trainers.Trainer(
            model, args, train_dataset=trainers.Sentences(noise=False), callbacks=[callback]
        ).train()
        (report,) = reports
        assert report.publish.result().name.startswith("policy@2-")
        assert [name.partition("-")[0] for name in engine.adapters] == ["policy@2"]


def test_saver_publish_saves_first(files: EngineFiles, tmp_path: Path) -> None:
    with (
        serving(files.base) as engine,
        CheckpointSaver(None, tmp_path / "run", tokenizer=tokenizer()) as saver,
    ):
        model = with_adapter(base_model("llama"), 3)
        report = saver.publish(model, engine.url, step=3, name="policy")
        assert report is not None
        assert (report.kind, report.path) == ("adapter", tmp_path / "run/checkpoint-3")
        report = saver.publish(base_model("llama", 4), [engine.url], tmp_path / "run/full")
        assert report is not None
        assert report.kind == "weights"
        assert "parameters" in report.servers[0].checked
        engine.fail("/v1/load_lora_adapter", 500)
        with pytest.raises(EngineError):
            saver.publish(model, engine.url, tmp_path / "run/third", version="other")
        assert ft_ckpt.verify(tmp_path / "run/third").ok
        with pytest.raises(ConfigError, match=r"nam=.*did you mean name"):
            saver.publish(model, engine.url, tmp_path / "run/fourth", nam="policy")
        assert not (tmp_path / "run/fourth").exists()


@contextmanager
def server_of_rank_0(folder: Path) -> Iterator[tuple[str, Engine | None]]:
    """A server in the process of rank 0: its URL on every rank, and itself on rank 0."""
    with CheckpointSaver(tokenizer=tokenizer()) as saver:
        saver.save(base_model("llama"), folder / "base")
    with serving(folder / "base") if RANK == 0 else nullcontext() as engine:
        urls = [engine.url if engine else ""]
        dist.broadcast_object_list(urls)
        yield urls[0], engine
        dist.barrier()


@pytest.mark.slow
@on_ranks(2)
def test_a_report_of_rank_0_and_an_error_on_all_ranks(tmp_path: Path) -> None:
    """The report is rank 0's; an error is raised on all ranks."""
    with (
        server_of_rank_0(tmp_path) as (url, engine),
        CheckpointSaver(directory=tmp_path / "run") as saver,
    ):
        report = saver.publish(with_adapter(base_model("llama"), 1), url, step=1, name="policy")
        assert (report is not None) == (RANK == 0)
        if engine is not None:
            assert report is not None
            assert [*engine.adapters] == [report.name]
            engine.fail("/v1/load_lora_adapter", 500)
        dist.barrier()
        with pytest.raises(
            EngineError if RANK == 0 else RankError, match="EngineCore encountered an issue"
        ):
            saver.publish(with_adapter(base_model("llama"), 2), url, step=2, name="policy")


@on_ranks(2)
def test_rank_0_publishes_the_checkpoints_of_a_run(tmp_path: Path) -> None:
    """Rank 0 publishes the checkpoints of a run, and again after the server has restarted."""
    with server_of_rank_0(tmp_path) as (url, engine):
        for attempt in (1, 2):
            model = with_adapter(base_model("llama").float(), 1)
            optimizer = torch.optim.SGD(
                [each for each in model.parameters() if each.requires_grad], lr=0.1
            )
            goal = {"url": url, "name": "policy"}
            with CheckpointSaver(directory=tmp_path / "run", publish=goal) as saver:
                saver.register(model=model, optimizer=optimizer)
                assert saver.resume().step == attempt - 1
                if engine is not None:
                    assert [name.partition("-")[0] for name in engine.adapters] == ["policy@1"] * (
                        attempt - 1
                    )
                saver.step(step=1)
                report = saver.save_state()
                assert (report.publish is not None) == (RANK == 0)
            if engine is not None:
                engine.start()
            dist.barrier()
