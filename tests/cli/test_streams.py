"""What `ft-ckpt` prints, whatever names are in it and whoever reads it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import PROGRAM, ft_ckpt, ft_ckpt_alone
from small_checkpoints import rewrite_manifest, save_with_state

RUN = [sys.executable, "-c", PROGRAM]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / os.fsdecode(b"r\xff\xc3\xa9n")
    save_with_state(folder / "checkpoint-1", 1, metrics={"loss": float("nan"), "vérité:a": 1.0})
    save_with_state(folder / "checkpoint-2", 2, metrics={"loss": float("inf"), "vérité:a": 2.0})
    return folder


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize(
    "words", [["ls"], ["verify"], ["ls", "--json"], ["prune", "--last", "1", "--dry-run"]]
)
def test_names_that_the_terminal_cannot_show_end_no_command(words, encoding, run):
    answer = ft_ckpt(words[0], run, *words[1:], encoding=encoding)
    assert (answer.code, answer.err) == (0, "")
    assert "checkpoint-2" in answer.out


def test_a_path_is_printed_as_the_bytes_that_it_is(run):
    answer = ft_ckpt_alone("best", run, "--metric", "vérité:a:min", PYTHONIOENCODING="utf-8")
    assert (answer.code, answer.out) == (0, f"{run / 'checkpoint-1'}\n")


@pytest.mark.parametrize("command", ["ls", "show", "report"])
def test_json_is_json_whatever_a_metric_is(command, run):
    answer = ft_ckpt(command, run / "checkpoint-1" if command == "show" else run, "--json")
    assert answer.code == 0
    assert answer.document
    assert '"nan"' in answer.out


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_is_gone_is_no_failed_check(unbuffered, run):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as nowhere:
        done = subprocess.run(
            [*RUN, "verify", run],
            stdout=nowhere,
            stderr=subprocess.PIPE,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_finds_no_room_is_an_error(unbuffered, run):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*RUN, "latest", run],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 2
    assert done.stderr.startswith(b"ft-ckpt: ")
    assert len(done.stderr.splitlines()) == 1


def test_closed_output_is_no_error(run):
    done = subprocess.run(
        f'exec {sys.executable} -c "{RUN[2]}" ls . >&-',
        shell=True,
        cwd=run,
        check=False,
        stderr=subprocess.PIPE,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words", [["ls"], ["report", "--json"], ["prune", "--daily", "1", "--dry-run"]]
)
def test_times_out_of_all_years_end_no_command(words, run):
    rewrite_manifest(
        run / "checkpoint-1", lambda document: document.update(created="0001-01-01T00:00:00+14:00")
    )
    answer = ft_ckpt(words[0], run, *words[1:])
    assert (answer.code, answer.err) == (0, "")
    assert "checkpoint-1" in answer.out
    assert ft_ckpt("show", run / "checkpoint-1").code == 0
