"""What every command promises: exit code, JSON, help, refusals, output without secrets or escapes.

`CASES` has a row for each command. What only one command does is tested in a file of its own.
"""

import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from buckets import in_bucket, new_bucket
from commands import Answer, ft_ckpt, ft_ckpt_alone, problems_in
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hostile_text import Trial, listening, put_mark, trials_in
from peft import LoraConfig, get_peft_model
from places import ROOT
from seeds import chosen_seed
from small_checkpoints import save

import ft_ckpt as library
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.checkpoint.leases import pin
from ft_ckpt.cli import COMMANDS
from ft_ckpt.storage.places import open_place

WRONG = (
    *("absent", "absent in a bucket", "file", "model", "trainer output"),
    *("truncated model", "truncated checkpoint", "runs"),
)
CUT = {"truncated checkpoint": 2}
FOLDERS = ("model", "trainer output", "truncated model", "truncated checkpoint", "runs")


@dataclass(frozen=True)
class Case:
    """How a command is called on the prepared places, and its answers."""

    words: str  # "": it is not called here
    keys: str = ""  # of its JSON document, or of each row; "": no --json
    code: int = 0
    more: tuple[str, ...] = ()  # further calls on hostile checkpoints
    wrong: str = "{x}"  # the call with {x} for a place that has something else
    codes: dict[str, int] = field(default_factory=dict)  # for such places, where it is not 2
    is_light: bool = False  # imports no library that is slow to import
    reads_buckets: bool = False  # gives the same answer for a run in a bucket


