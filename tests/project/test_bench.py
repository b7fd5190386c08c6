"""The bench runs, and what it says holds together: as a process, on tiny sizes, with the peers that
are installed.
"""

import json
import os
import re
import shutil
from xml.etree import ElementTree

import pytest
from launch import run_python
from places import ROOT

ONE_PROCESS = ("save", "stall", "cold", "warm", "first", "many", "convert", "frozen")
LAUNCHED = ("memory", "planning", "writers")
ALWAYS_THERE = {  # ways that need nothing but what the package itself depends on
    "save": {
        "limit: O_DIRECT write",
        "limit: memory copy",
        "ours",
        "ours, h5",
        "ours, dual",
        "safetensors",
        "h5py",
    },
    "stall": {"limit: memory copy", "ours", "torch DCP async"},
    "cold": {
        "limit: O_DIRECT read",
        "ours",
        "safetensors",
        "torch.load",
        "from_pretrained",
        "torch DCP",
    },
    "memory": {"ours", "ours, h5", "ours, dual", "safetensors", "torch.save"},
    "planning": {"ours, llama, rank 0", "ours, many, rank 0"},
    "writers": {"ours, 0 writers", "ours, 100 writers"},
    "ranks": {
        "ours",
        "ours, gather",
        "get_state_dict + save_pretrained",
        "torch DCP + consolidation",
    },
}
KEEPS_ALL = {"save", "memory", "ranks"}  # whose files hold every tensor


def bench(folder, *arguments):
    figures = folder / "figures.json"
    size = ("--sizes", "1MB", "--rounds", "1", "--folder", folder)
    said = run_bench(*size, "--json", figures, *arguments)
    return json.loads(figures.read_text()), said


def run_bench(*arguments):
    code = "import runpy; runpy.run_module('scripts.bench', run_name='__main__', alter_sys=True)"
    done = run_python(code, *arguments, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    figures, said = bench(folder, "--chart", folder / "chart", "--only", *ONE_PROCESS)
    assert sorted(path.name for path in folder.iterdir()) == ["chart", "figures.json"]
    return figures, said, folder


@pytest.mark.slow
def test_every_measure_has_rows_and_no_way_of_ours_failed(measured):
    figures, _, _ = measured
    for name in ONE_PROCESS:
        rows = rows_of(figures, name)
        assert any(way.startswith("ours") for way in rows)
        assert rows.keys() >= ALWAYS_THERE.get(name, set())
        assert [way for way in ALWAYS_THERE.get(name, ()) if "error" in rows[way]] == []


@pytest.mark.slow
def test_figures_are_possible(measured):
    check_possible(measured[0])


@pytest.mark.slow
def test_a_save_that_reuses_frozen_weights_writes_less_than_it_holds(measured):
    row = rows_of(measured[0], "frozen")["ours"]
    assert (
        row["trainable_bytes"]
        <= row["new_bytes"]
        < row["trainable_bytes"] + 100_000
        < row["disk_bytes"]
    )


@pytest.mark.slow
def test_the_machine_and_what_is_missing_are_told(measured):
    figures, said, _ = measured
    machine = figures["machine"]
    assert machine["cores"] == os.cpu_count()
    assert {"kernel", "file_system", "memory_bytes", "date"} <= machine.keys()
    assert {"torch", "safetensors"} <= machine["versions"].keys()
    assert all(name in said for name in figures["missing"])
    assert machine["rounds"] == 1


@pytest.mark.slow
def test_the_chart_has_ours_the_limit_and_the_best_peer(measured):
    figures, _, folder = measured
    rows = rows_of(figures, "cold")
    for theme in ("light", "dark"):
        words = words_of(folder / "chart" / f"figures-{theme}.svg")
        # names and figures in turns: the limit, ours, and the best peer
        at = words.index("Load from the disk") + 2
        expected = [
            rows["limit: O_DIRECT read"],
            rows["ours"],
            min(filter(is_peer, rows.values()), key=seconds_of),
        ]
        shown = [float(words[at + 2 * number + 1].removesuffix(" s")) for number in range(3)]
        assert words[at : at + 4 : 2] == ["the disk itself", "ft_ckpt"]
        assert max(map(len, words[at : at + 10 : 2])) <= 22  # names have so much room
        assert shown == [pytest.approx(row["seconds"], rel=0.06, abs=0.006) for row in expected]


def test_the_pages_and_their_chart_are_those_of_the_stored_figures(tmp_path):
    """`python -m scripts.bench --docs --only` makes them again."""
    (tmp_path / "docs").mkdir()
    pages = ["README.md", "docs/figures.md"]
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        (tmp_path / page).write_text(
            re.sub(r"(<!-- figures: \w+ -->\n)(?:.+\n)+", r"\1", text), encoding="utf-8"
        )
    shutil.copy(ROOT / "docs" / "figures.json", tmp_path / "docs")
    run_bench("--docs", tmp_path, "--only")
    for made in (
        *pages,
        "docs/figures.json",
        "docs/images/figures-light.svg",
        "docs/images/figures-dark.svg",
    ):
        assert (tmp_path / made).read_text(encoding="utf-8") == (ROOT / made).read_text(
            encoding="utf-8"
        ), made


def test_figures_of_two_machines_are_not_mixed(tmp_path):
    stored = tmp_path / "figures.json"
    shutil.copy(ROOT / "docs" / "figures.json", stored)
    found = json.loads(stored.read_text(encoding="utf-8"))
    found["machine"]["processor"] = "another"
    stored.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(AssertionError, match=r"figures of .*'another'.* measure all again"):
        run_bench("--json", stored, "--only", "many")
    assert json.loads(stored.read_text(encoding="utf-8")) == found


@pytest.mark.slow
def test_measuring_again_replaces_that_measure_alone(measured):
    before, _, folder = measured
    after, _ = bench(folder, "--only", "many")
    assert rows_of(after, "save") == rows_of(before, "save")
    assert rows_of(after, "many").keys() == rows_of(before, "many").keys()
    assert rows_of(after, "many") != rows_of(before, "many")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHED)
def test_measures_that_launch_processes(tmp_path, name):
    figures, _ = bench(tmp_path, "--only", name)
    check_possible(figures)
    assert rows_of(figures, name).keys() >= ALWAYS_THERE[name]


@pytest.mark.slow
def test_an_adapter_is_less_than_its_model(tmp_path):
    figures, _ = bench(tmp_path, "--only", "ranks", "adapter")
    check_possible(figures)
    assert rows_of(figures, "ranks").keys() >= ALWAYS_THERE["ranks"]
    whole, adapter = (rows_of(figures, name)["ours"]["disk_bytes"] for name in ("ranks", "adapter"))
    assert adapter < whole


def words_of(chart):
    return [text.text for text in ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}text")]


def is_peer(row):
    return not row["way"].startswith(("ours", "limit")) and "seconds" in row


def seconds_of(row):
    return row["seconds"]


def rows_of(figures, measure):
    return {row["way"]: row for row in figures["rows"] if row["measure"] == measure}


def check_possible(figures):
    """Times are times, and files that hold every tensor are no smaller than these, unless they are
    compressed.
    """
    timed = [row for row in figures["rows"] if "error" not in row]
    assert timed
    for row in timed:
        assert all(
            row[name] > 0 for name in ("seconds", "tensor_bytes", "disk_bytes") if name in row
        ), row
        assert row.get("return_seconds", 0) <= row.get("seconds", 0)
        if row["measure"] in KEEPS_ALL and "disk_bytes" in row and row["way"] != "orbax":
            assert row["disk_bytes"] >= row["tensor_bytes"], row
