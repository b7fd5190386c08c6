"""What stays of a run: each rule, and that no rule can take what a run cannot do without."""

import dataclasses
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ft_ckpt import Keep
from ft_ckpt.errors import ConfigError
from ft_ckpt.retention import HeldCheckpoint, check_metrics, newest_valid, plan_pruning

HOUR, DAY = 3600, 86400


def held(step, **facts):
    return HeldCheckpoint(
        **{"path": Path(f"checkpoint-{step}"), "step": step, "created": step * 60.0, **facts}
    )


def steps(paths):
    return sorted(int(path.name.rpartition("-")[2]) for path in paths)


def kept(run, keep, **options):
    return steps(plan_pruning(run, keep, **options).keep)


# Each rule


def test_last_goes_by_number():
    """Sorted as text, checkpoint-9 is newer than checkpoint-10."""
    assert kept([held(step) for step in (9, 10, 8, 100)], Keep(last=2)) == [10, 100]


def test_last_does_not_go_by_time():
    """A checkpoint that was copied, and so has a younger time, is not the newest."""
    assert kept([held(1, created=1e9), held(2), held(3)], Keep(last=2)) == [2, 3]


def test_every_steps():
    assert kept([held(step) for step in (0, 5, 10, 15, 20, 21)], Keep(every_steps=10)) == [
        0,
        10,
        20,
        21,
    ]
    assert kept([held(1), replace(held(2), step=None)], Keep(every_steps=1)) == [1]


def test_best_stays_and_the_newest_too():
    """One limit for two purposes deletes the best, or the one to resume from."""
    run = [
        held(step, metrics={"loss": loss})
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.4), (5, 0.8))
    ]
    assert kept(run, Keep(best=("loss", "min"))) == [2, 5]
    assert kept(run, Keep(best=("loss", "max"))) == [3, 5]
    assert kept(run, Keep(best=("loss", "min", 2), last=1)) == [2, 4, 5]
    assert kept(run, Keep(best=[("loss", "min"), ["loss", "max", 1]])) == [2, 3, 5]


def test_best_of_those_that_have_a_number():
    losses = (math.nan, math.inf, 0.3, 0.3, None, 7.0)
    run = [
        held(step, metrics={} if loss is None else {"loss": loss})
        for step, loss in enumerate(losses)
    ]
    assert kept(run, Keep(best=("loss", "min"))) == [2, 5]  # of equals the first
    assert kept(run, Keep(best=("loss", "max"))) == [1, 5]


@pytest.mark.parametrize("others", [{}, {"last": 1}, {"every_steps": 2}, {"daily": 1}])
def test_a_metric_that_none_has_deletes_nothing(others):
    losses = {1: 0.5, 2: 0.1, 3: 0.9}
    run = [held(step, metrics={"eval_loss": loss}) for step, loss in losses.items()]
    for best in (("eval_los", "min"), [("eval_loss", "min"), ("eval_los", "min")]):
        assert kept(run, Keep(best=best, **others)) == [1, 2, 3]
    with_state = [replace(each, has_state=True) for each in run]
    rules = Keep(last=2, state=Keep(best=("eval_los", "min"), **others))
    assert plan_pruning(with_state, rules).strip == ()
    assert kept(run, Keep(best=("eval_loss", "min"))) == [2, 3]


def test_a_metric_that_is_a_number_in_invalid_ones_alone_deletes_nothing():
    run = [
        held(1),
        held(2, metrics={"loss": math.nan}),
        held(3, metrics={"loss": 0.1}, valid=False),
    ]
    assert kept(run, Keep(best=("loss", "min"))) == [1, 2, 3]
    assert kept([*run, held(4, metrics={"loss": 0.2}), held(5)], Keep(best=("loss", "min"))) == [
        3,
        4,
        5,
    ]


def test_a_run_without_the_metric_beside_one_that_has_it():
    first = [held(step, run_id="a", metrics={"loss": 1.0 / step}) for step in (1, 2, 3)]
    second = [held(step, run_id="b", path=Path(f"other-{step}")) for step in (4, 5, 6)]
    assert kept([*first, *second], Keep(best=("loss", "max"))) == [1, 3, 4, 5, 6]


