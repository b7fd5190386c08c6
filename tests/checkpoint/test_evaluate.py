"""`ft-ckpt watch`: a command measures each checkpoint once, whatever is killed, and the rules follow the number."""

import math
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from buckets import in_bucket, new_bucket
from faults import contents, dies_at, save, save_of
from launch import run_python

import ft_ckpt
from ft_ckpt.checkpoint.bucket_delete import settle_in_bucket
from ft_ckpt.checkpoint.catalog import discover, read_manifest
from ft_ckpt.checkpoint.delete import delete_state
from ft_ckpt.checkpoint.evaluate import evaluate_run
from ft_ckpt.checkpoint.guards import PIN, SIGNED, lease_reasons, pin
from ft_ckpt.checkpoint.metrics import METRIC, read_metrics, write_metric
from ft_ckpt.checkpoint.prune import prune_run
from ft_ckpt.errors import CheckpointError, ConfigError
from ft_ckpt.retention import Keep
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place

RUN = "import sys; from ft_ckpt.cli import main; main()"
# Notes that it was called, and prints the number at the end of the checkpoint's name, and a half.
SCORE = 'n=${1##*-}; echo "$n" >> "$0"; echo "some words"; echo "$n.5"'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save_of(tmp_path / f"run/checkpoint-{step}", step=step, run_id="a")
    return tmp_path / "run"


class Watching:
    """One start of the watcher on a run, with a shell script as its command."""

    def __init__(self, run: Path | Place, script: str = SCORE, log: Path | None = None, **options: Any) -> None:
        self.log = log or Path(str(run)).with_name("calls")
        self.troubles: list[str] = []
        self.found: list[tuple[str, dict[str, float]]] = []
        self.after: Callable[[], object] = lambda: None

        def note(one: Any) -> None:
            self.found.append((Path(str(one.path)).name, dict(one.metrics)))
            self.after()

        command = ["sh", "-c", script, str(self.log), "{path}"]
        settings = {"idle_seconds": 0, "poll_seconds": 0.02, **options}
        name = settings.pop("metric", "score")
        self.go = lambda: evaluate_run(
            run, command, name, on_evaluated=note, on_trouble=self.troubles.append, **settings
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


def metrics(run: Path | Place) -> dict[str, float]:
    return {info.name: info.metrics["score"] for info in discover(run) if "score" in info.metrics}


def test_each_is_measured_once_oldest_first_and_rules_follow(run: Path) -> None:
    before = {path: read_manifest(path) for path in run.iterdir()}
    watching = Watching(run)
    assert watching.go() == 3
    assert (watching.calls, watching.troubles) == (["1", "2", "3"], [])
    assert metrics(run) == {"checkpoint-1": 1.5, "checkpoint-2": 2.5, "checkpoint-3": 3.5}
    assert Watching(run).go() == 0
    assert watching.calls == ["1", "2", "3"]
    assert {path: read_manifest(path) for path in run.iterdir()} == before
    assert all(ft_ckpt.verify(path).ok for path in run.iterdir())
    assert ft_ckpt.best(run, ("score", "min")) == run / "checkpoint-1"
    report = prune_run(run, Keep(best=("score", "min")))
    assert report.dropped == (run / "checkpoint-2",)
    assert report.kept[run / "checkpoint-1"] == ("best score",)
    shutil.rmtree(run / "checkpoint-3")
    save_of(run / "checkpoint-4", step=4, run_id="a")
    assert prune_run(run, Keep(last=1)).dropped == (run / "checkpoint-1",)  # its marks go with it
    assert not (run / "checkpoint-1").exists()


def test_new_ones_come_while_it_watches(run: Path) -> None:
    watching = Watching(run, idle_seconds=0.3)
    steps = iter((4, 5))

    def save_next() -> None:
        if (step := next(steps, None)) is not None:
            save_of(run / f"checkpoint-{step}", step=step, run_id="a")

    watching.after = save_next
    assert watching.go() == 5
    assert watching.calls == ["1", "2", "3", "4", "5"]


def test_the_run_may_begin_later(tmp_path: Path) -> None:
    timer = threading.Timer(0.2, lambda: save(tmp_path / "run/checkpoint-1", step=1))
    timer.start()
    assert Watching(tmp_path / "run", idle_seconds=2).go() == 1


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("0.25", {"score": 0.25}),
        ("1e-3\n\n  \n", {"score": 1e-3}),
        ("nan", {"score": math.nan}),
        ("-inf", {"score": -math.inf}),
        ('{"score": 2, "eval/loss": 0.5, "note": "x", "ok": true, "more": [1]}', {"eval/loss": 0.5, "score": 2.0}),
        ("noise\r\n7", {"score": 7.0}),
    ],
)
def test_what_a_command_may_print(tmp_path: Path, printed: str, expected: dict[str, float]) -> None:
    save(tmp_path / "run/checkpoint-1", step=1)
    watching = Watching(tmp_path / "run", f"printf '%s' '{printed}'")
    watching.go()
    ((_, found),) = watching.found
    assert list(found) == list(expected)
    stored = read_metrics(LocalStore(tmp_path / "run/checkpoint-1"), read_manifest(tmp_path / "run/checkpoint-1"))
    assert {name: repr(value) for name, value in stored.items()} == {n: repr(v) for n, v in expected.items()}
    assert Watching(tmp_path / "run").go() == 0


