"""Plants faults in copies of the project, one at a time, and tells which test catches each.

    scripts/planted                  all faults of tests/planted
    scripts/planted commit ID ...    those of some groups (files of tests/planted), or with some ids
    scripts/planted --list           prints the faults, and runs nothing
    scripts/planted --quick          the tests that a fault names, never the whole default run
    scripts/planted --jobs 2         so many copies at the same time
    scripts/planted --json           the outcomes as JSON

A fault is a change that somebody could make by mistake: a text that is once in a file, and the text
in its place. The tests that it names are run first, without the slow ones, then the whole default
run. A fault is caught when a test fails. At the end the tests that caught faults are run without
them, so that a test that always fails proves nothing.

The exit code is 1 if a fault is missed, if its text is not once in its file, if no test can be run
with it, if the tests do not end, or if a test fails without it; 2 for an unknown id. The working
tree stays as it is.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "planted"
NAMED_SECONDS = 600  # for the tests that a fault names
DEFAULT_SECONDS = 1800  # for the whole default run
PYTEST = ("-q", "-p", "no:cacheprovider", "-m", "not slow")
DEFAULT_RUN = ("-x", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")
LIBRARIES = [
    "pytest",
    "hypothesis",
    "torch",
    "torch.distributed.fsdp",
    "transformers",
    "accelerate",
    "peft",
    "h5py",
]
NO_TESTS = 5  # pytest's exit code where a name or an expression selects none
# of a test, of a launch of ranks
TIME_LIMITS = ("from pytest-timeout", "the process ended with status -1")


class StaleFaultError(ValueError):
    """The text of a fault is not exactly once in its file."""


@dataclass(frozen=True)
class Fault:
    """A change of one place in one file, which a test must notice."""

    id: str
    group: str
    breaks: str  # what a user would see
    file: str  # relative to the root of the project
    old: str
    new: str
    tests: tuple[str, ...]  # arguments of pytest: files, or files and -k

    def changed_text(self, root: Path) -> str:
        """Return the text of the file with the fault. Raises StaleFaultError."""
        text = (root / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise StaleFaultError(
                f"{self.id}: its text is {count} times in {self.file}, expected once"
            )
        return text.replace(self.old, self.new)

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """Put the fault into the project at `root` during the block. Raises StaleFaultError."""
        path = root / self.file
        whole_text, changed_text = path.read_text(encoding="utf-8"), self.changed_text(root)
        path.write_text(changed_text, encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(whole_text, encoding="utf-8")


@dataclass(frozen=True)
class TestRun:
    """The outcome of a run of pytest."""

    status: int | None  # pytest's exit code; None if it did not end in time
    failed: tuple[str, ...]  # the tests that failed
    output: str

    @property
    def met_time_limit(self) -> bool:
        """Whether a test failed because it did not end in its time."""
        return any(text in self.output for text in TIME_LIMITS)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one fault."""

    id: str
    group: str
    verdict: str  # "caught", "missed", "stale", "broken" or "hung"
    test: str = ""  # that failed
    by: str = ""  # "named tests" or "default run", and whether it was the time limit of the test
    seconds: float = 0.0
    detail: str = ""

    @property
    def line(self) -> str:
        shown = f"{self.test} ({self.by})" if self.verdict == "caught" else self.detail
        return f"{self.id:<34} {self.verdict:<7} {self.seconds:6.0f} s  {shown}"


def read_faults(folder: Path = FOLDER) -> list[Fault]:
    """Read the faults of all groups, in the order of their files."""
    faults = []
    for path in sorted(folder.glob("*.toml")):
        for record in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            tests = tuple(record.pop("tests"))
            faults.append(Fault(**record, group=path.stem, tests=tests))
    return faults


