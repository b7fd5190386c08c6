"""What goes wrong with servers: each failure is noticed, and undone, and no server stays paused."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_files import EngineFiles
from engine_models import base_model, tokenizer
from engine_server import Engine, serving
from faults import KILLS, Server, World, try_worlds
from places import python_path
from transformers import LlamaConfig, LlamaForCausalLM

import ft_ckpt.engines.publish as publishing
from ft_ckpt import CheckpointSaver, Keep, PublishReport, publish
from ft_ckpt.checkpoint.prune import prune_run
from ft_ckpt.engines import servers
from ft_ckpt.errors import CheckpointError, CorruptError, EngineError, LoadError

KINDS = ("vllm", "sglang")
Old = tuple[str, str, dict[str, Any]]  # weights, version and adapters of a server
_CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_RESUME_PAUSE_SECONDS", 0.01)


def send(checkpoint: Path, *engines: Engine, **options: Any) -> PublishReport:
    """Publish; no completion may come while a server is paused."""
    report = publish(checkpoint, [engine.url for engine in engines], timeout_seconds=10, **options)
    for engine in engines:
        assert not engine.is_paused
        assert not engine.during_pause
    return report


def failed(checkpoint: Path, *engines: Engine, **options: Any) -> str:
    """The text of the error that publishing gives; no server is paused then."""
    with pytest.raises(CheckpointError) as raised:
        publish(checkpoint, [engine.url for engine in engines], timeout_seconds=10, **options)
    assert not any(engine.is_paused for engine in engines)
    return str(raised.value)


# Adapters


@pytest.mark.parametrize("kind", KINDS)
def test_each_version_has_a_name(kind: str, files: EngineFiles) -> None:
    with serving(files.base, kind) as engine:
        reports = [send(path, engine, name="policy", keep=2) for path in files.adapters]
        assert [report.name.partition("-")[0] for report in reports] == ["policy@100", "policy@200", "policy@1000"]
        assert list(engine.adapters) == [report.name for report in reports]
        assert all(report.servers[0].is_new and "differ from the base's" in report.servers[0].checked
                   for report in reports)  # fmt: skip
        again = send(files.adapters[2], engine, name="policy", keep=3)
        assert not again.servers[0].is_new
        assert not again.servers[0].unloaded  # three are fewer than three and this
        assert send(files.adapters[2], engine, name="policy", keep=1).servers[0].unloaded == (reports[0].name,)
        assert send(files.adapters[1], engine, name="other", keep=0).servers[0].unloaded == ()
        assert send(files.adapters[2], engine, name="policy", keep=0).servers[0].unloaded == (reports[1].name,)
        assert len(engine.requests_to("/v1/load_lora_adapter" if kind == "vllm" else "/load_lora_adapter")) == 4


def test_the_same_adapter_again_changes_nothing(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        first = send(files.adapters[0], engine)
        engine.requests.clear()
        second = send(files.adapters[0], engine)
        assert (first.name, first.version) == (second.name, second.version)
        assert not engine.changes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("trait", "expected"), [("ignores adapters", "answers as the base does"), ("unlisted", "not in its list of models")]
)
def test_an_adapter_that_is_not_applied_is_unloaded(kind: str, trait: str, expected: str, files: EngineFiles) -> None:
    with serving(files.base, kind) as engine:
        send(files.adapters[0], engine)
        engine.traits.add(trait)
        assert expected in failed(files.adapters[1], engine)
        assert len(engine.adapters) == 1
        engine.traits.clear()
        send(files.adapters[1], engine)
        assert len(engine.adapters) == 2


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_answers_that_are_no_numbers_prove_nothing(
    number: float, files: EngineFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "log_probabilities", lambda *_: [-1.0, number])
    with serving(files.base) as engine:
        assert "no finite log probabilities" in failed(files.adapters[0], engine)
        assert not engine.adapters


def test_a_name_that_is_used_again_answers_from_the_new_files(files: EngineFiles) -> None:
    with serving(files.base, traits={"stale names"}) as engine:
        name = send(files.adapters[0], engine, name="p", version="v1").name
        assert "give another version=" in failed(files.adapters[1], engine, name="p", version="v1")
        assert engine.adapters[name].path == str(files.adapters[0])  # it was not new, and is still loaded
        del engine.adapters[name]
        send(files.adapters[1], engine, name="p", version="v1")
        assert engine.first_digests[name] == engine.adapters[name].digest  # the cache was dropped


def test_a_rank_that_the_server_refuses(files: EngineFiles) -> None:
    with serving(files.base) as large, serving(files.base, most_rank=4) as small:
        assert "LoRA rank 8 is greater than max_lora_rank 4" in failed(files.adapters[0], large, small)
        assert not large.adapters
        assert not small.adapters


def test_two_publishers_of_one_adapter(files: EngineFiles) -> None:
    with serving(files.base) as engine:

        def overtake() -> None:
            engine.faults.clear()
            publish(files.adapters[0], engine.url)

        engine.fail("/v1/load_lora_adapter", cuts="before", then=overtake)
        failed(files.adapters[0], engine)  # its connection was closed
        send(files.adapters[0], engine)

        # a refusal because the other was faster is none
        name = next(iter(engine.adapters))
        engine.adapters.clear()
        real = engine.load_adapter
        engine.load_adapter = lambda *given: (real(*given), real(*given))[0]  # type: ignore[method-assign]
        send(files.adapters[0], engine)
        assert list(engine.adapters) == [name]


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


@pytest.mark.parametrize("kind", KINDS)
def test_versions_of_weights(kind: str, files: EngineFiles) -> None:
    with serving(files.base, kind, traits={"sha256"}) as engine:
        for path, before in zip(files.weights, ("default", "run/checkpoint-1#"), strict=True):
            report = send(path, engine)
            assert engine.held == str(path)
            assert engine.weight_version == report.version
            assert report.version.startswith(f"run/{path.name}#")
            assert (report.servers[0].before or "").startswith(before)
            assert report.servers[0].checked == "27 of 27 parameters equal to the files"
            assert report.servers[0].paused_seconds > 0
        engine.requests.clear()
        again = send(files.weights[1], engine)
        assert not again.servers[0].is_new
        assert set(engine.changes) <= {"/resume", "/continue_generation"}
        assert send(files.weights[0], engine).servers[0].is_new  # back


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
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(3)
    for name in ("base", "run/checkpoint-1"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=1025, **sizes))
        with CheckpointSaver(None) as saver:
            saver.save(model, tmp_path / name, tokenizer=tokenizer())
    for ranks in (1, 2):
        with serving(tmp_path / "base", dtype=torch.bfloat16, pads=True, ranks=ranks) as engine:
            total = len(engine.shards)
            checked = send(tmp_path / "run/checkpoint-1", engine).servers[0].checked
            assert checked == f"{total} of {total} parameters equal to the files"


@pytest.mark.sample(4)
@pytest.mark.parametrize("start", ["the base", "a checkpoint"])
@pytest.mark.parametrize("trait", ["cached weights", "half update", "silent half", "own head"])
def test_weights_that_were_not_replaced(trait: str, start: str, files: EngineFiles) -> None:
    base, new = (files.base, files.weights[1]) if trait != "own head" else (files.qwen, files.qwen_weights)
    with serving(base, traits={trait} & {"own head"}) as engine:
        if start == "a checkpoint":
            send(files.weights[0] if trait != "own head" else files.qwen, engine)
        before, sums = engine.weight_version, engine.checksums()
        engine.traits |= {trait, "old head" if trait == "own head" else trait, "once"}
        text = failed(new, engine)
        assert engine.checksums() == sums
        assert engine.weight_version == before
        assert f"holds {before} again" in text
        assert ("out of memory" if trait == "half update" else "its SHA-256 is not that of the files") in text
        engine.traits &= {"own head"}
        send(new, engine)
        assert engine.held == str(new)


def test_digests_that_never_fit(files: EngineFiles) -> None:
    with serving(files.base, traits={"wrong digests"}) as engine:
        text = failed(files.weights[0], engine)
        assert "may hold a part of run/checkpoint-1" in text
        assert "default was not loaded again" in text
        assert engine.weight_version.endswith(" (loading)")
        assert send(files.weights[0], engine, check="listed").servers[0].checked == "the version only"


def test_what_the_server_does_not_report_is_named(files: EngineFiles) -> None:
    with serving(files.base, traits={"fewer digests"}) as engine:
        checked = send(files.weights[0], engine).servers[0].checked
        assert checked.startswith("21 of 21 parameters equal to the files; model.layers.3.input_layernorm.weight, ")
        assert checked.endswith("and 6 more: in none of them")


def test_a_server_without_digests_says_so(files: EngineFiles) -> None:
    for kind in KINDS:
        with serving(files.base, kind, traits={"no digests"}) as engine:
            assert send(files.weights[0], engine).servers[0].checked == "the version only"


def test_a_server_without_calls_for_weights(files: EngineFiles) -> None:
    with serving(files.base, traits={"no dev mode"}) as engine:
        text = failed(files.weights[0], engine)
        assert "VLLM_SERVER_DEV_MODE=1" in text
        assert "PAUSED" not in text
        assert engine.held == str(files.base)
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
        assert engine.held == str(files.weights[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_was_started_anew_is_filled_again(kind: str, files: EngineFiles) -> None:
    with serving(files.base, kind, traits={"sha256"}) as engine:
        send(files.weights[0], engine)
        engine.start()
        assert send(files.weights[0], engine).servers[0].is_new
        engine.load_weights(str(files.base))  # by somebody who did not tell the version
        assert send(files.weights[0], engine).servers[0].is_new
        assert engine.held == str(files.weights[0])


def test_a_server_that_refuses_to_resume_once_is_asked_again(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        engine.fail("/resume", 503)
        send(files.weights[0], engine)
        assert len(engine.requests_to("/resume")) == 2


def test_generation_goes_on_around_a_publish(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        over, bad, count = threading.Event(), [], [0]

        def ask() -> None:
            server = servers.connect(servers.Client(engine.url, timeout_seconds=20))
            try:
                while not over.is_set():
                    servers.probe(server, "base")
                    count[0] += 1
            except EngineError as error:
                bad.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        for path in (*files.weights, files.weights[0]):
            publish(path, engine.url)
        while not count[0] and thread.is_alive():  # publishes may be faster than the first answer
            time.sleep(0.01)
        over.set()
        thread.join()
        assert not bad
        assert count[0]


# Checkpoints that are refused


def damage(checkpoint: Path, folder: Path) -> Path:
    """A copy with one byte of its weights flipped."""
    target = folder / checkpoint.name
    shutil.copytree(checkpoint, target)
    file = next(target.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    return target


def test_what_is_damaged_or_foreign_changes_nothing(files: EngineFiles, tmp_path: Path) -> None:
    with serving(files.base) as engine:
        for path in (files.adapters[0], files.weights[0]):
            with pytest.raises(CorruptError):
                publish(damage(path, tmp_path), engine.url)
        (tmp_path / "cut").mkdir()
        (tmp_path / "cut/config.json").write_text("{}")
        with pytest.raises(CheckpointError):
            publish(tmp_path / "cut", engine.url)
        with pytest.raises(EngineError, match=r"architectures .*Qwen2.* start a server with this model"):
            publish(files.qwen_weights, engine.url)
        with pytest.raises(LoadError, match="no parts to publish as adapter"):
            publish(files.weights[0], engine.url, kind="adapter")
        assert not engine.changes


def test_what_the_server_cannot_see(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        send(files.weights[0], engine)
        text = failed(files.weights[1], engine, visible_at={str(files.root): "/not/mounted"})
        assert f"{files.weights[1]}, for the server /not/mounted" in text or "/not/mounted/run/checkpoint-2" in text
        assert engine.held == str(files.weights[0])  # a refused path has replaced nothing


# Several servers


@pytest.mark.parametrize("mixed", [False, True])
def test_all_servers_or_none(mixed: bool, files: EngineFiles) -> None:
    with serving(files.base) as one, serving(files.base, "sglang" if mixed else "vllm") as two:
        for path in (files.weights[0], files.adapters[0]):
            report = send(path, one, two)
            assert [each.url for each in report.servers] == [one.url, two.url]
            assert all(each.is_new for each in report.servers)
        sums, version, adapters = one.checksums(), one.weight_version, dict(one.adapters)
        if not mixed:
            two.traits |= {"silent half", "once"}
        else:
            two.fail("/update_weights_from_disk", cuts="before")
        text = failed(files.weights[1], one, two)
        assert text.count(f"holds {version} again") == 2
        two.fail("/load_lora_adapter", 500)
        failed(files.adapters[1], one, two)
        for engine in (one, two):
            assert (engine.checksums(), engine.weight_version, engine.adapters) == (sums, version, adapters)
        two.traits.clear()
        send(files.weights[1], one, two)
        send(files.adapters[1], one, two)
        assert one.held == two.held == str(files.weights[1])
        assert list(one.adapters) == list(two.adapters)


def test_servers_without_known_digests_are_compared_with_each_other(files: EngineFiles) -> None:
    with serving(files.base, "sglang") as one, serving(files.base, "sglang") as two:
        send(files.weights[0], one, two)
        two.traits |= {"cached weights"}
        text = failed(files.weights[1], one, two)
        assert "parameters that differ from those on" in text
        assert one.held == two.held == str(files.weights[0])


def test_one_server_that_is_gone(files: EngineFiles) -> None:
    with serving(files.base) as one:
        with serving(files.base) as two:
            send(files.weights[0], one, two)
        for path in (files.weights[1], files.adapters[0]):
            with pytest.raises(EngineError, match="is the server up"):
                publish(path, [one.url, two.url])
        assert one.held == str(files.weights[0])
        assert not one.adapters


# Interruptions


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/weight_checker"])
def test_control_c_puts_the_version_before_back(path: str, files: EngineFiles) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with serving(files.base) as engine:
        send(files.weights[0], engine)
        version = engine.weight_version

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

        engine.fail(path, cuts="after", then=interrupt)
        with pytest.raises(KeyboardInterrupt):
            publish(files.weights[1], engine.url)
        assert (engine.held, engine.weight_version, engine.is_paused) == (str(files.weights[0]), version, False)
    signal.signal(signal.SIGINT, before)


def test_a_checkpoint_is_not_deleted_while_a_server_reads_it(files: EngineFiles, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with CheckpointSaver(None) as saver:
        for step in (1, 2):
            saver.save(base_model("llama", step), run / f"checkpoint-{step}", step=step, tokenizer=tokenizer())
    with serving(files.base) as engine:
        there = []

        def prune() -> None:
            prune_run(run, Keep(last=1))
            there.append((run / "checkpoint-1/ft_ckpt.json").exists())

        engine.fail("/collective_rpc", cuts="before", then=prune)
        failed(run / "checkpoint-1", engine)  # its connection was closed; the server was given its first weights back
        assert there == [True]
        engine.fail("/resume", cuts="after", then=prune)
        send(run / "checkpoint-1", engine)
        assert there == [True, True]
        prune_run(run, Keep(last=1))
        assert not (run / "checkpoint-1").exists()


# A fault at every request


@contextmanager
def old_version(files: EngineFiles, kind: str, count: int = 1) -> Iterator[list[Engine]]:
    """Servers that hold the first version of the weights and of an adapter."""
    with ExitStack() as stack:
        engines = [stack.enter_context(serving(files.base, kind, traits={"sha256"})) for _ in range(count)]
        send(files.weights[0], *engines)
        send(files.adapters[0], *engines, name="policy")
        yield engines


def state_of(engine: Engine) -> Old:
    return engine.held, engine.weight_version, dict(engine.adapters)


def put_old(engine: Engine, old: Old) -> None:
    """Give the server what it held at the beginning."""
    engine.faults.clear()
    engine.held, engine.weight_version, engine.adapters = old[0], old[1], dict(old[2])
    engine.shards = engine._read(old[0])
    engine.running.set()


def check_fault(files: EngineFiles, engines: list[Engine], old: Old, what: str, world: World) -> None:
    """A fault of a request to the last server: all servers hold the old version or the new one; the next one works."""
    new = files.weights[1] if what == "weights" else files.adapters[1]
    for engine in engines:
        put_old(engine, old)
        engine.requests.clear()
    name = "policy" if what == "adapter" else None
    timeout_seconds = 0.5 if world.fault == "hang" else 10
    text, version = "", ""
    try:
        action = partial(publish, name=name, timeout_seconds=timeout_seconds)
        version = world.run(action, new, [engine.url for engine in engines]).version
    except CheckpointError as error:  # of a server that lists no models: no server
        text = str(error)
    assert world.fault or not text
    check_whole(engines, old, new, what, text, version)
    send(new, *engines, name=name)
    for engine in engines:
        assert engine.held == (str(new) if what == "weights" else old[0])
        assert "(loading)" not in engine.weight_version
        assert len(engine.adapters) == (1 if what == "weights" else 2)


def check_whole(engines: list[Engine], old: Old, new: Path, what: str, text: str, version: str) -> None:
    """All servers hold the old version or all the new one, as the error says."""
    for engine in engines:
        assert not engine.is_paused, text
        if what == "weights":
            is_new = not text or "all servers hold run/checkpoint-2" in text
            says_old = any(said in text for said in ("hold what they held before", f"holds {old[1]} again"))
            begun = any(each.requests_to("/pause") or each.requests_to("/pause_generation") for each in engines)
            assert not begun or is_new != says_old, text
            assert engine.held == (str(new) if is_new else old[0]), text
            assert engine.checksums() == engine.sums_of(engine.held)
            if not is_new:
                assert engine.weight_version == old[1], text
            elif version:
                assert engine.weight_version == version
        else:
            assert engine.weight_version == old[1]
            assert len(engine.adapters) == (1 if text else 2), text
            assert set(old[2]) <= set(engine.adapters)


FAULTS: dict[str, dict[str, Any]] = {
    "close": {"cuts": "before"},
    "close after": {"cuts": "after"},
    "hang": {"cuts": "before", "seconds": 60},
    **{str(status): {"status": status} for status in (400, 401, 404, 409, 500, 503)},
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("what", ["adapter", "weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_every_request(kind: str, what: str, how: str, count: int, files: EngineFiles) -> None:
    with old_version(files, kind, count) as engines:
        trial = partial(check_fault, files, engines, state_of(engines[-1]), what)
        assert try_worlds(trial, Server(engines[-1], {how: FAULTS[how]})).calls > 10


MISSING = [("weights", "404", number) for number in (13, 14, 15)]  # such as the version, which is read before it is set


@pytest.mark.parametrize(
    ("what", "how", "number"),
    [("adapter", "close after", 6), ("weights", "close", 7), ("weights", "close after", 12), *MISSING],
)
def test_a_fault_at_a_request(what: str, how: str, number: int, files: EngineFiles) -> None:
    with old_version(files, "vllm") as engines:
        world = World(Server(engines[-1], FAULTS), how, number)
        check_fault(files, engines, state_of(engines[-1]), what, world)
        assert world.is_met


# A publisher that is killed


@pytest.fixture
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork publishers from a process that has loaded their module."""
    monkeypatch.setenv("PYTHONPATH", python_path())
    _CONTEXT.set_forkserver_preload(["ft_ckpt.engines.publish"])
    ensure_running()


