"""The log of a run's saves: bounded, newest kept, through JSON and back."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings, strategies as st
from seeds import examples

from ft_ckpt.errors import LoadError
from ft_ckpt.schedule import LoggedSave, append_save, finish_last, log_from_json, log_to_json

ENTRIES = st.builds(
    LoggedSave,
    step=st.integers(0, 10**9),
    saved_at=st.floats(0, 1e12),
    reason=st.none() | st.text(),
    metrics=st.dictionaries(st.text(), st.floats()),
    stall_seconds=st.none() | st.floats(0, 1e6),
    seconds=st.none() | st.floats(0, 1e6),
    size_bytes=st.none() | st.integers(0, 1 << 62),
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(ENTRIES, max_size=3))
def test_a_log_goes_through_json_and_back(entries):
    text = json.dumps(log_to_json(entries), allow_nan=False)
    back = log_from_json(json.loads(text))
    assert repr(back) == repr(tuple(entries)), "as text: no number equals itself if it is none"


def test_a_long_log_is_thinned_out_at_its_older_end():
    log = ()
    for step in range(5000):
        log = append_save(log, LoggedSave(step, float(step), "steps", {"loss": 1 / (1 + step)}))
    steps = [each.step for each in log]
    assert len(log) <= 500
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert steps[-200:] == list(range(4800, 5000))
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert max(gaps[:20]) > max(gaps[-200:]) == 1


def test_a_step_that_is_saved_again_stands_once():
    log = append_save(
        (LoggedSave(1, 0.0, None), LoggedSave(2, 1.0, None)), LoggedSave(1, 2.0, "end")
    )
    assert [(each.step, each.reason) for each in log] == [(2, None), (1, "end")]


def test_the_end_of_a_save_in_the_background_is_noted():
    done, on_its_way = (
        LoggedSave(1, 0.0, None, seconds=2.0, size_bytes=3),
        LoggedSave(2, 1.0, None, stall_seconds=0.5),
    )
    now = LoggedSave(2, 1.0, None, stall_seconds=0.75, seconds=5.0, size_bytes=7)
    assert finish_last((done, on_its_way), 5.0, 7, 0.25) == (done, now)
    assert finish_last((), 5.0, 7, 0.25) == ()


@pytest.mark.parametrize(
    "wrong", [3, [3], [{}], ["x"], [{**log_to_json([LoggedSave(1, 0.0, None)])[0], "metrics": 1}]]
)
def test_a_log_that_was_tampered_with_is_refused(wrong):
    with pytest.raises(LoadError, match="not written by ft_ckpt"):
        log_from_json(wrong)


def test_metrics_that_are_not_finite_are_standard_json():
    entry = LoggedSave(1, 0.0, None, {"loss": math.nan, "gain": math.inf})
    assert log_to_json([entry])[0]["metrics"] == {"loss": "nan", "gain": "inf"}