def choose_faults(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Return the faults with one of the names as id or group; all without names.

    Ends the program for an unknown name.
    """
    unknown = set(names) - {fault.id for fault in faults} - {fault.group for fault in faults}
    if unknown:
        print(
            f"no fault or group of this name: {', '.join(sorted(unknown))}; see --list",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return [fault for fault in faults if not names or fault.id in names or fault.group in names]


def copy_project(goal: Path) -> None:
    """Copy the files of the working tree that git does not ignore."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():  # a deleted file is listed until it is committed
            (goal / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, goal / name)


def run_tests(root: Path, arguments: Sequence[str], limit_seconds: float) -> TestRun:
    """Run tests in the project at `root`; the processes that they started have ended then.

    The process is forked from one that has loaded the libraries, which takes longer than most of
    the tests.
    """
    with tempfile.TemporaryDirectory(prefix="planted-log-") as folder:
        log = Path(folder, "log")
        process = multiprocessing.get_context("forkserver").Process(
            target=be_pytest, args=(root, arguments, log)
        )
        process.start()
        process.join(limit_seconds)
        status = process.exitcode
        if status is None:
            end_process(process.pid or 0)
            process.join()
        output = log.read_text(encoding="utf-8", errors="replace")
    return TestRun(status, failed_tests(output), output)


def be_pytest(root: Path, arguments: Sequence[str], log: Path) -> None:
    """Run pytest in this process on the project at `root`, with its output in the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.chdir(root)
    for name in list(os.environ):
        # a caller's fork server has loaded the package without the fault
        if name.startswith(("FT_CKPT_", "PYTEST_")):
            del os.environ[name]
    os.environ["PYTHONPATH"] = str(root)
    others = [path for path in sys.path if Path(path).resolve() not in (ROOT, root)]
    sys.path[:] = [str(root), *others]
    for name in list(sys.modules):
        if name.partition(".")[0] == "scripts":  # of the working tree
            del sys.modules[name]
    assert "ft_ckpt" not in sys.modules, "the package comes from the copy"
    raise SystemExit(int(pytest.main([*PYTEST, *arguments])))


def load_libraries_once() -> None:
    """Fork the processes of `run_tests` from one that has the libraries.

    They are offline, with one thread each.
    """
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    multiprocessing.get_context("forkserver").set_forkserver_preload(LIBRARIES)


def end_process(pid: int) -> None:
    """Kill a process and its descendants."""
    process = psutil.Process(pid)
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()


def failed_tests(output: str) -> tuple[str, ...]:
    """Return the tests that pytest's summary lists as failed, also while they were prepared."""
    names = []
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("FAILED", "ERROR") and "::" in rest:
            names.append(rest.partition(" - ")[0])
    return tuple(names)


def try_fault(fault: Fault, root: Path, *, is_quick: bool) -> Outcome:
    """Run the tests with the fault, in a copy of the project."""
    begun_at = time.monotonic()

    def outcome(verdict: str, **facts: str) -> Outcome:
        duration = round(time.monotonic() - begun_at, 1)
        return Outcome(fault.id, fault.group, verdict, seconds=duration, **facts)

    runs = [("named tests", ("-x", *fault.tests), NAMED_SECONDS)]
    if not is_quick:
        runs.append(("default run", DEFAULT_RUN, DEFAULT_SECONDS))
    try:
        with fault.planted(root):
            for by, arguments, limit_seconds in runs:
                run = run_tests(root, arguments, limit_seconds)
                if run.status is None:
                    detail = f"the {by} did not end in {limit_seconds} s, nor did a test fail"
                    return outcome("hung", detail=detail)
                if run.status == 1 and run.failed:
                    how = f"{by}, its time limit" if run.met_time_limit else by
                    return outcome("caught", test=run.failed[0], by=how)
                if run.status not in (0, NO_TESTS):
                    last_lines = " / ".join(run.output.strip().splitlines()[-3:])
                    return outcome("broken", detail=f"pytest ended with {run.status}: {last_lines}")
    except StaleFaultError as error:
        return outcome("stale", detail=str(error))
    return outcome("missed", detail=fault.breaks)


def try_faults(
    faults: Sequence[Fault], jobs: int, *, is_quick: bool, shows: bool
) -> tuple[list[Outcome], list[str]]:
    """Try each fault; return the outcomes, and the tests that fail without a fault, too."""
    copies: SimpleQueue[Path] = SimpleQueue()

    def in_a_copy(fault: Fault) -> Outcome:
        root = copies.get()
        try:
            outcome = try_fault(fault, root, is_quick=is_quick)
        finally:
            copies.put(root)
        if shows:
            print(outcome.line, flush=True)
        return outcome

    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        for number in range(jobs):
            root = Path(folder, str(number))
            copy_project(root)
            copies.put(root)
        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(in_a_copy, faults))
        catching = sorted({outcome.test for outcome in outcomes if outcome.verdict == "caught"})
        always_failing: tuple[str, ...] = ()
        if catching:
            run = run_tests(copies.get(), catching, DEFAULT_SECONDS)
            always_failing = run.failed
            if run.status != 0 and not run.failed:
                raise SystemExit(
                    f"the tests that caught faults do not run without them:\n{run.output[-2000:]}"
                )
    return outcomes, list(always_failing)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/planted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="ID", help="ids of faults, or groups")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="copies that are tested at the same time"
    )
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    parser.add_argument("--quick", action="store_true", help="only the tests that a fault names")
    arguments = parser.parse_args()
    faults = choose_faults(read_faults(), arguments.names)
    if arguments.list:
        for fault in faults:
            print(f"{fault.group:<14} {fault.id:<34} {fault.file}: {fault.breaks}")
        return 0
    load_libraries_once()
    outcomes, always_failing = try_faults(
        faults, max(1, arguments.jobs), is_quick=arguments.quick, shows=not arguments.json
    )
    is_good = all(outcome.verdict == "caught" for outcome in outcomes) and not always_failing
    if arguments.json:
        records = [asdict(outcome) for outcome in outcomes]
        print(json.dumps({"outcomes": records, "fail without a fault": always_failing}, indent=2))
        return 0 if is_good else 1
    for test in always_failing:
        print(f"{test}: fails without a fault, too")
    verdicts = [outcome.verdict for outcome in outcomes]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)]
    print(f"{len(outcomes)} faults: {', '.join(counts)}")
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