def publish_in_a_process(world: World, path: Path, url: str, options: dict[str, Any]) -> int | None:
    """The exit status of a process that publishes."""
    process = _CONTEXT.Process(target=publish, args=(path, url), kwargs=options)
    process.start()
    world.begin(process.pid or 0)
    process.join()
    return process.exitcode


def check_kill(files: EngineFiles, engine: Engine, old: Old, what: str, world: World) -> None:
    """After a publisher that a request has killed, the server holds the old version or the new; the next one works."""
    new = files.weights[1] if what == "weights" else files.adapters[1]
    options = {"name": "policy"} if what == "adapter" else {}
    put_old(engine, old)
    status = world.run(publish_in_a_process, world, new, engine.url, options)
    assert status == (-signal.SIGKILL if world.is_met else 0)
    assert engine.held in (old[0], str(new))
    if engine.weight_version == old[1]:
        assert engine.held == old[0]
    if world.number % 2:  # another version than the one that was killed
        send(files.weights[0] if what == "weights" else files.adapters[2], engine, **options)
    send(new, engine, **options)
    assert engine.held == (str(new) if what == "weights" else old[0])


@pytest.mark.slow
@pytest.mark.usefixtures("_loaded")
@pytest.mark.parametrize("name", KILLS)
@pytest.mark.parametrize("what", ["adapter", "weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_every_request(kind: str, what: str, name: str, files: EngineFiles) -> None:
    with old_version(files, kind) as (engine,):
        trial = partial(check_kill, files, engine, state_of(engine), what)
        assert try_worlds(trial, Server(engine, {name: KILLS[name]})).calls > 10


@pytest.mark.slow
@pytest.mark.usefixtures("_loaded")
def test_a_kill_at_a_request(files: EngineFiles) -> None:
    with old_version(files, "vllm") as (engine,):  # when the weights are loaded
        check_kill(files, engine, state_of(engine), "weights", World(Server(engine, KILLS), "killed after", 7))
