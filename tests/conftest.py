"""Settings of all tests: no network, one thread for each process, one seed.

With one seed, a failure repeats. FT_CKPT_SEED chooses another, for property-based tests too;
`scripts/test --all` draws one. The longest files begin first.
"""

import gc
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import extensions
import pytest
import torch
from hypothesis import HealthCheck, settings
from launch import start_fork_server
from on_ranks import launches_of
from places import HELPERS
from s3_server import S3, running_s3
from seeds import examples
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
SEED = os.environ.setdefault("FT_CKPT_SEED", "0")
settings.register_profile(
    "seeded",
    derandomize=SEED == "0",
    max_examples=examples(100),
    # it measures seconds, which a busy machine has not
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("seeded")
extensions.prepare_folder()

# A file runs on one worker, so a file of a minute must not be the last to start, when the other
# worker is idle.
LONGEST_FILES = (
    "test_distributed",
    "test_documents",
    "test_trainer",
    "test_contract",
    "test_ranks_behaviour",
    "test_check_resume",
    "test_follow",
    "test_position",
    "test_examples",
    "test_publish_cli",
    "test_staging",
    "test_cli",
    "test_replicas",
    "test_faults",
    "test_resume_wrappers",
    "test_direct",
    "test_background",
    "test_background_ranks",
    "test_zero_optimizer",
    "test_position_ranks",
    "test_compression",
    "test_hdf5",
    "test_commit",
    "test_reuse",
    "test_running",
    "test_resume",
    "test_opening",
    "test_convert",
    "test_killed",
)

_SECONDS_OF_SLOW_TESTS = 7200  # campaigns, on a machine with other work

# Campaigns of several cases that share nothing: workers take the cases one by one, and not the
# file.
CAMPAIGNS = {
    "test_a_copy_that_is_killed_at_any_request_is_finished_by_the_next",
    "test_a_copy_that_is_refused_from_any_request_on_is_finished_by_the_next",
    "test_a_fault_at_every_request_of_two_writers",
    "test_a_flipped_bit_goes_nowhere",
    "test_a_run_that_is_killed_at_any_request_goes_on",
    "test_a_run_that_is_stopped_at_any_request_goes_on",
    "test_commands_that_are_killed_anywhere_are_finished_by_the_next_call",
    "test_every_fault",
    "test_every_fault_in_every_file",
    "test_every_fault_of_a_read",
    "test_hundreds_of_damaged_inputs",
    "test_killed_and_its_recovery_stopped",
    "test_killed_two_hundred_times",
    "test_mutated_files_give_right_values_or_an_error",
    "test_no_flipped_bit_gives_another_model",
}


def pytest_configure(config: pytest.Config) -> None:
    """Fork the workers of a run and their launches from one process.

    No garbage is collected before the first test.
    """
    if getattr(config.option, "numprocesses", None):
        start_fork_server()
        worker = f"popen//python={sys.executable} {HELPERS / 'worker.py'}"
        config.option.tx = [worker] * len(config.option.tx)
    gc.disable()


class _ByFileOrCase(LoadFileScheduling):
    """Hands out whole files, whose tests share their launches, and single cases of campaigns."""

    def _split_scope(self, nodeid: str) -> str:
        function = nodeid.partition("::")[2].partition("[")[0]
        return nodeid if function in CAMPAIGNS else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _ByFileOrCase(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_finish() -> None:
    """Exclude tests and libraries from later garbage collections, a tenth of the time of a run."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, mark the tests of --all as slow, skip those that lack an accelerator."""
    is_partial = any("::" in argument for argument in config.args) or config.getoption("lf", False)
    _mark_slow_cases(items, is_partial=is_partial)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SECONDS_OF_SLOW_TESTS))
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(Path(item.path).stem, len(places)))
    marked = [item for item in items if item.get_closest_marker("accelerator")]
    if marked and not torch.accelerator.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no accelerator here"))


def _mark_slow_cases(items: list[pytest.Item], *, is_partial: bool) -> None:
    """Mark as slow the cases of each test that its `sample` leaves out.

    The mark names the cases of the sample, or has the number of cases to draw. Raises UsageError
    for a case that there is not, unless the run `is_partial`.
    """
    cases_by_test: dict[str, dict[str, pytest.Item]] = {}
    samples: dict[str, Any] = {}
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None:
            test, _, case = item.nodeid.partition("[")
            cases_by_test.setdefault(test, {})[case.removesuffix("]")] = item
            samples[test] = mark.args
    for test, cases in cases_by_test.items():
        sample = samples[test]
        if isinstance(sample[0], int):
            fast = [case for case, item in cases.items() if not item.get_closest_marker("slow")]
            chances = random.Random(test.rpartition("::")[2])
            sample = chances.sample(fast, min(sample[0], len(fast)))
        unknown = sorted(set(sample) - cases.keys())
        if unknown and not is_partial:
            raise pytest.UsageError(f"{test}: no such cases to sample: {unknown}")
        for case in cases.keys() - set(sample):
            cases[case].add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape text without an encoding, as in hostile names: a worker could not send the report."""
    report = yield
    report.sections = [(name, _encodable(text)) for name, text in report.sections]
    failure = str(report.longrepr or "")
    if failure != _encodable(failure):
        report.longrepr = _encodable(failure)
    return report


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


@pytest.fixture(scope="session", autouse=True)
def _spread_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let ext4 put each test's folder into another block group.

    In a full group it searches past all deleted files.
    """
    with suppress(FileNotFoundError):  # not Linux
        subprocess.run(
            ["chattr", "+T", tmp_path_factory.getbasetemp()], stderr=subprocess.DEVNULL, check=False
        )


@pytest.fixture(scope="module", autouse=True)
def _launches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Share ranks between the tests of a file, see tests/helpers/on_ranks.py."""
    with launches_of(request.path):
        yield


@pytest.fixture(autouse=True)
def _end_loader_workers() -> Iterator[None]:
    """End the workers of loaders that a test leaves in a cycle, as with the traceback of an error.

    The garbage collector ends their queues first, and then waits five seconds for each worker.
    """
    yield
    if multiprocessing.active_children():
        for loader in gc.get_objects():
            shut_down = getattr(type(loader), "_shutdown_workers", None)
            if shut_down is not None:
                shut_down(loader)


@pytest.fixture
def s3() -> Iterator[S3]:
    """Serve S3 on loopback, with an empty bucket s3://bucket, see tests/helpers/s3_server.py."""
    pytest.importorskip("obstore")
    with running_s3() as server:
        yield server


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile faulty.c for LD_PRELOAD: calls to the disk fail, or end their process."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, and a loader that takes LD_PRELOAD")
    library = tmp_path_factory.mktemp("faulty") / "faulty.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, HELPERS / "faulty.c", "-ldl"],
        check=True,
    )
    return library
