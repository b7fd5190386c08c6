"""Commands on runs and files in buckets: the same answers as on a disk, with URLs for paths."""

import json
import re

import pytest
import torch
from buckets import in_bucket, new_bucket
from test_cli import ft_ckpt as command
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.cli import run_command
from ft_ckpt.errors import NotACheckpointError
from ft_ckpt.storage.place import Place


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


@pytest.fixture
def answer(capsys):
    """What a command prints, ages aside, and its exit code."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = run_command([str(each) for each in arguments])
        except SystemExit as ended:
            code = ended.code
        return re.sub(r"\b\d+ s\b", "now", capsys.readouterr().out), code or 0

    return run


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "{run}"),
        ("ls", "{run}", "--json"),
        ("latest", "{run}"),
        ("best", "{run}", "--json"),
        ("show", "{run}/checkpoint-2"),
        ("show", "{run}/checkpoint-2/model.safetensors", "--json"),
        ("verify", "{run}"),
        ("verify", "{run}/checkpoint-2", "--fast", "--json"),
        ("diff", "{run}/checkpoint-1", "{run}/checkpoint-3"),
        ("plan", "{run}", "--step-time", "1", "--save-time", "9", "--mtbf", "1d"),
        ("report", "{run}", "--json", "--drift", "2"),
    ],
    ids=" ".join,
)
def test_an_answer_is_that_of_a_disk(here, there, answer, words):
    near, far = (answer(*(word.format(run=run) for word in words)) for run in (here, there))
    assert near == (far[0].replace(there, str(here)), far[1])
    assert near[0]


def test_the_time_of_a_save_is_measured_in_the_bucket(there, answer):
    found, _ = answer("plan", there, "--step-time", "1", "--mtbf", "1d", "--json")
    assert json.loads(found)["measured"]
    assert not [each.name for each in ft_ckpt.open_place(there).folder.list() if "plan" in each.name]


def test_damage_is_found_and_named_by_its_url(there, answer):
    store = ft_ckpt.open_place(f"{there}/checkpoint-2").folder
    content = store.read("model.safetensors")
    store.write("model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    found, code = answer("verify", f"{there}/checkpoint-2")
    assert code == 1
    assert f"{there}/checkpoint-2: 1 problem," in found
    assert "model.safetensors: digest" in found


def test_files_of_others_are_verified_and_shown(tmp_path, answer):
    ft_ckpt.save({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    file = in_bucket(tmp_path / "x.safetensors")
    found, code = answer("verify", file)
    assert (code, found.startswith(f"{file}: ok, 1 file,")) == (0, True)
    assert answer("show", file)[0].startswith(f"{file}: 3 parameters in float32\n  1 tensor, 12 B\n")


@pytest.mark.parametrize("name", ["ls", "verify", "show"])
def test_what_is_not_there_is_said(name):
    bucket = new_bucket()
    bucket.write("other", b"")
    with pytest.raises(NotACheckpointError, match=rf"{bucket.url}/absent: no such f"):
        run_command([name, f"{Place(bucket)}/absent"])


def test_a_process_of_its_own_reads_a_server(s3, here):
    for each in here.rglob("*"):
        if each.is_file():
            ft_ckpt.open_place("s3://bucket/run").folder.write(str(each.relative_to(here)), each.read_bytes())
    found = command("latest", "s3://bucket/run")
    assert (found.stdout, found.stderr) == ("s3://bucket/run/checkpoint-3\n", "")
    assert command("verify", "s3://bucket/run").returncode == 0
    assert "s3://bucket/absent: no such folder" in command("ls", "s3://bucket/absent").stderr
