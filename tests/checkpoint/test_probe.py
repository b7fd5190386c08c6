"""A bucket is tried before training: what is wrong with it is said when the saver is made."""

import warnings

import pytest
from http_server import Fault
from s3_server import FAST

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import ConfigError, TargetError

RUN = "s3://bucket/runs/sft"


def test_a_bucket_that_can_be_used_is_left_as_it_was(s3):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saver = CheckpointSaver(None, RUN)
    assert saver.directory == RUN
    assert s3.names() == []
    assert len([line for line in s3.requests_like("PUT") if ".ft_ckpt-probe-" in str(line)]) == 2, (
        "the second is refused"
    )


def test_what_is_wrong_is_told(s3):
    with pytest.raises(ConfigError, match="no such bucket; create it, or correct its name"):
        CheckpointSaver(None, "s3://absent/runs", store_options=FAST)
    keys = {**FAST, "access_key_id": "WRONG"}
    with pytest.raises(TargetError, match=f"{RUN}: cannot be used with these credentials"):
        CheckpointSaver(None, RUN, store_options=keys)
    s3.faults.append(Fault("PUT", status=403, code="AccessDenied", times=99))
    with pytest.raises(
        TargetError, match=f"{RUN}: can be read, and not written; use credentials that may write"
    ):
        CheckpointSaver(None, RUN, store_options=FAST)


def test_a_store_without_conditions_is_warned_of(s3):
    s3.ignores_conditions = True
    with pytest.warns(UserWarning, match="ignores conditional writes"):
        CheckpointSaver(None, RUN)
    assert s3.names() == []


def test_names_that_come_again_need_leave_to_replace(s3):
    with pytest.raises(
        ConfigError, match=r"saves replace each other, which in a bucket takes overwrite=True"
    ):
        CheckpointSaver(None, RUN, name_template="epoch-{epoch}")
    assert (
        CheckpointSaver(None, RUN, name_template="epoch-{epoch}", overwrite=True).directory == RUN
    )
