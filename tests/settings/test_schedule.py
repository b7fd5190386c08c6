"""When to save: the rules of `Every`, the interval that costs least, and runs that fail,
simulated.
"""

import math
import random
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from ft_ckpt import Every
from ft_ckpt.errors import ConfigError, LoadError
from ft_ckpt.schedule import (
    History,
    after_save,
    after_step,
    begin_history,
    bounded_interval,
    expected_overhead,
    interval_seconds,
    needs_poll,
    next_poll,
    optimal_interval,
    own_reason,
    parse_seconds,
    shared_reason,
)

unhurried = settings(deadline=None)  # a busy machine is no failure
QUIET = {"signals": (), "deadline": None}


def drive(
    every,
    steps,
    step_seconds=1.0,
    cost=0.5,
    epoch_steps=10,
    metrics=None,
    unix=0.0,
    advance=1,
    history=None,
):
    """Steps at which a run of one process saves, and why; `metrics` is what is measured at a
    step.
    """
    now, found = 0.0, {}
    history = history or begin_history(0, 0, now)
    for step in range(advance, steps + 1, advance):
        now += step_seconds * advance
        history = after_step(history, step, now)
        values, epochs = (metrics or {}).get(step), step // epoch_steps
        reason = own_reason(every, history, step, epochs, values) or shared_reason(
            every, history, now, unix + now
        )
        if reason:
            now += cost
            found[step] = reason
            history = after_save(
                every, history, step, epochs, now, cost_seconds=cost, metrics=values, reason=reason
            )
            assert own_reason(every, history, step, epochs, values) is None, (
                "never twice for one step"
            )
            assert shared_reason(every, history, now + 1e9, unix + now) is None
    return found, history


# Steps, epochs, best


@unhurried
@given(every=st.integers(1, 20), advance=st.integers(1, 7), steps=st.integers(1, 100))
def test_steps_are_never_more_than_the_interval_apart(every, advance, steps):
    found, _ = drive(Every(steps=every, **QUIET), steps, advance=advance)
    assert max(b - a for a, b in pairwise([0, *found, steps])) < every + advance
    assert advance > 1 or list(found) == list(range(every, steps + 1, every))


@unhurried
@given(
    steps=st.integers(1, 12),
    minutes=st.floats(0.02, 1),
    seconds=st.floats(0.1, 5),
    cost=st.floats(0, 5),
)
def test_reasons_together_keep_each_promise(steps, minutes, seconds, cost):
    every = Every(steps=steps, minutes=minutes, **QUIET)
    found, _ = drive(every, 60, seconds, cost)
    gaps = [b - a for a, b in pairwise([0, *found])]
    assert set(range(steps, 61, steps)) <= set(found)
    assert all((gap - 1) * seconds < minutes * 60 * (1 + 1e-9) for gap in gaps)


@unhurried
@given(epochs=st.integers(1, 4), length=st.integers(1, 12))
def test_epochs(epochs, length):
    found, _ = drive(Every(epochs=epochs, **QUIET), 100, epoch_steps=length)
    assert list(found) == list(range(epochs * length, 101, epochs * length))


@unhurried
@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=16), max_size=20))
def test_best_saves_each_improvement_and_no_other(values):
    metrics = {2 * place: {"loss": value} for place, value in enumerate(values, 1)}
    found, history = drive(Every(best=("loss", "min"), **QUIET), 50, metrics=metrics)
    finite = [
        (step, value["loss"]) for step, value in metrics.items() if math.isfinite(value["loss"])
    ]
    better = [
        step
        for place, (step, value) in enumerate(finite)
        if all(value < old for _, old in finite[:place])
    ]
    assert list(found) == better
    assert not finite or history.best == {"loss": min(value for _, value in finite)}


def test_best_by_the_largest_and_without_the_metric():
    found, _ = drive(
        Every(best=("f1", "max"), **QUIET),
        4,
        metrics={1: {"f1": 1}, 2: {"f1": 0}, 3: {"a": 9}, 4: {"f1": 2}},
    )
    assert found == {1: "best", 4: "best"}


