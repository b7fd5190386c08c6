"""Contract tests of inference servers: inherit `ServerContract` and name the engine's requests.

All servers get what the files hold, or none does. A server that refuses, reports what is not so,
restarts or is lost is named, and gets back the version before.
"""

import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, ClassVar

import engine_server
import pytest
from engine_files import EngineFiles, save
from engine_models import base_model, with_adapter
from engine_server import Engine, State
from faults import KILLS, Server, World, try_worlds
from places import python_path

from ft_ckpt import PublishReport, publish
from ft_ckpt.errors import CheckpointError, CorruptError, EngineError, LoadError

PUBLISHED = ("adapter", "weights")  # of what is published
FAULTS: dict[str, dict[str, Any]] = {
    "close": {"cuts": "before"},
    "close after": {"cuts": "after"},
    "hang": {"cuts": "before", "seconds": 60},
    **{str(status): {"status": status} for status in (400, 401, 404, 409, 500, 503)},
}
_CONTEXT = multiprocessing.get_context("forkserver")


def publish_to(checkpoint: Path, *engines: Engine, **options: Any) -> PublishReport:
    """Publish to these servers."""
    return publish(
        checkpoint, [engine.url for engine in engines], **{"timeout_seconds": 20, **options}
    )


def send(checkpoint: Path, *engines: Engine, **options: Any) -> PublishReport:
    """Publish; assert that no completion came while a server was paused."""
    report = publish_to(checkpoint, *engines, **options)
    for engine in engines:
        assert not engine.is_paused
        assert not engine.during_pause
    return report


def failed(checkpoint: Path, *engines: Engine, **options: Any) -> str:
    """Return the text of the error that publishing raises; no server is paused then."""
    with pytest.raises(CheckpointError) as raised:
        publish_to(checkpoint, *engines, **options)
    assert not any(engine.is_paused for engine in engines)
    return str(raised.value)


@contextmanager
def holding(files: EngineFiles, kind: str, count: int = 1) -> Iterator[list[Engine]]:
    """Start servers that hold the first version of the weights and of an adapter."""
    with ExitStack() as stack:
        engines = []
        for _ in range(count):
            server = engine_server.serving(files.base, kind, traits={"sha256"})
            engines.append(stack.enter_context(server))
        send(files.weights[0], *engines)
        send(files.adapters[0], *engines)
        yield engines


def is_true(report: PublishReport, engine: Engine) -> bool:
    """Check whether a server holds what a report says."""
    if report.kind == "adapter":
        name = report.name.rpartition(":")[2]
        return name in engine.adapters and engine.adapters[name].path == str(report.path)
    is_whole = engine.checksums() == engine.sums_of(str(report.path))
    # another publisher may have paused it just now
    return is_whole and engine.weight_version == report.version


def check_label(engine: Engine, files: EngineFiles) -> None:
    """Assert that the version which the server reports is that of its weights."""
    assert not engine.is_paused
    if engine.weight_version.endswith(" (loading)"):
        return
    name = re.match(r"run/(checkpoint-\d)#", engine.weight_version)
    folder = files.base if name is None else files.weights[0].parent / name[1]
    assert name is not None or engine.weight_version == "default"
    assert engine.checksums() == engine.sums_of(str(folder))


