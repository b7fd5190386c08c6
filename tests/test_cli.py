"""`ft-ckpt` as people and scripts run it: in a process of its own."""

import json
import subprocess
import sys

import pytest
from faults import save

RUN = "import sys; from ft_ckpt.cli import main; main()"
LISTED = """
import atexit, sys
atexit.register(lambda: print(*sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr))
from ft_ckpt.cli import main
main()
"""


def ft_ckpt(*arguments, code=RUN):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def run(tmp_path):
    for step in (1, 20):
        save(tmp_path / f"checkpoint-{step}", step=step, shards=2, parts=("", "policy"))
    return tmp_path


def spoil(checkpoint):
    (checkpoint / "config.json").write_text("")


def test_ls(run):
    spoil(run / "checkpoint-20")
    answer = ft_ckpt("ls", run)
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0
    assert lines[0].split() == ["checkpoint", "step", "age", "size", "kind", "parts", "valid"]
    assert lines[1].split()[:2] == ["checkpoint-1", "1"]
    assert lines[1].split()[-4:] == ["full", "model,", "policy", "yes"]
    assert lines[2].split()[-1] == "no"
    assert "config.json: 0 bytes, expected 12" in lines[3]


def test_ls_json(run):
    rows = json.loads(ft_ckpt("ls", run, "--json").stdout)
    assert [(row["step"], row["valid"], row["parts"]) for row in rows] == [
        (1, True, ["", "policy"]),
        (20, True, ["", "policy"]),
    ]


def test_ls_of_an_empty_run(tmp_path):
    answer = ft_ckpt("ls", tmp_path)
    assert (answer.returncode, answer.stdout) == (0, f"{tmp_path}: no checkpoints\n")


def test_latest_falls_back_in_one_line(run):
    """Pain 20: the newest is not valid, and the script that asks gets the one before."""
    spoil(run / "checkpoint-20")
    answer = ft_ckpt("latest", run)
    assert (answer.returncode, answer.stdout) == (0, f"{run / 'checkpoint-1'}\n")
    assert answer.stderr.startswith(f"ft-ckpt: {run / 'checkpoint-20'}: not valid, using an older checkpoint: ")
    assert answer.stderr.count("\n") == 1


def test_latest_json(run):
    answer = json.loads(ft_ckpt("latest", "--json", run).stdout)
    assert answer == {"path": str(run / "checkpoint-20"), "step": 20, "created": "2026-01-01T00:00:20+00:00"}


def test_verify(run):
    answer = ft_ckpt("verify", run / "checkpoint-1")
    assert answer.returncode == 0
    assert answer.stdout.startswith(f"{run / 'checkpoint-1'}: ok, 8 files, ")


@pytest.mark.parametrize("fast", [True, False])
def test_verify_says_what_is_wrong(run, fast):
    """Pain 26: bit rot is found when every byte is read, and only then."""
    shard = run / "checkpoint-1" / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    answer = ft_ckpt("verify", run / "checkpoint-1", "--json", *(["--fast"] if fast else []))
    report = json.loads(answer.stdout)
    assert (answer.returncode, report["ok"], len(report["problems"])) == ((0, True, 0) if fast else (1, False, 1))


def test_show(run):
    lines = ft_ckpt("show", run / "checkpoint-1").stdout.splitlines()
    assert lines[0].endswith("checkpoint-1: full, step 1, created 2026-01-01T00:00:01+00:00")
    assert lines[2] == "model: model Tiny, 4 tensors"
    assert lines[4].split() == ["layers.0.weight", "2x3", "float32", "24", "B", "model-00001-of-00002.safetensors"]
    assert sum(line.startswith("layers.") for line in lines) == 8


def test_show_json(run):
    document = json.loads(ft_ckpt("show", run / "checkpoint-1", "--json").stdout)
    assert [part["name"] for part in document["parts"]] == ["", "policy"]
    assert document["parts"][0]["tensors"][0]["shape"] == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls"], "ls: none given, expected one folder"),
        (["ls", "{run}", "b"], "ls: {run} b given, expected one folder"),
        (["ls", "{run}/absent"], "{run}/absent: no such folder"),
        (["latest", "{run}"], "{run}: no valid checkpoint in it"),
        (["verify", "{run}/absent"], "{run}/absent: no ft_ckpt.json in it"),
        (["show", "{run}"], "{run}: no weights found; expected"),
    ],
)
def test_errors_are_one_line(tmp_path, arguments, message):
    answer = ft_ckpt(*(argument.format(run=tmp_path) for argument in arguments))
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"ft-ckpt: {message.format(run=tmp_path)}")
    assert answer.stderr.count("\n") == 1


def test_unknown_options_and_commands():
    for arguments in (["ls", "--deep", "."], ["destroy"]):
        answer = ft_ckpt(*arguments)
        assert answer.returncode == 2
        assert "Traceback" not in answer.stderr


def test_a_reader_that_has_seen_enough(run):
    head = [sys.executable, "-c", RUN, "show", str(run / "checkpoint-1"), "--json"]
    process = subprocess.Popen(head, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 1)


def test_version():
    from ft_ckpt import __version__

    assert ft_ckpt("--version").stdout == f"ft-ckpt {__version__}\n"


@pytest.mark.parametrize("command", [["--help"], ["ls", "--help"], ["ls"], ["latest"], ["verify"], ["show"]])
def test_starts_without_the_heavy_libraries(run, command):
    """A listing answers at once: nothing that trains is imported, nor what typer would use to check arguments."""
    path = {"ls": run, "latest": run}.get(command[0], run / "checkpoint-1")
    answer = ft_ckpt(*command, *([] if "--help" in command else [path]), code=LISTED)
    loaded = set(answer.stderr.split())
    assert answer.returncode == 0
    assert "ft_ckpt" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "accelerate", "peft", "safetensors", "pydantic"}
    assert "--help" not in command or "rich" not in loaded