def test_what_is_known_later_of_a_saved_step_saves_it_no_second_time():
    every = Every(epochs=1, best=("loss", "min"), **QUIET)
    history = after_save(
        every, after_step(begin_history(0, 0, 0.0), 10, 10.0), 10, 0, 11.0, cost_seconds=1.0
    )
    assert own_reason(every, history, 10, 1, {"loss": 1.0}) is None
    assert own_reason(every, history, 11, 1) == "epochs"


def test_a_save_that_failed_is_tried_an_interval_later():
    every = Every(steps=10, best=("loss", "min"), **QUIET)
    history = after_save(every, after_step(begin_history(0, 0, 0.0), 10, 10.0), 10, 0, 11.0)
    assert (history.save_seconds, history.best) == (None, {})
    assert own_reason(every, history, 11, 0, {}) is None
    assert own_reason(every, history, 11, 0, {"loss": 5.0}) == "best"
    assert own_reason(every, history, 20, 0) == "steps"


# Clocks and signals


def test_minutes_count_from_the_end_of_the_last_save():
    """Save every N minutes."""
    found, _ = drive(Every(minutes=1, **QUIET), 200, step_seconds=7, cost=30)
    assert list(found) == list(range(9, 201, 9))


def test_a_signal_comes_first_and_is_answered_on_a_saved_step():
    """A preempted run saves."""
    every, fresh = Every(minutes=1), begin_history(5, 0, 0.0)
    assert shared_reason(every, fresh, 100.0, 0.0, "SIGTERM") == "SIGTERM"
    assert shared_reason(every, fresh, 100.0, 0.0) is None
    assert shared_reason(every, after_step(fresh, 6, 100.0), 100.0, 0.0) == "minutes"


@pytest.mark.parametrize(
    "deadline",
    [
        4600,
        "1970-01-01T01:16:40Z",
        datetime.fromtimestamp(4600, timezone.utc),
        datetime.fromtimestamp(4600),
    ],
)
def test_deadline(deadline):
    found, _ = drive(
        Every(deadline=deadline, signals=()), 720, step_seconds=5, cost=30, unix=1000.0
    )
    assert set(found.values()) == {"deadline"}
    ends = [1000 + 5 * step + 30 * place for place, step in enumerate(found)]
    assert 4300 <= ends[0] <= 4305, "five minutes before, as no save was measured"
    assert [4500 <= end <= 4505 for end in ends[1:]] == [True], (
        "then three saves and two steps before"
    )


def test_deadline_of_a_slurm_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000")
    every = Every(signals=(), deadline_margin_minutes=10)
    assert every.deadline_unix() == 2000
    assert next(iter(drive(every, 200, step_seconds=10, unix=0.0)[0])) == 140
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert every.deadline_unix() is None
    assert not needs_poll(every)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    assert every.deadline_unix() is None


@unhurried
@given(
    job=st.floats(1, 2000),
    cost=st.floats(0.1, 100),
    seconds=st.floats(0.5, 20),
    known=st.booleans(),
)
def test_the_last_save_before_a_deadline_leaves_little_to_lose(job, cost, seconds, known):
    """A job of any length, even shorter than the margin, ends with less unsaved than there was left
    to save it in.
    """
    history = begin_history(0, 0, 0.0, History(save_seconds=cost if known else None).to_json())
    found, _ = drive(
        Every(deadline=job, signals=()), int(job / seconds), seconds, cost, history=history
    )
    if job < 4 * (cost + seconds):
        return
    last = max(found) * seconds + len(found) * cost
    assert last <= job, "it was whole in time"
    assert job - last <= max(job / 2, 2 * (cost + seconds)) + seconds + cost
    assert len(found) <= 2 + math.log2(job / cost + 2)


def test_margin_follows_the_measured_save():
    every = Every(deadline=10_000.0, signals=())
    history = History(step=5, saved_at=0.0, step_seconds=10.0, save_seconds=200.0)
    assert shared_reason(every, history, 9379.0, 9379.0) is None
    assert shared_reason(every, history, 9380.0, 9380.0) == "deadline"
    assert shared_reason(every, history, 10_001.0, 10_001.0) is None


# Meeting


