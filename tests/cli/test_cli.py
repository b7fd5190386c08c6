"""The answers of single commands, and the program: terminals, completion, options anywhere."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
from commands import PROGRAM, ft_ckpt, ft_ckpt_on_terminal
from small_checkpoints import make_checkpoint, manifest_of, save, save_of, save_with_state

from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.commit import open_staging
from ft_ckpt.checkpoint.leases import pin_reason
from ft_ckpt.checkpoint.manifest import manifest_to_json
from ft_ckpt.storage.places import open_place

DPO = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
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
    lines = answer.out.splitlines()
    assert answer.code == 0
    assert lines[0].split() == ["checkpoint", "step", "age", "size", "kind", "parts", "valid"]
    assert lines[1].split()[:2] == ["checkpoint-1", "1"]
    assert lines[1].split()[-4:] == ["full", "model,", "policy", "yes"]
    assert lines[2].split()[-1] == "no"
    assert "config.json: truncated: 0 bytes, but the manifest lists 12" in lines[3]


def test_ls_json(run):
    rows = ft_ckpt("ls", run, "--json").document
    assert [(row["step"], row["valid"], row["parts"]) for row in rows] == [
        (1, True, ["", "policy"]),
        (20, True, ["", "policy"]),
    ]


def test_ls_of_an_empty_run(tmp_path):
    answer = ft_ckpt("ls", tmp_path)
    assert (answer.code, answer.out) == (
        0,
        f"{tmp_path}: an empty folder; no save was completed there\n",
    )


def test_latest_falls_back_in_one_line(run):
    """The newest is not valid, and the script that asks gets the one before."""
    spoil(run / "checkpoint-20")
    answer = ft_ckpt("latest", run)
    assert (answer.code, answer.out) == (0, f"{run / 'checkpoint-1'}\n")
    assert answer.err.startswith(
        f"ft-ckpt: {run / 'checkpoint-20'}: not valid, using an older checkpoint: "
    )
    assert answer.err.count("\n") == 1


def test_latest_json(run):
    answer = ft_ckpt("latest", "--json", run).document
    assert answer == {
        "path": str(run / "checkpoint-20"),
        "step": 20,
        "created": "2026-01-01T00:00:20+00:00",
    }


def test_verify(run):
    answer = ft_ckpt("verify", run / "checkpoint-1")
    assert answer.code == 0
    assert answer.out.startswith(f"{run / 'checkpoint-1'}: ok, 8 files, ")


@pytest.mark.parametrize("fast", [True, False])
def test_verify_says_what_is_wrong(run, fast):
    """Bit rot is found, in a file as small as this one without being asked for."""
    shard = run / "checkpoint-1" / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    answer = ft_ckpt("verify", run / "checkpoint-1", "--json", *(["--fast"] if fast else []))
    report = answer.document
    assert (answer.code, report["ok"], len(report["problems"])) == (1, False, 1)


def test_show(run):
    lines = ft_ckpt("show", run / "checkpoint-1").out.splitlines()
    assert lines[0].endswith("checkpoint-1: 2 parts")
    assert lines[1] == "  step 1, saved 2026-01-01 00:00:01 UTC, full, 1.4 KB"
    assert lines[3] == "model: Tiny, 24 parameters in float32; 4 tensors"
    assert lines[5].split() == [
        "layers.0.weight",
        "2x3",
        "float32",
        "24",
        "B",
        "model-00001-of-00002.safetensors",
    ]
    assert sum(line.startswith("layers.") for line in lines) == 8


def test_show_json(run):
    document = ft_ckpt("show", run / "checkpoint-1", "--json").document
    assert [part["name"] for part in document["parts"]] == ["", "policy"]
    assert document["parts"][0]["tensors"][0]["shape"] == [2, 3]


def test_ls_of_what_a_run_has(tmp_path):
    """Metrics, a training state and a pin; a state is no part that could be loaded."""
    save_with_state(
        tmp_path / "checkpoint-3", 3, metrics={"eval_loss": 0.51234567, "accuracy": 1.0}
    )
    ft_ckpt("pin", tmp_path / "checkpoint-3")
    heads, words = (line.split() for line in ft_ckpt("ls", tmp_path).out.splitlines())
    assert heads[-4:] == ["kind", "eval_loss", "accuracy", "kept"]
    assert words[-6:-3] == ["full+state", "0.5123", "1"]
    assert words[-3:-1] == ["pinned", "by"]
    (row,) = ft_ckpt("ls", tmp_path, "--json").document
    assert row == row | {
        "parts": [""],
        "state": True,
        "adapter": None,
        "best": [],
        "pinned": True,
        "metrics": {"eval_loss": 0.51234567, "accuracy": 1},
    }


def test_pin_and_unpin(run):
    answer = ft_ckpt("pin", run / "checkpoint-1", "--reason", "the paper's")
    assert (answer.code, answer.out) == (
        0,
        f"{run / 'checkpoint-1'}: {pin_reason(open_place(run / 'checkpoint-1'))}\n",
    )
    assert answer.out.endswith(": the paper's\n")
    answers = [ft_ckpt("unpin", run / "checkpoint-1") for _ in range(2)]
    assert [(answer.code, answer.out) for answer in answers] == [
        (0, f"{run / 'checkpoint-1'}: no longer pinned\n"),
        (1, f"{run / 'checkpoint-1'}: was not pinned\n"),
    ]


@pytest.fixture
def long_run(tmp_path):
    for step in range(10, 60, 10):
        save_with_state(tmp_path / f"checkpoint-{step}", step, metrics={"loss": abs(20 - step)})
    (tmp_path / "checkpoint-10" / "notes.txt").write_text("mine")
    return tmp_path


def of_one_run(root):
    for info in discover(open_place(root)):
        (info.path / "ft_ckpt.json").write_text(
            manifest_to_json(replace(info.manifest, run_id="1146f0"))
        )


def steps(root):
    return [info.manifest.step for info in discover(open_place(root))]


RULES = ["--last", "2", "--best", "loss:min", "--best", "loss:max:1", "--state-last", "1"]


def test_prune(long_run):
    """What would go is said first, and why the rest stays."""
    answer = ft_ckpt("prune", long_run, *RULES, "--dry-run")
    lines = [line.rstrip().split(maxsplit=2) for line in answer.out.splitlines()]
    assert (answer.code, steps(long_run)) == (0, [10, 20, 30, 40, 50])
    assert lines[1:-1] == [
        *(["checkpoint-10", "drop"], ["checkpoint-30", "drop"]),
        ["checkpoint-20", "keep", "without state  best loss"],
        ["checkpoint-40", "keep", "without state  last 2"],
        ["checkpoint-50", "keep", "newest valid, last 2, best loss"],
    ]
    assert answer.out.endswith("would be freed\n")
    answer = ft_ckpt("prune", long_run, *RULES)
    assert (answer.code, steps(long_run)) == (0, [20, 40, 50])
    assert (
        answer.out.splitlines()[-1]
        == f"  {long_run / 'checkpoint-10' / 'notes.txt'}: stays, as no checkpoint listed it"
    )


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_misspelt_metric_deletes_nothing(long_run, dry_run):
    for rules in (["--best", "los:min"], ["--last", "1", "--best", "los:min"]):
        answer = ft_ckpt("prune", long_run, *rules, *dry_run)
        assert (answer.code, answer.out, steps(long_run)) == (2, "", [10, 20, 30, 40, 50])
        assert (
            "no checkpoint has 'los' (did you mean loss? metrics: loss); nothing was deleted"
            in answer.err
        )
    answer = ft_ckpt("best", long_run, "--metric", "los:min")
    assert (answer.code, answer.out) == (2, "")
    assert "no valid checkpoint with the metric 'los' (did you mean loss?" in answer.err


def test_prune_by_time_and_step(long_run):
    assert (
        ft_ckpt(
            "prune", long_run, "--every", "20", "--hourly", "1", "--daily", "1", "--weekly", "1"
        ).code
        == 0
    )
    assert steps(long_run) == [20, 40, 50]


def test_prune_json(long_run):
    document = ft_ckpt("prune", long_run, "--last", "1", "--json").document
    assert document["dropped"] == [
        str(long_run / f"checkpoint-{step}") for step in (10, 20, 30, 40)
    ]
    assert document["kept"] == {str(long_run / "checkpoint-50"): ["newest valid", "last 1"]}
    assert document["freed_bytes"] > 0
    assert document["problems"] == []


def test_prune_asks_which_run(long_run):
    """Two runs in one folder; which of them is meant has to be said."""
    of_one_run(long_run)
    save_with_state(long_run / "other-1", 1, run_id="other")
    answer = ft_ckpt("prune", long_run, "--last", "1")
    assert "other (1 checkpoints)" in answer.err
    assert (answer.code, len(steps(long_run))) == (2, 6)
    ft_ckpt("prune", long_run, "--last", "1", "--run", "other")
    assert len(steps(long_run)) == 6
    save_with_state(long_run / "other-2", 2, run_id="other")
    ft_ckpt("prune", long_run, "--last", "1", "--run", "all")
    assert steps(long_run) == [2, 50]


def test_prune_of_a_checkpoint_is_no_prune_of_a_run(long_run):
    answer = ft_ckpt("prune", long_run / "checkpoint-50", "--last", "1")
    assert "checkpoint-50: a checkpoint, expected the folder of a run" in answer.err
    assert answer.code != 0


def test_prune_of_all_runs_leaves_weights_and_averages(long_run):
    of_one_run(long_run)
    save_with_state(long_run / "final", 50, run_id="one", export=True)
    save_with_state(long_run / "soup", 40, export=True)
    save_with_state(long_run / "alone", 10)
    ft_ckpt("prune", long_run, "--last", "1", "--run", "all")
    assert sorted(path.name for path in long_run.iterdir() if (path / "ft_ckpt.json").exists()) == [
        "alone",
        "checkpoint-50",
        "final",
        "soup",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls"], "ls: expected RUN; see `ft-ckpt ls --help`"),
        (["ls", "{run}", "b"], "ls: b: one argument too many; see `ft-ckpt ls --help`"),
        (["ls", "{run}", "--deep"], "ls: --deep: no such option; see `ft-ckpt ls --help`"),
        (
            ["prune", "{run}", "--last", "few"],
            "prune: --last/--keep-last: few: expected a whole number from 1",
        ),
        (["destroy"], "destroy: no such command; `ft-ckpt --help` lists the commands"),
        (["unpin", "{run}"], "{run}: an empty folder"),
        (["ls", "{run}/absent"], "{run}/absent: no such folder"),
        (["verify", "{run}/absent"], "{run}/absent: no such folder"),
        (["verify", "{run}"], "{run}: no ft_ckpt.json and no safetensors files in it"),
        (["show", "{run}"], "{run}: an empty folder"),
        (["diff", "{run}"], "diff: expected B; see `ft-ckpt diff --help`"),
        (["diff", "{run}/absent", "{run}"], "{run}/absent: no such folder"),
        (["pin", "{run}"], "{run}: an empty folder"),
        (["prune", "{run}"], "prune: no rule given, so everything stays"),
        (["prune", "{run}/absent", "--last", "1"], "{run}/absent: no such folder"),
        (
            ["prune", "{run}", "--last", "0"],
            "prune: --last/--keep-last: 0: expected a whole number from 1",
        ),
        (["prune", "{run}", "--best", "loss"], "--best loss: expected a metric, min or max"),
    ],
)
def test_errors_are_one_line(tmp_path, arguments, message):
    answer = ft_ckpt(*(argument.format(run=tmp_path) for argument in arguments))
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"ft-ckpt: {message.format(run=tmp_path)}")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        [
            "average",
            "--json",
            "{run}/checkpoint-1",
            "--weights",
            "1,2",
            "{run}/checkpoint-1",
            "--force",
            "{run}/out",
        ],
        ["convert", "{run}/checkpoint-1", "--format", "h5", "--json", "--", "{run}/out"],
    ],
)
def test_options_stand_anywhere(run, words):
    answer = ft_ckpt(*(word.format(run=run) for word in words))
    assert answer.code == 0, answer.err
    assert answer.document["path"] == str(run / "out")


def test_as_a_module():
    module = subprocess.run(
        [sys.executable, "-m", "ft_ckpt", "--help"], capture_output=True, text=True, check=False
    )
    assert (module.returncode, module.stdout, module.stderr) == (0, ft_ckpt("--help").out, "")


def test_a_reader_that_has_seen_enough(run):
    head = [sys.executable, "-c", PROGRAM, "show", str(run / "checkpoint-1"), "--json"]
    process = subprocess.Popen(head, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 141)


def test_version():
    from ft_ckpt import __version__

    assert ft_ckpt("--version").out == f"ft-ckpt {__version__}\n"


def plain(lines):
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines]


@pytest.fixture
def wide_run(tmp_path):
    """Checkpoints of TRL's DPO: long names, fourteen metrics, several parts."""
    metrics = {f"{when}{name}": 0.123456 for when in ("", "eval_") for name in DPO} | {
        "loss": 0.5,
        "eval_loss": 0.25,
    }
    for step in (500, 1000):
        save_with_state(tmp_path / f"checkpoint-of-a-preference-run-{step}", step, metrics=metrics)
    return tmp_path


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_ls_fits_a_terminal(wide_run, columns):
    """A row is a line, its name whole; what else fits is shown, the loss first."""
    code, seen = ft_ckpt_on_terminal("ls", wide_run, columns=columns)
    lines = plain(seen)
    assert (code, len(lines)) == (0, 4)
    assert max(map(len, lines)) <= columns
    assert [line.split()[0] for line in lines[1:3]] == [
        f"checkpoint-of-a-preference-run-{n}" for n in (500, 1000)
    ]
    heads = lines[0].split()
    assert "loss" in heads or columns < 80
    assert {"step", "size", "eval_loss"} <= set(heads)
    assert not {"parts", "pinned", "valid"} & set(heads)
    assert lines[3].endswith(" more metrics: `ft-ckpt show`, or --metrics")


