"""The scripts of the repository: their help, and what they leave behind."""

import os
from pathlib import Path

import extensions
from launch import run_python
from places import ROOT


def test_the_bench_has_help():
    done = run_python("from scripts.bench.__main__ import main; main()", "--help", cwd=ROOT)
    assert (done.returncode, done.stdout.split()[0]) == (0, "usage:"), done.stderr


def test_stale_compiler_locks_are_dropped_and_held_ones_kept(tmp_path, monkeypatch):
    """A process killed while it compiled leaves its lock, for which every later one would wait
    without an end.
    """
    monkeypatch.setenv(extensions.FOLDER, str(tmp_path))
    stale, held = (tmp_path / "py3_cpu" / name / extensions.LOCK for name in ("stale", "held"))
    for lock in (stale, held):
        lock.parent.mkdir(parents=True)
    stale.touch()
    with held.open("x"):
        assert extensions.drop_stale_locks() == [stale]
        assert (stale.exists(), held.exists()) == (False, True)
    assert extensions.drop_stale_locks() == [held]


def test_operators_are_compiled_in_the_environment():
    """Not in the user's cache, where a lock would make every program of the user's wait."""
    assert not Path(os.environ[extensions.FOLDER]).is_relative_to(Path.home() / ".cache")
