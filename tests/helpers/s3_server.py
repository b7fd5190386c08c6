"""An S3 server on loopback, as strict as the real ones, with a clock and faults that a test sets.

How to use it: the fixture `s3` (tests/conftest.py) is a running `S3` whose address and keys are in the environment, so
`s3://bucket/runs/sft` is on it, here and in every process that is started from here:

    def test_something(s3):
        save(..., "s3://bucket/runs/sft")
        assert "runs/sft/checkpoint-1/ft_ckpt.json" in s3.names()  # of all objects; `s3.content(name)` is one's bytes
        s3.faults.append(Fault("PUT .*ft_ckpt.json", status=503, times=2))  # the next two requests that match
        s3.faults.append(Fault(at=s3.asked + 7, cuts="after"))  # the 7th from now: it is done, the answer is lost
        s3.faults.append(Fault(lambda asked: asked.size_bytes > 1000, status=403, code="ExpiredToken", times=99))
        s3.advance(86_400)  # its clock
        s3.ignores_conditions = True  # a store that overwrites all the same
        assert len(s3.seen("GET")) == 3  # in the log of requests, `s3.log`

A request is matched as "METHOD /bucket/key?query". `running_s3()` is the same without pytest; for processes that are
not started from here, `python tests/helpers/s3_server.py --port 9000` serves until it is ended. A process that was
forked must not have used obstore before the fork (its threads are not forked; it says so): fork first, or start anew.
Signatures are not checked, but keys have to be KEY. The client retries by itself, for minutes if every request fails:
`store_options={"retry_config": {"max_retries": 1}}`, or `FAST` as options, limits that.
"""

import argparse
import hashlib
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from loopback import answering

BUCKET, KEY = "bucket", "AKTEST"
FAST: dict[str, Any] = {
    "retry_config": {
        "max_retries": 3,
        "backoff": {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20), "base": 2},
    }
}
_LEAST_PART_BYTES = 5 << 20
_MOST_DELETED, _MOST_LISTED = 1000, 1000


@dataclass(frozen=True)
class Asked:
    """A received request."""

    number: int  # the first is 1
    method: str
    path: str  # unquoted: /bucket/key
    query: dict[str, str]
    headers: dict[str, str]  # by names in lower case
    size_bytes: int  # of its body

    @property
    def line(self) -> str:
        """Method, path and query, which faults are matched with."""
        asked = "&".join(f"{name}={value}" for name, value in self.query.items())
        return f"{self.method} {self.path}?{asked}"


@dataclass
class Fault:
    """A fault of the next `times` requests that match, or of the request with the number `at`."""

    matches: str | Callable[[Asked], bool] = ""
    at: int = 0
    times: int = 1
    status: int = 0  # error response, instead of executing the request
    code: str = "InternalError"
    headers: dict[str, str] = field(default_factory=dict)  # {"Retry-After": "1"}
    acts_first: bool = False  # with a status: execute the request all the same
    cuts: str = ""  # the connection "before" the work, "during" it (half is read or answered) or "after" it
    seconds: float = 0.0  # delay before everything else
    keeps_bytes: int | None = None  # body bytes to send; Content-Length stays that of the whole body
    then: Callable[[], object] | None = None  # called when the request was executed, before the response
    lies: bool = False  # with keeps_bytes: Content-Length is that of the bytes sent

    def befalls(self, asked: Asked) -> bool:
        """True if this request is affected."""
        if self.at:
            return asked.number == self.at
        if callable(self.matches):
            return self.matches(asked)
        return re.search(self.matches, asked.line) is not None


@dataclass(frozen=True)
class _Object:
    content: bytes
    etag: str
    modified: float


