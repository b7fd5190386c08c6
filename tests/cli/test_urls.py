"""Commands on runs and files in buckets, with URLs for paths; test_contract.py compares them with
those on a disk.
"""

import pytest
import torch
from buckets import in_bucket
from commands import Answer, ft_ckpt, ft_ckpt_alone
from torch import nn

import ft_ckpt as library
from ft_ckpt import CheckpointSaver, Keep


@pytest.fixture
def here(tmp_path):
    """A run of three checkpoints on a disk, of which the second is the best."""
    saver = CheckpointSaver(None, tmp_path / "run", keep=Keep(last=9, best=("loss", "min")))
    model = nn.Linear(3, 2)
    saver.register(model=model)
    for loss in (3.0, 1.0, 2.0):
        nn.init.constant_(model.weight, loss)
        saver.step()
        saver.save_state(metrics={"loss": loss})
    return tmp_path / "run"


@pytest.fixture
def there(here):
    """The URL of the same run in a bucket."""
    return str(in_bucket(here))


def test_the_time_of_a_save_is_measured_in_the_bucket(there):
    answer = ft_ckpt("plan", there, "--step-time", 1, "--mtbf", "1d", "--json")
    assert answer.document["measured"]
    assert not [
        each.name for each in library.open_place(there).folder.list() if "plan" in each.name
    ]


def test_damage_is_found_and_named_by_its_url(there):
    store = library.open_place(f"{there}/checkpoint-2").folder
    content = store.read("model.safetensors")
    store.write("model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    answer = ft_ckpt("verify", f"{there}/checkpoint-2")
    assert answer.code == 1
    assert f"{there}/checkpoint-2: 1 problem," in answer.out
    assert "model.safetensors: digest" in answer.out


def test_files_of_others_are_verified_and_shown(tmp_path):
    library.save({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    file = in_bucket(tmp_path / "x.safetensors")
    answer = ft_ckpt("verify", file)
    assert (answer.code, answer.out.startswith(f"{file}: ok, 1 file,")) == (0, True)
    assert ft_ckpt("show", file).out.startswith(
        f"{file}: 3 parameters in float32\n  1 tensor, 12 B\n"
    )


def test_a_process_of_its_own_reads_a_server(s3, here):
    for each in here.rglob("*"):
        if each.is_file():
            library.open_place("s3://bucket/run").folder.write(
                str(each.relative_to(here)), each.read_bytes()
            )
    assert ft_ckpt_alone("latest", "s3://bucket/run") == Answer(
        0, "s3://bucket/run/checkpoint-3\n", ""
    )
    assert ft_ckpt("verify", "s3://bucket/run").code == 0
    assert "s3://bucket/absent: no such folder" in ft_ckpt("ls", "s3://bucket/absent").err