def test_ls_shows_what_is_asked_for(wide_run):
    _, seen = ft_ckpt_on_terminal("ls", wide_run, "--metrics", columns=400)
    assert set(DPO) < set(plain(seen)[0].split())
    assert (
        "rewards/margins 0.123456"
        in ft_ckpt("show", wide_run / "checkpoint-of-a-preference-run-500").out
    )


def test_ls_marks_what_is_invalid(run):
    spoil(run / "checkpoint-20")
    _, seen = ft_ckpt_on_terminal("ls", run)
    assert [line.startswith("\x1b[31m") for line in seen[1:3]] == [False, True]
    assert plain(seen)[2].split()[-1] == "no"


def test_a_file_of_two_names_counts_once(tmp_path):
    staging = open_staging(tmp_path / "checkpoint-1")
    parts = make_checkpoint(staging.stage).parts
    os.link(staging.stage / "model.safetensors", staging.stage / "model.h5")
    staging.commit(manifest_of(staging.stage, parts, 1))
    weights, others = (
        (tmp_path / "checkpoint-1" / name).stat().st_size for name in ("model.h5", "config.json")
    )
    (row,) = ft_ckpt("ls", tmp_path, "--json").document
    assert row["bytes"] == weights + others
    assert (
        ft_ckpt("verify", tmp_path / "checkpoint-1", "--json").document["bytes"] == weights + others
    )