@pytest.mark.parametrize("name", ["", "x" * 300, "\\ud800"], ids=["empty", "long", "half a surrogate pair"])
def test_a_name_that_cannot_be_stored_stops_nothing(run: Path, name: str) -> None:
    watching = Watching(run, f"printf '%s' '{{\"{name}\": 2, \"score\": 0.5}}'")
    assert watching.go() == 3
    assert metrics(run) == {"checkpoint-1": 0.5, "checkpoint-2": 0.5, "checkpoint-3": 0.5}
    (trouble,) = watching.troubles
    assert trouble.startswith("metric '")
    assert trouble.endswith("it is left out")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo x >> "$0"; exit 3', "exit code 3"),
        ('echo x >> "$0"; kill -9 $$', "signal 9"),
        ('echo x >> "$0"; echo fine', "last line is 'fine'"),
        ('echo x >> "$0"', "last line is ''"),
        ('echo x >> "$0"; echo \'{"loss": 1}\'', "the number 'score'"),
    ],
)
def test_a_command_that_fails_is_tried_twice_then_skipped(tmp_path: Path, script: str, reason: str) -> None:
    save(tmp_path / "run/checkpoint-1", step=1)
    watching = Watching(tmp_path / "run", script)
    with pytest.raises(CheckpointError, match=reason):
        watching.go()
    assert watching.calls == ["x", "x"]
    assert [text.rpartition("; ")[2] == "trying again" for text in watching.troubles] == [True, False]
    assert "checkpoint-1: skipped: sh -c" in watching.troubles[1]
    assert list(tmp_path.glob(f"run/*/{METRIC}*")) == []


def test_one_that_fails_stops_no_other(run: Path) -> None:
    watching = Watching(run, f'case "$1" in *-2) echo 2 >> "$0"; exit 1;; esac; {SCORE}')
    with pytest.raises(CheckpointError, match="checkpoint-2: ended with exit code 1"):
        watching.go()
    assert watching.calls == ["1", "2", "3", "2"]
    assert metrics(run) == {"checkpoint-1": 1.5, "checkpoint-3": 3.5}
    again = Watching(run)  # a new start tries again
    assert again.go() == 1


def test_one_that_fails_once_is_no_error(run: Path) -> None:
    watching = Watching(run, f'if [ ! -e "$0" ]; then touch "$0"; exit 1; fi; {SCORE}')
    assert watching.go() == 3
    assert len(watching.troubles) == 1


