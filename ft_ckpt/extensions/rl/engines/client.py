"""Sends HTTP requests to an inference server.

The client sends JSON and reads JSON or text. It limits the time and the size of a response, and
follows no redirects or proxies.
"""

import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlencode, urlsplit

from ft_ckpt.errors import ConfigError, EngineError, reason_of
from ft_ckpt.messages import SECRET

TOKEN_VARIABLE = "FT_CKPT_ENGINE_TOKEN"  # noqa: S105 - the name of the environment variable, not a token
_ANSWER_LIMIT_BYTES = 256 << 20  # enough for the SHA-256 of a million parameters
_QUOTED_CHARACTERS = 300  # messages quote the beginning of a response
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110
_MAX_PUBLIC_CHARS = 3  # a word of a header is a secret only if it is longer


@dataclass(frozen=True)
class Answer:
    """The response of a server."""

    status: int
    text: str = field(repr=False)
    quoted: str
    """Status and beginning of the text, without secrets, for messages."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_absent(self) -> bool:
        """Whether the server has no such endpoint."""
        return self.status in (404, 405, 501)

    @cached_property
    def document(self) -> Any:
        """The parsed JSON text, or None if it is not JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


@dataclass(frozen=True)
class Client:
    """An HTTP client of one server.

    `headers` are sent with every request. Unless they include "Authorization", the token in the
    environment variable FT_CKPT_ENGINE_TOKEN is sent as bearer token. Messages contain neither.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        expected = f"{self.url}: expected the address of a server, such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(self.url)
            is_address = (
                parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            )
        except ValueError:  # an invalid port
            raise ConfigError(expected) from None

        if not is_address or parts.query or parts.fragment or not re.fullmatch(r"[!-~]+", self.url):
            raise ConfigError(expected)
        if parts.username or parts.password:
            raise ConfigError(
                f"{self.url}: a password in a URL is logged; give it in headers=, or "
                f"{TOKEN_VARIABLE}"
            )

        for name, value in self._all_headers().items():
            if not _HEADER_NAME.fullmatch(str(name)):
                raise ConfigError(f"header {name!r}: expected a name of letters, digits and dashes")
            if not isinstance(value, str) or not value.isascii() or not value.isprintable():
                raise ConfigError(
                    f"header {name}: expected printable ASCII; is there a line break in the token?"
                )

        object.__setattr__(self, "url", self.url.rstrip("/"))

    def get(self, path: str, **query: str) -> Answer:
        """Send GET `path`. Returns and raises what `post` does."""
        return self._send("GET", path, None, query)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Answer:
        """Send POST `path` with the JSON object `body`.

        Returns the response, also one with an error status. Raises EngineError if no complete
        response arrives within `timeout_seconds`, and for a redirect, which would send the token to
        another host and turn a POST into a GET.
        """
        data = json.dumps({} if body is None else body).encode()
        return self._send("POST", path, data, query)

    def expect(self, answer: Answer, action: str) -> Answer:
        """Return the response if it is a success.

        Raises EngineError with the server's text otherwise.
        """
        if not answer.is_success:
            raise EngineError(f"{self.url}: {action}: refused: {answer.quoted}")
        return answer

    def _send(self, method: str, path: str, data: bytes | None, query: Mapping[str, str]) -> Answer:
        parts = urlsplit(self.url)
        target = f"{parts.path}{path}"
        if query:
            target += f"?{urlencode(query)}"
        deadline = time.monotonic() + self.timeout_seconds
        try:
            with closing(self._connection()) as connection:
                connection.connect()

                # Each byte restarts the time limit of a socket, so a timer ends the connection at
                # the deadline.
                seconds_left = max(0.0, deadline - time.monotonic())
                timer = threading.Timer(seconds_left, _cut, [connection.sock])
                timer.daemon = True
                timer.start()
                try:
                    connection.request(method, target, data, self._all_headers())
                    answer = self._read(connection.getresponse(), path)
                finally:
                    timer.cancel()

                # After the deadline, the response may be cut and still look complete.
                if time.monotonic() >= deadline:
                    raise TimeoutError
                return answer
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, EngineError):
                raise
            if time.monotonic() >= deadline:
                reason = f"not in {self.timeout_seconds:g} s"
            elif isinstance(error, OSError):
                reason = reason_of(error)
            else:
                reason = f"not valid HTTP: {error}"
            text = self._clean(
                f"{self.url}{path}: no answer ({reason}); is the server up, and the address right?"
            )
            raise EngineError(text) from None

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host = str(parts.hostname)
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, parts.port, timeout=self.timeout_seconds)
        return http.client.HTTPConnection(host, parts.port, timeout=self.timeout_seconds)

    def _read(self, response: http.client.HTTPResponse, path: str) -> Answer:
        if 300 <= response.status < 400:
            location = self._clean(response.headers.get("Location", "nowhere"))
            raise EngineError(
                f"{self.url}{path}: redirected to {location}; give the address of the server itself"
            )

        content = response.read(_ANSWER_LIMIT_BYTES + 1)
        if len(content) > _ANSWER_LIMIT_BYTES:
            raise EngineError(
                f"{self.url}{path}: an answer of more than {_ANSWER_LIMIT_BYTES >> 20} MiB"
            )

        if response.length:  # the body ended early
            raise http.client.IncompleteRead(b"", response.length)
        text = content.decode("utf-8", "replace")
        beginning = self._clean(text).strip()[:_QUOTED_CHARACTERS]
        return Answer(response.status, text, f"{response.status} {beginning}")

    def _all_headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", **self.headers}
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if token and not any(name.lower() == "authorization" for name in headers):
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _clean(self, text: str) -> str:
        """Remove the secrets in the sent headers from a text, because a server may echo them."""
        for name, value in self._all_headers().items():
            if name != "Content-Type":
                for secret in _secrets_in(value):
                    text = text.replace(secret, SECRET)
        return text


def _secrets_in(value: str) -> list[str]:
    """Return the secrets in the value of a header, the longest first.

    They are the value without a scheme such as "Bearer", and its words, such as those of a cookie.
    """
    value = re.sub(r"^[A-Za-z]+ +", "", value.strip())
    # "=" divides a name from a value, but "=" at the end is padding of base64.
    words = re.split(r"[\s;,]+|(?<=\w)=(?=[^=])", value)
    secrets = {word for word in words if len(word) > _MAX_PUBLIC_CHARS}
    if value:
        secrets.add(value)
    return sorted(secrets, key=len, reverse=True)


def _cut(connection: socket.socket) -> None:
    """Shut down a connection from which another thread reads."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