def test_verify_of_a_run_is_of_all_its_checkpoints(run):
    answer = ft_ckpt("verify", run)
    assert (answer.code, [line.split(": ")[0] for line in answer.out.splitlines()]) == (
        0,
        [str(run / "checkpoint-1"), str(run / "checkpoint-20")],
    )
    spoil(run / "checkpoint-1")
    (run / "checkpoint-20" / "ft_ckpt.json").write_text("{")
    answer = ft_ckpt("verify", run, "--json")
    assert answer.code == 1
    assert [(report["ok"], len(report["problems"])) for report in answer.document] == [
        (False, 1)
    ] * 2


@pytest.fixture
def foreign(tmp_path):
    """A sharded folder that another library wrote."""
    folder = tmp_path / "model"
    make_checkpoint(folder, shards=2)
    return folder


def test_verify_of_a_foreign_folder(foreign):
    answer = ft_ckpt("verify", foreign)
    assert answer.code == 0
    assert answer.out.startswith(f"{foreign}: ok, 2 files, ")
    assert answer.out.endswith("; headers and indexes are consistent, values were not compared\n")
    assert ft_ckpt("verify", foreign / "model-00001-of-00002.safetensors").code == 0


def cut(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])


def misdirect(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("00002-of", "00001-of"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (
            cut,
            r"model-00001-of-00002\.safetensors: .*truncated: [0-9,]+ bytes, but its header",
        ),
        (
            lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
            "shards missing: model-00002-of-00002",
        ),
        (
            misdirect,
            r"not in the shards that it maps them to: layers\.1\.weight, layers\.3\.weight",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
            "no weight_map in it",
        ),
        (lambda folder: (folder / "config.json").write_text('{"a": '), r"config\.json: not JSON"),
    ],
)
def test_verify_says_what_is_wrong_with_a_foreign_folder(foreign, harm, words):
    harm(foreign)
    answer = ft_ckpt("verify", foreign)
    assert answer.code == 1
    assert re.search(words, answer.out), answer.out


