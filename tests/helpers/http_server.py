"""The base of all HTTP fakes on loopback: a log of their requests, and faults of chosen ones.

    # the next two requests that match
    server.faults.append(Fault("PUT .*ft_ckpt.json", 503, times=2))
    # the 7th from now: it is done, the answer is lost
    server.faults.append(Fault(at=server.request_count + 7, cuts="after"))
    # every large one
    is_large = lambda request: request.size_bytes > 1000
    server.faults.append(Fault(is_large, 403, code="ExpiredToken", times=99))
    assert len(server.requests_like("GET")) == 3

A request is matched as "METHOD /path?query". A fake is a `FakeServer` with its state, and a
`FakeHandler` that answers.
"""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from loopback import answering


@dataclass
class Request:
    """A received request."""

    method: str
    path: str  # unquoted
    query: dict[str, str]
    headers: dict[str, str]  # by names in lower case
    size_bytes: int  # of its body, as announced
    content: bytes = b""  # its body, once it was read
    number: int = 0  # the first is 1

    @property
    def line(self) -> str:
        """Method, path and query, which faults are matched with."""
        query = "&".join(f"{name}={value}" for name, value in self.query.items())
        return f"{self.method} {self.path}{'?' if query else ''}{query}"

    @property
    def body(self) -> Any:
        """Its body as JSON; {} for none."""
        return json.loads(self.content or b"{}")


@dataclass
class Fault:
    """A fault of the next `times` requests that match, or of those from the number `at` on.

    With neither a status nor a cut, the request is executed, and `seconds`, `then` and
    `keeps_bytes` apply to it.
    """

    matches: str | Callable[[Request], object] = ""
    status: int = 0  # an error response, instead of executing the request
    at: int = 0
    skips: int = 0  # matching requests that succeed first
    times: int = 1
    code: str = "InternalError"  # of the error response, where the protocol has one
    message: str = "a fault"  # likewise
    # of the error response: {"Retry-After": "1"}
    headers: dict[str, str] = field(default_factory=dict)
    acts_first: bool = False  # with a status: execute the request all the same
    # the connection "before" the work, "during" it (half is read or answered) or "after" it
    cuts: str = ""
    seconds: float = 0.0  # delay before everything else
    # body bytes to send; Content-Length stays that of the whole body
    keeps_bytes: int | None = None
    shortens_length: bool = False  # with keeps_bytes: Content-Length is that of the bytes sent
    then: Callable[[], object] | None = None  # called just before the response or the cut
    matched: int = 0  # requests that matched so far

    def applies_to(self, request: Request) -> bool:
        """Check whether this request is affected, and count it if it matches."""
        if callable(self.matches):
            is_match = bool(self.matches(request))
        else:
            is_match = re.search(self.matches, request.line) is not None
        if not is_match or request.number < self.at:
            return False
        self.matched += 1
        return self.skips < self.matched <= self.skips + self.times


class Answer(Exception):  # noqa: N818 - how a handler ends early
    """A response. A body that is neither bytes nor text is sent as JSON."""

    def __init__(
        self, status: int, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status)
        self.status, self.headers = status, dict(headers or {})
        if isinstance(body, bytes):
            self.body = body
            return
        is_text = isinstance(body, str)
        text = body if is_text else json.dumps({} if body is None else body)
        self.body = text.encode()
        self.headers.setdefault("Content-Type", "text/plain" if is_text else "application/json")


class FakeServer:
    """A server's state, and its interface for tests."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.over = threading.Event()  # set at the end, for requests that wait

    @property
    def request_count(self) -> int:
        """Number of requests so far."""
        return len(self.requests)

    def requests_like(self, pattern: str) -> list[str]:
        """Return the lines of the requests that match."""
        return [request.line for request in self.requests if re.search(pattern, request.line)]

    def arrive(self, request: Request) -> None:
        """Do what comes before a request is received; may block."""

    def admit(self, request: Request) -> Fault:
        """Log a request; return the fault that applies to it, an empty one if none does."""
        with self.lock:
            self.requests.append(request)
            request.number = self.request_count
            return next((fault for fault in self.faults if fault.applies_to(request)), Fault())

    def refusal(self, fault: Fault) -> Answer:
        """Return the error response of a fault, as the protocol has it."""
        return Answer(fault.status, {"error": fault.message}, fault.headers)


class FakeHandler(BaseHTTPRequestHandler):
    """Answers the requests to a fake; a subclass has `answer`, and `check` for keys and tokens."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each response waits 40 ms for the client's ACK
    fake: Any

    def answer(self, request: Request) -> Answer:
        """Execute a request; may raise its Answer as well."""
        raise NotImplementedError

    def check(self, request: Request) -> None:
        """Raise the Answer to a request without the right keys."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_any(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers.items()}
        length = int(self.headers.get("Content-Length") or 0)
        request = Request(self.command, unquote(url.path), query, headers, length)
        self.fake.arrive(request)
        fault = self.fake.admit(request)
        self.fake.over.wait(fault.seconds)
        is_half = fault.cuts == "during" and length > 0
        request.content = self.rfile.read(length // 2 if is_half else length) or self._chunks()
        if len(request.content) < length:  # a fault, or the client is gone
            self._cut()
            return
        answer = self._faulty(request, fault)
        if fault.then is not None:
            fault.then()
        if fault.cuts in ("before", "after"):
            self._cut()
        else:
            self._send(answer, fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_any  # noqa: N815 - http.server's names

    def _faulty(self, request: Request, fault: Fault) -> Answer:
        """Return the answer to a request with that fault, which may keep it from being executed."""
        is_skipped = fault.cuts == "before" or (fault.status and not fault.acts_first)
        answer = Answer(500) if is_skipped else self._outcome(request)
        return self.fake.refusal(fault) if fault.status else answer

    def _outcome(self, request: Request) -> Answer:
        try:
            self.check(request)
            return self.answer(request)
        except Answer as answer:
            return answer

    def _chunks(self) -> bytes:
        """Read a chunked body."""
        content = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return content

    def _cut(self) -> None:
        """Shut down the connection, also for processes that have inherited it."""
        self.close_connection = True
        with suppress(OSError):  # it may have ended already
            self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, answer: Answer, fault: Fault) -> None:
        body, whole = answer.body, len(answer.body)
        if fault.cuts == "during" or fault.keeps_bytes is not None:
            body = body[: whole // 2 if fault.keeps_bytes is None else fault.keeps_bytes]
        length = len(body) if fault.shortens_length else whole
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(length), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(ConnectionError):  # the client is gone
            self.wfile.write(body)
        if len(body) < length or fault.cuts:
            self._cut()


@contextmanager
def serving(
    fake: FakeServer, handler: type[FakeHandler], port: int = 0, host: str = "127.0.0.1"
) -> Iterator[None]:
    """Let `handler` answer for that fake during the block."""
    with answering(type("Handler", (handler,), {"fake": fake}), port, host) as fake.url:
        try:
            yield
        finally:
            fake.over.set()