PLANNED = "--step-time 1 --save-time 9 --mtbf 1d"
CONVERTED = "bytes casts format notes path seconds skipped tensors verified"
CASES = {
    "ls": Case(
        "{run} --metrics",
        "adapter best bytes created kept kind metrics parts path pinned problems state step valid",
        more=("{run}",),
        codes=dict.fromkeys(FOLDERS, 0),
        is_light=True,
        reads_buckets=True,
    ),
    "show": Case(
        "{newest}",
        "created delta export files format_version kind made_from metrics models notes number "
        "parts path rankings run_id shared step token versions world",
        more=("{newest}/model-00001-of-00002.safetensors", "{adapter}"),
        codes={"model": 0, "truncated checkpoint": 0},
        is_light=True,
        reads_buckets=True,
    ),
    "latest": Case(
        "{run}",
        "created path step",
        codes=dict.fromkeys(("absent", "absent in a bucket", *FOLDERS), 1),
        is_light=True,
        reads_buckets=True,
    ),
    "best": Case(
        "{run} --metric loss:min",
        "created path step",
        codes=dict.fromkeys(("absent", "absent in a bucket", *FOLDERS), 1) | CUT,
        is_light=True,
        reads_buckets=True,
    ),
    "diff": Case(
        "{older} {newest}",
        "a b counts layers settings tensors",
        code=1,
        more=("{newest} {older}", "{adapter} {adapter}"),
        wrong="{x} {good}",
        codes={"model": 1},
        reads_buckets=True,
    ),
    "report": Case(
        "{run} -o {out}/page.html --drift 1",
        "checkpoints disk_bytes drift metrics models notes rankings rules run saves training",
        wrong="{x} -o {out}.html --drift 0",
        reads_buckets=True,
    ),
    "verify": Case(
        "{run}",
        "bytes files notes ok path problems",
        more=("{newest} --fast", "{newest}/config.json", "{adapter}"),
        codes={"model": 0, "trainer output": 0, "truncated model": 1, "truncated checkpoint": 1},
        is_light=True,
        reads_buckets=True,
    ),
    "sign": Case("{newest} --key {key}", "path signature", wrong="{x} --key {out}.pem"),
    "check-resume": Case("", more=("{newest}/config.json",)),  # has its own tests
    "doctor": Case(
        "{run}",
        "abilities dangers free_bytes mount place safe sharing",
        codes=dict.fromkeys(("absent in a bucket", *FOLDERS), 0),
    ),
    "plan": Case(
        f"{{run}} {PLANNED}",
        "hours keep_last max_overhead measured mtbf_seconds optimum_steps restart_seconds rows "
        "save_seconds size_bytes step_seconds",
        more=(f"{{adapter}} {PLANNED}",),
        wrong=f"{{x}} {PLANNED}",
        codes={"model": 0, "truncated model": 0, "truncated checkpoint": 0},
        is_light=True,
        reads_buckets=True,
    ),
    "prune": Case(
        "{run} --last 1 --dry-run",
        "dropped dry_run freed_bytes kept left path problems stripped",
        more=("{run} --every 7 --dry-run",),
        wrong="{x} --last 1 --dry-run",
        is_light=True,
    ),
    "pin": Case("{newest} --reason x", codes={"truncated checkpoint": 0}, is_light=True),
    "unpin": Case("{newest}", codes={"truncated checkpoint": 1}, is_light=True),
    "cp": Case(
        "{newest} {out}/copy",
        "bytes files is_new path reused seconds sent_bytes source",
        wrong="{x} {out}",
    ),
    "sync": Case(
        "{run} {out}/runs",
        "copied dropped kept missing present problems stripped",
        more=("{run} {out}/dry --dry-run",),
        wrong="{x} {out}",
    ),
    "push": Case(
        "{newest} {bucket}",
        "bytes commit_url deleted files is_new notes oid path repo_id seconds url",
        wrong="{x} memory://wrong/pushed",
    ),
    "pull": Case(
        "{stored} {out}/pulled",
        "bytes files oid path seconds url verified",
        more=("{bucket}",),
        wrong="{x} {out}",
    ),
    "convert": Case(
        "{newest} {out}/converted",
        CONVERTED,
        more=("{newest} {out}/one.h5", "{adapter} {out}/adapter"),
        wrong="{x} {out}",
        codes={"model": 0},
    ),
    "merge": Case(
        "{adapter} {out}/merged --base {base}",
        CONVERTED,
        wrong="{x} {out}",
    ),
    "average": Case(
        "{older} {newest} {out}/average",
        CONVERTED,
        wrong="{x} {x} {out}",
        codes={"model": 0},
    ),
    "export": Case("{adapter} {out}/exported --for vllm", CONVERTED, wrong="{x} {out} --for vllm"),
    "publish": Case(
        "{newest} {out}/chain --delta",
        "kind name path seconds servers version",
        wrong="{x} http://127.0.0.1:9",
    ),
    "check-for": Case(
        "vllm {adapter}",
        "engine findings path",
        wrong="vllm {x}",
        codes={"model": 1},
    ),
    "watch": Case(
        "{run} --idle 0 -- stat -c %s {{path}}/config.json",
        "metrics path seconds",
        wrong="{x} --idle 0 -- true {{path}}",
        codes={"absent": 0, "absent in a bucket": 0},
    ),
}
RUN, ADAPTER = "run/checkpoint-2", "adapter"
REPORTED = ("ft_ckpt.json", "state/training.json")  # the files that `report` reads
CALLED = [name for name, case in CASES.items() if case.words]
EXCEPTION = re.compile(r"\b[A-Z][a-zA-Z]*(?:Error|Exception|Warning)\b")
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/cli.md")}
WITH_KEYS = (
    "s3://AKIA:S3CRET@bucket/run",
    "s3://AKIA:S3/CR+ET@bucket/run",
    "gs://bucket/run?X-Goog-Signature=S3CRET",
    "az://container/run?sv=1&sig=S3CRET",
    "hf://user:S3CRET@user/name",
    "hf://user/name?token=S3CRET",
)
SLOW = {"torch", "transformers", "numpy", "accelerate", "peft", "safetensors", "typer", "pydantic"}
LOADED = """
import json, sys
from contextlib import suppress
from ft_ckpt.cli import run_command
for words in json.loads(sys.argv[1]):
    with suppress(SystemExit):
        run_command(words)
    print(words[0], *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""
Places = dict[str, Any]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A run of two sharded checkpoints with state, an adapter, its base, and a key."""
    folder = tmp_path_factory.mktemp("prepared")
    model = models.build("llama")
    model.save_pretrained(folder / "base")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keep = Keep(last=9, best=("loss", "min"))
    saver = CheckpointSaver(
        None,
        folder / "run",
        tokenizer=models.tokenizer(),
        keep=keep,
        max_shard_size=40_000,
    )
    saver.register(model=model, optimizer=optimizer)
    for loss in (2.0, 1.0):
        model(**models.batch(1)).loss.backward()
        optimizer.step()
        saver.step()
        saver.save_state(metrics={"loss": loss})
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(models.build("llama"), config)
    CheckpointSaver().save(adapted, folder / ADAPTER, adapter_only=True)
    pin(open_place(folder / RUN), "kept")
    lease = '{"host": "x", "pid": 1, "machine": null}'
    (folder / RUN / ".ft_ckpt-lease-x-1-00000000").write_text(lease)
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "key.pem").write_bytes(key)
    return folder


