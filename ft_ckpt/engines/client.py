"""HTTP with an inference server: JSON out, JSON or text back, a limit on time and size, no redirects."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from ft_ckpt.errors import ConfigError, EngineError
from ft_ckpt.messages import SECRET

TOKEN_VARIABLE = "FT_CKPT_ENGINE_TOKEN"  # noqa: S105 - the name of the environment variable, not a token
_ANSWER_LIMIT_BYTES = 256 << 20  # SHA-256 of a million parameters
_QUOTED_CHARACTERS = 300  # of an answer, in messages


@dataclass(frozen=True)
class Answer:
    """The answer of a server."""

    status: int
    text: str

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def document(self) -> Any:
        """The JSON value in it; None if it is not JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None

    @property
    def quoted(self) -> str:
        """Its status and text, for messages."""
        return f"{self.status} {self.text.strip()[:_QUOTED_CHARACTERS]}".rstrip()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to another host, and turn a POST into a GET."""

    def redirect_request(self, *_arguments: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


@dataclass(frozen=True)
class Client:
    """The address of one server.

    `headers` are sent with every request. Without an "Authorization" among them the token in the environment variable
    FT_CKPT_ENGINE_TOKEN is sent as a bearer token. Neither is ever part of a message.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{self.url}: expected the address of a server, such as http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise ConfigError(f"{self.url}: a password in a URL is logged; give it in headers=, or {TOKEN_VARIABLE}")
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def get(self, path: str, **query: str) -> Answer:
        """GET `path`; as `post`."""
        return self._send("GET", path, None, query)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Answer:
        """POST the JSON object `body` to `path`; an answer of any status.

        Raises EngineError when there is no answer within `timeout_seconds`, and for a redirect.
        """
        return self._send("POST", path, json.dumps(body if body is not None else {}).encode(), query)

    def expect(self, answer: Answer, action: str) -> Answer:
        """The answer, if it is a success. Raises EngineError with the server's own words otherwise."""
        if not answer.is_success:
            raise EngineError(f"{self.url}: {action}: refused: {answer.quoted}")
        return answer

    def _send(self, method: str, path: str, data: bytes | None, query: Mapping[str, str]) -> Answer:
        address = f"{self.url}{path}" + (f"?{urlencode(query)}" if query else "")
        request = urllib.request.Request(address, data, self._all_headers(), method=method)  # noqa: S310 - checked above
        until = time.monotonic() + self.timeout_seconds
        try:
            with self._open(request) as response:
                if 300 <= response.status < 400:
                    there = self._clean(response.headers.get("Location", "nowhere"))
                    raise EngineError(f"{self.url}{path}: redirected to {there}; give the address of the server itself")
                return self._read(response, path, until)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, EngineError):
                raise
            reason = getattr(error, "reason", None) or error
            text = self._clean(f"{type(reason).__name__}: {reason}")
            raise EngineError(
                f"{self.url}{path}: no answer ({text}); is the server up, and the address right?"
            ) from None

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return _OPENER.open(request, timeout=self.timeout_seconds)
        except urllib.error.HTTPError as error:
            return error  # an answer with a status of 300 or more

    def _read(self, response: Any, path: str, until: float) -> Answer:
        """The body, piece by piece: the time limit of a socket begins again with each byte."""
        pieces, size_bytes = [], 0
        while piece := response.read1(1 << 20):
            pieces.append(piece)
            size_bytes += len(piece)
            if size_bytes > _ANSWER_LIMIT_BYTES:
                raise EngineError(f"{self.url}{path}: an answer of more than {_ANSWER_LIMIT_BYTES >> 20} MiB")
            if time.monotonic() > until:
                raise EngineError(f"{self.url}{path}: no whole answer in {self.timeout_seconds:g} s")
        return Answer(response.status, self._clean(b"".join(pieces).decode("utf-8", "replace")))

    def _all_headers(self) -> dict[str, str]:
        found = {"Content-Type": "application/json", **self.headers}
        token = os.environ.get(TOKEN_VARIABLE)
        if token and not any(name.lower() == "authorization" for name in found):
            found["Authorization"] = f"Bearer {token}"
        return found

    def _clean(self, text: str) -> str:
        """The text without the values of our own headers, which a server may repeat."""
        for name, value in self._all_headers().items():
            if name != "Content-Type":
                text = text.replace(value.rpartition(" ")[2] or value, SECRET)
        return text
