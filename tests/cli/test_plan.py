"""`ft-ckpt plan`: its figures against a count by hand, its table, its JSON."""

import pytest
from commands import ft_ckpt
from small_checkpoints import save

from ft_ckpt.cli.plan import PlannedRun, best_steps, human_time, interval_rows, total_overhead
from ft_ckpt.schedule import expected_overhead

JOB = PlannedRun(
    step_seconds=1.2,
    save_seconds=4.0,
    mtbf_seconds=6 * 3600,
    restart_seconds=300,
    size_bytes=2_500_000_000,
    keep_last=3,
    hours=24,
    max_overhead=0.05,
)
GIVEN = ["plan", "--step-time", 1.2, "--mtbf", "24h", "--nodes", 4]


def test_the_optimum_is_the_cheapest_number_of_steps():
    best = best_steps(JOB)
    cheapest = min(range(1, 5000), key=lambda steps: total_overhead(JOB, steps))
    assert best == pytest.approx(cheapest, rel=0.01)
    assert [row.steps for row in interval_rows(JOB) if row.optimum] == [best]


def test_rows_are_counted_right():
    row = next(row for row in interval_rows(JOB) if row.steps == 100)
    assert row.interval_seconds == 120
    assert row.saving == pytest.approx(4 / 120)
    assert (
        row.total
        == pytest.approx(expected_overhead(120, 4, 21600, 300))
        == row.saving + row.recomputation
    )
    assert row.saves == int(86400 / (120 * (1 + row.total)))
    assert row.disk_bytes == 4 * 2_500_000_000, "three, and the one being written"


def test_rows_of_a_run_that_keeps_all_of_an_unknown_size():
    job = PlannedRun(**{**JOB.__dict__, "keep_last": None})
    assert all(row.disk_bytes == row.saves * 2_500_000_000 for row in interval_rows(job))
    assert {
        row.disk_bytes for row in interval_rows(PlannedRun(**{**JOB.__dict__, "size_bytes": None}))
    } == {None}


@pytest.mark.parametrize(("overhead", "steps"), [(0.001, 3330), (0.5, best_steps(JOB))])
def test_the_overhead_is_bounded(overhead, steps):
    assert best_steps(PlannedRun(**{**JOB.__dict__, "max_overhead": overhead})) == steps


def test_a_step_longer_than_the_optimum():
    assert best_steps(PlannedRun(**{**JOB.__dict__, "step_seconds": 7200.0})) == 1
    assert [
        row.steps for row in interval_rows(PlannedRun(**{**JOB.__dict__, "step_seconds": 7200.0}))
    ] == [1, 2, 5, 10]


def test_table():
    answer = ft_ckpt(*GIVEN, "--model-size", "2.5GB", "--save-time", 4, "--keep-last", 3)
    first, second, heads, *lines = answer.out.splitlines()
    assert answer.code == 0
    assert first == "a save of 2.5 GB takes 4 s; a failure every 6.0 h"
    assert second.startswith("24 hours of running; a restart takes 5.0 min")
    assert heads.split() == [
        "steps",
        "interval",
        "saves",
        "disk",
        "saving",
        "recomputation",
        "total",
    ]
    marked = [line for line in lines if line.rstrip().endswith("<- optimum")]
    assert [line.split()[0] for line in marked] == [str(best_steps(JOB))]
    assert [line.split()[0] for line in lines] == [
        "50",
        "100",
        "200",
        str(best_steps(JOB)),
        "500",
        "1000",
        "2000",
    ]
    assert lines[1].split() == ["100", "2.0", "min", "685", "10.0", "GB", "3.33%", "1.75%", "5.08%"]


def test_json():
    answer = ft_ckpt(*GIVEN, "--model-size", "2.5GB", "--save-time", "4s", "--json")
    document = answer.document
    assert (document["optimum_steps"], document["measured"], document["mtbf_seconds"]) == (
        best_steps(JOB),
        False,
        21600,
    )
    assert [row["steps"] for row in document["rows"] if row["optimum"]] == [
        document["optimum_steps"]
    ]


def test_intervals_never_reached_are_told():
    given = [
        "plan",
        "--step-time",
        1,
        "--mtbf",
        1,
        "--restart-time",
        1,
        "--max-overhead",
        1,
        "--save-time",
    ]
    totals = [row["total"] for row in ft_ckpt(*given, 700, "--json").document["rows"]]
    assert (len(totals), totals[0] is None, totals[-1]) == (4, False, None)
    assert "never ends" in ft_ckpt(*given, 700).out.splitlines()[-1]
    answer = ft_ckpt(*given, 1000)
    assert (answer.code, answer.out) == (2, "")
    assert "the run would never get from one checkpoint to the next" in answer.err


def test_size_and_save_time_of_a_folder(tmp_path):
    for step in (1, 2):
        save(tmp_path / f"checkpoint-{step}", step=step)
    newest = tmp_path / "checkpoint-2"
    size = sum(
        file.stat().st_size
        for file in newest.rglob("*")
        if file.is_file() and file.name != "ft_ckpt.json"
    )
    for folder in (tmp_path, newest):
        before = sorted(tmp_path.rglob("*"))
        document = ft_ckpt(*GIVEN, folder, "--json").document
        assert (document["size_bytes"], document["measured"]) == (size, True)
        assert document["save_seconds"] > 0
        assert sorted(tmp_path.rglob("*")) == before, "what was written to measure is gone"


def test_folders_of_others(tmp_path):
    answer = ft_ckpt(*GIVEN, tmp_path)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "an empty folder; give a model, or --model-size" in answer.err
    (tmp_path / "model.safetensors").write_bytes(bytes(300))
    assert ft_ckpt(*GIVEN, tmp_path, "--json").document["size_bytes"] == 300


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "plan: expected --step-time; --mtbf; --model-size, --save-time or FOLDER"),
        (["--step-time", 1, "--save-time", 1], "plan: expected --mtbf;"),
        ([*GIVEN[1:], "--save-time", "soon"], "'soon' is not a duration"),
        ([*GIVEN[1:], "--save-time", 1, "a", "b"], "plan: b: one argument too many"),
        ([*GIVEN[1:], "absent"], "absent: no such folder"),
        ([*GIVEN[1:], "--model-size", "big"], "'big' is not a size"),
        ([*GIVEN[1:], "--save-time", 1, "--nodes", 0], "--nodes"),
        ([*GIVEN[1:], "--save-time", 1, "--max-overhead", 2], "--max-overhead"),
        ([*GIVEN[1:], "--save-time", 1, "--hours", "inf"], "--hours: inf: expected a number from"),
    ],
)
def test_errors(arguments, words):
    answer = ft_ckpt("plan", *arguments)
    assert (answer.code, answer.out, "Traceback" in answer.err) == (2, "", False)
    assert words in answer.err


def test_times_are_shown_in_a_fitting_unit():
    shown = [human_time(seconds) for seconds in (0.01234, 119, 120, 7200, 200_000)]
    assert shown == ["0.0123 s", "119 s", "2.0 min", "2.0 h", "2.3 d"]