def copied(prepared: Path, folder: Path) -> Places:
    """The words for the prepared places, with copies of run and adapter in `folder`."""
    for name in ("run", ADAPTER):
        shutil.copytree(prepared / name, folder / name)
    (folder / "out").mkdir()
    bucket = new_bucket().url
    return {
        "run": folder / "run",
        "newest": folder / RUN,
        "older": folder / "run" / "checkpoint-1",
        "adapter": folder / ADAPTER,
        "base": prepared / "base",
        "key": prepared / "key.pem",
        "out": folder / "out",
        "bucket": bucket,
        "stored": bucket,
    }


@pytest.fixture
def places(prepared, tmp_path, monkeypatch) -> Places:
    monkeypatch.setenv("FT_CKPT_CACHE", str(tmp_path / "cache"))
    places = copied(prepared, tmp_path)
    return {**places, "stored": in_bucket(places["newest"])}


@pytest.fixture(scope="module")
def wrong_folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("wrong")
    good = root / "runs" / "a" / "checkpoint-1"
    save(good, step=1)
    shutil.copytree(good, root / "model")
    (root / "model" / "ft_ckpt.json").unlink()
    config = {"architectures": ["Tiny"], "model_type": "llama"}
    (root / "model" / "config.json").write_text(json.dumps(config))
    shutil.copytree(root / "model", root / "output" / "checkpoint-2")
    (root / "output" / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2}')
    shutil.copytree(root / "model", root / "cut-model")
    shutil.copytree(good, root / "cut-checkpoint")
    for name in ("cut-model", "cut-checkpoint"):
        file = root / name / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
    return root


@pytest.fixture
def wrong_places(wrong_folder, tmp_path) -> Places:
    """Places that are not what a command takes, by name, and a checkpoint that is."""
    root = shutil.copytree(wrong_folder, tmp_path / "wrong")
    bucket = new_bucket()
    bucket.write("other", b"")
    paths = ("model/config.json", "model", "output", "cut-model", "cut-checkpoint", "runs")
    absent = (root / "absent", bucket.where("absent"))
    return {
        "good": root / "runs" / "a" / "checkpoint-1",
        **dict(zip(WRONG, [*absent, *(root / path for path in paths)], strict=True)),
    }


def call(name: str, words: str, places: Places, *options: str, encoding: str = "utf-8") -> Answer:
    """Run the command `name`; `words` contain names of `places`."""
    return ft_ckpt(name, *options, *words_of(words, places), encoding=encoding)


def words_of(words: str, places: Places) -> list[str]:
    return [word.format(**places) for word in words.split()]


def call_wrongly(name: str, place: object, out: Path, *options: str, good: object = "x") -> Answer:
    return call(name, CASES[name].wrong, {"x": place, "good": good, "out": out}, *options)


def check_refused(answer: Answer, *reasons: str) -> None:
    """Check that a command has ended with one line that says what to do."""
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer
    assert answer.err.startswith("ft-ckpt: ")
    assert EXCEPTION.search(answer.err) is None
    assert [reason for reason in reasons if reason not in answer.err] == []


called = pytest.mark.parametrize("name", CALLED)
every = pytest.mark.parametrize("name", CASES)


def test_each_command_has_a_case():
    assert list(CASES) == list(COMMANDS)


