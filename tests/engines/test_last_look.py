"""Servers that restart, and other publishers that come, between any two requests of a publish.

The outcome is an error, or a report of what the server holds at that time; and no server reports the version of weights
that it does not hold.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_files import EngineFiles
from engine_models import VOCABULARY, tokenizer, with_adapter
from engine_server import Engine, serving
from http_server import Request
from transformers import LlamaConfig, LlamaForCausalLM

import ft_ckpt.engines.publish as publishing
from ft_ckpt import CheckpointSaver, PublishReport, publish
from ft_ckpt.engines.reference import model_answers
from ft_ckpt.engines.servers import PROBE_PROMPTS
from ft_ckpt.errors import CheckpointError, EngineError

KINDS = ("vllm", "sglang")
WHATS = ("adapter", "weights")
PUBLISHER = "X-Publisher"
CHECKERS = ("/weight_checker", "/weights_checker")
ALL = None  # the requests that are left


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_RESUME_PAUSE_SECONDS", 0.01)


@dataclass(frozen=True)
class Small:
    """Checkpoints of a small Llama."""

    base: Path
    weights: tuple[Path, ...]
    adapters: tuple[Path, ...]

    def versions(self, what: str) -> tuple[Path, ...]:
        """The checkpoints of a kind, oldest first."""
        return self.weights if what == "weights" else self.adapters


def llama(seed: int, **settings: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {**sizes, "vocab_size": VOCABULARY, "initializer_range": 0.1, **settings}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16).eval()


def save(model: Any, path: Path, **options: Any) -> Path:
    with CheckpointSaver(None) as saver:
        saver.save(model, path, **options)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    root = tmp_path_factory.mktemp("small")
    words = tokenizer()
    base = save(llama(0), root / "base", tokenizer=words)
    steps = (1, 2, 3)
    weights = [save(llama(step), root / f"run/checkpoint-{step}", step=step, tokenizer=words) for step in steps]
    adapters = []
    for step in steps:
        model = with_adapter(llama(0), step)
        adapters.append(save(model, root / f"sft/checkpoint-{step}", step=step, adapter_only=True))
    return Small(base, tuple(weights), tuple(adapters))


def send(checkpoint: Path, *engines: Engine, publisher: str = "", **options: Any) -> PublishReport:
    headers = {PUBLISHER: publisher} if publisher else {}
    return publish(checkpoint, [engine.url for engine in engines], timeout_seconds=20, headers=headers, **options)


@contextmanager
def old_version(small: Small, kind: str, count: int = 1) -> Iterator[list[Engine]]:
    """Servers that hold the first version of the weights and of an adapter."""
    with ExitStack() as stack:
        engines = [stack.enter_context(serving(small.base, kind, traits={"sha256"})) for _ in range(count)]
        for checkpoint in (small.weights[0], small.adapters[0]):
            send(checkpoint, *engines)
        yield engines


def restore(engine: Engine, small: Small, version: str) -> None:
    """Give the server what it held at the beginning."""
    engine.faults.clear()
    engine.start()
    engine.load_weights(str(small.weights[0]))
    engine.weight_version = version
    engine.load_adapter(f"sft@{version_of(small.adapters[0])}", str(small.adapters[0]))
    engine.requests.clear()


def version_of(adapter: Path) -> str:
    """The version in the name of an adapter, as a server gets it."""
    with serving(adapter.parent.parent / "base") as engine:
        return send(adapter, engine).version


def is_true(report: PublishReport, engine: Engine) -> bool:
    """Whether a server holds what a report says."""
    if report.kind == "adapter":
        name = report.name.rpartition(":")[2]
        return name in engine.adapters and engine.adapters[name].path == str(report.path)
    is_whole = engine.checksums() == engine.sums_of(str(report.path))
    return is_whole and engine.weight_version == report.version  # another publisher may have paused it just now


def check_label(engine: Engine, small: Small) -> None:
    """A version that the server reports is that of its weights, and it answers."""
    assert not engine.is_paused
    if engine.weight_version.endswith(" (loading)"):
        return
    name = re.match(r"run/(checkpoint-\d)#", engine.weight_version)
    folder = small.base if name is None else small.weights[0].parent / name[1]
    assert name is not None or engine.weight_version == "default"
    assert engine.checksums() == engine.sums_of(str(folder))


# An event after every request


Event = Callable[[Engine, Small], Any]


def restart(engine: Engine, _: Small) -> None:
    engine.start()


def publish_weights(engine: Engine, small: Small) -> None:
    send(small.weights[2], engine)


def publish_adapter(engine: Engine, small: Small) -> None:
    send(small.adapters[2], engine, keep=0)


def load_silently(engine: Engine, small: Small) -> None:
    """As by somebody who does not tell the version."""
    engine.load_weights(str(small.weights[2]))


EVENTS: dict[str, Event] = {
    "restart": restart,
    "weights of another": publish_weights,
    "adapter of another": publish_adapter,
    "silent weights": load_silently,
}


def after_every_request(small: Small, kind: str, what: str, event: Event, count: int) -> int:
    """Let something happen just after the n-th request to the last server, for each n but the last one. Their number.

    After the last request, which reads what the report says, nothing that happens is in the report. For somebody who
    does not tell the version, that request is the last one for digests.
    """
    new = small.versions(what)[1]
    with old_version(small, kind, count) as engines:
        first, target = engines[0].weight_version, engines[-1]
        for engine in engines:
            restore(engine, small, first)
        send(new, *engines)
        paths = [request.path for request in target.requests]
        total = len(paths)
        if event is load_silently and what == "weights":
            total = max(number for number, path in enumerate(paths, 1) if path in CHECKERS)
        for number in range(1, total):
            for engine in engines:
                restore(engine, small, first)

            def happen() -> None:
                target.faults.clear()
                event(target, small)

            target.fail(skips=number - 1, then=happen)
            with suppress(CheckpointError):
                report = send(new, *engines)
                assert all(is_true(report, engine) for engine in engines), (number, report)
            for engine in engines:
                if event is not load_silently:
                    check_label(engine, small)
            assert is_true(send(new, *engines), target)
        return total


@pytest.mark.sample("1-restart-weights-vllm")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("count", [1, 2])
def test_an_event_after_any_request(count: int, event: str, what: str, kind: str, small: Small) -> None:
    assert after_every_request(small, kind, what, EVENTS[event], count) > 5


# Two publishers in turns


class Turns:
    """Lets two publishers send their requests in shares: so many of one, so many of the other, and so on."""

    def __init__(self, shares: list[tuple[str, int | None]]) -> None:
        self.shares = shares
        self.changed = threading.Condition()

    def wait(self, request: Request) -> None:
        """Wait until it is the turn of the publisher of this request, and count it.

        A share ends when its publisher sends one request more, or has ended: until then it looks at the server.
        """
        publisher = request.headers.get(PUBLISHER.lower(), "")
        with self.changed:
            if self.shares[0] == (publisher, 0):
                del self.shares[0]
                self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.shares[0][0] == publisher, timeout=60)
            count = self.shares[0][1]
            if count is not ALL:
                self.shares[0] = (publisher, count - 1)

    def end(self, publisher: str) -> None:
        """The publisher has ended: its shares go to the other one."""
        with self.changed:
            self.shares = [share for share in self.shares if share[0] != publisher]
            self.changed.notify_all()


def in_turns(small: Small, engine: Engine, whats: tuple[str, str], first: int, second: int) -> None:
    """One publisher sends `first` requests, another one `second`, then the first one all others, then the second."""
    shares: list[tuple[str, int | None]] = [("a", first), ("b", second), ("a", ALL), ("b", ALL)]
    turns = Turns([share for share in shares if share[1] != 0])
    untrue: list[str] = []

    def run(publisher: str, checkpoint: Path) -> None:
        try:
            report = send(checkpoint, engine, publisher=publisher)
            if not is_true(report, engine):
                untrue.append(f"{publisher}: {report}; the server holds {engine.held}, {engine.weight_version}")
        except EngineError:
            pass
        finally:
            turns.end(publisher)

    engine.gate, engine.patience_seconds = turns.wait, 0.05  # the publisher that has paused it waits for its turn
    checkpoints = [small.versions(what)[number] for number, what in enumerate(whats, 1)]
    threads = [threading.Thread(target=run, args=pair) for pair in zip("ab", checkpoints, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.gate = lambda _: None
    assert not untrue, (first, second, untrue)
    check_label(engine, small)


def requests_of(small: Small, engine: Engine, what: str, version: str) -> int:
    """The number of requests of a publish that nobody disturbs."""
    restore(engine, small, version)
    send(small.versions(what)[1], engine)
    return len(engine.requests)


PAIRS = [(one, other) for one in WHATS for other in WHATS]


@pytest.mark.slow
@pytest.mark.parametrize("whats", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_two_publishers_in_any_turns(kind: str, whats: tuple[str, str], small: Small) -> None:
    with old_version(small, kind) as (engine,):
        version = engine.weight_version
        counts = [requests_of(small, engine, what, version) for what in whats]
        for first in range(1, counts[0] + 1):
            for second in range(1, counts[1] + 1):
                restore(engine, small, version)
                in_turns(small, engine, whats, first, second)


@pytest.mark.parametrize(("first", "second"), [(9, 20), (14, 12), (16, 30)])
def test_two_publishers_in_turns(first: int, second: int, small: Small) -> None:
    with old_version(small, "vllm") as (engine,):
        restore(engine, small, engine.weight_version)
        in_turns(small, engine, ("weights", "weights"), first, second)


# What the errors say


def test_a_restart_is_named_and_all_servers_get_back_what_they_held(small: Small) -> None:
    with old_version(small, "vllm", 2) as engines:
        one, other = engines
        before = one.weight_version
        other.fail("/weight_checker", skips=1, then=other.start)
        with pytest.raises(EngineError) as raised:
            send(small.weights[1], *engines)
        text = str(raised.value)
        assert f"{other.url}: reports the version default, expected run/checkpoint-2#" in text
        assert "it was restarted, or another publisher has replaced its weights" in text
        for engine in engines:
            assert f"{engine.url} holds {before} again" in text
            assert (engine.held, engine.weight_version) == (str(small.weights[0]), before)


def test_weights_of_another_publisher_lose_the_version_that_was_set_over_them(small: Small) -> None:
    with old_version(small, "vllm") as (engine,):
        # the version has been read as ours, when the other publisher loads its weights and has not yet told a version
        number = [request.path for request in requests_from(small, engine)].index("/update_weight_version", 10)
        engine.fail(skips=number - 1, then=lambda: engine.load_weights(str(small.weights[2])))
        with pytest.raises(EngineError, match="its SHA-256 has changed since it was compared") as raised:
            send(small.weights[1], engine)
        assert "holds other weights, so its version was set to run/checkpoint-2#" in str(raised.value)
        assert engine.weight_version.endswith(" (loading)")
        assert engine.held == str(small.weights[2])


def requests_from(small: Small, engine: Engine) -> list[Request]:
    version = engine.weight_version
    send(small.weights[1], engine)
    requests = list(engine.requests)
    restore(engine, small, version)
    return requests


def test_an_adapter_that_another_publisher_unloads(small: Small) -> None:
    with serving(small.base) as engine:
        engine.fail("/v1/completions", skips=5, then=lambda: engine.adapters.clear())
        with pytest.raises(EngineError, match="not in its list of models after it was loaded"):
            send(small.adapters[0], engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_of_the_caller_is_loaded_once(kind: str, small: Small, tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    save(with_adapter(llama(0), 1), path, adapter_only=True)
    with serving(small.base, kind) as engine:
        send(path, engine, name="policy", version="prod")
        digest = engine.adapters["policy@prod"].digest
        save(with_adapter(llama(0), 2), path, adapter_only=True, overwrite=True)
        with pytest.raises(
            EngineError, match="loaded already, and whether from these files is not known; give another"
        ):
            send(path, engine, name="policy", version="prod")
        assert engine.adapters["policy@prod"].digest == digest
        send(path, engine, name="policy")
        assert len(engine.adapters) == 2


# What a server keeps from its start


FIELDS: dict[str, Any] = {
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "rms_norm_eps": 1e-3,
    "hidden_act": "gelu",
    "attention_bias": True,
    "head_dim": 16,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pretraining_tp": 2,
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_a_server_keeps_from_its_start(name: str, small: Small, tmp_path: Path) -> None:
    path = save(llama(1, **{name: FIELDS[name]}), tmp_path / "run/checkpoint-1", step=1, tokenizer=tokenizer())
    with serving(small.base) as engine:
        with pytest.raises(EngineError, match=rf"config\.json: .*{name}.*start a server with this model"):
            send(path, engine)
        assert not engine.changes


def test_an_attention_window_is_kept_from_the_start(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    paths = []
    for window in (None, 16):
        config = MistralConfig(**sizes, vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=window)
        paths.append(save(MistralForCausalLM(config), tmp_path / f"run/{window}", tokenizer=tokenizer()))
    with (
        serving(paths[0]) as engine,
        pytest.raises(EngineError, match=r"sliding_window 16, None in that of the served"),
    ):
        send(paths[1], engine)


def test_fields_of_training_and_token_ids_are_no_reason_to_refuse(small: Small, tmp_path: Path) -> None:
    settings = {"attention_dropout": 0.1, "use_cache": False, "eos_token_id": 7}
    path = save(llama(1, **settings), tmp_path / "run/checkpoint-1", step=1, tokenizer=tokenizer())
    with serving(small.base) as engine:
        checked = send(path, engine).servers[0].checked
        note = "it keeps its own token ids: eos_token_id 7, 2 in that of the served model"
        assert checked.endswith(f"equal to the files; {note}")


def test_a_config_that_is_not_here_is_said_to_be_uncompared(small: Small, tmp_path: Path) -> None:
    with serving(small.base) as engine:
        engine.base = tmp_path / "elsewhere"
        checked = send(small.weights[0], engine).servers[0].checked
        assert checked.endswith(f"its config was not compared: {engine.base} is not a folder here; see visible_at=")


# Linear layers in another layout


@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_another_layout_are_compared_with_those_before(kind: str, small: Small) -> None:
    with serving(small.base, kind, traits={"packed", "sha256"}) as engine:
        for checkpoint in (*small.weights[:2], small.base, small.base):
            before = engine.held
            checked = send(checkpoint, engine).servers[0].checked
            how = "changed with the update; answers differ from those before by up to "
            if before == str(checkpoint):
                how = "0 of them changed with the update, as in the files"
            assert checked.startswith(f"5 of 9 parameters equal to the files; 4 are kept in another layout, {how}")
            assert engine.held == str(checkpoint)


@pytest.mark.parametrize("version", [None, "v1"])
def test_layers_without_digests_are_counted(version: str | None, small: Small) -> None:
    with serving(small.base, traits={"packed away"}) as engine:
        packed = "5 of 9 parameters equal to the files; 4 are kept in another layout, without digests"
        for checkpoint in small.weights[:2]:
            report = send(checkpoint, engine, version=version).servers[0]
            assert report.is_new
            assert report.checked.startswith(f"{packed}; answers differ from those before by up to ")
        again = send(small.weights[1], engine, version=version).servers[0]
        assert again.is_new == (version is not None)  # a version of the caller does not name the content
        assert again.checked.startswith(packed)


@pytest.mark.parametrize("has_old_head", [False, True])
def test_a_tied_head_that_is_packed_is_proved_by_the_answers_of_transformers(
    has_old_head: bool, files: EngineFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {str(path): model_answers(path, "") for path in (files.qwen, files.qwen_weights)}
    wrong = [[value - 1 for value in values] for values in answers[str(files.qwen_weights)]]
    if has_old_head:
        answers[str(files.qwen_weights)] = wrong

    def answer(engine: Engine, _: str | None, prompt: list[int]) -> list[float]:
        return answers[engine.held][PROBE_PROMPTS.index(tuple(prompt))]

    monkeypatch.setattr(Engine, "log_probabilities", answer)
    with serving(files.qwen, traits={"packed away"}) as engine:
        if has_old_head:
            with pytest.raises(EngineError, match=r"are 1\.000 from those of transformers.*holds default again"):
                send(files.qwen_weights, engine)
            assert (engine.held, engine.weight_version) == (str(files.qwen), "default")
        else:
            checked = send(files.qwen_weights, engine).servers[0].checked
            assert checked.endswith("; they are those of transformers within 0.000")


def test_layers_that_stay_as_they_were_are_refused(small: Small) -> None:
    with serving(small.base, traits={"packed once"}) as engine:
        with pytest.raises(EngineError, match=r"layers\.0\..*: its SHA-256 is not that of the files"):
            send(small.weights[0], engine)
        assert (engine.held, engine.weight_version) == (str(small.base), "default")


def test_what_was_comparable_must_stay_so(small: Small) -> None:
    with serving(small.base) as engine:
        engine.fail("/collective_rpc", then=lambda: engine.traits.add("packed"))
        with pytest.raises(EngineError, match="as of 4 of 9 parameters"):
            send(small.weights[0], engine)


def test_nothing_is_learned_from_a_server_that_holds_something_else(small: Small) -> None:
    with serving(small.base, traits={"packed"}) as engine:
        engine.load_weights(str(small.weights[1]))  # by somebody who did not tell the version
        with pytest.raises(EngineError, match="its SHA-256 is not that of the files"):
            send(small.weights[0], engine)
        assert not engine.is_paused


@pytest.mark.parametrize("trait", ["packed", "packed away"])
def test_answers_that_stay_as_they_were_are_refused(trait: str, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "log_probabilities", lambda *_: [-1.0, -2.0])
    with serving(small.base, traits={trait}) as engine:
        send(small.base, engine, version="same")  # the same weights, and the same answers
        engine.start()
        with pytest.raises(EngineError, match="answers as before the update"):
            send(small.weights[0], engine)
        assert (engine.held, engine.weight_version) == (str(small.base), "default")


# Folders of any name


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["run#1", "my run", "läuft (2)", "a@b", "run/ch#eck point"])
@pytest.mark.parametrize("place", ["beside", "another run"])
def test_weights_from_a_folder_of_any_name_are_restored(place: str, name: str, small: Small, tmp_path: Path) -> None:
    run, _, checkpoint = name.partition("/")
    old = tmp_path / run / (checkpoint or "checkpoint#1")
    new = (tmp_path / "other" if place == "another run" else tmp_path / run) / "checkpoint-2"
    for seed, path in enumerate((old, new), 1):
        save(llama(seed), path, tokenizer=tokenizer())
    with serving(small.base) as engine:
        version = send(old, engine).version
        engine.traits |= {"half update", "once"}
        with pytest.raises(EngineError, match="again") as raised:
            send(new, engine)
        assert f"holds {version} again" in str(raised.value)
        assert (engine.held, engine.weight_version) == (str(old), version)
        assert engine.checksums() == engine.sums_of(str(old))