def test_polls_are_a_second_apart_and_cheap():
    def gap(step_seconds, poll=1e-4):
        return next_poll(History(step_seconds=step_seconds), 7, poll) - 7

    assert (gap(None), gap(3.0), gap(0.7), gap(0.1), gap(0.05)) == (1, 1, 1, 10, 20)
    assert gap(1e-6) == 100
    assert gap(1.0, poll=0.02) == 4


@unhurried
@given(seconds=st.floats(1e-6, 100), poll=st.floats(0, 0.02))
def test_polls_take_half_a_percent_or_are_as_far_apart_as_allowed(seconds, poll):
    gap = next_poll(History(step_seconds=seconds), 0, poll)
    assert 1 <= gap <= 100
    assert poll <= 0.005 * gap * seconds * (1 + 1e-9) or gap == 100


@pytest.mark.parametrize(
    ("settings", "polls"),
    [
        ({}, False),
        ({"steps": 5, "epochs": 1}, False),
        ({"minutes": 1}, True),
        ({"mtbf": "1h"}, True),
        ({"deadline": 5}, True),
    ],
)
def test_only_clocks_and_signals_need_a_meeting(settings, polls):
    assert needs_poll(Every(**QUIET | settings)) is polls
    assert needs_poll(Every(**QUIET | settings | {"signals": ("SIGTERM",)}))


# The optimum


def least(save, mtbf, restart=0.0):
    """Where the exact expected overhead is smallest, by narrowing in on it."""
    low, high = save / 1e6, 20 * mtbf
    for _ in range(300):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        worse_left = expected_overhead(a, save, mtbf, restart) > expected_overhead(
            b, save, mtbf, restart
        )
        low, high = (a, high) if worse_left else (low, b)
    return (low + high) / 2


@unhurried
@given(mtbf=st.floats(1e2, 1e7), ratio=st.floats(1e-5, 1e-2), restart=st.floats(0, 1000))
def test_daly_finds_the_exact_minimum(mtbf, ratio, restart):
    save = ratio * mtbf
    assert optimal_interval(save, mtbf) == pytest.approx(
        least(save, mtbf, restart / 1e3 * mtbf), rel=0.01
    )


@unhurried
@given(mtbf=st.floats(1e2, 1e7), ratio=st.floats(1e-3, 1.9))
def test_daly_costs_next_to_nothing_more_than_the_minimum(mtbf, ratio):
    save = ratio * mtbf
    best = expected_overhead(least(save, mtbf), save, mtbf)
    assert expected_overhead(optimal_interval(save, mtbf), save, mtbf) <= best * 1.01


def test_young_is_the_first_order_case():
    gaps = [
        abs(optimal_interval(c, 1e6, "young") / optimal_interval(c, 1e6) - 1)
        for c in (1000, 10, 0.1)
    ]
    assert gaps[0] > 10 * gaps[1] * 0.9 > 9 * gaps[2]
    assert optimal_interval(2, 100, "young") == 20
    assert optimal_interval(200, 100) == optimal_interval(1e9, 100) == 100


def test_the_model_agrees_with_failures_drawn_at_random():
    rng, save, mtbf, restart, interval = random.Random(1), 20.0, 1000.0, 50.0, 250.0
    spent, segments = 0.0, 20_000
    for _ in range(segments):
        need = interval + save
        while (life := rng.expovariate(1 / mtbf)) < need:
            spent, need = spent + life, restart + interval + save
        spent += need
    expected = expected_overhead(interval, save, mtbf, restart)
    assert spent / (segments * interval) - 1 == pytest.approx(expected, rel=0.03)
    assert expected_overhead(interval, save, math.inf) == save / interval
    assert expected_overhead(1e9, save, mtbf) == math.inf


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (1, -1), (math.nan, 1), (1, 1, "second")])
def test_optimal_interval_refuses(arguments):
    with pytest.raises(ConfigError):
        optimal_interval(*arguments)


