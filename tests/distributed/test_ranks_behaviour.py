"""Two ranks, one fault: every rank raises, nobody hangs, nothing half-written is left. The cases are in the worker."""

import pytest
from launch import run_cases

# Cases of one list share a launch. One that leaves the ranks out of step is the last of its list.
LAUNCHES = {
    "together": [
        "different_arguments",
        "what_follows_a_save",
        "error_on_one_rank",
        "writers_taken_over",
        "writer_raises",
        "one_writer",
        "only_rank_0",
    ],
    "many times": ["overwriting", "nothing_piles_up", "large_answers"],
    "short group timeout": ["slow_writer", "only_rank_1"],
}


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    seen: dict[str, dict[str, str]] = {}

    def passed(case: str) -> None:
        launch = next(name for name, cases in LAUNCHES.items() if case in cases)
        if launch not in seen:
            seen[launch] = run_cases("behaviour", LAUNCHES[launch], tmp_path_factory.mktemp("ranks"), timeout=120)
        if seen[launch][case]:
            pytest.fail(seen[launch][case], pytrace=False)

    return passed


def test_different_arguments_are_an_error_on_every_rank(passed):
    """Ranks disagree about what to save, and hang."""
    passed("different_arguments")


def test_one_rank_pushes_and_calls_what_follows_a_save(passed):
    passed("what_follows_a_save")


def test_error_on_one_rank_reaches_the_others(passed):
    """One rank fails, the others wait until the watchdog comes."""
    passed("error_on_one_rank")


def test_a_session_taken_over_is_an_error_on_every_rank(passed):
    """Rank 0 raises before the others enter the save, and they wait for it."""
    passed("writers_taken_over")


def test_failed_write_leaves_the_older_checkpoint_and_latest(passed):
    """`latest` moved, or the old checkpoint gone, though the new one failed; ranks left waiting."""
    passed("writer_raises")


def test_every_file_has_one_writer(passed):
    """All ranks write the same tokenizer and config."""
    passed("one_writer")


@pytest.mark.slow
def test_a_hundred_overwriting_saves(passed):
    """The atomic rename itself breaks with several ranks."""
    passed("overwriting")


@pytest.mark.slow
def test_the_store_of_the_launch_does_not_fill_up(passed):
    passed("nothing_piles_up")


@pytest.mark.slow
def test_answers_larger_than_a_value_of_the_store(passed):
    """torch's store ends at 8 MiB a value: the verdict of many ranks, or the facts of a large optimizer, are more."""
    passed("large_answers")


@pytest.mark.parametrize("rank", [0, 1])
def test_save_called_on_one_rank_only(passed, rank):
    """`if is_main_process: save(...)` hangs until the timeout."""
    passed(f"only_rank_{rank}")


def test_slow_disk_outlasts_the_group_timeout(passed):
    """The watchdog kills the job while rank 0 writes."""
    passed("slow_writer")
