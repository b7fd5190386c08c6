"""Checkpoints are pushed to the Hub as one commit, and fetched from it as they were: against a
server on loopback.
"""

import json
import os
import re
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import models
import pytest
import torch
from accelerate import Accelerator
from buckets import new_bucket
from compare import stored
from http_server import Fault
from hub_server import TOKEN, serving_hub, using_hub
from huggingface_hub import ModelCard, RepoCard
from huggingface_hub.utils import _http
from peft import LoraConfig, get_peft_model
from places import python_path
from small_checkpoints import leases_in
from transformers import AutoModelForCausalLM

import ft_ckpt
from ft_ckpt import CheckpointSaver, pull, push
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    MissingError,
    NameTakenError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.extensions.transfer.hub import (
    HubPlace,
    client as hub_client,
    model_card,
    parse_place,
    repositories as hub_module,
)
from ft_ckpt.storage.places import Place, open_place

METRICS = {"eval_loss": 2.0, "eval_accuracy": 0.5, "eval_runtime": 3.0, "learning_rate": 0.1}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(hub_client, "PAUSE_SECONDS", 0.01)
    # the library's own retries
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: time.sleep(0.01)))
    with serving_hub(part_bytes=20_000) as server, using_hub(server):
        yield server


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A full model, an adapter of a base in a folder, and a checkpoint of a run, made once."""
    folder = tmp_path_factory.mktemp("made")
    with CheckpointSaver(tokenizer=models.tokenizer()) as saver:
        saver.save(models.build("llama", 0), folder / "full", step=7, metrics=METRICS)
        saver.save(models.build("llama", 1), folder / "sharded", max_shard_size=20_000, step=8)
        models.build("llama", 0).save_pretrained(folder / "base")
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        saver.save(adapted, folder / "adapter", adapter_only=True)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(models.build("llama", 2))
    with CheckpointSaver(accelerator, folder / "run", tokenizer=models.tokenizer()) as saver:
        saver.save_state(
            model, folder / "run" / "checkpoint-5", extra_files={"trainer_state.json": "{}"}
        )
    return folder


def metadata(hub, name="user/model"):
    return RepoCard(hub.files(name)["README.md"].decode()).data.to_dict()


def test_a_pushed_checkpoint_is_one_commit_and_comes_back_as_it_was(hub, made, tmp_path):
    report = push(made / "full", "user/model")
    assert report.is_new
    assert hub.repositories["user/model"].messages == ["initial commit", "Push full, step 7"]
    assert set(hub.files("user/model")) == {".gitattributes", *report.files}
    assert hub.requests_like("PUT /lfs/part"), "no file went in parts"
    fetched = pull(report.url, tmp_path / "back")
    assert fetched.verified
    assert fetched.oid == report.oid
    assert all(path.is_file() for path in (tmp_path / "back").iterdir())
    assert ft_ckpt.verify(tmp_path / "back").ok
    assert read_manifest(open_place(tmp_path / "back")).metrics == METRICS
    assert stored(tmp_path / "back").keys() == stored(made / "full").keys()
    assert all(
        torch.equal(one, stored(made / "full")[name])
        for name, one in stored(tmp_path / "back").items()
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_the_same_again_makes_no_commit(hub, made, tmp_path):
    first = push(made / "full", "user/model")
    again = push(made / "full", "hf://user/model")
    assert (again.is_new, again.oid) == (False, first.oid)
    pull("hf://user/model", tmp_path / "back")
    back = push(tmp_path / "back", "user/model")
    assert (back.is_new, back.oid) == (False, first.oid)


def test_weights_of_an_older_checkpoint_go_with_the_same_commit(hub, made, tmp_path):
    hub.put(
        "user/model",
        {"pytorch_model.bin": b"x", "notes.txt": b"mine", "demo/model.safetensors": b"y"},
    )
    first = push(made / "sharded", "user/model")
    assert first.deleted == ("pytorch_model.bin",)
    shards = {name for name in first.files if name.startswith("model-")}
    assert len(shards) > 1
    second = push(made / "full", "user/model")
    assert set(second.deleted) == {*shards, "model.safetensors.index.json"}
    assert {"notes.txt", "demo/model.safetensors", "model.safetensors"} <= set(
        hub.files("user/model")
    )
    assert len(hub.repositories["user/model"].messages) == 3
    pull("hf://user/model", tmp_path / "back")
    assert ft_ckpt.verify(tmp_path / "back").ok


def test_the_state_of_a_run_stays_here_unless_it_is_asked_for(hub, made, tmp_path):
    (made / "run" / "checkpoint-5" / ".ft_ckpt-pin").touch()
    report = push(made / "run" / "checkpoint-5", "user/model")
    assert not [
        name for name in report.files if "state" in name or "/." in name or name.startswith(".")
    ]
    assert "state/training.safetensors" in report.notes[0]
    pull("hf://user/model", tmp_path / "weights")
    assert ft_ckpt.verify(tmp_path / "weights").ok
    assert [part.kind for part in read_manifest(open_place(tmp_path / "weights")).parts] == [
        "model"
    ]
    push(made / "run" / "checkpoint-5", "hf://user/model/last-checkpoint", state=True)
    assert "model.safetensors" in hub.files("user/model")
    pull("hf://user/model@main/last-checkpoint", tmp_path / "whole")
    accelerator = Accelerator(cpu=True)
    with CheckpointSaver(accelerator, tmp_path / "run") as saver:
        model = accelerator.prepare(models.build("llama", 3))
        assert saver.resume(tmp_path / "whole", model=model).resumed_from is not None
    assert all(
        torch.equal(value, stored(tmp_path / "whole")[name])
        for name, value in model.state_dict().items()
        if name in stored(tmp_path / "whole")
    )


def test_nothing_names_this_machine(hub, made, tmp_path):
    report = push(made / "adapter", "user/model")
    assert any(
        "adapter_config.json: base_model_name_or_path was a path" in note for note in report.notes
    )
    assert [
        name for name, content in hub.files("user/model").items() if str(made).encode() in content
    ] == []
    assert (
        json.loads(hub.files("user/model")["adapter_config.json"])["base_model_name_or_path"]
        is None
    )
    push(made / "adapter", "user/named", base_id="org/base")
    assert (
        json.loads(hub.files("user/named")["adapter_config.json"])["base_model_name_or_path"]
        == "org/base"
    )
    pull("hf://user/named", tmp_path / "back")
    assert read_manifest(open_place(tmp_path / "back")).parts[0].base.id == "org/base"
    assert ft_ckpt.load_model(tmp_path / "back", base=made / "base")
    card = metadata(hub, "user/named")
    assert (card["library_name"], card["base_model"], card["base_model_relation"]) == (
        "peft",
        "org/base",
        "adapter",
    )
    assert {"lora", "base_model:adapter:org/base"} <= set(card["tags"])
    assert card["pipeline_tag"] == "text-generation"


def test_the_card_says_what_the_model_is_and_how_good(hub, made):
    push(made / "full", "user/model", base_id="org/base")
    card = ModelCard(hub.files("user/model")["README.md"].decode()).data
    assert (card.library_name, card.base_model, card["base_model_relation"]) == (
        "transformers",
        "org/base",
        "finetune",
    )
    assert {(one.metric_type, one.metric_value) for one in card.eval_results} == {
        ("loss", 2.0),
        ("accuracy", 0.5),
    }
    assert card.eval_results[0].task_type == "text-generation"
    assert card.model_name == "model"


@pytest.mark.parametrize("tags", ["5", "[license: mit]", "mine"])
def test_tags_that_are_no_list_of_texts_stay(tags):
    facts = model_card.CardFacts(
        "model", None, "org/base", "finetune", None, ("base_model:finetune:org/base",), {}
    )
    text, notes = model_card.updated_card(f"---\ntags: {tags}\n---\n", facts)
    given = {"5": 5, "[license: mit]": {"license": "mit"}}.get(tags, tags)
    assert RepoCard(text).data["tags"] == [given, "base_model:finetune:org/base"]
    assert notes == []


def test_a_card_that_is_there_keeps_its_text_and_its_own_metadata(hub, made):
    result = {
        "task": {"type": "x"},
        "dataset": {"type": "glue", "name": "GLUE"},
        "metrics": [{"type": "f1", "value": 1}],
    }
    head = {"license": "mit", "tags": ["mine"], "model-index": [{"name": "m", "results": [result]}]}
    hub.put(
        "user/model",
        {"README.md": f"---\n{json.dumps(head)}\n---\n\n# Mine\r\n  kept as it is\n".encode()},
    )
    push(made / "full", "user/model")
    text = hub.files("user/model")["README.md"].decode()
    assert text.endswith("---\n\n# Mine\r\n  kept as it is\n")
    card = metadata(hub)
    assert (card["license"], card["tags"], card["library_name"]) == (
        "mit",
        ["mine"],
        "transformers",
    )
    assert card["model-index"][0]["results"][0] == result
    assert len(card["model-index"][0]["results"]) == 2
    assert not push(made / "full", "user/model").is_new
    assert hub.files("user/model")["README.md"].decode() == text


@pytest.mark.slow
@pytest.mark.parametrize("text", ["---\na: [\n---\nhello\n", "---\n- a\n---\nhello\n"])
def test_a_card_that_cannot_be_read_stays_as_it_is(hub, made, text):
    hub.put("user/model", {"README.md": text.encode()})
    report = push(made / "full", "user/model")
    assert any("its metadata cannot be read" in note for note in report.notes)
    assert hub.files("user/model")["README.md"].decode() == text


def test_a_branch_is_made_and_others_stay(hub, made, tmp_path):
    hub.put("user/model", {"a.txt": b"1"})
    report = push(made / "full", "user/model", revision="exp")
    assert report.url == "hf://user/model@exp"
    assert set(hub.files("user/model")) == {"a.txt"}
    assert "model.safetensors" in hub.files("user/model", "exp")
    assert pull("hf://user/model@exp", tmp_path / "back").oid == report.oid


def test_private_is_kept_or_refused(hub, made):
    push(made / "full", "user/secret", private=True)
    assert hub.repositories["user/secret"].private
    hub.put("user/open", {"a.txt": b"1"})
    with pytest.raises(TargetError, match="public, and private=True"):
        push(made / "full", "user/open", private=True)
    assert set(hub.files("user/open")) == {"a.txt"}


@pytest.mark.slow
def test_a_name_alone_is_of_the_account(hub, made):
    assert push(made / "full", "mine").repo_id == "user/mine"


# What goes wrong


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST .*/preupload/", 503),
        pytest.param(Fault("PUT /lfs/", 500), marks=pytest.mark.slow),
        Fault("PUT /lfs/", cuts="before"),
        pytest.param(Fault("POST .*/commit/", 503, times=2), marks=pytest.mark.slow),
        pytest.param(Fault("POST .*/commit/", 500, acts_first=True), marks=pytest.mark.slow),
        Fault("POST .*/commit/", cuts="after"),
        Fault("GET .*/resolve/", 503),
        pytest.param(Fault("POST .*/commit/", seconds=0.2), marks=pytest.mark.slow),
    ],
    ids=[
        "busy",
        "storage",
        "cut",
        "commit refused",
        "commit made",
        "answer lost",
        "reading",
        "slow",
    ],
)
def test_a_push_outlives_what_passes(hub, made, fault):
    hub.put("user/model", {"README.md": b"# mine\n"})
    hub.faults.append(fault)
    report = push(made / "full", "user/model")
    assert fault.matched >= fault.times
    assert (
        hub.files("user/model")["model.safetensors"]
        == (made / "full" / "model.safetensors").read_bytes()
    )
    assert len(hub.repositories["user/model"].messages) == 2
    assert report.oid == hub.repositories["user/model"].branches["main"]


def test_commits_of_others_meanwhile_are_built_on(hub, made, monkeypatch):
    hub.put("user/model", {"README.md": b"# old\n"})
    real, seen = hub_module._read_head, []

    def look(api, place, options):
        head = real(api, place, options)
        if not seen:
            hub.put("user/model", {"README.md": b"# newer\n", "model.safetensors": b"theirs"})
        seen.append(head)
        return head

    monkeypatch.setattr(hub_module, "_read_head", look)
    push(made / "full", "user/model")
    assert len(seen) == 2
    assert b"# newer" in hub.files("user/model")["README.md"]
    assert (
        hub.files("user/model")["model.safetensors"]
        == (made / "full" / "model.safetensors").read_bytes()
    )


@pytest.mark.parametrize(
    "status",
    [403, pytest.param(413, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.slow)],
)
def test_what_does_not_pass_is_an_error_and_the_repository_is_as_it_was(hub, made, status):
    hub.put("user/model", {"a.txt": b"1"})
    hub.faults.append(Fault("POST .*/commit/", status, times=99))
    with pytest.raises(TargetError, match=f"hf://user/model: not pushed .*{status}"):
        push(made / "full", "user/model")
    assert set(hub.files("user/model")) == {"a.txt"}
    hub.faults.clear()
    assert push(made / "full", "user/model").is_new
    assert not leases_in(made / "full")


def test_a_wrong_token_is_told_without_being_shown(hub, made):
    with pytest.raises(TargetError, match="hf auth login") as found:
        push(made / "full", "user/model", token="hf_wrong")
    assert "hf_wrong" not in str(found.value)


def test_files_that_do_not_arrive_are_named(hub, made):
    """A .gitignore in the repository leaves files out of a commit, and nobody says so."""
    hub.ignored.add("model.safetensors")
    with pytest.raises(TargetError, match=r"model\.safetensors not in the commit .* \.gitignore"):
        push(made / "full", "user/model")


@pytest.mark.parametrize(
    ("place", "meant"),
    [
        ("user/name", HubPlace("user/name")),
        ("hf://user/name", HubPlace("user/name")),
        ("hf://models/user/name/", HubPlace("user/name")),
        ("hf://user/name@v1", HubPlace("user/name", "v1")),
        ("hf://user/name@a%2Fb/c/d", HubPlace("user/name", "a/b", "c/d")),
        ("hf://user/name@refs/pr/3/c", HubPlace("user/name", "refs/pr/3", "c")),
    ],
)
def test_places_are_read_as_the_hub_writes_them(place, meant):
    assert parse_place(place) == meant


@pytest.mark.parametrize(
    "place",
    [
        "ftp://host/x",
        "hf://datasets/user/name",
        "hf://user",
        "a/b/c",
        "us er/x",
        "hf://user/name@",
        "",
    ],
)
def test_other_places_are_refused(made, place):
    with pytest.raises(ConfigError, match="expected"):
        push(made / "full", place)
    with pytest.raises(ConfigError):
        push(made / "full", "hf://user/name@one", revision="two")


def test_only_what_is_committed_and_whole_is_pushed(hub, made, tmp_path):
    (tmp_path / "plain").mkdir()
    with pytest.raises(NotACheckpointError):
        push(tmp_path / "plain", "user/model")
    with CheckpointSaver(tokenizer=models.tokenizer()) as saver:
        saver.save(models.build("llama", 0), tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CorruptError, match="not sent"):
        push(tmp_path / "damaged", "user/model")
    assert hub.repositories == {}


def test_a_pull_is_whole_or_nothing(hub, made, tmp_path):
    push(made / "full", "user/model")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(NameTakenError):
        pull("hf://user/model", tmp_path / "taken")
    pull("hf://user/model", tmp_path / "back")
    pull("hf://user/model", tmp_path / "back", overwrite=True)
    hub.put(
        "user/model",
        {"model.safetensors": hub.files("user/model")["model.safetensors"][:-1] + b"x"},
    )
    with pytest.raises(CorruptError, match=r"model\.safetensors: digest"):
        pull("hf://user/model", tmp_path / "other")
    for place in ("hf://user/absent", "hf://user/model@absent", "hf://user/model/absent"):
        with pytest.raises(MissingError):
            pull(place, tmp_path / "other")
    hub.faults.append(Fault("GET .*/resolve/", 403, times=99))
    with pytest.raises(UnreadableError):
        pull("hf://user/model", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "taken"]


@pytest.mark.slow
def test_what_has_no_manifest_is_fetched_as_it_is(hub, tmp_path):
    hub.put("org/base", {"config.json": b"{}", "onnx/model.onnx": b"x", ".gitattributes": b""})
    report = pull("hf://org/base", tmp_path / "base")
    assert not report.verified
    assert {
        path.relative_to(tmp_path / "base").as_posix()
        for path in (tmp_path / "base").rglob("*")
        if path.is_file()
    } == {"config.json", "onnx/model.onnx"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


# In the background


def test_pushes_in_the_background_keep_what_they_push_and_go_in_order(hub, made, tmp_path):
    hub.faults.append(Fault("POST .*/preupload/", seconds=0.3))
    with CheckpointSaver(tokenizer=models.tokenizer()) as saver:
        first = saver.save(
            models.build("llama", 0), tmp_path / "out", push_to_hub="user/model", step=1
        )
        assert leases_in(tmp_path / "out")
        weights = (tmp_path / "out" / "model.safetensors").read_bytes()
        second = saver.save(
            models.build("llama", 1), tmp_path / "out", push_to_hub="user/model", step=2
        )
        assert not first.push.done
    assert second.push.done
    assert hub.repositories["user/model"].messages[1:] == ["Push out, step 1", "Push out, step 2"]
    commits = hub.repositories["user/model"].commits
    assert commits[first.push.result().oid]["model.safetensors"].content == weights
    assert (
        hub.files("user/model")["model.safetensors"]
        == (tmp_path / "out" / "model.safetensors").read_bytes()
    )
    assert not leases_in(tmp_path / "out")


def test_a_push_that_fails_costs_nothing_else(hub, tmp_path):
    hub.faults.append(Fault("POST .*/commit/", 403))
    with warnings.catch_warnings(record=True) as told, CheckpointSaver() as saver:
        report = saver.save(
            models.build("llama", 0), tmp_path / "out", push_to_hub="user/model", background=True
        )
        pending = report.result().push
        pending.wait()
    assert [
        text
        for text in map(str, told)
        if "not pushed: " in text and "403" in text and "ft-ckpt push" in text
    ]
    with pytest.raises(TargetError, match="403"):
        pending.result()
    assert ft_ckpt.verify(tmp_path / "out").ok
    assert push(tmp_path / "out", "user/model").is_new


def test_a_pull_before_the_push_that_fails_does_not_fail_the_save(hub, tmp_path, monkeypatch):
    """The Hub's client needs local files; the cache that they go to cannot be written."""
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("FT_CKPT_CACHE", str(tmp_path / "taken" / "cache"))
    with CheckpointSaver() as saver:
        report = saver.save(
            models.build("llama", 0), Place(new_bucket(), "out"), push_to_hub="user/model"
        )
        with pytest.raises(CheckpointError, match="taken"):
            report.push.result()
    assert ft_ckpt.verify(report.place).ok


