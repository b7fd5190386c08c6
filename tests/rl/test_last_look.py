"""Two publishers in turns, and what a server keeps from its start: fields of its config, and
layouts of its layers.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
from contract_server import PUBLISHED, check_label, holding, is_true, publish_to, send
from engine_files import EngineFiles, save
from engine_models import VOCABULARY, base_model, tokenizer
from engine_server import Engine, State, serving
from http_server import Request

from ft_ckpt.errors import EngineError
from ft_ckpt.extensions.rl.engines import PROBE_PROMPTS, model_answers

KINDS = ("vllm", "sglang")
PUBLISHER = "X-Publisher"
ALL = None  # the requests that are left


# Two publishers in turns


class Turns:
    """Lets two publishers send their requests in shares: so many of one, so many of the other, and
    so on.
    """

    def __init__(self, shares: list[tuple[str, int | None]]) -> None:
        self.shares = shares
        self.changed = threading.Condition()

    def wait(self, request: Request) -> None:
        """Wait until it is the turn of the publisher of this request, and count it.

        A share ends when its publisher sends one request more, or has ended: until then it looks at
        the server.
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


def in_turns(
    files: EngineFiles, engine: Engine, whats: tuple[str, str], first: int, second: int
) -> None:
    """One publisher sends `first` requests, another one `second`, then the first one all others,
    then the second.
    """
    shares: list[tuple[str, int | None]] = [("a", first), ("b", second), ("a", ALL), ("b", ALL)]
    turns = Turns([share for share in shares if share[1] != 0])
    untrue: list[str] = []

    def run(publisher: str, checkpoint: Path) -> None:
        try:
            report = publish_to(checkpoint, engine, headers={PUBLISHER: publisher})
            if not is_true(report, engine):
                untrue.append(
                    f"{publisher}: {report}; the server holds {engine.weights_path}, "
                    f"{engine.weight_version}"
                )
        except EngineError:
            pass
        finally:
            turns.end(publisher)

    # the publisher that has paused it waits for its turn
    engine.gate, engine.patience_seconds = turns.wait, 0.05
    checkpoints = [files.versions(what)[number] for number, what in enumerate(whats, 1)]
    threads = [
        threading.Thread(target=run, args=pair) for pair in zip("ab", checkpoints, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.gate = lambda _: None
    assert not untrue, (first, second, untrue)
    check_label(engine, files)


def requests_of(files: EngineFiles, engine: Engine, what: str, old: State) -> list[Request]:
    """The requests of a publish that nobody disturbs."""
    engine.put_back(old)
    send(files.versions(what)[1], engine)
    requests = list(engine.requests)
    engine.put_back(old)
    return requests


PAIRS = [(one, other) for one in PUBLISHED for other in PUBLISHED]


@pytest.mark.slow
@pytest.mark.parametrize("whats", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_two_publishers_in_any_turns(kind: str, whats: tuple[str, str], files: EngineFiles) -> None:
    with holding(files, kind) as (engine,):
        old = engine.state()
        counts = [len(requests_of(files, engine, what, old)) for what in whats]
        for first in range(1, counts[0] + 1):
            for second in range(1, counts[1] + 1):
                engine.put_back(old)
                in_turns(files, engine, whats, first, second)


@pytest.mark.parametrize(("first", "second"), [(9, 20), (14, 12), (16, 30)])
def test_two_publishers_in_turns(first: int, second: int, files: EngineFiles) -> None:
    with holding(files, "vllm") as (engine,):
        in_turns(files, engine, ("weights", "weights"), first, second)


def test_weights_of_another_publisher_lose_the_version_that_was_set_over_them(
    files: EngineFiles,
) -> None:
    with holding(files, "vllm") as (engine,):
        # the version has been read as ours, when the other publisher loads its weights and has not
        # yet told a version
        requests = requests_of(files, engine, "weights", engine.state())
        number = [request.path for request in requests].index("/update_weight_version", 10)
        engine.fail(skips=number - 1, then=lambda: engine.load_weights(str(files.weights[2])))
        with pytest.raises(
            EngineError, match="its SHA-256 has changed since it was compared"
        ) as raised:
            send(files.weights[1], engine)
        assert "holds other weights, so its version was set to run/checkpoint-2#" in str(
            raised.value
        )
        assert engine.weight_version.endswith(" (loading)")
        assert engine.weights_path == str(files.weights[2])


# What a server keeps from its start


FIELDS: dict[str, Any] = {
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "rms_norm_eps": 1e-3,
    "hidden_act": "gelu",
    "attention_bias": True,
    "head_dim": 32,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pretraining_tp": 2,
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_a_server_keeps_from_its_start(
    name: str, files: EngineFiles, tmp_path: Path
) -> None:
    path = save(
        base_model("llama", 1, **{name: FIELDS[name]}),
        tmp_path / "run/checkpoint-1",
        step=1,
        tokenizer=tokenizer(),
    )
    with serving(files.base) as engine:
        with pytest.raises(
            EngineError, match=rf"config\.json: .*{name}.*start a server with this model"
        ):
            send(path, engine)
        assert not engine.changes


def test_an_attention_window_is_kept_from_the_start(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    paths = []
    for window in (None, 16):
        config = MistralConfig(
            **sizes, vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=window
        )
        paths.append(
            save(MistralForCausalLM(config), tmp_path / f"run/{window}", tokenizer=tokenizer())
        )
    with (
        serving(paths[0]) as engine,
        pytest.raises(EngineError, match=r"sliding_window 16, None in that of the served"),
    ):
        send(paths[1], engine)


def test_fields_of_training_and_token_ids_are_no_reason_to_refuse(
    files: EngineFiles, tmp_path: Path
) -> None:
    settings = {"attention_dropout": 0.1, "use_cache": False, "eos_token_id": 7}
    path = save(
        base_model("llama", 1, **settings),
        tmp_path / "run/checkpoint-1",
        step=1,
        tokenizer=tokenizer(),
    )
    with serving(files.base) as engine:
        checked = send(path, engine).servers[0].checked
        note = "it keeps its own token ids: eos_token_id 7, 2 in that of the served model"
        assert checked.endswith(f"equal to the files; {note}")


def test_a_config_that_is_not_here_is_said_to_be_uncompared(
    files: EngineFiles, tmp_path: Path
) -> None:
    with serving(files.base) as engine:
        engine.base = tmp_path / "elsewhere"
        checked = send(files.weights[0], engine).servers[0].checked
        assert checked.endswith(
            f"its config was not compared: {engine.base} is not a folder here; see visible_at="
        )


# Linear layers in another layout


@pytest.mark.parametrize("version", [None, "v1"])
def test_layers_without_digests_are_counted(version: str | None, files: EngineFiles) -> None:
    with serving(files.base, traits={"packed away"}) as engine:
        packed = (
            "11 of 27 parameters equal to the files; 16 are kept in another layout, without digests"
        )
        for checkpoint in files.weights[:2]:
            report = send(checkpoint, engine, version=version).servers[0]
            assert report.is_new
            assert report.checked.startswith(
                f"{packed}; answers differ from those before by up to "
            )
        again = send(files.weights[1], engine, version=version).servers[0]
        # a version of the caller does not name the content
        assert again.is_new == (version is not None)
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
        return answers[engine.weights_path][PROBE_PROMPTS.index(tuple(prompt))]

    monkeypatch.setattr(Engine, "log_probabilities", answer)
    with serving(files.qwen, traits={"packed away"}) as engine:
        if has_old_head:
            with pytest.raises(
                EngineError, match=r"are 1\.000 from those of transformers.*holds default again"
            ):
                send(files.qwen_weights, engine)
            assert (engine.weights_path, engine.weight_version) == (str(files.qwen), "default")
        else:
            checked = send(files.qwen_weights, engine).servers[0].checked
            assert checked.endswith("; they are those of transformers within 0.000")


def test_layers_that_stay_as_they_were_are_refused(files: EngineFiles) -> None:
    with serving(files.base, traits={"packed once"}) as engine:
        with pytest.raises(
            EngineError, match=r"layers\.0\..*: its SHA-256 is not that of the files"
        ):
            send(files.weights[0], engine)
        assert (engine.weights_path, engine.weight_version) == (str(files.base), "default")


def test_what_was_comparable_must_stay_so(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        engine.fail("/collective_rpc", then=lambda: engine.traits.add("packed"))
        with pytest.raises(EngineError, match="as of 16 of 27 parameters"):
            send(files.weights[0], engine)


def test_nothing_is_learned_from_a_server_that_holds_something_else(files: EngineFiles) -> None:
    with serving(files.base, traits={"packed"}) as engine:
        engine.load_weights(str(files.weights[1]))  # by somebody who did not tell the version
        with pytest.raises(EngineError, match="its SHA-256 is not that of the files"):
            send(files.weights[0], engine)
        assert not engine.is_paused


@pytest.mark.parametrize("trait", ["packed", "packed away"])
def test_answers_that_stay_as_they_were_are_refused(
    trait: str, files: EngineFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "log_probabilities", lambda *_: [-1.0, -2.0])
    with serving(files.base, traits={trait}) as engine:
        send(files.base, engine, version="same")  # the same weights, and the same answers
        engine.start()
        with pytest.raises(EngineError, match="answers as before the update"):
            send(files.weights[0], engine)
        assert (engine.weights_path, engine.weight_version) == (str(files.base), "default")


# Folders of any name


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["run#1", "my run", "läuft (2)", "a@b", "run/ch#eck point"])
@pytest.mark.parametrize("place", ["beside", "another run"])
def test_weights_from_a_folder_of_any_name_are_restored(
    place: str, name: str, files: EngineFiles, tmp_path: Path
) -> None:
    run, _, checkpoint = name.partition("/")
    old = tmp_path / run / (checkpoint or "checkpoint#1")
    new = (tmp_path / "other" if place == "another run" else tmp_path / run) / "checkpoint-2"
    for seed, path in enumerate((old, new), 1):
        save(base_model("llama", seed), path, tokenizer=tokenizer())
    with serving(files.base) as engine:
        version = send(old, engine).version
        engine.traits |= {"half update", "once"}
        with pytest.raises(EngineError, match="again") as raised:
            send(new, engine)
        assert f"holds {version} again" in str(raised.value)
        assert (engine.weights_path, engine.weight_version) == (str(old), version)
        assert engine.checksums() == engine.sums_of(str(old))