class TestAnswers:
    @called
    def test_a_text_that_any_terminal_shows(self, name, places):
        answer = call(name, CASES[name].words, places, encoding="ascii")
        assert (answer.code, answer.err) == (CASES[name].code, "")
        assert answer.out
        assert problems_in(answer.out) == []

    @pytest.mark.parametrize("name", [name for name in CALLED if CASES[name].keys])
    def test_a_document_with_its_keys(self, name, places):
        answer = call(name, CASES[name].words, places, "--json")
        assert (answer.code, answer.err) == (CASES[name].code, "")
        assert answer.rows
        for row in answer.rows:
            assert sorted(row) == CASES[name].keys.split()

    @pytest.mark.parametrize("option", [(), ("--json",)], ids=["text", "json"])
    @pytest.mark.parametrize("name", [name for name in CALLED if CASES[name].reads_buckets])
    def test_the_same_for_a_run_in_a_bucket(self, name, option, places):
        run = in_bucket(places["run"])
        stored = {"run": run, "newest": f"{run}/checkpoint-2", "older": f"{run}/checkpoint-1"}
        local = call(name, CASES[name].words, places, *option)
        remote = call(name, CASES[name].words, {**places, **stored}, *option)
        ages = re.compile(r"\b\d+ s\b")
        text = remote.out.replace(str(run), str(places["run"]))
        assert local.out
        assert (local.code, ages.sub("now", local.out)) == (remote.code, ages.sub("now", text))

    def test_none_imports_what_it_does_not_need(self, prepared, tmp_path):
        """One fresh interpreter runs them all; the help needs no tables either."""
        places = copied(prepared, tmp_path)
        light = [name for name in CALLED if CASES[name].is_light]
        calls = [["--help"], *([name, "--help"] for name in (*light, "diff"))]
        calls.append(["verify", str(places["base"])])
        calls.append(["plan", "--model-size", "1MB", *PLANNED.split()])
        calls += [[name, *words_of(CASES[name].words, places)] for name in light]
        answer = ft_ckpt_alone(json.dumps(calls), code=LOADED)
        assert answer.code == 0
        reports = [line.split() for line in answer.err.splitlines()]
        assert len(reports) == len(calls)
        for words, (command, *modules) in zip(calls, reports, strict=True):
            is_help = words[-1] == "--help"
            assert "ft_ckpt" in modules
            assert command == words[0]
            assert not SLOW & set(modules), words
            assert not (is_help and "rich" in modules), words


class TestHelp:
    @every
    def test_it_names_what_the_pages_name(self, name):
        answer = ft_ckpt(name, "--help")
        assert (answer.code, answer.err) == (0, "")
        assert ft_ckpt(name, "-h") == answer
        assert max(map(len, answer.out.splitlines())) <= 80
        for option in options_on_pages(name):
            assert option in answer.out
        described = re.search(rf"`{name}((?: [^`]*)?)`", PAGES["docs/cli.md"])
        assert described is not None
        usage = answer.out.splitlines()[0].split()
        for word in described[1].split():
            assert word in usage or f"[{word}]" in usage

    @every
    def test_what_its_section_names_is_there(self, name):
        sections = re.findall(r"^### (.*)\n((?:(?!^#).*\n)*)", PAGES["docs/cli.md"], re.MULTILINE)
        commands = {heading: re.split(r", | and ", heading) for heading, _ in sections}
        ((heading, text),) = [section for section in sections if name in commands[section[0]]]
        mentioned = {*commands[heading], *re.findall(r"`ft-ckpt ([a-z-]+)", text)}
        help_of_all = "".join(ft_ckpt(command, "--help").out for command in mentioned)
        for option in re.findall(r"`(--[a-z-]+)", text):
            assert option in help_of_all

    @every
    def test_all_but_pins_take_json(self, name):
        takes = "--json" in ft_ckpt(name, "--help").out
        assert takes == (name not in ("pin", "unpin"))
        assert bool(CASES[name].keys) == (takes and name in CALLED)


def options_on_pages(name: str) -> Iterator[str]:
    """The options in the calls of a command on the pages."""
    for text in PAGES.values():
        for words in re.findall(rf"ft-ckpt {name} ([^`\n]*)", text):
            its_own = re.split(r" -- |\.py", words)[0]
            yield from re.findall(r"(?<!\S)--[a-z-]+", its_own)