def test_metrics_that_no_checkpoint_has_are_named():
    run = [held(step, run_id="a", metrics={"eval_loss": 1.0, "accuracy": 0.5}) for step in (1, 2)]
    check_metrics(run, Keep(best=("eval_loss", "min")))
    check_metrics([], Keep(best=("eval_los", "min")))
    expected = (
        r"no checkpoint has 'eval_los' \(did you mean eval_loss\? metrics: accuracy, eval_loss\)"
    )
    for keep in (
        Keep(best=("eval_los", "min")),
        Keep(last=1, state=Keep(best=("eval_los", "min"))),
    ):
        with pytest.raises(ConfigError, match=expected):
            check_metrics(run, keep)
    with pytest.raises(ConfigError, match=r"'perplexity' \(metrics: accuracy, eval_loss\)"):
        check_metrics(run, Keep(best=("perplexity", "min")))
    with pytest.raises(ConfigError, match=r"'loss' .they have no metrics"):
        check_metrics([*run, held(3, run_id="b")], Keep(best=("loss", "min")), "b")


def test_the_past_by_time():
    run = [held(step, created=step * 6.0 * HOUR) for step in range(40)]  # four a day
    assert kept(run, Keep(daily=3)) == [31, 35, 39]
    assert kept(run, Keep(hourly=2)) == [38, 39]
    assert kept(run, Keep(weekly=2)) == [15, 39]  # 1 January 1970 was a Thursday
    far = [held(1, created=0.0), held(2, created=1.0), held(3, created=90.0 * DAY)]
    assert kept(far, Keep(daily=2)) == [2, 3]  # days without one do not count


def test_the_newest_of_a_period_goes_by_number():
    """The run went on on a node whose clock is ten minutes behind."""
    run = [held(1, created=1800.0), held(2, created=1260.0), held(3, created=2.0 * HOUR)]
    assert kept(run, Keep(hourly=2)) == [2, 3]


def test_rules_are_a_union():
    run = [
        held(step, created=step * float(DAY), metrics={"loss": abs(step - 12)})
        for step in range(1, 31)
    ]
    keep = Keep(last=2, every_steps=10, best=("loss", "min"), daily=3)
    assert kept(run, keep) == [10, 12, 20, 28, 29, 30]
    assert plan_pruning(run, keep).keep[Path("checkpoint-30")] == (
        *("newest valid", "last 2", "every 10 steps", "daily: 1970-01-31"),
    )


def test_without_rules_everything_stays():
    run = [held(step, valid=step != 2) for step in range(5)]
    assert kept(run, Keep()) == [0, 1, 2, 3, 4]
    assert plan_pruning([], Keep(last=1)) == plan_pruning([], Keep())


# What no rule can take


def test_damaged_ones_take_no_place():
    """The limit counts what cannot be loaded, so all that can be is deleted."""
    run = [held(step, valid=step < 4) for step in range(1, 7)]
    assert kept(run, Keep(last=2)) == [2, 3, 5, 6]
    assert kept(run, Keep(every_steps=100)) == [3]


def test_nothing_goes_while_none_is_valid():
    assert kept([held(step, valid=False) for step in range(5)], Keep(last=1)) == [0, 1, 2, 3, 4]


def test_another_runs_stay():
    """Two runs in one folder, and one deletes the other's."""
    run = [held(step, run_id="ours" if step % 2 else "theirs") for step in range(8)]
    assert kept([*run, held(9)], Keep(last=1), run_id="ours") == [0, 2, 4, 6, 7, 9]


def test_guards():
    run = [held(step, guards=("pinned",) if step == 1 else ()) for step in range(4)]
    found = plan_pruning(run, Keep(last=1))
    assert (found.keep[Path("checkpoint-1")], steps(found.drop)) == (("pinned",), [0, 2])