def run_with_failures(every, steps, step_seconds, cost, mtbf, restart=0.0, seed=0):
    """Wall seconds until `steps` steps are done and saved, and the history; what a failure loses is
    done again.
    """
    rng, now, history, kept, base = random.Random(seed), 0.0, begin_history(0, 0, 0.0), None, 0
    failure = rng.expovariate(1 / mtbf)
    while base < steps:
        step = history.step + 1
        now += step_seconds
        history = after_step(history, step, now)
        reason = own_reason(every, history, step, 0) or shared_reason(every, history, now, now)
        if reason or step == steps:
            now += cost
            document = after_save(every, history, step, 0, now, reason=reason).to_json()
            history = after_save(every, history, step, 0, now, cost_seconds=cost, reason=reason)
            if now < failure:
                kept, base = document, step
        if now >= failure:
            now = failure + restart
            failure = now + rng.expovariate(1 / mtbf)
            history = begin_history(base, 0, now, kept)
    return now, history


STEP, COST, MTBF = 60.0, 30.0, 4 * 3600.0
SIMULATED = {"steps": 15_000, "step_seconds": STEP, "cost": COST, "mtbf": MTBF}


def test_the_optimum_loses_less_than_bad_intervals():
    best = optimal_interval(COST, MTBF) / STEP
    lost = {}
    for factor in (1 / 8, 1 / 3, 3, 8):
        every = Every(steps=max(1, round(best * factor)), **QUIET)
        lost[factor] = run_with_failures(every, **SIMULATED)[0] - SIMULATED["steps"] * STEP
    adaptive = (
        run_with_failures(Every.optimal(mtbf=MTBF, **QUIET), **SIMULATED)[0]
        - SIMULATED["steps"] * STEP
    )
    assert adaptive < 0.9 * min(lost.values())
    expected = (
        expected_overhead(optimal_interval(COST, MTBF), COST, MTBF) * SIMULATED["steps"] * STEP
    )
    assert adaptive == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("guess", ["10min", "10d"])
def test_the_interval_converges_whatever_was_guessed(guess):
    """Failures met with outweigh the failure rate that was given."""
    every = Every.optimal(mtbf=guess, max_overhead=0.5, **QUIET)
    wanted = optimal_interval(COST, MTBF)
    assert not 0.5 < interval_seconds(every, History(save_seconds=COST)) / wanted < 2
    _, history = run_with_failures(every, **SIMULATED | {"steps": 40_000})
    assert history.failures > 50
    assert interval_seconds(every, history) == pytest.approx(wanted, rel=0.25)


def test_the_interval_follows_the_cost_of_saving():
    every, history = Every.optimal(mtbf="24h", **QUIET), begin_history(0, 0, 0.0)
    assert interval_seconds(every, history) == pytest.approx(optimal_interval(1.0, 86400))
    for cost in (2.0, 40.0):
        for step in range(20):
            history = after_save(every, history, step, 0, 0.0, cost_seconds=cost)
        assert interval_seconds(every, history) == pytest.approx(
            max(optimal_interval(cost, 86400), 19 * cost), rel=0.01
        )


@unhurried
@given(cost=st.floats(0.01, 1000), mtbf=st.floats(10, 1e6), overhead=st.floats(0.001, 1))
def test_saving_never_takes_more_than_the_overhead_allowed(cost, mtbf, overhead):
    every = Every.optimal(mtbf=mtbf, max_overhead=overhead, **QUIET)
    interval = interval_seconds(every, History(save_seconds=cost))
    assert cost / (cost + interval) <= overhead * (1 + 1e-9)
    assert interval == pytest.approx(
        max(optimal_interval(cost, mtbf), bounded_interval(cost, overhead))
    )


def test_a_run_stays_within_the_overhead():
    every = Every.optimal(mtbf="1min", max_overhead=0.05, **QUIET)
    found, _ = drive(every, 2000, step_seconds=1.0, cost=10.0)
    assert len(list(found)[1:]) * 10.0 <= 0.05 * (2000 + len(found) * 10.0), (
        "after the first, which measures"
    )
    assert len(found) > 8


# What survives a restart


def test_failures_are_counted_and_planned_stops_are_not():
    for reason, failures in [
        ("steps", 1),
        ("optimum", 1),
        ("best", 1),
        ("SIGTERM", 0),
        ("deadline", 0),
        (None, 0),
    ]:
        kept = after_save(
            Every(), after_step(begin_history(0, 0, 0.0), 3, 9.0), 3, 0, 10.0, reason=reason
        ).to_json()
        assert begin_history(3, 0, 77.0, kept).failures == failures


