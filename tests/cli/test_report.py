"""`ft-ckpt report`: a run on one page, as facts, as text, and as a browser shows it."""

import html
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from buckets import in_bucket
from commands import ft_ckpt as run_command
from small_checkpoints import edit, rewrite_manifest, save_of
from training import QUIET, prepared

import ft_ckpt
from ft_ckpt import CheckpointSaver, Every, Keep, cli
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.cli.report.chart_axes import value_axis
from ft_ckpt.cli.report.charts import Mark, thinned
from ft_ckpt.cli.report.gathering import gather_facts
from ft_ckpt.cli.report.page import page_text
from ft_ckpt.cli.report.style import PAGE_STYLE
from ft_ckpt.errors import CheckpointError, ConfigError, NotACheckpointError, TargetError
from ft_ckpt.runs.state import read_document
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place

STEPS = 18
VOID = {"meta", "link"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Saved in the background at every third step, resumed half-way; the newest two stay, and the
    best.

    The weights are exported at the end.
    """
    folder = tmp_path_factory.mktemp("report") / "a <run> & more"
    for until in (9, STEPS):
        training = prepared()
        keep = Keep(last=2, best=("score", "max"), state=Keep(last=1))
        every = Every(steps=3, signals=())
        settings = {"every": every, "keep": keep, "background": True, **QUIET}
        with CheckpointSaver(training.accelerator, folder, **settings) as saver:
            saver.resume()
            for (batch,) in saver.remaining(training.loader, epochs=3):
                loss = training.model(batch).square().mean()
                training.accelerator.backward(loss)
                training.optimizer.step()
                training.optimizer.zero_grad()
                step = saver.progress.step + 1
                saver.step({"loss": loss.item(), "score": -abs(step - 6)})
                if step == until:
                    break
            if step == STEPS:
                saver.save(training.model, folder / "final")
    return folder


@dataclass
class Page(HTMLParser):
    """The parts of a page that tests look at; an element that is not closed is an error."""

    rows: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # by the label of the table
    titles: list[str] = field(default_factory=list)  # of marks and charts
    facts: dict[str, str] = field(default_factory=dict)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()
        self.stack, self.words, self.table, self.column, self.term = [], "", "", "", ""

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.stack.append(tag)
        self.table = attributes.get("aria-label", self.table) if tag == "div" else self.table
        if tag == "tr":
            self.rows.setdefault(self.table, []).append({})
        self.column = attributes.get("data-label", "name") if tag in ("th", "td") else self.column
        self.words = "" if tag in ("title", "th", "td", "dt", "dd") else self.words

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words += data

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag
        if tag == "title":
            self.titles.append(self.words)
        elif tag in ("th", "td"):
            self.rows[self.table][-1][self.column] = self.words
        elif tag == "dt":
            self.term = self.words
        elif tag == "dd":
            self.facts[self.term] = self.words

    def table_rows(self, label: str) -> list[dict[str, str]]:
        """The rows of a table and of its folded part, without the heads."""
        tables = [rows for name, rows in self.rows.items() if name.startswith(label)]
        return [row for rows in tables for row in rows[1:]]


def page_of(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.stack == []
    return page


def reported(folder: object, tmp_path: Path) -> Page:
    """The page that the command writes about a run."""
    answer = run_command("report", folder, "-o", tmp_path / "page.html")
    assert (answer.code, answer.err) == (0, "")
    return page_of((tmp_path / "page.html").read_text())


def log_as(run: Path, saves: Sequence[Mapping[str, Any]]) -> None:
    """Replace the log of the saves in the newest training state."""
    file = "state/training.json"
    newest = run / f"checkpoint-{STEPS}"
    document = json.loads((newest / file).read_text())
    document["history"]["saves"] = list(saves)
    edit(newest, file, json.dumps(document))


def logged(step: int, **metrics: float | str) -> dict[str, Any]:
    times = {"stall_seconds": 0.01, "seconds": 0.1, "size_bytes": 100}
    return {"step": step, "saved_at": 1.7e9 + step, "reason": "steps", "metrics": metrics, **times}


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


# The facts


def test_the_log_outlives_checkpoints_and_restarts(run):
    facts = gather_facts(open_place(run), ("loss", "score"), comparisons=8)
    names = [checkpoint.name for checkpoint in facts.checkpoints]
    assert names == ["checkpoint-6", "checkpoint-9", "checkpoint-15", "checkpoint-18", "final"]
    assert [save.step for save in facts.saves] == [3, 6, 9, 12, 15, 18]
    assert [save.step for save in facts.dropped_saves] == [3, 12]
    timed = [save for save in facts.saves if save.step not in (9, 18)]
    assert all(
        save.seconds > 0 and save.size_bytes > 0 and save.stall_seconds > 0 for save in timed
    )
    untimed = [save for save in facts.saves if save not in timed]
    assert {save.seconds for save in untimed} == {None}, "a checkpoint cannot know its own"
    assert [step for step, _ in facts.metric_points("score")] == [3, 6, 9, 12, 15, 18]
    assert dict(facts.metric_points("score"))[6] == 0


def test_why_each_checkpoint_is_kept(run):
    checkpoints = {
        each.name: each for each in gather_facts(open_place(run), (), comparisons=0).checkpoints
    }
    assert checkpoints["checkpoint-9"].kept == (), "until the next sweep of another process"
    assert "best score" in checkpoints["checkpoint-6"].kept
    assert "last 2" in checkpoints["checkpoint-15"].kept
    assert "newest valid" in checkpoints["checkpoint-18"].kept


def test_drift_is_that_of_the_files(run):
    (first, *_, last) = gather_facts(open_place(run), (), comparisons=8).drift
    names = (first.before, first.after, last.after)
    assert names == ("checkpoint-6", "checkpoint-9", "checkpoint-18"), "without the export"
    before, after = (ft_ckpt.load(run / name / "model.safetensors") for name in names[:2])
    tensors = [name for name in before if name.startswith("3.")]
    change = sum((after[name].double() - before[name].double()).square().sum() for name in tensors)
    norm = sum(before[name].double().square().sum() for name in tensors)
    assert first.layers["3"] == pytest.approx(float((change / norm).sqrt()))


def test_sizes_are_those_on_the_disk(run):
    facts = gather_facts(open_place(run), (), comparisons=0)
    files = {path.stat().st_ino: path.stat().st_size for path in run.rglob("*") if path.is_file()}
    manifests = sum(path.stat().st_size for path in run.rglob("ft_ckpt.json"))
    assert facts.disk_bytes == sum(files.values()) - manifests


def test_the_facts_alone(run, capsys):
    cli.run_command(["report", str(run), "--json", "--drift", "0"])
    document = json.loads(capsys.readouterr().out)
    assert [checkpoint["step"] for checkpoint in document["checkpoints"]] == [6, 9, 15, 18, 18]
    assert document["drift"] == []
    assert document["training"]["ranks"] == 1


# The page


def test_the_page_is_complete_and_loads_nothing(run, tmp_path):
    page = reported(run, tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert "a &lt;run&gt; &amp; more" in text
    assert not re.search(r'(src|href)="(?!data:)|url\(|@import', text)
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    headings = [tag for tag, _ in page.tags if tag in ("h1", "h2")]
    assert headings == ["h1", *["h2"] * 7]
    charts = [attributes for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert len(charts) == 6
    assert all(
        attributes.get("scope") in ("col", "row") for tag, attributes in page.tags if tag == "th"
    )


def test_the_run_is_described(run, tmp_path):
    facts = reported(run, tmp_path).facts
    manifest = read_manifest(open_place(run / f"checkpoint-{STEPS}"))
    (model, _) = manifest.parts
    sizes = {tensor.name: math.prod(tensor.shape) for tensor in model.tensors}
    trained = sum(sizes[name] for name in model.trainable)
    numbers = f"{trained} parameters trained, {sum(sizes.values())} values stored"
    assert facts["model"] == f"Sequential: {numbers}, float32, int64"
    assert (facts["ranks"], facts["wrapper"]) == ("1", "none")
    assert facts["progress"].startswith(f"step {STEPS}, ")
    assert f"torch {manifest.versions['torch']}" in facts["versions"]
    assert re.fullmatch(
        r"[\d.]+ \w+ for 4 saves \([\d.]+% of the training time\)", facts["training waited"]
    )


def test_the_newest_comes_first_with_its_times(run, tmp_path):
    page = reported(run, tmp_path)
    names = [row["name"] for row in page.table_rows("Checkpoints")]
    assert names == [
        "final",
        "checkpoint-18",
        "checkpoint-15",
        "checkpoint-9",
        "checkpoint-6best score",
    ]
    saves = page.table_rows("Saves")
    assert [row["name"] for row in saves] == [f"step {step}" for step in (18, 15, 12, 9, 6, 3)]
    assert re.fullmatch(r"≥ \d+\.\d{3}", saves[0]["on disk, s"])
    assert all(
        re.fullmatch(r"\d+\.\d{3}", row["on disk, s"])
        for row in saves
        if row["name"] not in ("step 18", "step 9")
    )
    assert float(saves[0]["size, KB"]) > float(page.table_rows("Checkpoints")[0]["size, KB"]), (
        "not that of final"
    )


def test_the_last_save_is_not_that_of_the_export(run, tmp_path):
    saves = {row["name"]: row["checkpoint"] for row in reported(run, tmp_path).table_rows("Saves")}
    assert saves["step 18"] == "checkpoint-18"
    assert (saves["step 12"], saves["step 3"]) == ("deleted", "deleted")


def test_reasons_are_sentences(run, tmp_path):
    rows = reported(run, tmp_path).table_rows("Checkpoints")
    reasons = {row["name"]: row["why it is here"] for row in rows}
    assert reasons["final"] == "exported weights, which no rule deletes"
    assert reasons["checkpoint-18"] == "the newest whole checkpoint; last 2"
    assert (
        reasons["checkpoint-9"]
        == "the next save deletes it: not one of the last 2, not the best by score (max)"
    )
    assert reasons["checkpoint-6best score"] == "best score"


def test_each_mark_has_a_title(run, tmp_path):
    page = reported(run, tmp_path)
    assert "score 0.000, step 6, checkpoint-6, the best" in page.titles
    assert "score -3.000, step 3, deleted" in page.titles
    assert any(re.fullmatch(r"step 6: training waited .+", title) for title in page.titles)
    assert any(re.fullmatch(r"checkpoint-6, .+ UTC: best score", title) for title in page.titles)
    assert any(re.fullmatch(r"step 3, .+ UTC: deleted", title) for title in page.titles)
    assert any(
        re.fullmatch(r"checkpoint-18: weights .+, training state .+", title)
        for title in page.titles
    )
    assert any(re.fullmatch(r"3, step 18: [\d.e-]+", title) for title in page.titles)


def test_what_is_damaged_is_named_and_the_rest_shown(copied, tmp_path):
    os.truncate(copied / "checkpoint-15" / "model.safetensors", 100)
    (copied / "checkpoint-18" / "state" / "training.json").write_text("{")
    facts = gather_facts(open_place(copied), ("loss",), comparisons=8)
    assert [drift.after for drift in facts.drift] == ["checkpoint-9"], (
        "15 is a side of the other pairs"
    )
    assert sum("were not compared" in note for note in facts.notes) == 2
    assert any("training.json" in note for note in facts.notes)
    assert [bool(checkpoint.problems) for checkpoint in facts.checkpoints] == [
        False,
        False,
        True,
        True,
        False,
    ]
    page = reported(copied, tmp_path)
    assert "were not compared" in (tmp_path / "page.html").read_text()
    assert [row["name"] for row in page.table_rows("Checkpoints")][1:3] == [
        "checkpoint-18damaged",
        "checkpoint-15damaged",
    ]


def test_what_cannot_be_reported_is_said(run, tmp_path):
    for name in ("page.pdf", "page.png"):
        with pytest.raises(ConfigError, match=r"expected a name that ends in \.html"):
            cli.run_command(["report", str(run), "-o", str(tmp_path / name)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpointError, match="empty"):
        cli.run_command(["report", str(tmp_path / "empty"), "-o", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()


# Odd runs


def test_one_checkpoint_without_metrics_and_state(tmp_path):
    save_of(tmp_path / "run" / "checkpoint-7", step=7)
    page = reported(tmp_path / "run", tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert "no checkpoint has a training state" in text
    assert "Metrics" not in text
    assert page.facts.keys() == {"model"}
    (row,) = page.table_rows("Checkpoints")
    assert (row["step"], row["why it is here"]) == ("7", "unknown without a training state")


def test_one_logged_save(copied, tmp_path):
    for name in ("checkpoint-6", "checkpoint-9", "checkpoint-15", "final"):
        shutil.rmtree(copied / name)
    log_as(copied, [logged(18, loss=0.5)])
    page = reported(copied, tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert "1 checkpoint, " in text
    assert "Of 1 logged save, none were deleted" in text
    assert [row["name"] for row in page.table_rows("Saves")] == ["step 18"]


def test_a_run_without_rules_keeps_all(copied, tmp_path):
    file = "state/training.json"
    newest = copied / "checkpoint-18"
    edit(newest, file, json.dumps({**json.loads((newest / file).read_text()), "keep": None}))
    reasons = {
        row["why it is here"] for row in reported(copied, tmp_path).table_rows("Checkpoints")[1:]
    }
    assert all("the run keeps all checkpoints" in reason for reason in reasons)


def test_hundreds_of_checkpoints(tmp_path):
    run = tmp_path / "run"
    save_of(run / "checkpoint-1", step=1)
    for step in range(2, 301):
        folder = shutil.copytree(run / "checkpoint-1", run / f"checkpoint-{step}")
        rewrite_manifest(folder, lambda document, step=step: document.update(step=step))
    answer = run_command("report", run, "-o", tmp_path / "page.html", "--drift", 0)
    assert answer.code == 0
    page = page_of((tmp_path / "page.html").read_text())
    assert [int(row["step"]) for row in page.table_rows("Checkpoints")] == [*range(300, 0, -1)]
    assert len(page.rows["Checkpoints, newest first"]) == 1 + 20, "the others are folded away"


def test_thousands_of_points_keep_their_extremes(copied, tmp_path):
    losses = {step: 1 + step % 7 / 100 for step in range(19, 5019)}
    losses |= {1234: 9.0, 3456: -5.0}
    log_as(copied, [logged(step, loss=loss) for step, loss in losses.items()])
    page = reported(copied, tmp_path)
    drawn = [title for title in page.titles if title.startswith("loss ")]
    assert {"loss 9.000, step 1234, deleted", "loss -5.000, step 3456, deleted"} <= {*drawn}
    assert 100 < len(drawn) < 500
    assert re.search(
        r"\d{3} of 5004 points, with the lowest and highest", (tmp_path / "page.html").read_text()
    )


def test_a_thinned_curve_has_the_range_of_each_interval():
    marks = [Mark(x, math.sin(x * 12.9898) * x, str(x), is_hollow=True) for x in range(4000)]
    drawn = thinned(marks)
    assert len(drawn) <= 400
    for start in range(0, 4000, 40):
        group = [mark.y for mark in marks if start <= mark.x < start + 39]
        near = [mark.y for mark in drawn if start - 40 <= mark.x < start + 80]
        assert min(near) <= min(group)
        assert max(near) >= max(group)


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\x1b[31mred",
    "\u202eback",
    "&amp;",
    "x" * 300,
)


def test_hostile_names_are_text(copied, tmp_path):
    values = dict.fromkeys(HOSTILE, 1.0)
    log_as(copied, [logged(step, **values) for step in (3, 6)])
    rewrite_manifest(
        copied / "checkpoint-18",
        lambda document: document.update(metrics=values, rankings={HOSTILE[0]: "min"}),
    )
    page = reported(copied, tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not any(
        attribute.startswith("on") for _, attributes in page.tags for attribute in attributes
    )
    assert all(character.isprintable() or character == "\n" for character in text)
    for name in HOSTILE[:4]:
        shown = name.encode("unicode_escape").decode() if not name.isprintable() else name
        assert f"{shown} 1.000, step 3, deleted" in page.titles


def test_values_that_are_not_finite_are_named(copied, tmp_path):
    log_as(
        copied,
        [
            logged(3, loss="nan"),
            logged(6, loss="inf"),
            logged(9, loss="-inf"),
            logged(12, loss=1e308),
        ],
    )
    page = reported(copied, tmp_path)
    titles = [title for title in page.titles if title.startswith("loss ")]
    assert titles[0] == "loss nan, step 3, deleted"
    drawing = (tmp_path / "page.html").read_text()
    assert "NaN" not in drawing
    numbers = re.findall(r' (?:[xyr]|c[xy]|height|width)="([^"]+)"', drawing)
    assert all(math.isfinite(float(number.rstrip("%"))) for number in numbers)


def test_a_bucket(run, tmp_path):
    url = str(in_bucket(run))
    cli.run_command(["report", url, "-o", str(tmp_path / "page.html")])
    page = page_of((tmp_path / "page.html").read_text())
    assert html.escape(url) in (tmp_path / "page.html").read_text()
    assert page.table_rows("Checkpoints")[0]["name"] == "final"


def test_no_secret_reaches_the_page(run):
    facts = gather_facts(open_place(run), ("loss",), comparisons=0)
    secret = "https://user:hunter2@example.org/base?token=abc123"
    (model,) = facts.models
    text = page_text(replace(facts, run=f"{secret}/run", models=(replace(model, base=secret),)))
    assert "hunter2" not in text
    assert "abc123" not in text


@pytest.mark.parametrize(
    ("values", "is_log"),
    [
        ([0.01, 10.0], False),
        ([1.0, 2.0, 3.0, 4.0, 5.0], False),
        ([0.01, 0.1, 1.0, 2.0, 3.0], True),
        ([0.0, 0.1, 1.0, 20.0, 300.0], False),
        ([-1.0, 0.1, 1.0, 20.0, 300.0], False),
    ],
)
def test_a_scale_is_linear_unless_the_range_needs_another(values, is_log):
    axis = value_axis(values)
    assert axis.is_log is is_log
    shares = [axis.position_of(value) for value in values]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1


@pytest.mark.parametrize(
    "values", [[], [3.0], [0.0, 0.0], [1e-320], [1e300, -1e300], [1.0, 1 + 2e-16], [math.nan, 2.0]]
)
def test_every_range_has_a_scale(values):
    axis = value_axis(values)
    assert axis.low <= axis.high
    assert all(map(math.isfinite, (*axis.ticks, axis.low, axis.high)))


def test_text_is_readable_in_both_schemes():
    """WCAG 2.1 AA: 4.5 for text, 3 for lines and marks."""
    for scheme in re.findall(r":root \{([^}]+)\}", PAGE_STYLE):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for ground in ("page", "card"):
            ratios = {name: contrast(colours[name], colours[ground]) for name in colours}
            assert all(ratios[name] >= 4.5 for name in ("text", "muted", "good", "bad", "first")), (
                ratios
            )
            assert all(ratios[name] >= 3 for name in ("second", "third")), ratios


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    ]
    return sum(
        weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )


# States that say what they cannot, and saves that failed


@pytest.mark.parametrize(
    "wrong", [{"keep": {"last": 2}}, {"history": {"saves": [3]}}, {"keep": {"odd": 1}}]
)
def test_a_state_that_says_what_it_cannot_is_an_error_of_ours(run, wrong, monkeypatch):
    known = read_document(
        LocalStore(run / "checkpoint-18"), read_manifest(open_place(run / "checkpoint-18"))
    )
    monkeypatch.setattr("ft_ckpt.cli.report.gathering.read_document", lambda *_: known | wrong)
    with pytest.raises(CheckpointError):
        gather_facts(open_place(run), (), comparisons=0)


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
    saves = gather_facts(open_place(tmp_path), (), comparisons=0).saves
    assert [(each.step, each.seconds is None) for each in saves] == [(1, False), (3, True)]


def fail(*_):
    raise TargetError("no such disk")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
@pytest.mark.parametrize("width", [390, 800, 1440])
def test_a_browser_shows_all_of_it_and_loads_nothing(copied, tmp_path, width):
    """The page stands in a frame of this width, which reports what it needs and what it has
    loaded.
    """
    rewrite_manifest(
        copied / "checkpoint-18", lambda document: document["metrics"].update({"long" * 60: 1.0})
    )
    reported(copied, tmp_path)
    frame = html.escape((tmp_path / "page.html").read_text())
    measure = """
        const frame = document.querySelector("iframe");
        const page = frame.contentDocument, root = page.documentElement;
        const loaded = frame.contentWindow.performance.getEntriesByType("resource");
        const texts = [...page.querySelectorAll("p, dd, h1, h2, figcaption")];
        const clipped = texts.filter(text => text.scrollWidth > text.clientWidth);
        const dark = getComputedStyle(page.body).backgroundColor;
        document.title = JSON.stringify([root.scrollWidth, loaded.length, clipped.length, dark]);
    """
    style = f"border: 0; height: 900px; width: {width}px"
    outer = f"""<title></title><iframe style="{style}" srcdoc="{frame}"></iframe>
        <script>window.onload = () => {{ {measure} }}</script>"""
    (tmp_path / "frame.html").write_text(outer)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    grounds = set()
    for scheme in (0, 1):
        look = f"--blink-settings=preferredColorScheme={scheme}"
        command = ["chromium", *flags, look, "--dump-dom", (tmp_path / "frame.html").as_uri()]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        measured = re.search(r"<title>(.*?)</title>", answer.stdout)[1]
        *sizes, ground = json.loads(measured)
        assert sizes == [width, 0, 0]
        grounds.add(ground)
    assert len(grounds) == 2, "each scheme has its colours"
