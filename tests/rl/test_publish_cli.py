"""`ft-ckpt publish`, `export` and `check-for` as people and scripts run them."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EngineFiles
from engine_models import base_model, with_adapter
from engine_server import serving
from launch import run_python

RUN = "import sys; from ft_ckpt.cli import main; main()"
TOKEN = "sk-VERYSECRET"


def ft_ckpt(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    found: subprocess.CompletedProcess[str] = run_python(RUN, *arguments, **environment)
    return found


def test_publish_and_the_same_again(files: EngineFiles) -> None:
    with serving(files.base) as one, serving(files.base) as other:
        answer = ft_ckpt("publish", files.adapters[0], one.url, other.url, "--name", "policy")
        assert (answer.returncode, answer.stderr) == (0, "")
        lines = answer.stdout.splitlines()
        assert "checkpoint-100 -> policy@100-" in lines[0]
        assert lines[1].split() == ["server", "engine", "before", "checked", "paused"]
        assert [line.split()[0] for line in lines[2:4]] == [one.url, other.url]
        assert "listed; answers differ from the base's" in lines[2]
        again = json.loads(
            ft_ckpt("publish", files.adapters[0], one.url, "--name", "policy", "--json").stdout
        )
        assert again["servers"][0]["is_new"] is False
        assert (again["kind"], again["path"]) == ("adapter", str(files.adapters[0]))


def test_publish_of_weights(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        answer = ft_ckpt(
            "publish", files.weights[0], engine.url, "--as", "weights", "--in-flight", "abort"
        )
        assert answer.returncode == 0
        assert (
            "39 of 39 parameters" in answer.stdout
            or "parameters equal to the files" in answer.stdout
        )
        assert [each.query for each in engine.requests_to("/pause")] == [{"mode": "abort"}]


def test_publish_under_another_path(files: EngineFiles, tmp_path: Path) -> None:
    (tmp_path / "seen").symlink_to(files.root)
    with serving(files.base) as engine:
        answer = ft_ckpt(
            "publish",
            files.adapters[0],
            engine.url,
            "--visible-at",
            f"{files.root}={tmp_path}/seen",
        )
        assert answer.returncode == 0
        assert (
            engine.requests_to("/v1/load_lora_adapter")[0].body["lora_path"]
            == f"{tmp_path}/seen/sft/checkpoint-100"
        )


def test_a_failed_publish_is_an_error_without_the_token(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        engine.fail("/v1/load_lora_adapter", 500)
        answer = ft_ckpt(
            "publish", files.adapters[0], engine.url, "--header", f"Authorization=Bearer {TOKEN}"
        )
        assert (answer.returncode, answer.stdout) == (2, "")
        assert "EngineCore encountered an issue" in answer.stderr
        assert {each.headers["authorization"] for each in engine.requests} == {f"Bearer {TOKEN}"}
        assert TOKEN not in answer.stderr
        answer = ft_ckpt("publish", files.adapters[0], engine.url, "--header", TOKEN)
        assert answer.returncode == 2
        assert "expected NAME=VALUE" in answer.stderr
        assert TOKEN not in answer.stderr


@pytest.mark.slow
def test_publish_follows_until_a_signal(files: EngineFiles, tmp_path: Path) -> None:
    shutil.copytree(files.adapters[0], tmp_path / "run/checkpoint-100")
    with serving(files.base) as engine:
        command = [
            sys.executable,
            "-c",
            RUN,
            "publish",
            "--follow",
            str(tmp_path / "run"),
            engine.url,
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert "checkpoint-100 -> run@100-" in process.stdout.readline()
            shutil.copytree(files.adapters[1], tmp_path / "run/.new")
            (tmp_path / "run/.new").rename(tmp_path / "run/checkpoint-200")
            while "checkpoint-200 -> run@200-" not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            rest, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, ""), rest


def test_follow_ends_when_nothing_new_comes(files: EngineFiles, tmp_path: Path) -> None:
    with serving(files.base) as engine:
        assert (
            ft_ckpt("publish", "--follow", tmp_path / "run", engine.url, "--idle", "0").returncode
            == 0
        )


def test_export_and_check_for(files: EngineFiles, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    with_adapter(base_model("llama"), 1, rank_pattern={"q_proj": 4}).save_pretrained(adapter)
    answer = ft_ckpt("check-for", "vllm", adapter)
    assert answer.returncode == 1
    assert answer.stdout.startswith("rank_pattern: set, and read by few versions of vllm")
    found = json.loads(
        ft_ckpt("check-for", "vllm", adapter, "--max-lora-rank", "4", "--json").stdout
    )
    assert (found["engine"], len(found["findings"])) == ("vllm", 2)
    answer = ft_ckpt("export", adapter, tmp_path / "plain", "--for", "vllm")
    assert answer.returncode == 0
    assert "rank 8 and scale 2 for all 28 layers" in answer.stdout
    assert ft_ckpt("check-for", "vllm", tmp_path / "plain").returncode == 0
    again = ft_ckpt("export", adapter, tmp_path / "plain", "--for", "vllm")
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert (
        ft_ckpt(
            "export", adapter, tmp_path / "plain", "--for", "vllm", "--force", "--json"
        ).returncode
        == 0
    )


@pytest.mark.parametrize(
    "words", [["check-for", "tgi", "x"], ["export", "a", "b"], ["publish", "a"]]
)
def test_words_that_are_missing(words: list[str]) -> None:
    assert ft_ckpt(*words).returncode == 2