def test_all_that_a_kept_checkpoint_is_read_from_stays():
    """A base may be of a run whose steps are higher, and have a base itself."""
    base_of = {9: 8, 10: 9, 5: 10}
    run = [
        held(
            step,
            run_id="second" if step == 5 else "first",
            base=Path(f"checkpoint-{base_of[step]}") if step in base_of else None,
        )
        for step in (5, 7, 8, 9, 10, 20)
    ]
    found = plan_pruning(run, Keep(last=1))
    assert steps(found.drop) == [7]
    assert found.keep[Path("checkpoint-8")] == ("the base of checkpoint-9",)


def test_state_has_rules_of_its_own():
    run = [
        held(step, has_state=step != 6, guards=("pinned",) if step == 1 else ())
        for step in range(7)
    ]
    found = plan_pruning(run, Keep(last=5, state=Keep(last=2)))
    assert (steps(found.keep), steps(found.drop), steps(found.strip)) == (
        [1, 2, 3, 4, 5, 6],
        [0],
        [2, 3],
    )
    assert steps(plan_pruning(run, Keep(state=Keep(last=1))).strip) == [0, 2, 3, 4]
    assert plan_pruning(run, Keep(last=5)).strip == ()


def test_the_way_back_stays():
    """A final save without a training state does not cost the last one that has it."""
    run = [held(1, has_state=True), held(2, has_state=True, valid=False), held(3)]
    found = plan_pruning(run, Keep(last=1, state=Keep(last=1)))
    assert (steps(found.keep), steps(found.drop), found.strip) == ([1, 3], [2], ())


def test_nothing_is_stripped_bare():
    run = [held(step, has_state=True, has_weights=False) for step in range(3)]
    assert (
        kept(run, Keep(last=2, state=Keep(last=1))),
        plan_pruning(run, Keep(last=2, state=Keep(last=1))).strip,
    ) == (
        [2],
        (),
    )


