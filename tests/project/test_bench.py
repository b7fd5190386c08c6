"""The bench runs, and what it says holds together: as a process, on tiny sizes, with the peers that are installed."""

import json
import os
import subprocess
import sys

import pytest
from places import ROOT

ONE_PROCESS = ("save", "stall", "cold", "warm", "first", "many", "convert", "frozen")
LAUNCHED = ("ranks", "memory", "planning", "writers")
ALWAYS_THERE = {  # ways that need nothing but what the package itself depends on
    "save": {"limit: O_DIRECT write", "limit: memory copy", "ours", "ours, h5", "ours, dual", "safetensors", "h5py"},
    "stall": {"limit: memory copy", "ours", "torch DCP async"},
    "cold": {"limit: O_DIRECT read", "ours", "safetensors", "torch.load", "from_pretrained", "torch DCP"},
    "memory": {"ours", "ours, h5", "ours, dual", "safetensors", "torch.save"},
    "planning": {"ours, llama, rank 0", "ours, many, rank 0"},
    "writers": {"ours, 0 writers", "ours, 100 writers"},
    "ranks": {"ours", "ours, gather", "get_state_dict + save_pretrained", "torch DCP + consolidation"},
}
KEEPS_ALL = {"save", "memory", "ranks"}  # whose files hold every tensor


def bench(folder, *arguments):
    figures = folder / "figures.json"
    command = [sys.executable, "-m", "scripts.bench", "--sizes", "1MB", "--rounds", "1", "--folder", str(folder)]
    done = subprocess.run(
        [*command, "--json", str(figures), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(figures.read_text()), done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    figures, said = bench(folder, "--plot", folder / "figures.png", "--only", *ONE_PROCESS)
    assert sorted(path.name for path in folder.iterdir()) == ["figures.json", "figures.png"]
    return figures, said, folder


def test_every_measure_has_rows_and_no_way_of_ours_failed(measured):
    figures, _, _ = measured
    for name in ONE_PROCESS:
        rows = rows_of(figures, name)
        assert any(way.startswith("ours") for way in rows)
        assert rows.keys() >= ALWAYS_THERE.get(name, set())
        assert [way for way in ALWAYS_THERE.get(name, ()) if "error" in rows[way]] == []


def test_figures_are_possible(measured):
    check_possible(measured[0])


def test_a_save_that_reuses_frozen_weights_writes_less_than_it_holds(measured):
    row = rows_of(measured[0], "frozen")["ours"]
    assert row["trainable_bytes"] <= row["new_bytes"] < row["trainable_bytes"] + 100_000 < row["disk_bytes"]


def test_the_machine_and_what_is_missing_are_told(measured):
    figures, said, folder = measured
    machine = figures["machine"]
    assert machine["cores"] == os.cpu_count()
    assert {"kernel", "file_system", "memory_bytes", "date"} <= machine.keys()
    assert {"torch", "safetensors"} <= machine["versions"].keys()
    assert all(name in said for name in figures["missing"])
    assert (folder / "figures.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_measuring_again_replaces_that_measure_alone(measured):
    before, _, folder = measured
    after, _ = bench(folder, "--only", "many")
    assert rows_of(after, "save") == rows_of(before, "save")
    assert rows_of(after, "many").keys() == rows_of(before, "many").keys()
    assert rows_of(after, "many") != rows_of(before, "many")


@pytest.mark.slow
def test_measures_that_launch_processes(tmp_path):
    figures, _ = bench(tmp_path, "--only", *LAUNCHED, "adapter")
    check_possible(figures)
    for name in LAUNCHED:
        assert rows_of(figures, name).keys() >= ALWAYS_THERE[name]
    whole, adapter = (rows_of(figures, name)["ours"]["disk_bytes"] for name in ("ranks", "adapter"))
    assert adapter < whole


def rows_of(figures, measure):
    return {row["way"]: row for row in figures["rows"] if row["measure"] == measure}


def check_possible(figures):
    """Times are times, and files that hold every tensor are no smaller than these, unless they are compressed."""
    for row in figures["rows"]:
        if "error" in row:
            continue
        assert all(row[name] > 0 for name in ("seconds", "tensor_bytes", "disk_bytes") if name in row), row
        assert row.get("return_seconds", 0) <= row.get("seconds", 0)
        if row["measure"] in KEEPS_ALL and "disk_bytes" in row and row["way"] != "orbax":
            assert row["disk_bytes"] >= row["tensor_bytes"], row