def test_a_damaged_checkpoint_is_skipped_and_not_measured(run: Path) -> None:
    (run / "checkpoint-2/model.safetensors").write_bytes(b"")
    (run / "checkpoint-3/ft_ckpt.json").write_text("{")
    watching = Watching(run)
    with pytest.raises(CheckpointError, match="truncated: 0 bytes"):
        watching.go()
    assert watching.calls == ["1"]
    assert sorted(text.partition(": skipped")[0] for text in watching.troubles) == [
        str(run / "checkpoint-2"),
        str(run / "checkpoint-3"),
    ]


def test_it_is_leased_while_it_is_measured(run: Path) -> None:
    def try_to_delete() -> None:
        while not (leased := [path for path in run.iterdir() if lease_reasons(path)]):
            time.sleep(0.01)
        seen.append((leased, prune_run(run, Keep(last=1)).kept))
        (run.parent / "go").touch()

    seen: list[Any] = []
    thread = threading.Thread(target=try_to_delete)
    thread.start()
    watching = Watching(run, f'while [ ! -e "{run.parent}/go" ]; do sleep 0.02; done; {SCORE}')
    watching.go()
    thread.join()
    assert seen[0][0] == [run / "checkpoint-1"]
    assert any("in use by" in why for why in seen[0][1][run / "checkpoint-1"])
    assert set(watching.calls) == {"1", "3"}  # the second was deleted before its turn
    assert watching.troubles == []


def test_an_overwrite_is_measured_again_and_a_lost_state_is_not(run: Path) -> None:
    Watching(run).go()
    save_of(run / "checkpoint-2", step=2, run_id="a", created="2026-02-02T00:00:00+00:00")
    assert metrics(run) == {"checkpoint-1": 1.5, "checkpoint-3": 3.5}
    watching = Watching(run)
    assert watching.go() == 1
    delete_state(run / "checkpoint-1")
    assert watching.go() == 0
    assert len(metrics(run)) == 3


def test_a_metric_of_the_save_settles_it(tmp_path: Path) -> None:
    save_of(tmp_path / "run/checkpoint-1", step=1, metrics={"score": 9.0})
    assert Watching(tmp_path / "run").go() == 0
    assert Watching(tmp_path / "run", metric="other").go() == 1
    assert ft_ckpt.best(tmp_path / "run", ("other", "max")) is not None


def test_a_mark_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    save(path, step=1)
    store, manifest = LocalStore(path), read_manifest(path)
    write_metric(store, manifest, "score", 1.0)
    call = 1
    while dies_at(call, lambda: write_metric(store, manifest, "score", 2.0)):
        assert read_metrics(store, manifest)["score"] in (1.0, 2.0)
        assert ft_ckpt.verify(path).ok
        call += 1
    assert call > 2
    assert read_metrics(store, manifest) == {"score": 2.0}
    (mark,) = path.glob(f"{METRIC}*")
    for text in ("", "{", "[]", '{"metric": "score"}', '{"metric": "score", "value": [], "created": ""}'):
        mark.write_text(text)
        assert read_metrics(store, manifest) == {}