def test_rules_that_cannot_be_meant():
    for wrong in (
        {"last": 0},
        {"last": np.int64(2)},
        {"daily": 1.5},
        {"every_steps": True},
        {"best": ("loss",)},
        {"best": "loss"},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
            Keep(**wrong)
    for best in (
        ("loss", "least"),
        ("loss", "min", 0),
        [("loss", "min", None)],
        ("loss", "min", 1, 2),
        5,
    ):
        with pytest.raises(ConfigError, match=r"best=.*expected \(metric, 'min' or 'max'\)"):
            Keep(best=best)
    with pytest.raises(ConfigError, match="state=2: expected rules without a state of their own"):
        Keep(last=3, state=2)
    with pytest.raises(ConfigError, match=r"last=-1.*weekly='a'.*state"):
        Keep(last=-1, weekly="a", state=Keep(state=Keep(last=1)))


# Any history

COUNTS = st.none() | st.integers(1, 4)
METRIC = st.sampled_from([-1.0, 0.0, 0.5, 2.0, math.nan, math.inf])
BEST = st.tuples(
    st.sampled_from(["loss", "other"]), st.sampled_from(["min", "max"]), st.integers(1, 3)
)


@st.composite
def keeps(draw, state=True):
    rules = {name: draw(COUNTS) for name in ("last", "hourly", "daily", "weekly")}
    rules |= {
        "every_steps": draw(st.none() | st.integers(1, 7)),
        "best": draw(st.none() | BEST | st.lists(BEST)),
    }
    return Keep(**rules, state=draw(st.none() | keeps(state=False)) if state else None)


@st.composite
def histories(draw):
    """Checkpoints in any order, with steps that may be equal or unknown, of two runs."""
    count = draw(st.integers(0, 12))
    return [
        HeldCheckpoint(
            path=Path(f"{number}"),
            step=draw(st.none() | st.integers(0, 30)),
            created=draw(st.integers(0, 60)) * 5.0 * HOUR,
            metrics=draw(st.dictionaries(st.sampled_from(["loss", "other"]), METRIC)),
            guards=draw(st.sampled_from([(), (), (), ("pinned",), ("in use",)])),
            valid=draw(st.booleans()),
            has_state=(state := draw(st.booleans())),
            has_weights=not state or draw(st.booleans()),
            run_id=draw(st.sampled_from(["a", "b"])),
        )
        for number in range(count)
    ]


@given(histories(), keeps(), st.sampled_from([None, "a"]))
def test_any_history(run, keep, run_id):
    """Whatever the history and the rules: the newest valid, the way back, and everything guarded
    survive whole.
    """
    found = plan_pruning(run, keep, run_id)
    assert sorted([*found.keep, *found.drop]) == sorted(each.path for each in run)
    assert set(found.strip) <= set(found.keep)
    assert all(found.keep.values())
    touched = {*found.drop, *found.strip}
    assert not touched & {
        each.path for each in run if each.guards or (run_id and each.run_id != run_id)
    }
    for one in [run_id] if run_id else ["a", "b"]:
        ours = [each for each in run if each.run_id == one]
        valid = [each for each in ours if each.valid]
        assert valid or not touched & {each.path for each in ours}
        for group in (valid, [each for each in valid if each.has_state]):
            assert not group or max(group, key=age).path not in touched


@given(histories(), keeps())
def test_each_run_is_judged_by_itself(run, keep):
    """An export is nobody's, and takes no place of a checkpoint's."""
    exports = [
        dataclasses.replace(each, path=Path(f"{each.path}-export"), is_export=True) for each in run
    ]
    found = plan_pruning([*run, *exports], keep)
    apart = [plan_pruning(run, keep, run_id) for run_id in ("a", "b")]
    assert set(found.drop) == {path for plan in apart for path in plan.drop}
    assert set(found.strip) == {path for plan in apart for path in plan.strip}


@given(histories(), keeps())
def test_any_history_against_a_model(run, keep):
    """The rules once more, each said for one checkpoint instead of for all at once."""
    run = [dataclasses.replace(each, run_id="a") for each in run]
    found, valid = plan_pruning(run, keep), [each for each in run if each.valid]
    state = keep.state or Keep()
    for each in run:
        firm = each.guards or not valid or each.path in newest_valid(run)
        asked = wanted(each, run, keep) or (each.valid and wanted(each, valid, keep))
        stateful, sound = (
            [one for one in run if one.has_state],
            [one for one in valid if one.has_state],
        )
        bare = each.has_state and not firm
        bare = bare and not (
            wanted(each, stateful, state) or (each.valid and wanted(each, sound, state))
        )
        assert (each.path in found.keep) == bool(
            firm or (asked and not (bare and not each.has_weights))
        )
        assert (each.path in found.strip) == (bare and each.path in found.keep)


def age(each):
    return (-1 if each.step is None else each.step, each.created, str(each.path))


def wanted(each, run, keep) -> bool:
    rules = [value for name, value in vars(keep).items() if name != "state" and value]
    younger = sum(age(other) > age(each) for other in run)
    found = not rules or (keep.last is not None and younger < keep.last)
    found |= bool(keep.every_steps) and each.step is not None and each.step % keep.every_steps == 0
    for metric, mode, count in keep.rankings:
        found |= all(math.isnan(o.metrics.get(metric, math.nan)) for o in run if o.valid)
        if not math.isnan(each.metrics.get(metric, math.nan)):
            value = {
                o.path: o.metrics.get(metric, math.nan) * (1 if mode == "min" else -1) for o in run
            }
            better = [o for o in run if (value[o.path], age(o)) < (value[each.path], age(each))]
            better = [o for o in better if not math.isnan(value[o.path])]
            found |= len(better) < count
    for count, length, shift in (
        (keep.hourly, HOUR, 0),
        (keep.daily, DAY, 0),
        (keep.weekly, 7 * DAY, 3 * DAY),
    ):
        period = {o.path: (o.created + shift) // length for o in run}
        fellows = [o for o in run if period[o.path] == period[each.path]]
        is_newest = max(fellows, key=age) == each
        later = {period[o.path] for o in run if period[o.path] > period[each.path]}
        found |= count is not None and is_newest and len(later) < count
    return bool(found)
