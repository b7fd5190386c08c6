"""A run in a bucket, stopped at every request: by a kill, and by each fault that a line or a store can have.

Each trial resumes the run, makes a step, saves, commits and prunes. No checkpoint is lost, none that is seen is not
whole, the run goes on as if nothing had been, and nothing that was broken off stays.
"""

import pytest
from bucket_lives import PREFIX, Life, committed, kill_at, live
from http_server import Fault

BEFORE, DONE, AFTER = 2, 3, 4  # the step that each trial begins at, the one that it makes, and the one after it


def conditional(number):
    """That request, if it has a condition: no other is answered so."""
    return lambda asked: asked.number == number and bool({"if-match", "if-none-match"} & asked.headers.keys())


FAULTS = {
    "killed before": lambda number: kill_at(number, acts_first=False),
    "killed after": lambda number: kill_at(number, acts_first=True),
    "refused": lambda number: lambda _: Fault(at=number, status=403, code="ExpiredToken"),
    "conflict": lambda number: lambda _: Fault(at=number, status=409, code="ConditionalRequestConflict"),
    "failed": lambda number: lambda _: Fault(at=number, status=500),
    "condition failed": lambda number: lambda _: Fault(conditional(number), status=412, code="PreconditionFailed"),
    "slow down": lambda number: lambda _: Fault(at=number, status=503, code="SlowDown"),
    "done, and an error": lambda number: lambda _: Fault(at=number, status=500, acts_first=True),
    "answer lost": lambda number: lambda _: Fault(at=number, cuts="after"),
    "answer cut": lambda number: lambda _: Fault(at=number, cuts="during"),
    "cut": lambda number: lambda _: Fault(at=number, cuts="before"),
    "answer too short": lambda number: lambda _: Fault(at=number, keeps_bytes=1, lies=True),
}
SAMPLE = [("killed after", 0.5), ("answer lost", 0.55)]


class Run:
    """A run of two steps in a bucket, put back there for each trial; and what it comes to where nothing happens."""

    def __init__(self, s3):
        self.s3 = s3
        self.expected = live(s3, BEFORE)
        assert self.expected == Life(0, "", self.expected.losses)
        self.start = dict(s3.buckets["bucket"])
        begun = s3.asked
        self.expected.losses.update(live(s3, DONE).losses)
        self.requests = s3.asked - begun
        self.expected.losses.update(live(s3, AFTER).losses)
        assert committed(s3) == {DONE, AFTER}
        self.files = {name for name in self.start if f"-{BEFORE}/" in name} | set(s3.names())

    def trial(self, what: str, number: int) -> None:
        s3 = self.s3
        s3.buckets["bucket"] = dict(self.start)
        stopped = live(s3, DONE, FAULTS[what](s3.asked + number))
        assert committed(s3) >= ({BEFORE} if DONE not in committed(s3) else {BEFORE, DONE}), (what, number)
        assert (stopped.status < 0) == what.startswith("killed"), (what, number, stopped)
        s3.advance(2 * 86_400)
        again = live(s3, AFTER)
        assert (again.status, again.error) == (0, ""), (what, number, again)
        for life in (stopped, again):
            assert life.losses.items() <= self.expected.losses.items(), (what, number)
        kept = {DONE, AFTER} | ({BEFORE} & committed(s3))  # which a run that was resumed from it leaves alone
        assert committed(s3) == kept, (what, number)
        assert [name for name in s3.names(PREFIX) if name not in self.files] == [], (what, number)


@pytest.fixture
def run(s3):
    return Run(s3)


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on(run):
    for what, share in SAMPLE:
        run.trial(what, max(1, int(run.requests * share)))


@pytest.mark.slow
@pytest.mark.parametrize("what", FAULTS)
def test_a_run_that_is_stopped_at_any_request_goes_on(run, what):
    for number in range(1, run.requests + 1):
        run.trial(what, number)
