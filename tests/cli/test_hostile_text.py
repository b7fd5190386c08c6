"""Every command and public function on checkpoints that hold terminal escapes and secrets, in each of their fields.

A trial puts a mark into one field (of a manifest, a config, a tokenizer, an index, a training state, a safetensors
header), into the name of a file or folder, or into a pin or a lease. What is printed, logged, warned of and raised must
have no control character and no secret, and no line that the mark has made.
"""

import contextlib
import io
import json
import logging
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from buckets import new_bucket
from seeds import chosen_seed
from small_checkpoints import edit, rewrite_manifest

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.checkpoint import guards
from ft_ckpt.cli import main

NAME_MARK = "\x1b]0;own\x07\x7f\u202e\r\nforged: ok\udc9b?sig=S3CRET"
MARK = f"\x9b31m\u2028{NAME_MARK}&X-Amz-Credential=S3CRET <script>alert(1)</script>[/red] $\\x https://u:S3CRET@h/p"
RUN, ADAPTER = "run/checkpoint-2", "adapter"
COMMANDS = {
    RUN: [
        *("ls {run}", "ls {run} --metrics --json", "latest {run}", "best {run} --metric loss:min --json"),
        *("show {it}", "show {it} --json", "show {it}/model-00001-of-00002.safetensors", "verify {run}"),
        *("verify {it} --fast --json", "verify {it}/config.json", "diff {other} {it}", "diff {it} {other} --json"),
        *("report {run} -o {out}/page.html --drift 1", "report {run} --json --drift 1", "convert {it} {out}/converted"),
        *("convert {it} {out}/one.h5 --json", "average {other} {it} {out}/average", "cp {it} {out}/copy"),
        *("sync {run} {out}/runs --dry-run", "sync {run} {out}/runs --json", "push {it} {bucket}", "pull {bucket}"),
        *("prune {run} --last 1 --dry-run", "prune {run} --every 7 --dry-run --json", "pin {it} --reason x"),
        *("unpin {it}", "plan {run} --step-time 1 --save-time 9 --mtbf 1d", "check-resume {it}/config.json"),
    ],
    ADAPTER: [
        *("show {it}", "show {it} --json", "verify {it}", "merge {it} {out}/merged --base {base}"),
        *("diff {it} {it}", "convert {it} {out}/converted", "plan {it} --step-time 1 --save-time 9 --mtbf 1d"),
    ],
}
Trial = tuple[str, str, tuple[Any, ...], str]  # folder, file, place in its JSON, what becomes of that


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run of two sharded checkpoints with state, an adapter, and its base."""
    folder = tmp_path_factory.mktemp("hostile")
    model = models.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keep = Keep(last=9, best=("loss", "min"))
    saver = CheckpointSaver(None, folder / "run", tokenizer=models.tokenizer(), keep=keep, max_shard_size=40_000)
    saver.register(model=model, optimizer=optimizer)
    for loss in (2.0, 1.0):
        model(**models.batch(1)).loss.backward()
        optimizer.step()
        saver.step()
        saver.save_state(metrics={"loss": loss})
    CheckpointSaver().save(models.build("lora"), folder / ADAPTER, adapter_only=True)
    guards.pin(folder / RUN, "kept")
    (folder / RUN / ".ft_ckpt-lease-x-1-00000000").write_text('{"host": "x", "pid": 1, "machine": null}')
    models.build("qwen3").save_pretrained(folder / "base")
    return folder


def trials_in(made: Path) -> list[Trial]:
    """One for each field and each file; of those that only numbers or names of tensors tell apart, one."""
    found = all_trials(made)
    random.Random(chosen_seed()).shuffle(found)
    kinds = {}
    for root, name, place, how in found:
        kind = re.sub(r"\d+|'[^']*[./][^']*'", "*", repr(place))
        kinds[root, re.sub(r"\d+-of", "*", name), kind, how] = (root, name, place, how)
    return sorted(kinds.values(), key=repr)


def all_trials(made: Path) -> list[Trial]:
    found: list[Trial] = []
    for root in COMMANDS:
        for path in sorted(path for path in (made / root).rglob("*") if path.is_file()):
            name = path.relative_to(made / root).as_posix()
            found += [(root, name, (), how) for how in ("renamed", "renamed on the disk alone", "copied beside")]
            document = read_json(path)
            if document is not None:
                found += [(root, name, place, how) for place, how in fields_of(document)]
            else:
                found.append((root, name, (), "text"))
        found += [(root, name, (), "folder") for name in ("renamed", "beside")]
    return found


def read_json(path: Path) -> Any:
    """The JSON in a file, or in the header of a safetensors file; None where there is none."""
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    is_json = path.suffix == ".json" or path.name.startswith(".")
    return json.loads(path.read_text()) if is_json else None


def fields_of(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """The fields of a JSON value."""
    if place:
        yield place, "value"
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys:
            if isinstance(value, dict):
                yield (*place, key), "key"
            yield from fields_of(value[key], (*place, key))


def marked(value: Any, place: tuple[Any, ...], how: str) -> Any:
    """The JSON value with the mark at a place of it."""
    if not place:
        return f"{value}{MARK}" if isinstance(value, str) else MARK
    key, *rest = place
    if isinstance(value, list):
        return [marked(each, tuple(rest), how) if number == key else each for number, each in enumerate(value)]
    if rest or how == "value":
        return {name: marked(each, tuple(rest), how) if name == key else each for name, each in value.items()}
    return {f"{name}{MARK}" if name == key else name: each for name, each in value.items()}


def put_mark(folder: Path, trial: Trial) -> Path:
    """Put the mark into the checkpoint `folder`, and let its manifest vouch for it; where it is now."""
    _, name, place, how = trial
    path = folder / name
    if how == "folder":
        goal = folder.with_name(folder.name + NAME_MARK)
        return folder.rename(goal) if name == "renamed" else Path(shutil.copytree(folder, goal) and folder)
    if how == "copied beside":
        shutil.copy(path, f"{path}{NAME_MARK}")
    elif how.startswith("renamed"):
        path.rename(f"{path}{NAME_MARK}")
        if how == "renamed" and name != "ft_ckpt.json":
            rewrite_manifest(folder, lambda document: rename_all(document, name))
    elif how == "text":
        write_listed(folder, name, os.fsencode(MARK))
    elif name == "ft_ckpt.json":
        rewrite_manifest(folder, lambda document: replace_all(document, marked(dict(document), place, how)))
    elif path.suffix != ".safetensors":
        write_listed(folder, name, json.dumps(marked(read_json(path), place, how)).encode())
    else:
        header = json.dumps(marked(read_json(path), place, how)).encode()
        data = path.read_bytes()
        rest = data[8 + int.from_bytes(data[:8], "little") :]
        write_listed(folder, name, len(header).to_bytes(8, "little") + header + rest)
    return folder


def write_listed(folder: Path, name: str, data: bytes) -> None:
    (folder / name).unlink(missing_ok=True)
    if name.startswith("."):
        (folder / name).write_bytes(data)
    else:
        edit(folder, name, data)


def rename_all(document: dict[str, Any], name: str) -> None:
    for file in document["files"]:
        file["path"] += NAME_MARK if file["path"] == name else ""
    for part in document["parts"]:
        for tensor in part["tensors"]:
            tensor["file"] += NAME_MARK if tensor["file"] == name else ""


def replace_all(document: dict[str, Any], other: dict[str, Any]) -> None:
    document.clear()
    document.update(other)


class Listener(logging.Handler):
    """Keeps the records of our loggers, as a formatter would show them."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(self.format(record))


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Messages of log records and of warnings while the block runs."""
    listener, logger = Listener(), logging.getLogger("ft_ckpt")
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield listener.heard
        listener.heard += [str(each.message) for each in caught if "ft_ckpt" in str(each.filename)]
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def run_command(words: list[str]) -> tuple[str, list[str]]:
    """What a command prints in this process, and what is wrong with it."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    shown, hook, argv = warnings.showwarning, sys.excepthook, sys.argv
    sys.argv = ["ft-ckpt", *words]
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]), warnings.catch_warnings():
            warnings.simplefilter("always")
            try:
                main()
            except SystemExit:
                pass
            except Exception:
                sys.excepthook(*sys.exc_info())
    finally:
        warnings.showwarning, sys.excepthook, sys.argv = shown, hook, argv
    out, err = (decoded(stream) for stream in streams)
    problems = [*problems_in(out), *problems_in(err)]
    if "--json" in words and out:
        json.loads(out)
    return out, problems


