"""URLs with keys are refused, and no answer of a server, name or label brings a secret or an escape
to a terminal.
"""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import MARK, NAME_MARK, ft_ckpt, ft_ckpt_alone, ft_ckpt_on_terminal, problems_in
from http_server import Fault
from hub_server import serving_hub, using_hub
from huggingface_hub.utils import _http
from small_checkpoints import rewrite_manifest, save_with_state

import ft_ckpt as library
from ft_ckpt import CheckpointSaver, SaverConfig, progress_bars
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import CheckpointError, ConfigError
from ft_ckpt.extensions.transfer.endpoints import PushOptions
from ft_ckpt.storage.places import open_place

WITH_KEYS = {
    "s3://AKIA:S3CRET@bucket/run": "AWS_SECRET_ACCESS_KEY",
    "s3://AKIA:S3/CR+ET@bucket/run": "AWS_SECRET_ACCESS_KEY",
    "gs://bucket/run?X-Goog-Signature=S3CRET": "open_place",
    "az://container/run?sv=1&sig=S3CRET": "open_place",
    "hf://user:S3CRET@user/name": "HF_TOKEN",
    "hf://user/name?token=S3CRET": "HF_TOKEN",
}
TAKERS = {
    "open_place": library.open_place,
    "latest": library.latest,
    "load_model": library.load_model,
    "directory": lambda url: CheckpointSaver(directory=url),
    "push": lambda url: library.push("run/checkpoint-1", url),
    "pull": lambda url: library.pull(url, "pulled"),
    "copy": lambda url: library.copy("run/checkpoint-1", url),
    "sync": lambda url: library.sync("run", url),
    "convert": lambda url: library.convert("run/checkpoint-1", url),
    "base_id": lambda url: SaverConfig(base_id=url),
}


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_with_state(Path("run/checkpoint-1"), 1)
    return Path("run")


def chain_of(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("taker", TAKERS)
def test_a_url_with_keys_is_refused_and_nowhere_repeated(taker, run, tmp_path):
    for url, way in WITH_KEYS.items():
        with pytest.raises(ConfigError) as caught:
            TAKERS[taker](url)
        told = [f"{error} {error!r}" for error in chain_of(caught.value)]
        assert [text for text in told if "S3CRET" in text or "CR+ET" in text] == []
        if (url.startswith("hf") and taker in ("push", "pull")) or not (
            url.startswith("hf") or taker == "base_id"
        ):
            assert way in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], (
        "nothing is made of what was refused"
    )


def test_containers_and_revisions_are_no_keys():
    """Refused for other reasons, or not at all."""
    with pytest.raises(CheckpointError, match=r"not read|no model"):
        library.pull("hf://user/name@refs/pr/1", "nowhere")
    place = library.open_place("abfss://container@account.dfs.core.windows.net/run")
    assert str(place) == "abfss://container@account.dfs.core.windows.net/run"


@pytest.mark.parametrize("status", [400, 403, 500])
def test_what_a_bucket_answers_is_not_repeated_as_it_is(status, s3, run):
    code = "Odd\x1b]0;own\x07\u202e https://u:S3CRET@h/?X-Amz-Signature=S3CRET"
    options = {
        "endpoint": s3.url,
        "access_key_id": "A",
        "secret_access_key": "B",
        "client_options": {"allow_http": True},
    }
    place = library.open_place(
        "s3://bucket/runs", **options, region="us-east-1", retry_config={"max_retries": 0}
    )
    s3.faults = [Fault(times=1000, status=status, code=code)]
    for call in (
        library.latest,
        lambda place: library.sync(run, place),
        lambda place: place.store.read("x"),
    ):
        with pytest.raises(CheckpointError) as caught:
            call(place)
        assert "Odd" in str(caught.value)
        assert [each for error in chain_of(caught.value) for each in problems_in(str(error))] == []


@pytest.mark.parametrize("status", [400, 403, 404])
def test_what_the_hub_answers_is_not_repeated_as_it_is(status, run, monkeypatch):
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: time.sleep(0.01)))
    says = (
        "odd \x1b]0;own\x07\u202e https://cdn/x?X-Amz-Credential=S3CRET&X-Amz-Signature=S3CRET "
        "https://u:S3CRET@h"
    )
    with serving_hub() as hub, using_hub(hub):
        for call in (
            lambda: library.pull("hf://user/name", "pulled"),
            lambda: library.push("run/checkpoint-1", "user/x"),
            lambda: library.pull("hf://buckets/user/name/x", "pulled"),
            lambda: library.copy("run/checkpoint-1", "hf://buckets/user/name/x"),
        ):
            hub.faults = [Fault(".", status=status, message=says, times=100)]
            with pytest.raises(CheckpointError) as caught:
                call()
            assert "odd" in str(caught.value)
            assert [
                each for error in chain_of(caught.value) for each in problems_in(str(error))
            ] == []


