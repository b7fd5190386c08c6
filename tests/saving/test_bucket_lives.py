"""A run in a bucket, stopped at every request: by a kill, and by each fault that a line or a store
can have.

Each trial resumes the run, makes a step, saves, commits and prunes. No checkpoint is lost, none
that is seen is not whole, the run goes on as if nothing had been, and nothing that was broken off
stays.
"""

import pytest
from bucket_lives import PREFIX, committed, live
from faults import Server, try_worlds

# the step that each trial begins at, the one that it makes, and the one after it
BEFORE, DONE, AFTER = 2, 3, 4


def is_conditional(request):
    """Whether it has a condition: no other is answered so."""
    return bool({"if-match", "if-none-match"} & request.headers.keys())


FAULTS = {
    "killed before": {"cuts": "before"},
    "killed after": {"cuts": "after"},
    "refused": {"status": 403, "code": "ExpiredToken"},
    "conflict": {"status": 409, "code": "ConditionalRequestConflict"},
    "failed": {"status": 500},
    "condition failed": {"matches": is_conditional, "status": 412, "code": "PreconditionFailed"},
    "slow down": {"status": 503, "code": "SlowDown"},
    "done, and an error": {"status": 500, "acts_first": True},
    "answer lost": {"cuts": "after"},
    "answer cut": {"cuts": "during"},
    "cut": {"cuts": "before"},
    "answer too short": {"keeps_bytes": 1, "lies": True},
}
SAMPLE = ("killed after", "answer lost")


class Run:
    """A run of two steps in a bucket, put back there for each trial; and what it comes to where
    nothing happens.
    """

    def __init__(self, s3):
        self.s3 = s3
        begun = live(s3, BEFORE)
        assert (begun.status, begun.error) == (0, "")
        self.losses = begun.losses
        self.start = dict(s3.buckets["bucket"])
        self.files = {name for name in self.start if f"-{BEFORE}/" in name}

    def trial(self, world):
        s3 = self.s3
        s3.buckets["bucket"] = dict(self.start)
        stopped = world.run(live, s3, DONE, world)
        assert committed(s3) >= ({BEFORE} if DONE not in committed(s3) else {BEFORE, DONE})
        assert (stopped.status < 0) == world.fault.startswith("killed"), stopped
        s3.advance(2 * 86_400)
        again = live(s3, AFTER)
        assert (again.status, again.error) == (0, ""), again
        if not world.fault:
            self.losses |= stopped.losses | again.losses
            self.files |= set(s3.names())
        for life in (stopped, again):
            assert life.losses.items() <= self.losses.items()
        # which a run that was resumed from it leaves alone
        kept = {DONE, AFTER} | ({BEFORE} & committed(s3))
        assert committed(s3) == kept
        assert [name for name in s3.names(PREFIX) if name not in self.files] == []


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on(s3):
    faults = {name: FAULTS[name] for name in SAMPLE}
    try_worlds(Run(s3).trial, Server(s3, faults), max_worlds=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_that_is_stopped_at_any_request_goes_on(s3, name):
    try_worlds(Run(s3).trial, Server(s3, {name: FAULTS[name]}))
