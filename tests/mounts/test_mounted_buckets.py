"""Saves into buckets that are mounted as folders: the URL is given instead, by an error or a
warning.
"""

import warnings

import models
import pytest
from network_disks import MOUNTED_BUCKETS

from ft_ckpt import CheckpointSaver, verify
from ft_ckpt.errors import TargetError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", MOUNTED_BUCKETS, ids=lambda kind: kind.name)
def test_a_save_into_a_mounted_bucket_names_the_url(kind, tmp_path):
    with kind(tmp_path / "stand") as disk, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (client,) = disk.clients(1)
        refusal = ""
        try:
            with CheckpointSaver(None, client / "run") as saver:
                path = saver.save(models.build("llama"), step=1).path
        except TargetError as error:
            refusal = str(error)
        else:
            assert verify(path).problems == ()
    messages = [refusal, *(str(warning.message) for warning in caught)]
    assert any("give its URL (s3://...) instead" in message for message in messages), messages