def test_settings_do_not_show_their_keys():
    assert "S3CRET" not in repr(SaverConfig(store_options={"secret_access_key": "S3CRET"}))
    assert "S3CRET" not in repr(PushOptions(token="S3CRET"))
    with pytest.raises(ConfigError, match=r"publish=\*\*\*: expected a server's URL") as caught:
        SaverConfig(
            publish={
                "url": "http://host",
                "after_resume": "newest",
                "headers": {"X-Api-Key": "S3CRET"},
            }
        )
    assert "S3CRET" not in str(caught.value)


def test_a_manifest_stores_no_keys(tmp_path):
    save_with_state(tmp_path / "run", 1, notes=("from https://u:S3CRET@h/x?sig=S3CRET",))
    assert read_manifest(open_place(tmp_path / "run")).notes == ("from https://***@h/x?sig=***",)
    assert "S3CRET" not in (tmp_path / "run" / "ft_ckpt.json").read_text()


def test_a_wrong_value_of_a_manifest_is_cut_short_without_its_keys(tmp_path):
    save_with_state(tmp_path / "checkpoint-1", 1)
    value = [f"{'a' * 30} https://u:S3CRET@h/p"]
    rewrite_manifest(tmp_path / "checkpoint-1", lambda document: document.update(step=value))
    with pytest.raises(CheckpointError, match=r"step.*\.\.\.") as found:
        read_manifest(open_place(tmp_path / "checkpoint-1"))
    assert "S3CRET" not in str(found.value)


def test_a_field_whose_name_is_no_text_is_an_error(run):
    rewrite_manifest(run / "checkpoint-1", lambda document: document.update({"\udc9b": 1}))
    answer = ft_ckpt("show", "run/checkpoint-1")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "ft_ckpt.json: malformed manifest (" in answer.err
    assert "not UTF-8" in answer.err


def test_values_in_json_are_exact(run):
    exact = "a\x1b]0;x\x07\r\n\x9b\u202e\x7f\udc9bé"
    rewrite_manifest(
        run / "checkpoint-1", lambda document: document.update(kind=exact, metrics={exact: 1.0})
    )
    for words in (["ls", "run"], ["show", "run/checkpoint-1"]):
        answer = ft_ckpt(*words, "--json")
        assert problems_in(answer.out + answer.err) == []
        (row,) = answer.rows
        assert (row["kind"], row["metrics"]) == (exact, {exact: 1.0})


def test_a_path_with_an_escape_is_printed_escaped_and_others_exactly(tmp_path):
    for name in ("a\x1b]0;x\x07", "b\u202e", "c\udc9b", "d\udcff\u3000é", "e\u200c"):
        save_with_state(tmp_path / name / "checkpoint-1", 1)
        answer = ft_ckpt("latest", tmp_path / name)
        if name[0] in "abc":
            assert (problems_in(answer.out + answer.err), "\\" in answer.out) == ([], True)
        else:
            assert answer.out == f"{tmp_path / name / 'checkpoint-1'}\n"


@pytest.mark.parametrize("suffix", [".safetensors", ".h5", ".pt", ".npz"])
def test_names_of_tensors_in_all_formats(suffix, tmp_path):
    file = tmp_path / f"x{suffix}"
    tensors = {NAME_MARK.replace("\udc9b", ""): torch.ones(2), "other": torch.ones(2)}
    if suffix == ".npz":
        np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})
    elif suffix == ".pt":
        torch.save(tensors, file)
    else:
        library.save(tensors, file)
    for words in (
        ["show"],
        ["verify"],
        ["show", "--json"],
        ["convert", tmp_path / "y.safetensors"],
        ["diff", file],
    ):
        answer = ft_ckpt(words[0], file, *words[1:])
        assert problems_in(answer.out + answer.err) == []


def test_a_table_on_a_terminal_has_no_codes_but_its_own_colours(run):
    rewrite_manifest(
        run / "checkpoint-1",
        lambda document: document.update(metrics={f"loss{MARK}": 1.0}, kind=MARK),
    )
    (run / "checkpoint-1" / "config.json").write_text("{")  # not valid: a red row
    code, seen = ft_ckpt_on_terminal("ls", "run", "--metrics", columns=4000)
    assert code == 0
    text = "\n".join(seen)
    assert "\x1b[31m" in text
    assert problems_in(re.sub(r"\x1b\[[0-9;]*m", "", text)) == []
    assert "[/red]" in text


def test_a_progress_bar_shows_a_label_as_text(monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress_bars, "MIN_SECONDS", 0.0)
    with progress_bars.track_bytes(1 << 30, f"[bold]{MARK}[/nope]") as advance:
        advance(1 << 20)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", capfd.readouterr().err)
    assert problems_in(shown) == []
    assert "[bold]" in shown


def test_a_crash_of_the_command_is_printable():
    code = f"""
import sys
import ft_ckpt.cli as cli
import ft_ckpt.cli.show
def fail(*_, **__):
    raise KeyError("x") from ValueError({MARK!r})
ft_ckpt.cli.show.discover = fail
sys.argv = ["ft-ckpt", "ls", "."]
cli.main()
"""
    text = ft_ckpt_alone(code=code).err
    assert "ValueError" in text
    assert "KeyError" in text
    assert set(problems_in(text)) <= {"a line forged"}, "a traceback keeps the lines of messages"