def test_prune_of_a_run_with_its_final_weights(long_run):
    """What a saver saved by itself is of no run: it stays, and nobody has to say which run is
    meant.
    """
    of_one_run(long_run)
    save_of(long_run / "final", step=None)
    answer = ft_ckpt("prune", long_run, "--last", "1")
    assert answer.code == 0, answer.err
    assert re.search(r"final +keep +of no run", answer.out)
    assert {info.path.name for info in discover(open_place(long_run))} == {"final", "checkpoint-50"}


def test_best(long_run):
    for asked in ("loss:min", "loss:max"):
        answer = ft_ckpt("best", long_run, "--metric", asked)
        expected = "checkpoint-20" if asked == "loss:min" else "checkpoint-50"
        assert (answer.code, answer.out) == (0, f"{long_run / expected}\n")
    assert ft_ckpt("best", long_run, "--metric", "loss").code == 2


def test_help_in_short(run):
    """A word for each command, whole; -h as people type it."""
    code, seen = ft_ckpt_on_terminal("-h")
    assert code == 0
    assert max(map(len, seen)) <= 80
    assert not any(line.rstrip().endswith("...") for line in seen[1:])
    assert ft_ckpt("ls", "-h").out == ft_ckpt("ls", "--help").out
    assert ft_ckpt().out == ft_ckpt("--help").out


