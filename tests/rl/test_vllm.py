"""Publishing to a real vLLM: what it then holds and answers, with generation in flight.

FT_CKPT_VLLM names a Python that has vllm, and puts these tests into the default run; else one is
installed.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_files import EngineFiles, engine_files
from engine_models import base_model, tokenizer, with_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from vllm_server import VARIABLE, RealServer, running_vllm

from ft_ckpt import CheckpointSaver, load_model, publish
from ft_ckpt.errors import CorruptError, EngineError
from ft_ckpt.extensions.rl.engines import PROBE_PROMPTS, Client, connect, is_unreported

pytestmark = [
    pytest.mark.timeout(2400),
    *([] if os.environ.get(VARIABLE) else [pytest.mark.slow]),
]
SIZES = {"hidden_size": 256, "intermediate_size": 384}  # heads of 64: the kernels take few sizes
NEAR = 0.2  # of log probabilities in bfloat16 and in float32; on AVX-512 BF16 up to 0.13 were seen


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> EngineFiles:
    """Checkpoints that no test changes."""
    return engine_files(tmp_path_factory.mktemp("vllm"), **SIZES)


@contextmanager
def asked_all_the_time(server: RealServer) -> Iterator[list[str]]:
    """Completions by two threads while the block runs; the list is of those that failed, and ends
    with their number.
    """
    over, failures, count = threading.Event(), [], [0]

    def ask() -> None:
        client = Client(server.url, timeout_seconds=120)
        while not over.is_set():
            body = {"model": "base", "prompt": [3, 5, 7], "max_tokens": 24, "ignore_eos": True}
            answer = client.post("/v1/completions", body)
            found = answer.document["choices"][0] if answer.is_success else {}
            if found.get("finish_reason") != "length":
                failures.append(answer.quoted)
            count[0] += 1

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        over.set()
        for thread in threads:
            thread.join()
        assert count[0] > 2


def check_answers(server: RealServer, name: str, model: Any) -> None:
    """The likeliest tokens of the server have the log probabilities of `model` in transformers."""
    client = Client(server.url)
    for prompt in PROBE_PROMPTS:
        body = {
            "model": name,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 5,
        }
        answer = client.expect(
            client.post("/v1/completions", {**body, "return_tokens_as_token_ids": True}), "asked"
        )
        found = answer.document["choices"][0]["logprobs"]["top_logprobs"][0]
        with torch.no_grad():
            expected = torch.log_softmax(
                model(input_ids=torch.tensor([prompt])).logits[0, -1].float(), -1
            )
        assert len(found) >= 5
        for token, value in found.items():
            assert abs(float(expected[int(token.removeprefix("token_id:"))]) - value) < NEAR


def reference(checkpoint: Path, base: Path | None = None) -> Any:
    return load_model(checkpoint, base=base).float().eval()


def check_comparison(checked: str) -> None:
    """All parameters are equal to the files, or the linear layers are packed, as on processors with
    AVX-512 BF16.
    """
    counts = re.match(r"(\d+) of (\d+) parameters equal to the files", checked)
    assert counts is not None, checked
    equal, total = map(int, counts.groups())
    if equal != total:
        assert total - equal == 16
        packed = (
            "; 16 are kept in another layout, without digests; answers differ from those "
            "before by up to "
        )
        assert packed in checked, checked


def has_packed_head(server: RealServer, model: Path) -> bool:
    """Whether it keeps a packed copy of a tied head, which it does not replace with the weights."""
    digests = connect(Client(server.url)).digests() or {}
    is_tied = bool(json.loads((model / "config.json").read_text())["tie_word_embeddings"])
    return is_tied and any(map(is_unreported, digests.values()))


def check_publishes(
    server: RealServer, adapters: list[Path], weights: list[Path], base: Path
) -> None:
    """Two adapters and full versions, with generation in flight."""
    with asked_all_the_time(server) as failures:
        names = []
        for path in adapters:
            report = publish(path, server.url, name="policy", base=base)
            assert "those of transformers and PEFT" in report.servers[0].checked
            names.append(report.name)
        served = connect(Client(server.url)).served()
        assert list(served.adapters) == names
        for path, name in zip(adapters, names, strict=True):
            check_answers(server, name, reference(path, base))
        if has_packed_head(server, base):
            with pytest.raises(
                EngineError, match=r"from those of transformers.*tied head.* holds default again"
            ):
                publish(weights[0], server.url)
            check_answers(server, "base", reference(base))
            return
        for path, in_flight in zip(
            [*weights, weights[0], base], ("wait", "keep", "wait", "wait"), strict=True
        ):
            report = publish(path, server.url, in_flight=in_flight)
            check_comparison(report.servers[0].checked)
            assert report.servers[0].is_new
            check_answers(server, "base", reference(path))
        again = publish(base, server.url)
        assert not again.servers[0].is_new
    assert not failures
    for path, name in zip(adapters, names, strict=True):  # adapters outlive the weights below them
        check_answers(server, name, reference(path, base))


def test_a_llama(files: EngineFiles, tmp_path: Path) -> None:
    adapters = list(files.adapters[:2])
    with running_vllm(files.base, tmp_path / "log") as server:
        check_publishes(server, adapters, list(files.weights[:2]), files.base)
        check_refusals(server, files, tmp_path)
        publish(files.weights[0], server.url)
        server.kill()
        with pytest.raises(EngineError, match="is the server up"):
            publish(files.weights[0], server.url)
    with running_vllm(files.base, tmp_path / "log") as server:
        report = publish(files.weights[0], server.url)
        assert (report.servers[0].before, report.servers[0].is_new) == ("default", True)
        check_answers(server, "base", reference(files.weights[0]))
        check_rollback(server, files, tmp_path)


def check_refusals(server: RealServer, files: EngineFiles, folder: Path) -> None:
    """Damaged and foreign checkpoints change nothing."""
    client = Client(server.url)
    before = client.post("/weight_checker", {"action": "checksum"}).document
    listed = connect(client).served()
    for path in (files.weights[0], files.adapters[0]):
        damaged = folder / "damaged" / path.name
        shutil.copytree(path, damaged)
        file = next(damaged.glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-2] ^= 64
        file.write_bytes(content)
        with pytest.raises(CorruptError):
            publish(damaged, server.url)
    with pytest.raises(EngineError, match="start a server with this model"):
        publish(files.qwen_weights, server.url)
    assert client.post("/weight_checker", {"action": "checksum"}).document == before
    assert connect(client).served() == listed


def check_rollback(server: RealServer, files: EngineFiles, folder: Path) -> None:
    """The server sees another copy of a checkpoint: other values, half a file, none."""
    copy = folder / "copy"
    shutil.copytree(files.root, copy)
    seen = {str(files.root): str(copy)}
    file = copy / "run/checkpoint-2/model.safetensors"
    tensors = load_file(file)
    version = connect(Client(server.url)).weight_version()
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        EngineError, match=r"model.norm.weight: its SHA-256 is not that of the files"
    ) as raised:
        publish(files.weights[1], server.url, visible_at=seen)
    assert f"holds {version} again" in str(raised.value)
    check_answers(server, "base", reference(files.weights[0]))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(EngineError, match="refused: 500") as raised:
        publish(files.weights[1], server.url, visible_at=seen)
    assert f"holds {version} again" in str(raised.value)
    check_answers(server, "base", reference(files.weights[0]))
    shutil.rmtree(copy / "run/checkpoint-2")
    with pytest.raises(EngineError, match="refused: 500") as raised:
        publish(files.weights[1], server.url, visible_at=seen)
    assert f"holds {version} again" in str(raised.value)
    check_answers(server, "base", reference(files.weights[0]))
    publish(files.weights[1], server.url)
    check_answers(server, "base", reference(files.weights[1]))


def test_a_qwen_with_grouped_heads_and_a_tied_head(files: EngineFiles, tmp_path: Path) -> None:
    adapters = []
    for step in (1, 2):
        model = with_adapter(AutoModelForCausalLM.from_pretrained(files.qwen), step)
        adapters.append(tmp_path / f"sft/checkpoint-{step}")
        with CheckpointSaver(None) as saver:
            saver.save(model, adapters[-1], step=step, adapter_only=True)
    weights = [files.qwen_weights, tmp_path / "run/checkpoint-2"]
    with CheckpointSaver(None) as saver:
        saver.save(base_model("qwen", 2, **SIZES), weights[1], step=2, tokenizer=tokenizer())
    with running_vllm(files.qwen, tmp_path / "log") as server:
        check_publishes(server, adapters, weights, files.qwen)