class S3:
    """The server's buckets, and its interface for tests."""

    def __init__(self) -> None:
        self.url = ""
        self.buckets: dict[str, dict[str, _Object]] = {BUCKET: {}}
        self.uploads: dict[str, tuple[str, str, dict[int, bytes]]] = {}  # bucket, key and parts of unfinished uploads
        self.faults: list[Fault] = []
        self.log: list[Asked] = []
        self.ignores_conditions = False
        self.hides_versions = False  # no ETag after a multipart upload, as with Ceph's gateway
        self.listed_at_once = _MOST_LISTED
        self.clock: Callable[[], float] = time.time
        self.lock = threading.RLock()

    @property
    def asked(self) -> int:
        """Number of requests so far."""
        return len(self.log)

    def seen(self, pattern: str) -> list[str]:
        """The requests that match."""
        return [asked.line for asked in self.log if re.search(pattern, asked.line)]

    def names(self, prefix: str = "", bucket: str = BUCKET) -> list[str]:
        """The keys of all objects with that prefix."""
        return sorted(key for key in self.buckets[bucket] if key.startswith(prefix))

    def content(self, name: str, bucket: str = BUCKET) -> bytes:
        """The bytes of an object."""
        return self.buckets[bucket][name].content

    def put(self, name: str, content: bytes, bucket: str = BUCKET) -> str:
        """Write an object as another client would; return its ETag."""
        return self.keep(bucket, name, content, hashlib.md5(content).hexdigest())

    def keep(self, bucket: str, name: str, content: bytes, digest: str) -> str:
        """Store `content` under that key, with an ETag of `digest`."""
        etag = f'"{digest}"'
        self.buckets[bucket][name] = _Object(content, etag, float(int(self.clock())))
        return etag

    def advance(self, seconds: float) -> None:
        """Put the clock forward."""
        before = self.clock
        self.clock = lambda: before() + seconds

    def environment(self) -> dict[str, str]:
        """The environment variables that point a client to this server."""
        names = {"ENDPOINT_URL": self.url, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": "SKTEST"}
        return {f"AWS_{name}": value for name, value in {**names, "REGION": "us-east-1"}.items()}

    def admit(self, asked: Asked) -> Fault | None:
        """The fault that applies to a request, if any; its count goes down."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.befalls(asked):
                    fault.times -= 1
                    return fault
        return None


class _Answer(Exception):  # noqa: N818 - how a handler ends early
    def __init__(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers or {}


def _refusal(status: int, code: str, headers: dict[str, str] | None = None) -> _Answer:
    body = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>"
    return _Answer(status, body.encode(), {"Content-Type": "application/xml", **(headers or {})})


def _document(name: str, *inside: str) -> _Answer:
    body = f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{"".join(inside)}</{name}>'
    return _Answer(200, f'<?xml version="1.0" encoding="UTF-8"?>{body}'.encode(), {"Content-Type": "application/xml"})


def _field(name: str, value: object) -> str:
    return f"<{name}>{escape(str(value))}</{name}>"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    s3: S3

    def log_message(self, *_: Any) -> None:
        pass

    def do_any(self) -> None:
        url, length = urlsplit(self.path), int(self.headers.get("Content-Length") or 0)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.s3.lock:
            asked = Asked(self.s3.asked + 1, self.command, unquote(url.path), query, headers, length)
            self.s3.log.append(asked)
        fault = self.s3.admit(asked) or Fault()
        time.sleep(fault.seconds)
        if fault.cuts == "before" or (fault.cuts == "during" and length):
            self.rfile.read(length // 2 if fault.cuts == "during" else 0)
            self._cut()
            return
        body = self.rfile.read(length)
        if len(body) < length:  # the client is gone
            self._cut()
            return
        if fault.status:
            if fault.acts_first:
                self._outcome(asked, body)
            self._send(_refusal(fault.status, fault.code, fault.headers), fault)
            return
        answer = self._outcome(asked, body)
        if fault.then is not None:
            fault.then()
        self._send(answer, fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_any  # noqa: N815 - http.server's names

    def _cut(self) -> None:
        """Shut down the connection, also for processes that have inherited it."""
        self.close_connection = True
        with suppress(OSError):  # it may have ended already
            self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, answer: _Answer, fault: Fault) -> None:
        if fault.cuts == "after":
            self._cut()
            return
        body, whole = answer.body, len(answer.body)
        if fault.cuts == "during" or fault.keeps_bytes is not None:
            body = body[: whole // 2 if fault.keeps_bytes is None else fault.keeps_bytes]
        self.send_response(answer.status)
        length = len(body) if fault.lies else whole
        for name, value in {"Content-Length": str(length), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # the client is gone
                self.wfile.write(body)
            if len(body) < length or fault.cuts:
                self._cut()

    def _outcome(self, asked: Asked, body: bytes) -> _Answer:
        try:
            if f"Credential={KEY}/" not in asked.headers.get("authorization", ""):
                raise _refusal(403, "InvalidAccessKeyId")
            bucket, _, key = asked.path.lstrip("/").partition("/")
            with self.s3.lock:
                if bucket not in self.s3.buckets:
                    raise _refusal(404, "NoSuchBucket")
                answer: _Answer = self._action(asked)(self, bucket, key, asked, body)
                return answer
        except _Answer as answer:
            return answer

    def _action(self, asked: Asked) -> Any:
        for method, needs, action in _ROUTES:
            if method == asked.method and (not needs or needs in asked.query or needs in asked.headers):
                return action
        raise _refusal(405, "MethodNotAllowed")

    # Request handlers

    def get(self, bucket: str, key: str, asked: Asked, _: bytes) -> _Answer:
        found, headers = self._found(bucket, key), asked.headers
        if not self.s3.ignores_conditions and headers.get("if-match", found.etag) not in (found.etag, "*"):
            raise _refusal(412, "PreconditionFailed")
        described = {"ETag": found.etag, "Last-Modified": formatdate(found.modified, usegmt=True)}
        described |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if asked.method == "HEAD":
            return _Answer(200, b"", {**described, "Content-Length": str(len(found.content))})
        if "range" not in headers:
            return _Answer(200, found.content, described)
        size = len(found.content)
        start, stop = _range_of(headers["range"], size)
        described["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return _Answer(206, found.content[start:stop], described)

    def put(self, bucket: str, key: str, asked: Asked, body: bytes) -> _Answer:
        self._check_conditions(bucket, key, asked)
        return _Answer(200, b"", {"ETag": self.s3.put(key, body, bucket)})

    def copy(self, bucket: str, key: str, asked: Asked, _body: bytes) -> _Answer:
        source, _, name = unquote(asked.headers["x-amz-copy-source"]).lstrip("/").partition("/")
        if source not in self.s3.buckets:
            raise _refusal(404, "NoSuchBucket")
        etag = self.s3.put(key, self._found(source, name).content, bucket)
        return _document("CopyObjectResult", _field("ETag", etag), _field("LastModified", self._now()))

    def delete(self, bucket: str, key: str, _asked: Asked, _: bytes) -> _Answer:
        self.s3.buckets[bucket].pop(key, None)
        return _Answer(204)

    def delete_many(self, bucket: str, _key: str, asked: Asked, body: bytes) -> _Answer:
        if "content-md5" not in asked.headers and not any(name.startswith("x-amz-checksum") for name in asked.headers):
            raise _refusal(400, "InvalidRequest")  # as the real one does
        keys = [each.text or "" for each in ElementTree.fromstring(body).iter() if each.tag.endswith("Key")]
        if len(keys) > _MOST_DELETED:
            raise _refusal(400, "MalformedXML")
        for doomed in keys:
            self.s3.buckets[bucket].pop(doomed, None)
        return _document("DeleteResult", *(f"<Deleted>{_field('Key', doomed)}</Deleted>" for doomed in keys))

    def list(self, bucket: str, _key: str, asked: Asked, _: bytes) -> _Answer:
        prefix, delimiter = asked.query.get("prefix", ""), asked.query.get("delimiter", "")
        after = asked.query.get("continuation-token", asked.query.get("start-after", ""))
        limit = min(int(asked.query.get("max-keys", _MOST_LISTED)), self.s3.listed_at_once)
        entries = sorted({_entry(key, prefix, delimiter) for key in self.s3.buckets[bucket] if key.startswith(prefix)})
        left = [entry for entry in entries if entry > after]
        shown = left[:limit]
        more = [_field("NextContinuationToken", shown[-1])] if len(left) > limit else []
        facts = [_field("Name", bucket), _field("Prefix", prefix), _field("KeyCount", len(shown))]
        facts += [_field("MaxKeys", limit), _field("IsTruncated", str(bool(more)).lower()), *more]
        return _document("ListBucketResult", *facts, *(self._listed(bucket, entry, delimiter) for entry in shown))

    def begin(self, bucket: str, key: str, _asked: Asked, _: bytes) -> _Answer:
        upload = uuid.uuid4().hex
        self.s3.uploads[upload] = bucket, key, {}
        names = _field("Bucket", bucket), _field("Key", key), _field("UploadId", upload)
        return _document("InitiateMultipartUploadResult", *names)

    def put_part(self, bucket: str, key: str, asked: Asked, body: bytes) -> _Answer:
        number = int(asked.query["partNumber"])
        if not 1 <= number <= 10_000:
            raise _refusal(400, "InvalidArgument")
        self._upload(bucket, key, asked)[number] = body
        return _Answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def complete(self, bucket: str, key: str, asked: Asked, body: bytes) -> _Answer:
        parts = self._upload(bucket, key, asked)
        numbers = [int(each.text or 0) for each in ElementTree.fromstring(body).iter() if each.tag.endswith("Number")]
        if not numbers or numbers != sorted(numbers) or not set(numbers) <= parts.keys():
            raise _refusal(400, "InvalidPart")
        if any(len(parts[number]) < _LEAST_PART_BYTES for number in numbers[:-1]):
            raise _refusal(400, "EntityTooSmall")
        self._check_conditions(bucket, key, asked)
        del self.s3.uploads[asked.query["uploadId"]]
        digests = b"".join([hashlib.md5(parts[number]).digest() for number in numbers])
        digest = f"{hashlib.md5(digests).hexdigest()}-{len(numbers)}"
        etag = self.s3.keep(bucket, key, b"".join([parts[number] for number in numbers]), digest)
        told = "" if self.s3.hides_versions else etag
        return _document("CompleteMultipartUploadResult", _field("Key", key), _field("ETag", told))

    def abort(self, bucket: str, key: str, asked: Asked, _: bytes) -> _Answer:
        self._upload(bucket, key, asked)
        del self.s3.uploads[asked.query["uploadId"]]
        return _Answer(204)

    def list_uploads(self, bucket: str, _key: str, asked: Asked, _: bytes) -> _Answer:
        found = [(name, key) for name, (place, key, _) in self.s3.uploads.items() if place == bucket]
        found = [each for each in found if each[1].startswith(asked.query.get("prefix", ""))]
        entries = [f"<Upload>{_field('Key', key)}{_field('UploadId', name)}</Upload>" for name, key in found]
        return _document("ListMultipartUploadsResult", *entries, "<IsTruncated>false</IsTruncated>")

    def _upload(self, bucket: str, key: str, asked: Asked) -> dict[int, bytes]:
        place, name, parts = self.s3.uploads.get(asked.query["uploadId"], ("", "", {}))
        if (place, name) != (bucket, key):
            raise _refusal(404, "NoSuchUpload")
        return parts

    def _found(self, bucket: str, key: str) -> _Object:
        found = self.s3.buckets[bucket].get(key)
        if found is None:
            raise _refusal(404, "NoSuchKey")
        return found

    def _check_conditions(self, bucket: str, key: str, asked: Asked) -> None:
        found, conditions = self.s3.buckets[bucket].get(key), asked.headers
        if self.s3.ignores_conditions:
            return
        if conditions.get("if-none-match") == "*" and found is not None:
            raise _refusal(412, "PreconditionFailed")
        if "if-match" in conditions and (found is None or found.etag != conditions["if-match"]):
            raise _refusal(412, "PreconditionFailed")

    def _listed(self, bucket: str, entry: str, delimiter: str) -> str:
        if delimiter and entry.endswith(delimiter):
            return f"<CommonPrefixes>{_field('Prefix', entry)}</CommonPrefixes>"
        found = self.s3.buckets[bucket][entry]
        facts = _field("Key", entry) + _field("LastModified", self._now(found.modified)) + _field("ETag", found.etag)
        return f"<Contents>{facts}{_field('Size', len(found.content))}</Contents>"

    def _now(self, moment: float | None = None) -> str:
        given = datetime.fromtimestamp(self.s3.clock() if moment is None else moment, tz=timezone.utc)
        return given.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _range_of(header: str, size_bytes: int) -> tuple[int, int]:
    """Start and end of the bytes of a Range header, limited to the size of the object."""
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size_bytes - int(last)), size_bytes
    if int(first) >= size_bytes:
        raise _refusal(416, "InvalidRange")
    return int(first), min(size_bytes, int(last) + 1) if last else size_bytes


def _entry(key: str, prefix: str, delimiter: str) -> str:
    """Entry of a key in a listing: the key, or its common prefix."""
    cut = key.find(delimiter, len(prefix)) if delimiter else -1
    return key if cut < 0 else key[: cut + len(delimiter)]


_ROUTES: list[tuple[str, str, Any]] = [  # method, query parameter or header, handler
    ("HEAD", "", _Handler.get),
    ("GET", "uploads", _Handler.list_uploads),
    ("GET", "list-type", _Handler.list),
    ("GET", "", _Handler.get),
    ("PUT", "partNumber", _Handler.put_part),
    ("PUT", "x-amz-copy-source", _Handler.copy),
    ("PUT", "", _Handler.put),
    ("POST", "delete", _Handler.delete_many),
    ("POST", "uploads", _Handler.begin),
    ("POST", "uploadId", _Handler.complete),
    ("DELETE", "uploadId", _Handler.abort),
    ("DELETE", "", _Handler.delete),
]


@contextmanager
def running_s3(port: int = 0, host: str = "127.0.0.1") -> Iterator[S3]:
    """A server that answers while the block runs; the environment points clients to it."""
    s3 = S3()
    with answering(type("Handler", (_Handler,), {"s3": s3}), port, host) as s3.url:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with patch.dict(os.environ, {**kept, **s3.environment()}, clear=True):
            yield s3


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=9000)
    with running_s3(parser.parse_args().port) as s3:
        print(*(f"export {name}={value}" for name, value in s3.environment().items()), sep="\n", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