def test_options_have_one_name(long_run):
    """The same rule by the same name, and by the one it had elsewhere."""
    for name in ("--last", "--keep-last"):
        assert ft_ckpt("prune", long_run, name, "2", "--dry-run").code == 0
        assert ft_ckpt(
            "plan",
            "--model-size",
            "1GB",
            "--save-time",
            "1",
            "--step-time",
            "1",
            "--mtbf",
            "1d",
            name,
            "3",
        )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell):
    with patch.dict(os.environ, SHELL=f"/bin/{shell}"):
        answer = ft_ckpt("--show-completion")
    assert (answer.code, "_FT_CKPT_COMPLETE" in answer.out) == (0, True)


def test_completion_in_bash(tmp_path):
    (tmp_path / "ft-ckpt").write_text(f"#!{sys.executable}\n{PROGRAM}\n")
    (tmp_path / "ft-ckpt").chmod(0o755)
    script = """eval "$(ft-ckpt --show-completion)"
    COMP_WORDS=(ft-ckpt pru) COMP_CWORD=1; _ft_ckpt_completion ft-ckpt; echo "${COMPREPLY[@]}"
    COMP_WORDS=(ft-ckpt prune --st) COMP_CWORD=2; _ft_ckpt_completion ft-ckpt
    echo ${COMPREPLY[@]}"""
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SHELL": "/bin/bash"}
    shell = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    assert shell.stdout.split("\n")[:2] == ["prune", "--state-last --state-every"], shell.stderr


def test_diff_and_convert_as_scripts_use_them(run):
    """Exit code 1 for a difference, as of diff itself; what is there is replaced when that was
    said.
    """
    one, other = run / "checkpoint-1", run / "checkpoint-20"
    assert [ft_ckpt("diff", one, each).code for each in (one, other)] == [0, 1]
    assert ft_ckpt("diff", one, other, "--json").code == 1
    target = run / "out.safetensors"
    target.write_text("mine")
    answer = ft_ckpt("convert", one / "model-00001-of-00002.safetensors", target)
    assert (answer.code, target.read_text()) == (2, "mine")
    assert "exists already; give --force to replace it" in answer.err
    answer = ft_ckpt("convert", one / "model-00001-of-00002.safetensors", target, "--force")
    assert (answer.code, target.stat().st_size > 4) == (0, True), answer.err
    assert ft_ckpt("convert", one, run).code == 2