def damaged(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint into `folder` with one changed bit of its weights."""
    target = shutil.copytree(checkpoint, folder / checkpoint.name)
    file = next(target.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    return target


def check_all_or_none(
    files: EngineFiles, first: Engine, second: Engine, begin_fault: Callable[[], object]
) -> None:
    """Publish to two servers, of which the second fails at times: both hold the same version.

    `begin_fault` makes it fail with the next weights, and a refused request with an adapter.
    """
    for path in (files.weights[0], files.adapters[0]):
        report = send(path, first, second)
        assert [server.url for server in report.servers] == [first.url, second.url]
        assert all(server.is_new for server in report.servers)
    sums, version, adapters = first.checksums(), first.weight_version, dict(first.adapters)
    begin_fault()
    text = failed(files.weights[1], first, second)
    assert text.count(f"holds {version} again") == 2
    second.fail("/load_lora_adapter", 500)
    failed(files.adapters[1], first, second)
    for engine in (first, second):
        assert engine.checksums() == sums
        assert (engine.weight_version, engine.adapters) == (version, adapters)
    second.faults.clear()
    send(files.weights[1], first, second)
    send(files.adapters[1], first, second)
    assert first.weights_path == second.weights_path == str(files.weights[1])
    assert list(first.adapters) == list(second.adapters)


# Events at a server between two requests of a publish


def _restart(engine: Engine, _: EngineFiles) -> None:
    engine.start()


def _publish_weights(engine: Engine, files: EngineFiles) -> None:
    publish_to(files.weights[2], engine)


def _publish_adapter(engine: Engine, files: EngineFiles) -> None:
    publish_to(files.adapters[2], engine, keep=0)


def _load_silently(engine: Engine, files: EngineFiles) -> None:
    """Load weights as somebody who does not tell the version."""
    engine.load_weights(str(files.weights[2]))


EVENTS: dict[str, Callable[[Engine, EngineFiles], None]] = {
    "restart": _restart,
    "weights of another": _publish_weights,
    "adapter of another": _publish_adapter,
    "silent weights": _load_silently,
}


def check_event(
    files: EngineFiles, engines: list[Engine], new: Path, event: str, number: int
) -> None:
    """Let an event happen just after request `number` to the last server.

    A report is true nevertheless, a version is that of the weights, and the next publish works.
    """
    target = engines[-1]

    def happen() -> None:
        target.faults.clear()
        EVENTS[event](target, files)

    target.fail(skips=number - 1, then=happen)
    with suppress(CheckpointError):
        report = publish_to(new, *engines)
        assert all(is_true(report, engine) for engine in engines), (number, report)
    if event != "silent weights":
        for engine in engines:
            check_label(engine, files)
    assert is_true(publish_to(new, *engines), target)


# A fault of a request


def check_fault(
    files: EngineFiles, engines: list[Engine], old: State, what: str, world: World
) -> None:
    """Publish the second version of `what` while a request to the last server fails.

    All servers hold the old version or the new one, and the next publish works.
    """
    new = files.versions(what)[1]
    for engine in engines:
        engine.put_back(old)
    timeout_seconds = 0.5 if world.fault == "hang" else 10
    text, version = "", ""
    try:
        action = partial(publish, timeout_seconds=timeout_seconds)
        version = world.run(action, new, [engine.url for engine in engines]).version
    except CheckpointError as error:  # of a server that lists no models: no server
        text = str(error)
    assert world.fault or not text
    check_whole(engines, old, new, what, text, version)
    send(new, *engines)
    for engine in engines:
        assert engine.weights_path == (str(new) if what == "weights" else old.weights)
        assert "(loading)" not in engine.weight_version
        assert len(engine.adapters) == (1 if what == "weights" else 2)


def check_whole(
    engines: list[Engine], old: State, new: Path, what: str, text: str, version: str
) -> None:
    """Assert that all servers hold the old version or all the new one, as the error `text` says."""
    is_new = not text or "all servers hold run/checkpoint-2" in text
    says_old = "hold what they held before" in text or f"holds {old.version} again" in text
    pauses = []
    for engine in engines:
        pauses += engine.requests_to("/pause") + engine.requests_to("/pause_generation")
    if what == "weights" and pauses:
        assert is_new != says_old, text
    for engine in engines:
        assert not engine.is_paused, text
        if what == "adapter":
            assert engine.weight_version == old.version
            assert len(engine.adapters) == (1 if text else 2), text
            assert set(old.adapters) <= set(engine.adapters)
            continue
        assert engine.weights_path == (str(new) if is_new else old.weights), text
        assert engine.checksums() == engine.sums_of(engine.weights_path)
        if not is_new:
            assert engine.weight_version == old.version, text
        elif version:
            assert engine.weight_version == version


def publish_in_a_process(world: World, path: Path, url: str) -> int | None:
    """Publish in another process, which the world may kill; return its exit status."""
    process = _CONTEXT.Process(target=publish, args=(path, url))
    process.start()
    world.begin(process.pid or 0)
    process.join()
    return process.exitcode


def check_kill(files: EngineFiles, engine: Engine, old: State, what: str, world: World) -> None:
    """Kill a publisher at a request: the server holds the old version or the new one.

    The next publish works.
    """
    other, new = files.versions(what)[0], files.versions(what)[1]
    if what == "adapter":
        other = files.adapters[2]
    engine.put_back(old)
    status = world.run(publish_in_a_process, world, new, engine.url)
    assert status == (-signal.SIGKILL if world.is_met else 0)
    assert engine.weights_path in (old.weights, str(new))
    if engine.weight_version == old.version:
        assert engine.weights_path == old.weights
    if world.number % 2:  # another version than the one that was killed
        send(other, engine)
    send(new, engine)
    assert engine.weights_path == (str(new) if what == "weights" else old.weights)


class ServerContract:
    """An engine's behaviour, by its name in `engine_server` and the paths of its requests."""

    kind: ClassVar[str]
    load_adapter: ClassVar[str]
    pause: ClassVar[str]
    resume: ClassVar[str]
    load_weights: ClassVar[str]
    digests: ClassVar[str]

    @pytest.fixture
    def _preloaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fork publishers from a process that has loaded their module."""
        monkeypatch.setenv("PYTHONPATH", python_path())
        _CONTEXT.set_forkserver_preload(["ft_ckpt.extensions.rl.publishing.steps"])
        ensure_running()

    @contextmanager
    def serving(
        self, base: Path, traits: set[str] | None = None, **settings: Any
    ) -> Iterator[Engine]:
        """Start a server of this engine, whose digests are those of the files."""
        all_traits = {"sha256", *(traits or ())}
        with engine_server.serving(base, self.kind, traits=all_traits, **settings) as engine:
            yield engine

    def holding(self, files: EngineFiles, count: int = 1) -> Any:
        """Start servers of this engine as `holding` does."""
        return holding(files, self.kind, count)

    def test_each_version_has_a_name(self, files: EngineFiles) -> None:
        with self.serving(files.base) as engine:
            reports = [send(path, engine, name="policy", keep=2) for path in files.adapters]
            names = [report.name for report in reports]
            versions = [name.partition("-")[0] for name in names]
            assert versions == ["policy@100", "policy@200", "policy@1000"]
            assert list(engine.adapters) == names
            for report in reports:
                assert report.servers[0].is_new
                assert "differ from the base's" in report.servers[0].checked
            (server,) = send(files.adapters[2], engine, name="policy", keep=3).servers
            assert not server.is_new
            assert not server.unloaded  # three are fewer than three and this
            (server,) = send(files.adapters[2], engine, name="policy", keep=1).servers
            assert server.unloaded == (names[0],)
            (server,) = send(files.adapters[1], engine, name="other", keep=0).servers
            assert server.unloaded == ()
            (server,) = send(files.adapters[2], engine, name="policy", keep=0).servers
            assert server.unloaded == (names[1],)
            assert len(engine.requests_to(self.load_adapter)) == 4

    def test_the_same_adapter_again_changes_nothing(self, files: EngineFiles) -> None:
        with self.serving(files.base) as engine:
            first = send(files.adapters[0], engine)
            engine.requests.clear()
            second = send(files.adapters[0], engine)
            assert (first.name, first.version) == (second.name, second.version)
            assert not engine.changes

    @pytest.mark.parametrize(
        ("trait", "expected"),
        [
            ("ignores adapters", "answers as the base does"),
            ("unlisted", "not in its list of models"),
        ],
    )
    def test_an_adapter_that_is_not_applied_is_unloaded(
        self, trait: str, expected: str, files: EngineFiles
    ) -> None:
        with self.serving(files.base) as engine:
            send(files.adapters[0], engine)
            engine.traits.add(trait)
            assert expected in failed(files.adapters[1], engine)
            assert len(engine.adapters) == 1
            engine.traits.clear()
            send(files.adapters[1], engine)
            assert len(engine.adapters) == 2

    @pytest.mark.parametrize("number", [float("nan"), float("-inf")])
    def test_answers_that_are_no_numbers_prove_nothing(
        self, number: float, files: EngineFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Engine, "log_probabilities", lambda *_: [-1.0, number])
        with self.serving(files.base) as engine:
            assert "no finite log probabilities" in failed(files.adapters[0], engine)
            assert not engine.adapters

    def test_a_rank_that_the_server_refuses(self, files: EngineFiles) -> None:
        with self.serving(files.base) as large, self.serving(files.base, max_rank=4) as small:
            text = failed(files.adapters[0], large, small)
            assert "LoRA rank 8 is greater than max_lora_rank 4" in text
            assert not large.adapters
            assert not small.adapters

    def test_two_publishers_of_one_adapter(self, files: EngineFiles) -> None:
        with self.serving(files.base) as engine:

            def overtake() -> None:
                engine.faults.clear()
                publish(files.adapters[0], engine.url)

            engine.fail(self.load_adapter, cuts="before", then=overtake)
            failed(files.adapters[0], engine)  # its connection was closed
            send(files.adapters[0], engine)

            # a refusal because the other was faster is none
            name = next(iter(engine.adapters))
            engine.adapters.clear()
            load_once = engine.load_adapter

            def load_after_another(name: str, path: str) -> None:
                load_once(name, path)  # by the other publisher
                load_once(name, path)

            engine.load_adapter = load_after_another  # type: ignore[method-assign]
            send(files.adapters[0], engine)
            assert list(engine.adapters) == [name]

    def test_versions_of_weights(self, files: EngineFiles) -> None:
        with self.serving(files.base) as engine:
            versions_before = ("default", "run/checkpoint-1#")
            for path, before in zip(files.weights[:2], versions_before, strict=True):
                report = send(path, engine)
                assert engine.weights_path == str(path)
                assert engine.weight_version == report.version
                assert report.version.startswith(f"run/{path.name}#")
                assert (report.servers[0].before or "").startswith(before)
                assert report.servers[0].checked == "27 of 27 parameters equal to the files"
                assert report.servers[0].paused_seconds > 0
            engine.requests.clear()
            assert not send(files.weights[1], engine).servers[0].is_new
            assert set(engine.changes) <= {self.resume}
            assert send(files.weights[0], engine).servers[0].is_new  # back

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("start", ["the base", "a checkpoint"])
    @pytest.mark.parametrize("trait", ["cached weights", "half update", "silent half", "own head"])
    def test_weights_that_were_not_replaced(
        self, trait: str, start: str, files: EngineFiles
    ) -> None:
        has_own_head = trait == "own head"
        base, old, new = files.base, files.weights[0], files.weights[1]
        if has_own_head:
            base, old, new = files.qwen, files.qwen, files.qwen_weights
        with self.serving(base, traits={trait} & {"own head"}) as engine:
            if start == "a checkpoint":
                send(old, engine)
            before, sums = engine.weight_version, engine.checksums()
            engine.traits |= {trait, "old head" if has_own_head else trait, "once"}
            text = failed(new, engine)
            assert engine.checksums() == sums
            assert engine.weight_version == before
            assert f"holds {before} again" in text
            reason = "its SHA-256 is not that of the files"
            if trait == "half update":
                reason = "out of memory"
            assert reason in text
            engine.traits -= {"cached weights", "half update", "silent half"}
            send(new, engine)
            assert engine.weights_path == str(new)

    def test_a_server_without_digests_says_so(self, files: EngineFiles) -> None:
        with self.serving(files.base, traits={"no digests"}) as engine:
            assert send(files.weights[0], engine).servers[0].checked == "the version only"

    def test_a_server_that_was_restarted_gets_its_weights_again(self, files: EngineFiles) -> None:
        with self.serving(files.base) as engine:
            send(files.weights[0], engine)
            engine.start()
            assert send(files.weights[0], engine).servers[0].is_new
            engine.load_weights(str(files.base))  # by somebody who did not tell the version
            assert send(files.weights[0], engine).servers[0].is_new
            assert engine.weights_path == str(files.weights[0])

    def test_a_server_that_refuses_to_resume_once_is_asked_again(self, files: EngineFiles) -> None:
        with self.serving(files.base) as engine:
            engine.fail(self.resume, 503)
            send(files.weights[0], engine)
            assert len(engine.requests_to(self.resume)) == 2

    def test_what_is_damaged_or_foreign_changes_nothing(
        self, files: EngineFiles, tmp_path: Path
    ) -> None:
        with self.serving(files.base) as engine:
            for path in (files.adapters[0], files.weights[0]):
                with pytest.raises(CorruptError):
                    publish(damaged(path, tmp_path), engine.url)
            (tmp_path / "cut").mkdir()
            (tmp_path / "cut/config.json").write_text("{}")
            with pytest.raises(CheckpointError):
                publish(tmp_path / "cut", engine.url)
            other_model = r"architectures .*Qwen2.* start a server with this model"
            with pytest.raises(EngineError, match=other_model):
                publish(files.qwen_weights, engine.url)
            with pytest.raises(LoadError, match="no parts to publish as adapter"):
                publish(files.weights[0], engine.url, kind="adapter")
            assert not engine.changes

    def test_what_the_server_cannot_see(self, files: EngineFiles) -> None:
        with self.serving(files.base) as engine:
            send(files.weights[0], engine)
            text = failed(files.weights[1], engine, visible_at={str(files.root): "/not/mounted"})
            by_client = f"{files.weights[1]}, for the server /not/mounted"
            by_server = "/not/mounted/run/checkpoint-2"
            assert by_client in text or by_server in text
            # a refused path has replaced nothing
            assert engine.weights_path == str(files.weights[0])

    def test_all_servers_or_none(self, files: EngineFiles) -> None:
        with self.serving(files.base) as first, self.serving(files.base) as second:

            def begin_fault() -> None:
                second.traits |= {"silent half", "once"}

            check_all_or_none(files, first, second, begin_fault)

    def test_one_server_that_is_gone(self, files: EngineFiles) -> None:
        with self.serving(files.base) as engine:
            with self.serving(files.base) as lost:
                send(files.weights[0], engine, lost)
            for path in (files.weights[1], files.adapters[0]):
                with pytest.raises(EngineError, match="is the server up"):
                    publish(path, [engine.url, lost.url])
            assert engine.weights_path == str(files.weights[0])
            assert not engine.adapters

    @pytest.mark.parametrize("request_name", ["pause", "load_weights", "digests"])
    def test_control_c_puts_the_version_before_back(
        self, request_name: str, files: EngineFiles
    ) -> None:
        # a shell's background jobs ignore it
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with self.serving(files.base) as engine:
            send(files.weights[0], engine)
            version = engine.weight_version

            def interrupt() -> None:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)

            engine.fail(getattr(self, request_name), cuts="after", then=interrupt)
            with pytest.raises(KeyboardInterrupt):
                publish(files.weights[1], engine.url)
            assert not engine.is_paused
            assert (engine.weights_path, engine.weight_version) == (str(files.weights[0]), version)
        signal.signal(signal.SIGINT, before)

    @pytest.mark.slow
    @pytest.mark.parametrize("count", [1, 2])
    @pytest.mark.parametrize("how", FAULTS)
    @pytest.mark.parametrize("what", PUBLISHED)
    def test_a_fault_at_every_request(
        self, what: str, how: str, count: int, files: EngineFiles
    ) -> None:
        with self.holding(files, count) as engines:
            trial = partial(check_fault, files, engines, engines[-1].state(), what)
            assert try_worlds(trial, Server(engines[-1], {how: FAULTS[how]})).calls > 10

    @pytest.mark.parametrize(
        ("what", "how", "number"),
        [("adapter", "close after", 6), ("weights", "close", 7), ("weights", "close after", 12)],
    )
    def test_a_fault_at_a_request(
        self, what: str, how: str, number: int, files: EngineFiles
    ) -> None:
        with self.holding(files) as engines:
            world = World(Server(engines[-1], FAULTS), how, number)
            check_fault(files, engines, engines[-1].state(), what, world)
            assert world.is_met

    @pytest.mark.slow
    @pytest.mark.usefixtures("_preloaded")
    @pytest.mark.parametrize("name", KILLS)
    @pytest.mark.parametrize("what", PUBLISHED)
    def test_a_kill_at_every_request(self, what: str, name: str, files: EngineFiles) -> None:
        with self.holding(files) as (engine,):
            trial = partial(check_kill, files, engine, engine.state(), what)
            assert try_worlds(trial, Server(engine, {name: KILLS[name]})).calls > 10

    @pytest.mark.sample("1-restart-weights")
    @pytest.mark.parametrize("what", PUBLISHED)
    @pytest.mark.parametrize("event", EVENTS)
    @pytest.mark.parametrize("count", [1, 2])
    def test_an_event_after_any_request(
        self, count: int, event: str, what: str, files: EngineFiles
    ) -> None:
        """Let the event happen after each request but the last, which reads what is reported.

        Weights of somebody who does not tell the version are noticed in the digests alone: their
        last request is the last one then.
        """
        new = files.versions(what)[1]
        with self.holding(files, count) as engines:
            old = engines[-1].state()
            for engine in engines:
                engine.put_back(old)
            send(new, *engines)
            paths = [request.path for request in engines[-1].requests]
            total = len(paths)
            if event == "silent weights" and what == "weights":
                total = len(paths) - paths[::-1].index(self.digests)
            assert total > 5
            for number in range(1, total):
                for engine in engines:
                    engine.put_back(old)
                check_event(files, engines, new, event, number)

    def test_a_restart_is_named_and_all_servers_get_back_what_they_held(
        self, files: EngineFiles
    ) -> None:
        with self.holding(files, 2) as engines:
            first, restarted = engines
            before = first.weight_version
            restarted.fail(self.digests, skips=1, then=restarted.start)
            with pytest.raises(EngineError) as raised:
                send(files.weights[1], *engines)
            text = str(raised.value)
            assert (
                f"{restarted.url}: reports the version default, expected run/checkpoint-2#" in text
            )
            assert "it was restarted, or another publisher has replaced its weights" in text
            for engine in engines:
                assert f"{engine.url} holds {before} again" in text
                assert engine.weights_path == str(files.weights[0])
                assert engine.weight_version == before

    def test_an_adapter_that_another_publisher_unloads(self, files: EngineFiles) -> None:
        with self.serving(files.base) as engine:
            engine.fail("/v1/completions", skips=5, then=lambda: engine.adapters.clear())
            with pytest.raises(EngineError, match="not in its list of models after it was loaded"):
                send(files.adapters[0], engine)

    def test_a_version_of_the_caller_is_loaded_once(
        self, files: EngineFiles, tmp_path: Path
    ) -> None:
        path = tmp_path / "adapter"
        save(with_adapter(base_model("llama"), 1), path, adapter_only=True)
        with self.serving(files.base) as engine:
            send(path, engine, name="policy", version="prod")
            digest = engine.adapters["policy@prod"].digest
            save(with_adapter(base_model("llama"), 2), path, adapter_only=True, overwrite=True)
            unknown = "loaded already, and whether from these files is not known; give another"
            with pytest.raises(EngineError, match=unknown):
                send(path, engine, name="policy", version="prod")
            assert engine.adapters["policy@prod"].digest == digest
            send(path, engine, name="policy")
            assert len(engine.adapters) == 2

    def test_layers_in_another_layout_are_compared_with_those_before(
        self, files: EngineFiles
    ) -> None:
        with self.serving(files.base, traits={"packed"}) as engine:
            for checkpoint in (*files.weights[:2], files.base, files.base):
                before = engine.weights_path
                checked = send(checkpoint, engine).servers[0].checked
                how = "changed with the update; answers differ from those before by up to "
                if before == str(checkpoint):
                    how = "0 of them changed with the update, as in the files"
                assert checked.startswith(
                    f"11 of 27 parameters equal to the files; 16 are kept in another layout, {how}"
                )
                assert engine.weights_path == str(checkpoint)
