"""`ft-ckpt report`: a run on one page. The browser that looks at it is marked slow."""

import json
import os
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from test_cli import ft_ckpt as run_command
from training import QUIET, prepared

import ft_ckpt
from ft_ckpt import CheckpointSaver, Every, Keep, cli
from ft_ckpt.checkpoint.catalog import read_manifest
from ft_ckpt.cli.report import draw_run, gather_facts, write_report
from ft_ckpt.errors import CheckpointError, ConfigError, NotACheckpointError, TargetError
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.training.state import read_document

STEPS = 18


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Saved in the background at every third step, resumed half-way; the newest two stay, and the best."""
    folder = tmp_path_factory.mktemp("report") / "a <run> & more"
    for until in (9, STEPS):
        made = prepared()
        keep = Keep(last=2, best=("score", "max"), state=Keep(last=1))
        every = Every(steps=3, signals=())
        with CheckpointSaver(made.accelerator, folder, every=every, keep=keep, background=True, **QUIET) as saver:
            saver.resume()
            for (batch,) in saver.remaining(made.loader, epochs=3):
                loss = made.model(batch).square().mean()
                made.accelerator.backward(loss)
                made.optimizer.step()
                made.optimizer.zero_grad()
                step = saver.progress.step + 1
                saver.step({"loss": loss.item(), "score": -abs(step - 6)})
                if step == until:
                    break
    return folder


def test_the_log_outlives_checkpoints_and_restarts(run):
    facts = gather_facts(run, ("loss", "score"), comparisons=8)
    assert [each.step for each in facts.checkpoints] == [6, 9, 15, 18], "the run went on from 9"
    assert [each.step for each in facts.saves] == [3, 6, 9, 12, 15, 18]
    assert facts.dropped_steps == (3, 12)
    timed = [each for each in facts.saves if each.step not in (9, 18)]
    assert all(each.seconds > 0 and each.size_bytes > 0 and each.stall_seconds > 0 for each in timed)
    assert {each.seconds for each in facts.saves if each not in timed} == {None}, "a checkpoint cannot know its own"
    assert [step for step, _ in facts.metric_points("score")] == [3, 6, 9, 12, 15, 18]
    assert dict(facts.metric_points("score"))[6] == 0


def test_why_each_checkpoint_is_kept(run):
    kept = {each.step: each.kept for each in gather_facts(run, (), comparisons=0).checkpoints}
    assert kept[9] == (), "until the next sweep of another process"
    assert "best score" in kept[6]
    assert "last 2" in kept[15]
    assert "newest valid" in kept[18]


def test_drift_is_that_of_the_files(run):
    (first, *_, last) = gather_facts(run, (), comparisons=8).drift
    assert (first.before, first.after, last.after) == ("checkpoint-6", "checkpoint-9", "checkpoint-18")
    one, other = (ft_ckpt.load(run / name / "model.safetensors") for name in ("checkpoint-6", "checkpoint-9"))
    names = [name for name in one if name.startswith("3.")]
    change = sum((other[name].double() - one[name].double()).square().sum() for name in names)
    norm = sum(one[name].double().square().sum() for name in names)
    assert first.layers["3"] == pytest.approx(float((change / norm).sqrt()))


def test_sizes_are_those_on_the_disk(run):
    facts = gather_facts(run, (), comparisons=0)
    files = {path.stat().st_ino: path.stat().st_size for path in run.rglob("*") if path.is_file()}
    manifests = sum(path.stat().st_size for path in run.rglob("ft_ckpt.json"))
    assert facts.disk_bytes == sum(files.values()) - manifests


def test_the_page_is_whole_and_shows_all(run, tmp_path):
    answer = run_command("report", run, "-o", tmp_path / "page.html")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "4 checkpoints" in answer.stdout
    page = (tmp_path / "page.html").read_text()
    drawing = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert len(drawing.findall(".//{http://www.w3.org/2000/svg}path")) > 50
    assert "a &lt;run&gt; &amp; more" in page
    assert all(f"<td>checkpoint-{step}</td>" in page for step in (6, 9, 15, 18))
    assert page.count("<td>deleted</td>") == 2
    assert not re.search(r'(src|href)="(?!#|data:)', page), "nothing is loaded from elsewhere"
    assert "<script" not in page


@pytest.mark.slow
def test_one_checkpoint_and_one_point(run, tmp_path):
    facts = gather_facts(run, ("loss",), comparisons=8)
    first = replace(facts, checkpoints=facts.checkpoints[:1], saves=facts.saves[:2], drift=())
    only = replace(first, saves=())
    for found, text in ((facts, "4 checkpoints, "), (facts, ". 2 older ones were deleted."),
                        (first, "1 checkpoint, "), (first, ". 1 older one was deleted."),
                        (only, ". None was deleted.")):  # fmt: skip
        write_report(found, tmp_path / "page.html")
        assert text in (tmp_path / "page.html").read_text()
    axes = drawn(only)[0]
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [6], "no steps between whole ones"


def test_each_chart_takes_the_width_of_the_page(run):
    for axes in drawn(gather_facts(run, ("loss",), comparisons=8)):
        assert axes.get_position().x1 > (0.8 if axes.images else 0.95), axes.get_title()


def drawn(facts):
    """The charts, without the scale of colours."""
    figure = draw_run(facts)
    figure.draw_without_rendering()
    return [part.axes[0] for part in figure.subfigs]


def test_the_picture_and_the_facts_alone(run, tmp_path, capsys):
    write_report(gather_facts(run, ("loss",), comparisons=0), tmp_path / "page.png")
    head = (tmp_path / "page.png").read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:24])
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert width > 1000 < 2 * height
    cli.run_command(["report", str(run), "--json", "--drift", "0"])
    told = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in told["checkpoints"]] == [6, 9, 15, 18]
    assert told["drift"] == []


def test_what_cannot_be_reported_is_said(run, tmp_path):
    with pytest.raises(ConfigError, match=r"expected a name that ends in \.html or \.png"):
        cli.run_command(["report", str(run), "-o", str(tmp_path / "page.pdf")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpointError, match="empty"):
        cli.run_command(["report", str(tmp_path / "empty"), "-o", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()


def test_what_is_damaged_is_named_and_the_rest_shown(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    os.truncate(copied / "checkpoint-15" / "model.safetensors", 100)
    (copied / "checkpoint-18" / "state" / "training.json").write_text("{")
    facts = gather_facts(copied, ("loss",), comparisons=8)
    assert [each.after for each in facts.drift] == ["checkpoint-9"], "neither side of the other pairs was 15"
    assert sum("were not compared" in note for note in facts.notes) == 2
    assert any("training.json" in note for note in facts.notes)
    assert max(each.step for each in facts.saves) < 18, "the log of an older state"
    assert [bool(each.problems) for each in facts.checkpoints] == [False, False, True, True]
    write_report(facts, tmp_path / "page.html")
    assert "were not compared" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("wrong", [{"keep": {"last": 2}}, {"history": {"saves": [3]}}, {"keep": {"odd": 1}}])
def test_a_state_that_says_what_it_cannot_is_an_error_of_ours(run, wrong, monkeypatch):
    known = read_document(LocalStore(run / "checkpoint-18"), read_manifest(run / "checkpoint-18"))
    monkeypatch.setattr("ft_ckpt.cli.report.read_document", lambda *_: known | wrong)
    with pytest.raises(CheckpointError):
        gather_facts(run, (), comparisons=0)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_failed_is_not_in_the_log(tmp_path, monkeypatch, background):
    made = prepared()

    def save_step(step):
        saver.step({"loss": 1.0}, step=step)
        saver.save_state()
        return saver.wait()

    with CheckpointSaver(made.accelerator, tmp_path, background=background, **QUIET) as saver:
        save_step(1)
        with monkeypatch.context() as broken:
            broken.setattr("ft_ckpt.saving.background.run_save", fail)
            with pytest.raises(CheckpointError, match="no such disk"):
                save_step(2)
        save_step(3)
    saves = gather_facts(tmp_path, (), comparisons=0).saves
    assert [(each.step, each.seconds is None) for each in saves] == [(1, False), (3, True)]


def fail(*_):
    raise TargetError("no such disk")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_browser_shows_it(run, tmp_path):
    write_report(gather_facts(run, ("loss",), comparisons=8), tmp_path / "page.html")
    calm = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    page = f"file://{tmp_path}/page.html"
    done = subprocess.run(["chromium", *calm, "--dump-dom", page], capture_output=True, text=True, timeout=120)
    assert "kept because" in done.stdout
    shot = tmp_path / "shot.png"
    subprocess.run(["chromium", *calm, f"--screenshot={shot}", page], capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 20_000