def test_names_of_metrics(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    save(path, step=1)
    store, manifest = LocalStore(path), read_manifest(path)
    names = ["eval/loss", "../up", "é %", ".", "a" * 200]
    for number, name in enumerate(names):
        write_metric(store, manifest, name, float(number))
    assert read_metrics(store, manifest) == dict(zip(names, map(float, range(5)), strict=True))
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-1"]
    for wrong in ("", "a" * 201, "/" * 70):
        with pytest.raises(ConfigError, match="expected 1 to 200 bytes"):
            write_metric(store, manifest, wrong, 1.0)


def test_what_cannot_be_is_an_error_at_once(run: Path) -> None:
    for command in (["true"], ["no-such-program", "{path}"]):
        with pytest.raises(ConfigError):
            evaluate_run(run, command, "score", idle_seconds=0)


def test_a_run_in_a_bucket(tmp_path: Path) -> None:
    bucket = new_bucket("team/run")
    for step in (1, 2):
        save_of(tmp_path / f"checkpoint-{step}", step=step, run_id="a")
        in_bucket(tmp_path / f"checkpoint-{step}", bucket)
    watching = Watching(Place(bucket), log=tmp_path / "calls")
    assert watching.go() == 2
    assert metrics(Place(bucket)) == {"checkpoint-1": 1.5, "checkpoint-2": 2.5}
    report = prune_run(Place(bucket), Keep(best=("score", "min")))
    assert report.dropped == ()
    assert Watching(Place(bucket), log=tmp_path / "calls").go() == 0
    assert prune_run(Place(bucket), Keep(last=1)).dropped != ()
    assert not [each.name for each in bucket.list() if "checkpoint-1" in each.name]


def test_marks_in_a_bucket_outlive_the_processes_that_wrote_them(tmp_path: Path) -> None:
    bucket = new_bucket("team/run")
    save(tmp_path / "checkpoint-1", step=1)
    in_bucket(tmp_path / "checkpoint-1", bucket)
    Watching(Place(bucket), log=tmp_path / "calls").go()
    store = bucket.within("checkpoint-1")
    store.write(SIGNED, b"{}")
    pin(Place(store))
    assert settle_in_bucket(store, {each.name: each for each in store.list()}, time.time() + 1e6) is None
    assert {PIN, SIGNED, f"{METRIC}score"} <= {each.name for each in store.list()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_command_under_way(run: Path, number: int) -> None:
    script = f'{SCORE}; touch "$0.begun"; sleep 1; echo "$n.5"'
    command = [sys.executable, "-c", RUN, "watch", run, "--", "sh", "-c", script, run.parent / "calls", "{path}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (run.parent / "calls.begun").exists():
        time.sleep(0.02)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.startswith(f"{run / 'checkpoint-1'}: score 1.5, ")
    assert output.count("\n") == 1
    assert metrics(run) == {"checkpoint-1": 1.5}


@pytest.mark.parametrize("times", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_one_that_is_killed_goes_on_where_it_was(run: Path, times: int) -> None:
    """Killed at any moment; what has its metric is not measured again, and every checkpoint gets one."""
    calls = run.parent / "calls"
    command = [sys.executable, "-c", RUN, "watch", run, "--", "sh", "-c", f"sleep 0.05; {SCORE}", calls, "{path}"]
    for number in range(times):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(0.2 + 0.4 * number / times)
        process.kill()
        process.wait()
        settled = metrics(run)
        before = calls.read_text().split() if calls.exists() else []
        time.sleep(0.2)  # a command that outlives the watcher
        if len(settled) == 3:
            break
        assert all(before.count(name.partition("-")[2]) >= 1 for name in settled)
    Watching(run).go()
    assert metrics(run) == {"checkpoint-1": 1.5, "checkpoint-2": 2.5, "checkpoint-3": 3.5}
    called = calls.read_text()
    Watching(run).go()
    assert calls.read_text() == called


def test_the_command(run: Path) -> None:
    before = contents(run)
    words = ["watch", run, "--metric", "loss", "--idle", "0", "--json", "--"]
    done = run_python(RUN, *words, "sh", "-c", "echo --; echo 0.5", "--flag", "{path}/config.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"loss": 0.5') == 3, done.stdout
    changed = {name for name, content in contents(run).items() if before.get(name) != content}
    assert changed == {f"checkpoint-{step}/{METRIC}loss" for step in (1, 2, 3)}
    listed = run_python(RUN, "ls", run)
    assert "loss" in listed.stdout.splitlines()[0]
    assert run_python(RUN, "best", run, "--metric", "loss:min").stdout == f"{run / 'checkpoint-1'}\n"
    assert run_python(RUN, "watch", run).returncode == 2
    assert run_python(RUN, "watch", run, "--idle", "0", "--", "sh", "-c", "exit 1", "{path}").returncode == 2