def decoded(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode("utf-8", "surrogateescape")  # type: ignore[attr-defined]


def problems_in(text: str, *, lines: bool = True) -> list[str]:
    """What a terminal or a log must not get."""
    controls = {one for one in text if not one.isprintable() and not (lines and one == "\n")}
    found = [f"{one!r} printed" for one in sorted(controls)]
    found += ["a secret printed"] if "S3CRET" in text else []
    return found + (["a line forged"] if any(line.startswith("forged") for line in text.split("\n")) else [])


def call_functions(it: Path, out: Path) -> Iterator[tuple[str, list[str]]]:
    """Each public function by its name, and what is wrong with its errors, warnings and records."""
    run = it.parent
    calls = {
        "latest": lambda: ft_ckpt.latest(run),
        "best": lambda: ft_ckpt.best(run, ("loss", "min")),
        "verify": lambda: ft_ckpt.verify(it),
        "load_model": lambda: ft_ckpt.load_model(it),
        "load": lambda: ft_ckpt.load(it / "model-00001-of-00002.safetensors"),
        "copy": lambda: ft_ckpt.copy(it, out / "copied"),
        "resume": lambda: resume_in(run),
    }
    for name, call in calls.items():
        with listening() as heard:
            try:
                call()
            except Exception as error:
                heard.append(str(error) if isinstance(error, ft_ckpt.errors.CheckpointError) else repr(error))
                heard += [each for each in error.args if isinstance(each, str)]
        yield name, [problem for text in heard for problem in problems_in(text, lines=False)]


def resume_in(run: Path) -> None:
    model = models.build("llama")
    with CheckpointSaver(None, run, on_failure="warn") as saver:
        saver.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
        saver.resume(allow=["model"])


def finds_of(made: Path, trial: Trial, work: Path) -> list[str]:
    """What is wrong with the output of commands and functions after a trial's mark was put."""
    root, file, place, _ = trial
    for name in ("run", ADAPTER):
        shutil.copytree(made / name, work / name)
    it = put_mark(work / root, trial)
    out = work / "out"
    out.mkdir()
    bucket = new_bucket().url
    finds = []
    for command in COMMANDS[root]:
        if "page.html" in command and place and file not in ("ft_ckpt.json", "state/training.json"):
            continue  # drawing takes three seconds
        places = {"run": it.parent, "it": it, "other": it.parent / "checkpoint-1", "base": made / "base", "out": out}
        words = [word.format(**places, bucket=bucket) for word in command.split()]
        finds += [f"{command.split('}')[0]}: {problem}" for problem in run_command(words)[1]]
    page = out / "page.html"
    if page.exists():
        text = page.read_text()
        finds += [f"page: {problem}" for problem in problems_in(text)] + ["page: a script"] * ("<script" in text)
    if root == RUN:
        finds += [f"{name}(): {problem}" for name, problems in call_functions(it, out) for problem in problems]
    return list(dict.fromkeys(finds))


def campaign(made: Path, trials: list[Trial], tmp_path: Path) -> dict[Trial, list[str]]:
    """The trials with finds."""
    found = {}
    for number, trial in enumerate(trials):
        finds = finds_of(made, trial, tmp_path / f"{number}")
        shutil.rmtree(tmp_path / f"{number}")
        if finds:
            found[trial] = finds
    print(f"{len(trials)} trials, {len(found)} with finds, {sum(map(len, found.values()))} finds")
    return found


@pytest.mark.slow
def test_each_field_in_turn(made, tmp_path, monkeypatch):
    monkeypatch.setenv("FT_CKPT_CACHE", str(tmp_path / "cache"))
    assert campaign(made, trials_in(made), tmp_path) == {}


def test_a_field(made, tmp_path, monkeypatch):
    monkeypatch.setenv("FT_CKPT_CACHE", str(tmp_path / "cache"))
    assert campaign(made, random.Random(chosen_seed()).sample(trials_in(made), 1), tmp_path) == {}
