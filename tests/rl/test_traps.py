"""Layouts of weights that a server shards, pads or reports in part, and what changes while it is
published to.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_server import failed, send
from engine_files import EngineFiles, save
from engine_models import base_model, tokenizer
from engine_server import serving
from transformers import LlamaConfig, LlamaForCausalLM

from ft_ckpt import Keep, publish
from ft_ckpt.errors import EngineError
from ft_ckpt.extensions.rl.engines import Client, connect, probe
from ft_ckpt.runs.folder import prune_run
from ft_ckpt.storage.places import open_place

# Adapters


def test_a_name_that_is_used_again_answers_from_the_new_files(files: EngineFiles) -> None:
    with serving(files.base, traits={"stale names"}) as engine:
        name = send(files.adapters[0], engine, name="p", version="v1").name
        assert "give another version=" in failed(files.adapters[1], engine, name="p", version="v1")
        # it was not new, and is still loaded
        assert engine.adapters[name].path == str(files.adapters[0])
        del engine.adapters[name]
        send(files.adapters[1], engine, name="p", version="v1")
        assert engine.first_digests[name] == engine.adapters[name].digest  # the cache was dropped


def test_an_adapter_waits_for_no_paused_server(files: EngineFiles) -> None:
    with serving(files.base) as one, serving(files.base, "sglang") as two:
        one.running.clear()
        two.weight_version = "run/checkpoint-1#0123456789abcdef (loading)"
        for engine in (one, two):
            with pytest.raises(EngineError, match="publish full weights again"):
                publish(files.adapters[0], engine.url, timeout_seconds=10)
            assert not engine.adapters
            send(files.weights[0], engine)
            assert send(files.adapters[0], engine).name in engine.adapters


# Full weights


LAYOUTS: dict[str, dict[str, Any]] = {
    "two ranks": {"ranks": 2},
    "padded": {"pads": True, "lora": False},
    "padded on two ranks": {"pads": True, "ranks": 2},
    "in another type": {"dtype": torch.float16},
    "sglang": {"kind": "sglang", "ranks": 2, "traits": {"sha256"}},
    "awake": {"traits": {"no digests while paused"}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_digests_of_layouts(layout: str, files: EngineFiles) -> None:
    with serving(files.base, **LAYOUTS[layout]) as engine:
        checked = send(files.weights[0], engine).servers[0].checked
        total = len(engine.shards)
        assert checked == f"{total} of {total} parameters equal to the files"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_digests_of_grouped_heads_and_a_tied_head(ranks: int, files: EngineFiles) -> None:
    """With four ranks each key head is held twice."""
    for traits in (set(), {"own head"}):
        with serving(files.qwen, ranks=ranks, traits=traits) as engine:
            total = len(engine.shards)
            checked = send(files.qwen_weights, engine).servers[0].checked
            assert checked == f"{total} of {total} parameters equal to the files"


def test_digests_of_an_odd_vocabulary_in_another_type(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(3)
    for name in ("base", "run/checkpoint-1"):
        save(
            LlamaForCausalLM(LlamaConfig(vocab_size=1025, **sizes)),
            tmp_path / name,
            tokenizer=tokenizer(),
        )
    for ranks in (1, 2):
        with serving(tmp_path / "base", dtype=torch.bfloat16, pads=True, ranks=ranks) as engine:
            total = len(engine.shards)
            checked = send(tmp_path / "run/checkpoint-1", engine).servers[0].checked
            assert checked == f"{total} of {total} parameters equal to the files"


def test_digests_that_never_fit(files: EngineFiles) -> None:
    with serving(files.base, traits={"wrong digests"}) as engine:
        text = failed(files.weights[0], engine)
        assert "may hold a part of run/checkpoint-1" in text
        assert "default was not loaded again" in text
        assert engine.weight_version.endswith(" (loading)")
        assert (
            send(files.weights[0], engine, check="listed").servers[0].checked == "the version only"
        )


def test_what_the_server_does_not_report_is_named(files: EngineFiles) -> None:
    with serving(files.base, traits={"fewer digests"}) as engine:
        checked = send(files.weights[0], engine).servers[0].checked
        assert checked.startswith(
            "21 of 21 parameters equal to the files; model.layers.3.input_layernorm.weight, "
        )
        assert checked.endswith("and 6 more: in none of them")


def test_a_server_without_calls_for_weights(files: EngineFiles) -> None:
    with serving(files.base, traits={"no dev mode"}) as engine:
        text = failed(files.weights[0], engine)
        assert "VLLM_SERVER_DEV_MODE=1" in text
        assert "PAUSED" not in text
        assert engine.weights_path == str(files.base)
        send(files.adapters[0], engine)


def test_a_version_of_somebody_else_is_not_taken_for_the_first(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        send(files.weights[0], engine, version="v1")
        assert engine.weight_version == "v1"
        assert not send(files.weights[0], engine, version="v1").servers[0].is_new
        assert send(files.weights[1], engine, version="v1").servers[0].is_new  # other files
        engine.traits |= {"half update", "once"}
        text = failed(files.weights[0], engine, version="v2")
        assert "where its version v1 came from is not known" in text
        assert engine.weight_version == "v2 (loading)"
        send(files.weights[0], engine, version="v2")
        assert engine.weights_path == str(files.weights[0])


def test_generation_goes_on_around_a_publish(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        over, bad, count = threading.Event(), [], [0]

        def ask() -> None:
            server = connect(Client(engine.url, timeout_seconds=20))
            try:
                while not over.is_set():
                    probe(server, "base")
                    count[0] += 1
            except EngineError as error:
                bad.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        for path in (*files.weights[:2], files.weights[0]):
            publish(path, engine.url)
        while not count[0] and thread.is_alive():  # publishes may be faster than the first answer
            time.sleep(0.01)
        over.set()
        thread.join()
        assert not bad
        assert count[0]


# Several servers


def test_servers_without_known_digests_are_compared_with_each_other(files: EngineFiles) -> None:
    with serving(files.base, "sglang") as one, serving(files.base, "sglang") as two:
        send(files.weights[0], one, two)
        two.traits |= {"cached weights"}
        text = failed(files.weights[1], one, two)
        assert "parameters that differ from those on" in text
        assert one.weights_path == two.weights_path == str(files.weights[0])


def test_a_checkpoint_is_not_deleted_while_a_server_reads_it(
    files: EngineFiles, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        save(
            base_model("llama", step), run / f"checkpoint-{step}", step=step, tokenizer=tokenizer()
        )
    with serving(files.base) as engine:
        there = []

        def prune() -> None:
            prune_run(open_place(run), Keep(last=1))
            there.append((run / "checkpoint-1/ft_ckpt.json").exists())

        engine.fail("/collective_rpc", cuts="before", then=prune)
        # its connection was closed; the server was given its first weights back
        failed(run / "checkpoint-1", engine)
        assert there == [True]
        engine.fail("/resume", cuts="after", then=prune)
        send(run / "checkpoint-1", engine)
        assert there == [True, True]
        prune_run(open_place(run), Keep(last=1))
        assert not (run / "checkpoint-1").exists()
