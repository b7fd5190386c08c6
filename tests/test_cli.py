"""`ft-ckpt` as people and scripts run it: in a process of its own."""

import json
import subprocess
import sys

import pytest
from faults import save
from test_sweep import save_with_state

from ft_ckpt.catalog import discover
from ft_ckpt.marks import pinned

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
    assert lines[0].split() == [
        *("checkpoint", "step", "age", "size", "kind", "parts", "state", "metrics", "pinned", "valid"),
    ]
    assert lines[1].split()[:2] == ["checkpoint-1", "1"]
    assert lines[1].split()[-7:] == ["full", "model,", "policy", "no", "-", "no", "yes"]
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


def test_ls_of_what_a_run_has(tmp_path):
    """Metrics, a training state and a pin; a state is no part that could be loaded."""
    save_with_state(tmp_path / "checkpoint-3", 3, metrics={"eval_loss": 0.51234567, "accuracy": 1.0})
    ft_ckpt("pin", tmp_path / "checkpoint-3")
    words = ft_ckpt("ls", tmp_path).stdout.splitlines()[1].split()
    assert words[-8:] == ["model", "yes", "eval_loss", "0.5123,", "accuracy", "1", "yes", "yes"]
    (row,) = json.loads(ft_ckpt("ls", tmp_path, "--json").stdout)
    assert row == row | {
        "parts": [""],
        "state": True,
        "pinned": True,
        "metrics": {"eval_loss": 0.51234567, "accuracy": 1},
    }


def test_pin_and_unpin(run):
    answer = ft_ckpt("pin", run / "checkpoint-1", "--reason", "the paper's")
    assert (answer.returncode, answer.stdout) == (0, f"{run / 'checkpoint-1'}: {pinned(run / 'checkpoint-1')}\n")
    assert answer.stdout.endswith(": the paper's\n")
    assert ft_ckpt("unpin", run / "checkpoint-1").stdout == f"{run / 'checkpoint-1'}: no longer pinned\n"
    assert ft_ckpt("unpin", run / "checkpoint-1").stdout == f"{run / 'checkpoint-1'}: was not pinned\n"


@pytest.fixture
def long_run(tmp_path):
    for step in range(10, 60, 10):
        save_with_state(tmp_path / f"checkpoint-{step}", step, metrics={"loss": abs(20 - step)})
    (tmp_path / "checkpoint-10" / "notes.txt").write_text("mine")
    return tmp_path


def steps(root):
    return [info.manifest.step for info in discover(root)]


RULES = ["--last", "2", "--best", "loss:min", "--best", "loss:max:1", "--state-last", "1"]


def test_prune(long_run):
    """Pain 24: what would go is said first, and why the rest stays."""
    answer = ft_ckpt("prune", long_run, *RULES, "--dry-run")
    lines = [line.rstrip().split(maxsplit=2) for line in answer.stdout.splitlines()]
    assert (answer.returncode, steps(long_run)) == (0, [10, 20, 30, 40, 50])
    assert lines[1:-1] == [
        *(["checkpoint-10", "drop"], ["checkpoint-30", "drop"]),
        ["checkpoint-20", "keep", "without state  best loss"],
        ["checkpoint-40", "keep", "without state  last 2"],
        ["checkpoint-50", "keep", "newest valid, last 2, best loss"],
    ]
    assert answer.stdout.endswith("would be freed\n")
    answer = ft_ckpt("prune", long_run, *RULES)
    assert (answer.returncode, steps(long_run)) == (0, [20, 40, 50])
    assert (
        answer.stdout.splitlines()[-1]
        == f"  {long_run / 'checkpoint-10' / 'notes.txt'}: stays, as no checkpoint listed it"
    )


def test_prune_by_time_and_step(long_run):
    assert ft_ckpt("prune", long_run, "--every", "20", "--hourly", "1", "--daily", "1", "--weekly", "1").returncode == 0
    assert steps(long_run) == [20, 40, 50]


def test_prune_json(long_run):
    document = json.loads(ft_ckpt("prune", long_run, "--last", "1", "--json").stdout)
    assert document["dropped"] == [str(long_run / f"checkpoint-{step}") for step in (10, 20, 30, 40)]
    assert document["kept"] == {str(long_run / "checkpoint-50"): ["newest valid", "last 1"]}
    assert document["freed_bytes"] > 0
    assert document["problems"] == []


def test_prune_asks_which_run(long_run):
    """Pain 24: two runs in one folder; which of them is meant has to be said."""
    save_with_state(long_run / "other-1", 1, run_id="other")
    answer = ft_ckpt("prune", long_run, "--last", "1")
    assert "other (1 checkpoints)" in answer.stderr
    assert (answer.returncode, len(steps(long_run))) == (2, 6)
    ft_ckpt("prune", long_run, "--last", "1", "--run", "other")
    assert len(steps(long_run)) == 6
    ft_ckpt("prune", long_run, "--last", "1", "--run", "all")
    assert steps(long_run) == [50]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls"], "ls: none given, expected one folder"),
        (["ls", "{run}", "b"], "ls: {run} b given, expected one folder"),
        (["ls", "{run}/absent"], "{run}/absent: no such folder"),
        (["latest", "{run}"], "{run}: no valid checkpoint in it"),
        (["verify", "{run}/absent"], "{run}/absent: no ft_ckpt.json in it"),
        (["show", "{run}"], "{run}: no weights found; expected"),
        (["diff", "{run}"], "diff: {run} given, expected A B"),
        (["diff", "{run}/absent", "{run}"], "{run}/absent: no such file or folder"),
        (["pin", "{run}"], "{run}: no ft_ckpt.json in it; pin a checkpoint that"),
        (["prune", "{run}"], "prune: no rule given, so everything stays"),
        (["prune", "{run}/absent", "--last", "1"], "{run}/absent: no such folder"),
        (["prune", "{run}", "--last", "0"], "last=0: expected a whole number from 1"),
        (["prune", "{run}", "--best", "loss"], "--best loss: expected a metric, min or max"),
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


@pytest.mark.parametrize("command", [["pin", "checkpoint-1"], ["prune", ".", "--last", "9"], ["diff", "--help"]])
def test_pruning_needs_no_torch(run, command):
    name, path, *rest = command
    answer = ft_ckpt(name, path if path == "--help" else run / path, *rest, code=LISTED)
    assert answer.returncode == 0
    assert not set(answer.stderr.split()) & {"torch", "transformers", "numpy", "accelerate", "peft", "safetensors"}