def test_a_resumed_run_goes_on_from_what_was_kept():
    every = Every(steps=10, best=("loss", "min"), **QUIET)
    before = after_save(
        every,
        after_step(begin_history(0, 0, 0.0), 12, 24.0),
        12,
        1,
        30.0,
        cost_seconds=6.0,
        metrics={"loss": 2.0},
        reason="best",
    )
    after = begin_history(12, 1, 500.0, before.to_json())
    assert (after.best, after.step_seconds, after.save_seconds, after.run_seconds) == (
        {"loss": 2.0},
        2.0,
        6.0,
        30.0,
    )
    assert (after.saved_at, after.saved_step) == (500.0, 12)
    assert own_reason(every, after, 13, 1, {"loss": 3.0}) is None
    assert own_reason(every, after, 20, 1) == "steps"


def test_an_epoch_that_ended_with_the_save_is_not_saved_again():
    """Whoever resumes may count the epoch, whose last batch was just given, as not over yet."""
    every = Every(epochs=1, **QUIET)
    kept = after_save(
        every, after_step(begin_history(0, 0, 0.0), 10, 10.0), 10, 1, 11.0, reason="epochs"
    ).to_json()
    after = begin_history(10, 0, 0.0, kept)
    assert [own_reason(every, after, step, epochs) for step, epochs in [(11, 1), (20, 2)]] == [
        None,
        "epochs",
    ]


def test_a_history_that_was_tampered_with_is_refused():
    kept = History().to_json()
    for wrong in (
        {"failures": "3"},
        {"saved_epochs": 0.5},
        {"best": {"loss": "x"}},
        {"run_seconds": None},
        {"best": []},
    ):
        with pytest.raises(LoadError, match=f"history: {next(iter(wrong))}"):
            begin_history(0, 0, 0.0, kept | wrong)
    with pytest.raises(LoadError, match="missing required field saved_epochs"):
        begin_history(0, 0, 0.0, {})


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps=0: expected a whole number above 0"),
        ({"steps": 2.5}, "steps=2.5: expected a whole"),
        ({"steps": True}, "steps=True: expected a whole"),
        ({"epochs": -1}, "epochs=-1"),
        ({"minutes": 0}, "minutes=0: expected a number above 0"),
        ({"minutes": math.nan}, "minutes=nan"),
        ({"best": "loss"}, "best='loss': expected the name of a metric"),
        ({"best": ("loss", "least")}, "best="),
        ({"signals": "SIGTERM"}, "signals='SIGTERM': expected a tuple"),
        ({"signals": ("SIGKILL",)}, "signals=\\('SIGKILL',\\): expected a tuple of SIGTERM"),
        ({"exit_code": 256}, "exit_code=256: expected 0 to 255"),
        ({"deadline": "tomorrow"}, "deadline='tomorrow': expected"),
        ({"deadline": []}, "deadline="),
        ({"deadline_margin_minutes": -1}, "deadline_margin_minutes=-1"),
        ({"mtbf": "a while"}, "mtbf='a while': expected a duration"),
        ({"mtbf": 0}, "mtbf=0: expected a duration"),
        ({"max_overhead": 0}, "max_overhead=0"),
        ({"mtbf": 10**400}, "mtbf=10+: expected a duration"),
        ({"max_overhead": None}, "max_overhead=None"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ConfigError, match=words):
        Every(**settings)


def test_all_problems_at_once_and_none_with_nothing_set():
    with pytest.raises(
        ConfigError, match=r"steps=0.*; minutes=-1.*; best=.*; signals=.*; deadline=.*; mtbf"
    ):
        Every(steps=0, minutes=-1, best=("a", "b"), signals=("SIGFOO",), deadline="x", mtbf="y")
    assert drive(Every(**QUIET), 50)[0] == {}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5 min", 90),
        ("24h", 86400),
        ("2 days", 172800),
        (".5s", 0.5),
        (7, 7),
        (timedelta(hours=1), 3600),
    ],
)
def test_durations(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "h", "-5s", "5 weeks", 0, -1, math.nan, None, True, timedelta(0)]
)
def test_what_is_no_duration(text):
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_seconds(text)
