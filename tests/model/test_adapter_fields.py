"""Fields of adapter_config.json that were changed: followed as PEFT follows them, or refused."""

import random

import pytest

from tests.helpers.adapter_fields import FieldTrials
from tests.helpers.methods import METHODS, UNMERGEABLE

ALL = sorted({**METHODS, **UNMERGEABLE})


@pytest.mark.parametrize("method", ["lora", "dora", "loha"])
def test_some_fields(tmp_path, method):
    trials = FieldTrials(method, tmp_path)
    some = random.Random(7).sample(trials.all_changes(), 6)
    assert not [wrong for field, value in some for wrong in trials.finds(field, value)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ALL)
def test_every_field(tmp_path, method):
    trials = FieldTrials(method, tmp_path)
    assert not [wrong for field, value in trials.all_changes() for wrong in trials.finds(field, value)]
