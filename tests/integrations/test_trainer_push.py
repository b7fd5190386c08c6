"""A Trainer with the callback pushes what ft_ckpt has committed, as the Trainer's own settings
say.
"""

import models
import pytest
from http_server import Fault
from hub_server import serving_hub, using_hub
from huggingface_hub import RepoCard
from trainers import ours, run

import ft_ckpt
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import TargetError
from ft_ckpt.storage.places import open_place

PUSHING = {"push_to_hub": True, "hub_model_id": "user/run", "max_steps": 3, "save_total_limit": 3}


@pytest.fixture
def hub():
    with serving_hub() as server, using_hub(server):
        yield server


def messages(hub, name="user/run"):
    return hub.repositories[name].messages[1:]


def test_every_save_is_pushed_while_older_checkpoints_go(hub, tmp_path):
    hub.faults.append(Fault("POST .*/preupload/", seconds=0.5))
    made = ours(
        tmp_path,
        **{**PUSHING, "save_total_limit": 1},
        hub_always_push=True,
        processing_class=models.tokenizer(),
    )
    run(made)
    assert messages(hub) == [f"Training in progress, step {step}" for step in (1, 2, 3)]
    files = hub.files("user/run")
    assert {"model.safetensors", "tokenizer.json", "README.md", "ft_ckpt.json"} <= set(files)
    assert not [name for name in files if "state" in name or name.endswith((".bin", ".pt"))]
    assert (
        files["model.safetensors"] == (tmp_path / "checkpoint-3" / "model.safetensors").read_bytes()
    )
    for commit, step in zip(
        list(hub.repositories["user/run"].commits.values())[1:], (1, 2, 3), strict=True
    ):
        assert f'"step": {step},'.encode() in commit["ft_ckpt.json"].content


@pytest.mark.slow
def test_a_push_under_way_lets_the_next_save_pass(hub, tmp_path):
    hub.faults.append(Fault("POST .*/preupload/", seconds=2.0))
    run(ours(tmp_path, **PUSHING))
    assert messages(hub) == ["Training in progress, step 1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "folders"),
    [
        ("all_checkpoints", ["checkpoint-2", "checkpoint-3"]),
        ("checkpoint", ["last-checkpoint"]),
    ],
)
def test_whole_checkpoints_are_pushed_to_be_resumed_from(hub, tmp_path, strategy, folders):
    settings = {**PUSHING, "hub_always_push": True, "hub_strategy": strategy, "save_steps": 2}
    expected = run(ours(tmp_path / "run", **settings))
    assert {name.split("/")[0] for name in hub.files("user/run") if "/" in name} == set(folders)
    pulled = tmp_path / "again" / "pulled"
    ft_ckpt.pull(f"hf://user/run/{folders[0]}", pulled)
    step = read_manifest(open_place(pulled)).step
    assert step == (3 if strategy == "checkpoint" else 2)
    if step == 2:
        assert (
            run(ours(tmp_path / "again", max_steps=3, save_strategy="no"), pulled) == expected[2:]
        )


def test_at_the_end_the_model_is_pushed_with_the_trainers_card(hub, tmp_path):
    hub.put("user/run", {"README.md": b"# old\n"})
    settings = {**PUSHING, "hub_strategy": "end", "hub_revision": "exp", "kind": "lora"}
    made = ours(tmp_path, **settings)
    run(made)
    assert "exp" not in hub.repositories["user/run"].branches
    report = made.push_to_hub(commit_message="Done", license="mit")
    assert (report.repo_id, report.url) == ("user/run", "hf://user/run@exp")
    text = hub.files("user/run", "exp")["README.md"].decode()
    card = RepoCard(text).data
    assert "generated automatically" in text
    assert (card["library_name"], card["license"]) == ("peft", "mit")
    assert card["tags"] == ["lora", "transformers"], "no base without a name"
    assert ft_ckpt.verify(tmp_path).ok, "the folder is still what its manifest says"
    assert "training_args.bin" not in hub.files("user/run", "exp")
    assert messages(hub) == ["Done"]


@pytest.mark.slow
def test_a_push_that_fails_does_not_end_training(hub, tmp_path):
    hub.faults.append(Fault("POST .*/commit/", 403, times=9))
    with pytest.warns(UserWarning, match="checkpoint-1: not pushed: .*403"):
        run(ours(tmp_path, **PUSHING))
    assert ft_ckpt.verify(tmp_path / "checkpoint-3").ok
    made = ours(tmp_path, **PUSHING)
    with pytest.raises(TargetError, match="403"):
        made.push_to_hub()
