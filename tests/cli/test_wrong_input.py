"""Every command on wrong input: one line that says what to do, an exit code, no traceback, no name of an exception."""

import io
import json
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from small_checkpoints import save

from ft_ckpt.cli import COMMANDS, main

INPUTS = ("absent", "file", "model", "trainer output", "truncated model", "truncated checkpoint", "runs")
OPTIONS = {  # the words of each command, with {x} for the input; {x} alone if it is not listed
    "average": "{x} {x} {out}",
    "check-for": "vllm {x}",
    "convert": "{x} {out}",
    "cp": "{x} {out}",
    "diff": "{x} {good}",
    "export": "{x} {out} --for vllm",
    "merge": "{x} {out}",
    "plan": "{x} --step-time 1 --mtbf 1d --save-time 1",
    "prune": "{x} --last 1 --dry-run",
    "publish": "{x} http://127.0.0.1:9",
    "pull": "{x} {out}",
    "push": "{x} memory://wrong/pushed",
    "report": "{x} -o {out}.html --drift 0",
    "sign": "{x} --key {out}.pem",
    "sync": "{x} {out}",
    "watch": "{x} --idle 0 -- true {{path}}",
}
FINE = {  # (command, input): what is no mistake, with its exit code
    **{("ls", name): 0 for name in INPUTS if name not in ("absent", "file")},
    **{(command, "model"): 0 for command in ("show", "verify", "convert", "plan")},
    **{("doctor", name): 0 for name in INPUTS if name not in ("absent", "file")},
    **{(command, "truncated checkpoint"): 0 for command in ("show", "pin", "plan")},
    ("average", "model"): 0,
    ("diff", "model"): 1,
    ("check-for", "model"): 1,
    ("plan", "truncated model"): 0,
    ("verify", "trainer output"): 0,
    ("watch", "absent"): 0,
}
SOFT = {  # exit code 1 instead of 2: a check failed, or there is nothing to print
    *(("verify", name) for name in ("truncated model", "truncated checkpoint")),
    *(("latest", name) for name in INPUTS if name != "file"),
    *(("best", name) for name in INPUTS if name not in ("file", "truncated checkpoint")),
    ("unpin", "truncated checkpoint"),
}
EXCEPTION = re.compile(r"\b[A-Z][a-zA-Z]*(?:Error|Exception|Warning)\b")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The wrong inputs by name, small enough that every command can be tried on each."""
    root = tmp_path_factory.mktemp("wrong")
    save(root / "runs" / "a" / "checkpoint-1", step=1)
    good = root / "runs" / "a" / "checkpoint-1"
    shutil.copytree(good, root / "model")
    (root / "model" / "ft_ckpt.json").unlink()
    (root / "model" / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "model_type": "llama"}))
    shutil.copytree(root / "model", root / "output" / "checkpoint-2")
    (root / "output" / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2}')
    shutil.copytree(root / "model", root / "cut-model")
    shutil.copytree(good, root / "cut-checkpoint")
    for name in ("cut-model", "cut-checkpoint"):
        file = root / name / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
    paths = ("absent", "model/config.json", "model", "output", "cut-model", "cut-checkpoint", "runs")
    return {"root": root, "good": good} | {name: root / path for name, path in zip(INPUTS, paths, strict=True)}


def answer(monkeypatch, words):
    """Exit code, standard output and standard error of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["ft-ckpt", *map(str, words)])
    monkeypatch.setattr("warnings.showwarning", None)
    monkeypatch.setattr(sys, "excepthook", None)
    out, err, code = io.StringIO(), io.StringIO(), None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return code, out.getvalue(), err.getvalue()


def words_of(command, text, places, tmp_path):
    places = {"x": text, "good": places["good"], "out": tmp_path / "out"}
    return [command, *(word.format(**places) for word in OPTIONS.get(command, "{x}").split())]


@pytest.mark.sample(36)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("check-resume", "doctor")])
def test_every_command_on_wrong_input(command, name, places, tmp_path, monkeypatch):
    code, out, err = answer(monkeypatch, words_of(command, places[name], places, tmp_path))
    assert code == FINE.get((command, name), 1 if (command, name) in SOFT else 2), err
    assert EXCEPTION.search(out + err) is None
    if code == 2:
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("ft-ckpt: ")
        assert re.search(r"; |, expected |: truncated|expected ", err), "what to do, or what was expected"


@pytest.mark.sample(10)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_on_an_unknown_option(command, places, tmp_path, monkeypatch):
    words = words_of(command, places["model"], places, tmp_path)
    code, out, err = answer(monkeypatch, [words[0], "--jsn", *words[1:]])
    assert (code, out) == (2, "")
    suggestion = "" if command in ("pin", "unpin") else " did you mean --json? See"
    assert f"ft-ckpt: {command}: --jsn: no such option;{suggestion}" in err
    assert f"`ft-ckpt {command} --help`" in err


@pytest.mark.sample(10)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_without_arguments(command, monkeypatch):
    code, out, err = answer(monkeypatch, [command])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ft-ckpt: {command}: expected ")
    assert f"`ft-ckpt {command} --help`" in err