def test_after_an_exception_what_is_not_pushed_is_named(hub, tmp_path):
    hub.faults.append(Fault("POST .*/preupload/", seconds=0.5))
    pushed = []

    def fail():
        with CheckpointSaver() as saver:
            pushed.append(
                saver.save(
                    models.build("llama", 0), tmp_path / "out", push_to_hub="user/model"
                ).push
            )
            raise KeyError

    with (
        pytest.warns(UserWarning, match="out to hf://user/model: not pushed yet"),
        pytest.raises(KeyError),
    ):
        fail()
    assert pushed[0].result().is_new


def test_a_destination_that_cannot_be_is_refused_ahead_of_the_save(tmp_path):
    with CheckpointSaver() as saver, pytest.raises(ConfigError, match="no model repository"):
        saver.save(models.build("llama", 0), tmp_path / "out", push_to_hub="hf://datasets/a/b")
    assert not (tmp_path / "out").exists()


def test_the_commands_speak_with_the_hub_that_the_environment_names(hub, made, tmp_path):
    """In a process of its own, as huggingface_hub reads the environment when it is imported."""
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
    }
    environment = {**os.environ, **settings, "PYTHONPATH": python_path(), "HF_HOME": str(tmp_path)}
    steps = [
        ["push", str(made / "full"), "hf://user/model", "--json"],
        ["pull", "hf://user/model", "back"],
    ]
    steps += [
        ["push", "back", "hf://user/model"],
        ["pull", "hf://user/model", "back"],
        ["push", "back", "user/model"],
    ]
    code = (
        f"import sys; from ft_ckpt.cli import main\nfor words in {steps}:\n    sys.argv = "
        "['ft-ckpt', *words]\n"
    )
    code += "    try: main()\n    except SystemExit as end: print('exit', end.code or 0)\n"
    code += "assert 'torch' not in sys.modules\n"
    # the process waits for it
    code += "import ft_ckpt; ft_ckpt.push('back', 'hf://user/late', background=True)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    report, back, again, taken, bare = re.split(r"exit \d\n", done.stdout)[:5]
    assert re.findall(r"exit (\d)", done.stdout) == ["0", "0", "0", "2", "2"], (
        done.stdout + done.stderr
    )
    assert json.loads(report)["oid"] in hub.repositories["user/model"].commits
    assert "verified" in back
    assert "all of it was there" in again
    assert (taken, bare) == ("", "")
    assert "user/late" in hub.repositories, done.stderr
    assert (
        hub.files("user/late").get("model.safetensors")
        == hub.files("user/model")["model.safetensors"]
    )
    assert "back: exists already" in done.stderr
    assert "user/model: expected a URL" in done.stderr
