"""The client, and what it says of servers: tokens, limits of time and size, redirects, engines that
are refused.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import http_server
import pytest
from engine_files import EngineFiles
from engine_server import serving
from http_server import Answer, FakeHandler, FakeServer, Fault, Request

from ft_ckpt import publish
from ft_ckpt.errors import ConfigError, EngineError
from ft_ckpt.extensions.rl.engines import Client, client as client_module, connect

TOKEN = "sk-VERYSECRET0123"


@contextmanager
def answered(
    reply: Answer | Callable[[FakeHandler], Answer], *faults: Fault
) -> Iterator[FakeServer]:
    """A server that gives this answer to each request, or the one that `reply` makes of it."""

    class Handler(FakeHandler):
        def answer(self, request: Request) -> Answer:
            return reply if isinstance(reply, Answer) else reply(self)

    server = FakeServer()
    server.faults = list(faults)
    with http_server.serving(server, Handler):
        yield server


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_CKPT_ENGINE_TOKEN", f"{TOKEN}\n")


@pytest.mark.usefixtures("token")
def test_the_token_is_sent_and_never_shown() -> None:
    def echo(handler: FakeHandler) -> Answer:
        return Answer(401, f"denied: {handler.headers['Authorization']}")

    with answered(echo) as server:
        client = Client(server.url)
        answer = client.post("/pause")
        assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
        assert "denied" in answer.quoted
        with pytest.raises(EngineError, match="refused: 401 denied") as raised:
            client.expect(answer, "pausing")
        with pytest.raises(EngineError, match="its list of models: refused: 401") as unknown:
            connect(client)
    for text in (str(raised.value), str(unknown.value), repr(client), repr(answer), answer.quoted):
        assert TOKEN not in text


@pytest.mark.parametrize(
    ("name", "value", "echoed"),
    [
        ("Cookie", f"session={TOKEN}; lang=en", f"session={TOKEN}; lang=en"),
        ("Cookie", f"session={TOKEN}; lang=en", TOKEN),
        ("Authorization", f"Basic {TOKEN}== ", f"Basic {TOKEN}=="),
    ],
)
def test_a_header_that_is_echoed_is_not_shown(name: str, value: str, echoed: str) -> None:
    with answered(Answer(401, f"denied: {echoed}")) as server:
        answer = Client(server.url, {name: value}).post("/pause")
        assert "denied" in answer.quoted
        assert TOKEN not in answer.quoted


@pytest.mark.usefixtures("token")
def test_a_header_argument_goes_before_the_environment() -> None:
    with answered(Answer(200)) as server:
        client = Client(server.url, {"authorization": "Basic b3RoZXI="})
        client.get("/version")
        assert "Bearer" not in str(server.requests)
        assert "Basic" not in repr(client)


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    with answered(Answer(200)) as elsewhere:
        location = {"Location": f"{elsewhere.url}/x?token={TOKEN}"}
        with answered(Answer(status, b"", location)) as server:
            client = Client(server.url)
            for call in (client.get, client.post):
                with pytest.raises(EngineError, match="redirected to http://127") as raised:
                    call("/v1/models")
                assert TOKEN not in str(raised.value)
    assert not elsewhere.requests


def test_a_header_value_does_not_change_what_is_read() -> None:
    with answered(Answer(200, {"version": "0.32.1"})) as server:
        assert Client(server.url, {"X-Priority": "1"}).get("/version").document == {
            "version": "0.32.1"
        }


@pytest.mark.parametrize(
    "headers", [{"X": 5}, {"X": "a\nb"}, {"X": "a\r\nHost: b"}, {"Authorization": "Bearer sécret"}]
)
def test_a_header_with_a_line_break_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as raised:
        Client("http://127.0.0.1:1", headers)
    assert "cret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host/?a=b",
        "",
        "http://host/#x",
        "http://ho st",
        "http://ho\nst",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected the address of a server"):
        Client(url)


def test_a_password_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="a password in a URL is logged") as raised:
        Client(f"http://user:{TOKEN}@host:8000")
    assert TOKEN not in str(raised.value)


def _dribble(handler: FakeHandler, content: bytes) -> None:
    try:
        for place in range(len(content)):
            handler.wfile.write(content[place : place + 1])
            handler.wfile.flush()
            time.sleep(0.02)
    except OSError:
        pass


@pytest.mark.parametrize("where", ["headers", "body", "body without a length", "silence"])
def test_a_server_that_dribbles_is_given_up_in_time(where: str) -> None:
    head = b"HTTP/1.1 200 OK\r\n"
    whole = {
        "headers": head + b"X: y\r\n" * 100,
        "body": head + b"Content-Length: 400\r\n\r\n" + b" " * 400,
        "body without a length": head + b"\r\n" + b" " * 400,
        "silence": b"",
    }[where]

    def act(handler: FakeHandler) -> Answer:
        handler.wfile.write(whole[: -len(whole) % 400])
        if whole:
            _dribble(handler, whole)
        else:
            handler.fake.over.wait(1.5)
        raise ConnectionError

    with answered(act) as server:
        begun = time.monotonic()
        with pytest.raises(EngineError, match=r"no answer \(not in 0.4 s\)"):
            Client(server.url, timeout_seconds=0.4).get("/weight_info")
        assert time.monotonic() - begun < 1.4


def test_an_answer_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_ANSWER_LIMIT_BYTES", 1 << 20)
    for headers in ("", f"Content-Length: {2 << 20}\r\n"):

        def act(handler: FakeHandler, headers: str = headers) -> Answer:
            handler.wfile.write(f"HTTP/1.1 200 OK\r\n{headers}\r\n".encode())
            for _ in range(32):
                handler.wfile.write(b" " * (1 << 16))
            raise ConnectionError

        with (
            answered(act) as server,
            pytest.raises(EngineError, match="an answer of more than 1 MiB"),
        ):
            Client(server.url).get("/weight_checker")


def test_an_answer_that_ends_early_is_none() -> None:
    document = b'{"version": "1"}'
    with (
        answered(Answer(200, document.ljust(400)), Fault(keeps_bytes=len(document))) as server,
        pytest.raises(EngineError, match="no answer"),
    ):
        Client(server.url).get("/version")


def test_control_characters_of_an_answer_are_escaped() -> None:
    hostile = json.dumps({"error": "x"}).encode() + b"\x1b[2J\r\n\xff\xe2\x80\xae"
    with answered(Answer(500, hostile)) as server:
        client = Client(server.url)
        with pytest.raises(EngineError) as raised:
            client.expect(client.get("/resume"), "resuming")
        assert str(raised.value).isprintable()
        assert "\\x1b[2J" in str(raised.value)


def test_nothing_answers() -> None:
    with (
        answered(Answer(200), Fault(cuts="before")) as server,
        pytest.raises(EngineError, match=r"no answer .*is the server up"),
    ):
        Client(server.url).get("/v1/models")
    with pytest.raises(EngineError, match=r"no answer \(Connection refused\)"):
        Client(server.url).get("/v1/models")


def test_deep_json_is_none() -> None:
    with answered(Answer(200, b"[" * 100_000)) as server:
        assert Client(server.url).get("/v1/models").document is None


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "lmdeploy": (
        {"/v1/models": {"data": [{"id": "m", "owned_by": "lmdeploy"}]}},
        "LMDeploy takes weights as",
    ),
    "tensorrt_llm": (
        {"/v1/models": {"data": [{"id": "m", "owned_by": "tensorrt_llm"}]}},
        "TensorRT-LLM takes no new",
    ),
    "llamacpp": (
        {"/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp"}]}},
        "llama.cpp reads adapters",
    ),
    "old llamacpp": ({"/props": {"chat_template": "x"}}, "llama.cpp reads adapters"),
    "ollama": (
        {"/v1/models": {"data": [{"id": "m", "owned_by": "library"}]}},
        "ollama makes models from GGUF",
    ),
    "empty ollama": (
        {"/v1/models": {"data": None}, "/api/version": {"version": "0.34"}},
        "ollama makes models",
    ),
    "tgi": ({"/info": {"model_id": "m"}}, "TGI reads adapters"),
    "another": (
        {"/v1/models": {"data": [{"id": "m", "owned_by": "me"}]}},
        "no server that can be published to",
    ),
    "a page": ({"/v1/models": "<html>"}, "no server that can be published to"),
    "a number": ({"/v1/models": {"data": 5}}, "no server that can be published to"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_engines_are_refused_by_name(name: str, files: EngineFiles) -> None:
    pages, expected = OTHERS[name]

    def look_up(handler: FakeHandler) -> Answer:
        page = pages.get(handler.path)
        return Answer(404 if page is None else 200, page)

    with answered(look_up) as server, pytest.raises(ConfigError, match=expected):
        publish(files.adapters[0], server.url, timeout_seconds=5)
    assert {request.method for request in server.requests} == {"GET"}


def test_engines_say_who_they_are(files: EngineFiles) -> None:
    with serving(files.base) as one, serving(files.base, "sglang") as two:
        first, second = (connect(Client(f"{engine.url}/")) for engine in (one, two))
        assert (first.engine, first.version, second.engine, second.version) == (
            "vLLM",
            "0.32.0",
            "SGLang",
            "0.5.9",
        )
        assert first.served().base == second.served().base == "base"
        assert first.weight_version() == second.weight_version() == "default"


def test_a_path_that_is_no_text_is_not_known() -> None:
    models = {
        "data": [
            {"id": "m", "root": 5, "owned_by": "vllm"},
            {"id": "a", "root": [1], "parent": "m"},
        ]
    }
    with answered(Answer(200, models)) as server:
        served = connect(Client(server.url)).served()
        assert (served.base, served.base_path, served.adapters) == ("m", None, {"a": None})


def test_a_server_behind_a_redirect_gets_nothing(files: EngineFiles) -> None:
    with (
        serving(files.base) as real,
        serving(files.base, traits={"redirects"}, redirect_url=real.url) as engine,
    ):
        with pytest.raises(EngineError, match="redirected to"):
            publish(files.adapters[0], engine.url)
        assert not real.requests


def test_no_proxy_gets_the_token(files: EngineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(files.base) as proxy, serving(files.base) as engine:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        connect(Client(engine.url))
        assert not proxy.requests


def test_many_requests_leave_no_thread(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        client = Client(engine.url)
        before = threading.active_count()
        for _ in range(50):
            client.get("/weight_info")
        # The test's server has a thread for each connection, which may not have ended yet.
        clients = [
            thread for thread in threading.enumerate() if "process_request" not in thread.name
        ]
        assert len(clients) < before + 10


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"name": "a@b"}, "name='a@b'"),
        ({"name": ""}, "name=''"),
        ({"version": "a b"}, "version='a b'"),
        ({"version": "x:y"}, "version='x:y'"),
        ({"version": 5}, "version=5"),
        ({"kind": "model"}, "kind='model'"),
        ({"keep": -1}, "keep=-1"),
        ({"in_flight": "drop"}, "in_flight='drop'"),
        ({"check": "none"}, "check='none'"),
        ({"visible_at": {"/nowhere": "/x"}}, "below no folder of visible_at="),
    ],
)
def test_wrong_arguments_change_nothing(
    wrong: dict[str, Any], expected: str, files: EngineFiles
) -> None:
    with serving(files.base) as engine:
        with pytest.raises(ConfigError, match=expected):
            publish(files.adapters[0], engine.url, **wrong)
        with pytest.raises(ConfigError, match="each once"):
            publish(files.adapters[0], [engine.url, f"{engine.url}/"])
        with pytest.raises(ConfigError, match="no url"):
            publish(files.adapters[0], [])
        assert not engine.changes


def test_folders_are_seen_under_other_paths(files: EngineFiles, tmp_path: Path) -> None:
    (tmp_path / "there").symlink_to(files.root)
    with serving(files.base) as engine:
        report = publish(
            files.adapters[0], engine.url, visible_at={str(files.root): str(tmp_path / "there")}
        )
        assert engine.adapters[report.name].path == str(tmp_path / "there/sft/checkpoint-100")
        weights = {
            "visible_at": {
                str(files.root): str(tmp_path / "there"),
                str(files.root.parent): "/wrong",
            }
        }
        publish(files.weights[0], engine.url, **weights)  # the longer one counts
        assert engine.weights_path == str(tmp_path / "there/run/checkpoint-1")
        engine.start()
        nested = {str(tmp_path / "else"): str(files.root.parent), str(files.root): str(files.root)}
        (found,) = publish(files.adapters[1], engine.url, visible_at=nested).servers
        # the longer one counts for the server's path, too
        assert "its base was not compared" not in found.checked
        here = str(files.adapters[1])
        with pytest.raises(EngineError) as raised:
            publish(here, engine.url, visible_at={str(files.root): "/not/mounted"})
        assert here in str(raised.value)
        assert "/not/mounted/sft/checkpoint-200" in str(raised.value)