class TestRefusals:
    @every
    def test_an_unknown_option_and_no_arguments(self, name, tmp_path):
        answer = call_wrongly(name, "x", tmp_path, "--jsn")
        suggestion = "" if name in ("pin", "unpin") else " did you mean --json? See"
        advice = f"`ft-ckpt {name} --help`"
        check_refused(answer, f"ft-ckpt: {name}: --jsn: no such option;{suggestion}", advice)
        check_refused(ft_ckpt(name), f"ft-ckpt: {name}: expected ", advice)

    @pytest.mark.parametrize("wrong", WRONG)
    @called
    def test_a_place_that_holds_something_else(self, name, wrong, wrong_places, tmp_path):
        place, good = wrong_places[wrong], wrong_places["good"]
        answer = call_wrongly(name, place, tmp_path / "out", good=good)
        code = CASES[name].codes.get(wrong, 2)
        assert answer.code == code, answer
        if code == 2:
            check_refused(answer)
            assert re.search(r"; |expected |: truncated", answer.err), "what to do, or expected"
        assert EXCEPTION.search(answer.out + answer.err) is None

    @called
    def test_places_of_other_kinds(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        check_refused(call_wrongly(name, "ftp://bucket/run", Path("out")), "ftp://")
        if name not in ("push", "pull", "cp"):
            answer = call_wrongly(name, "hf://buckets/user/name/run", Path("out"))
            check_refused(answer, "AWS_ENDPOINT_URL")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("url", WITH_KEYS)
    @called
    def test_a_url_with_keys(self, name, url, tmp_path, monkeypatch):
        """It is nowhere repeated, and nothing is made of it."""
        monkeypatch.chdir(tmp_path)
        with listening() as records:
            answer = call_wrongly(name, url, Path("out"))
        check_refused(answer)
        for text in (answer.err, *records):
            assert problems_in(text) == []
            assert "CR+ET" not in text
        assert list(tmp_path.iterdir()) == []


class TestHostileText:
    """Commands and functions on marked checkpoints: no escape, secret or forged line gets out."""

    def test_one_field(self, prepared, tmp_path, monkeypatch):
        monkeypatch.setenv("FT_CKPT_CACHE", str(tmp_path / "cache"))
        trials = random.Random(chosen_seed()).sample(trials_in(prepared, (RUN, ADAPTER)), 1)
        assert campaign(prepared, trials, tmp_path) == {}

    @pytest.mark.slow
    def test_each_field_in_turn(self, prepared, tmp_path, monkeypatch):
        monkeypatch.setenv("FT_CKPT_CACHE", str(tmp_path / "cache"))
        assert campaign(prepared, trials_in(prepared, (RUN, ADAPTER)), tmp_path) == {}


def campaign(prepared: Path, trials: list[Trial], folder: Path) -> dict[Trial, list[str]]:
    """The problems of each trial that has some."""
    problems = {}
    for number, trial in enumerate(trials):
        work = folder / f"{number}"
        if texts := list(problems_of(prepared, trial, work)):
            problems[trial] = texts
        shutil.rmtree(work)
    print(f"{len(trials)} trials, {len(problems)} with problems")
    return problems


def problems_of(prepared: Path, trial: Trial, work: Path) -> Iterator[str]:
    """What is wrong with the output of commands and functions after a trial's mark was put."""
    places = copied(prepared, work)
    marked = put_mark(work / trial.root, trial)
    if trial.root == RUN:
        places["newest"] = marked
    else:
        places["adapter"] = marked
    subjects = "{adapter}" if trial.root == ADAPTER else ("{newest}", "{run}")
    for name, case in CASES.items():
        if name == "report" and trial.place and trial.file not in REPORTED:
            continue  # drawing takes three seconds
        for words in (case.words, *case.more):
            if any(word.startswith(subjects) for word in words.split()):
                for problem in problems_of_call(name, words, places):
                    yield f"{name}: {problem}"
    page = places["out"] / "page.html"
    if page.exists():
        yield from (f"page: {problem}" for problem in problems_in(page.read_text()))
        if "<script" in page.read_text():
            yield "page: a script"
    if trial.root == RUN:
        yield from problems_of_functions(marked, places["out"])


def problems_of_call(name: str, words: str, places: Places) -> Iterator[str]:
    """The problems of a command's text, and of its JSON, whose values are exact but for secrets."""
    for option in [(), ("--json",)] if CASES[name].keys else [()]:
        answer = call(name, words, places, *option)
        yield from problems_in(answer.out)
        yield from problems_in(answer.err)
        if answer.err.startswith("Traceback"):
            yield f"a crash: {answer.err}"
        if option and answer.out and not answer.rows:
            yield "no rows in its JSON"


def problems_of_functions(marked: Path, out: Path) -> Iterator[str]:
    """What is wrong with errors, warnings and records of public functions, each after its name."""
    run = marked.parent
    calls = {
        "latest": lambda: library.latest(run),
        "best": lambda: library.best(run, ("loss", "min")),
        "verify": lambda: library.verify(marked),
        "load_model": lambda: library.load_model(marked),
        "load": lambda: library.load(marked / "model-00001-of-00002.safetensors"),
        "copy": lambda: library.copy(marked, out / "copied"),
        "resume": lambda: resume_in(run),
    }
    for name, function in calls.items():
        with listening() as texts:
            try:
                function()
            except Exception as error:
                is_ours = isinstance(error, library.errors.CheckpointError)
                texts.append(str(error) if is_ours else repr(error))
                texts += [argument for argument in error.args if isinstance(argument, str)]
        for text in texts:
            yield from (f"{name}(): {problem}" for problem in problems_in(text, lines=False))


def resume_in(run: Path) -> None:
    model = models.build("llama")
    with CheckpointSaver(None, run, on_failure="warn") as saver:
        saver.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
        saver.resume(allow=["model"])
