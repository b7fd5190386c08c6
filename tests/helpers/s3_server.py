"""An S3 server on loopback, as strict as real ones, with a clock and faults that a test sets.

The fixture `s3` (tests/conftest.py) is a running `S3`, whose address and keys are in the
environment. So `s3://bucket/runs/sft` is on it, in this process and in those that it starts:

    def test_something(s3):
        save(..., "s3://bucket/runs/sft")
        # names of all objects; `s3.content(name)` is the bytes of one
        assert "runs/sft/checkpoint-1/ft_ckpt.json" in s3.names()
        s3.faults.append(Fault("PUT .*ft_ckpt.json", status=503, times=2))  # see http_server.py
        s3.advance(86_400)  # its clock
        s3.ignores_conditions = True  # a store that overwrites all the same
        assert len(s3.requests_like("GET")) == 3  # in the log of requests, `s3.requests`

`running_s3()` is the same without pytest. For other processes, `python tests/helpers/s3_server.py
--port 9000` serves until it is ended. A process must not use obstore before it is forked, because
threads of obstore are not forked. Signatures are not checked, but keys have to be KEY. The client
retries by itself, for minutes if every request fails; the options `FAST`, or
`store_options={"retry_config": {"max_retries": 1}}`, limit that.
"""

import argparse
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from typing import Any, cast
from unittest.mock import patch
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from http_server import Answer, FakeHandler, FakeServer, Fault, Request, serving

BUCKET, KEY = "bucket", "AKTEST"
FAST: dict[str, Any] = {
    "retry_config": {
        "max_retries": 3,
        "backoff": {
            "init_backoff": timedelta(milliseconds=5),
            "max_backoff": timedelta(milliseconds=20),
            "base": 2,
        },
    }
}
_MIN_PART_BYTES = 5 << 20
_MAX_DELETED, _MAX_LISTED = 1000, 1000


@dataclass(frozen=True)
class _Object:
    content: bytes
    etag: str
    modified: float


class S3(FakeServer):
    """The server's buckets, and its interface for tests."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets: dict[str, dict[str, _Object]] = {BUCKET: {}}
        # bucket, key and parts of unfinished uploads
        self.uploads: dict[str, tuple[str, str, dict[int, bytes]]] = {}
        self.ignores_conditions = False
        self.hides_versions = False  # no ETag after a multipart upload, as with Ceph's gateway
        self.listed_at_once = _MAX_LISTED
        self.clock: Callable[[], float] = time.time

    def names(self, prefix: str = "", bucket: str = BUCKET) -> list[str]:
        """Return the keys of all objects with that prefix."""
        return sorted(key for key in self.buckets[bucket] if key.startswith(prefix))

    def content(self, name: str, bucket: str = BUCKET) -> bytes:
        """Return the bytes of an object."""
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
        """Return the environment variables that point a client to this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "SKTEST",
            "AWS_REGION": "us-east-1",
        }

    def refusal(self, fault: Fault) -> Answer:
        """Return the error response of a fault."""
        return _refusal(fault.status, fault.code, fault.headers)


def _refusal(status: int, code: str, headers: dict[str, str] | None = None) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>"
    return Answer(status, body.encode(), {"Content-Type": "application/xml", **(headers or {})})


def _document(name: str, *inside: str) -> Answer:
    start = '<?xml version="1.0" encoding="UTF-8"?>'
    body = f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{"".join(inside)}</{name}>'
    return Answer(200, (start + body).encode(), {"Content-Type": "application/xml"})


def _values_in(document: bytes, tag: str) -> list[str]:
    """Return the texts of all elements of an XML document whose tag ends so."""
    elements = ElementTree.fromstring(document).iter()
    return [element.text or "" for element in elements if element.tag.endswith(tag)]


def _field(name: str, value: object) -> str:
    return f"<{name}>{escape(str(value))}</{name}>"


class _Handler(FakeHandler):
    @property
    def s3(self) -> S3:
        return cast("S3", self.fake)

    def check(self, request: Request) -> None:
        if f"Credential={KEY}/" not in request.headers.get("authorization", ""):
            raise _refusal(403, "InvalidAccessKeyId")

    def answer(self, request: Request) -> Answer:
        bucket, _, key = request.path.lstrip("/").partition("/")
        with self.s3.lock:
            if bucket not in self.s3.buckets:
                raise _refusal(404, "NoSuchBucket")
            answer: Answer = self._action(request)(self, bucket, key, request, request.content)
            return answer

    def _action(self, request: Request) -> Any:
        for method, needs, action in _ROUTES:
            is_match = not needs or needs in request.query or needs in request.headers
            if method == request.method and is_match:
                return action
        raise _refusal(405, "MethodNotAllowed")

    # Request handlers

    def get(self, bucket: str, key: str, request: Request, _: bytes) -> Answer:
        stored, headers = self._object(bucket, key), request.headers
        is_same = headers.get("if-match", stored.etag) in (stored.etag, "*")
        if not is_same and not self.s3.ignores_conditions:
            raise _refusal(412, "PreconditionFailed")
        size = len(stored.content)
        facts = {"ETag": stored.etag, "Last-Modified": formatdate(stored.modified, usegmt=True)}
        facts |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if request.method == "HEAD":
            return Answer(200, b"", {**facts, "Content-Length": str(size)})
        if "range" not in headers:
            return Answer(200, stored.content, facts)
        start, stop = _range_of(headers["range"], size)
        facts["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return Answer(206, stored.content[start:stop], facts)

    def put(self, bucket: str, key: str, request: Request, body: bytes) -> Answer:
        self._check_conditions(bucket, key, request)
        return Answer(200, b"", {"ETag": self.s3.put(key, body, bucket)})

    def copy(self, bucket: str, key: str, request: Request, _body: bytes) -> Answer:
        source, _, name = unquote(request.headers["x-amz-copy-source"]).lstrip("/").partition("/")
        if source not in self.s3.buckets:
            raise _refusal(404, "NoSuchBucket")
        etag = self.s3.put(key, self._object(source, name).content, bucket)
        facts = _field("ETag", etag), _field("LastModified", self._now())
        return _document("CopyObjectResult", *facts)

    def delete(self, bucket: str, key: str, _request: Request, _: bytes) -> Answer:
        self.s3.buckets[bucket].pop(key, None)
        return Answer(204, b"")

    def delete_many(self, bucket: str, _key: str, request: Request, body: bytes) -> Answer:
        names = " ".join(request.headers)
        if "content-md5" not in names and "x-amz-checksum" not in names:
            raise _refusal(400, "InvalidRequest")  # as the real one does
        keys = _values_in(body, "Key")
        if len(keys) > _MAX_DELETED:
            raise _refusal(400, "MalformedXML")
        for key in keys:
            self.s3.buckets[bucket].pop(key, None)
        deleted = [f"<Deleted>{_field('Key', key)}</Deleted>" for key in keys]
        return _document("DeleteResult", *deleted)

    def list(self, bucket: str, _key: str, request: Request, _: bytes) -> Answer:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        limit = min(int(query.get("max-keys", _MAX_LISTED)), self.s3.listed_at_once)
        keys = self.s3.names(prefix, bucket)
        entries = {_entry(key, prefix, delimiter) for key in keys}
        remaining = sorted(entry for entry in entries if entry > after)
        page, is_truncated = remaining[:limit], len(remaining) > limit
        facts = [_field("Name", bucket), _field("Prefix", prefix), _field("KeyCount", len(page))]
        facts += [_field("MaxKeys", limit), _field("IsTruncated", str(is_truncated).lower())]
        if is_truncated:
            facts.append(_field("NextContinuationToken", page[-1]))
        rows = [self._row(bucket, entry, delimiter) for entry in page]
        return _document("ListBucketResult", *facts, *rows)

    def begin(self, bucket: str, key: str, _request: Request, _: bytes) -> Answer:
        upload = uuid.uuid4().hex
        self.s3.uploads[upload] = bucket, key, {}
        names = _field("Bucket", bucket), _field("Key", key), _field("UploadId", upload)
        return _document("InitiateMultipartUploadResult", *names)

    def put_part(self, bucket: str, key: str, request: Request, body: bytes) -> Answer:
        number = int(request.query["partNumber"])
        if not 1 <= number <= 10_000:
            raise _refusal(400, "InvalidArgument")
        self._upload(bucket, key, request)[number] = body
        return Answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def complete(self, bucket: str, key: str, request: Request, body: bytes) -> Answer:
        parts = self._upload(bucket, key, request)
        numbers = [int(text or 0) for text in _values_in(body, "Number")]
        if not numbers or numbers != sorted(numbers) or not set(numbers) <= parts.keys():
            raise _refusal(400, "InvalidPart")
        if any(len(parts[number]) < _MIN_PART_BYTES for number in numbers[:-1]):
            raise _refusal(400, "EntityTooSmall")
        self._check_conditions(bucket, key, request)
        del self.s3.uploads[request.query["uploadId"]]
        digests = b"".join([hashlib.md5(parts[number]).digest() for number in numbers])
        digest = f"{hashlib.md5(digests).hexdigest()}-{len(numbers)}"
        etag = self.s3.keep(bucket, key, b"".join([parts[number] for number in numbers]), digest)
        if self.s3.hides_versions:
            etag = ""
        return _document("CompleteMultipartUploadResult", _field("Key", key), _field("ETag", etag))

    def abort(self, bucket: str, key: str, request: Request, _: bytes) -> Answer:
        self._upload(bucket, key, request)
        del self.s3.uploads[request.query["uploadId"]]
        return Answer(204, b"")

    def list_uploads(self, bucket: str, _key: str, request: Request, _: bytes) -> Answer:
        prefix, entries = request.query.get("prefix", ""), []
        for upload, (its_bucket, key, _parts) in self.s3.uploads.items():
            if its_bucket == bucket and key.startswith(prefix):
                facts = _field("Key", key) + _field("UploadId", upload)
                entries.append(f"<Upload>{facts}</Upload>")
        return _document("ListMultipartUploadsResult", *entries, "<IsTruncated>false</IsTruncated>")

    def _upload(self, bucket: str, key: str, request: Request) -> dict[int, bytes]:
        """Return the parts of an upload. Raises the refusal of an unknown one."""
        its_bucket, name, parts = self.s3.uploads.get(request.query["uploadId"], ("", "", {}))
        if (its_bucket, name) != (bucket, key):
            raise _refusal(404, "NoSuchUpload")
        return parts

    def _object(self, bucket: str, key: str) -> _Object:
        stored = self.s3.buckets[bucket].get(key)
        if stored is None:
            raise _refusal(404, "NoSuchKey")
        return stored

    def _check_conditions(self, bucket: str, key: str, request: Request) -> None:
        stored, conditions = self.s3.buckets[bucket].get(key), request.headers
        if self.s3.ignores_conditions:
            return
        if conditions.get("if-none-match") == "*" and stored is not None:
            raise _refusal(412, "PreconditionFailed")
        if "if-match" in conditions and (stored is None or stored.etag != conditions["if-match"]):
            raise _refusal(412, "PreconditionFailed")

    def _row(self, bucket: str, entry: str, delimiter: str) -> str:
        """Return the row of a listing for a key or a common prefix."""
        if delimiter and entry.endswith(delimiter):
            return f"<CommonPrefixes>{_field('Prefix', entry)}</CommonPrefixes>"
        stored = self.s3.buckets[bucket][entry]
        modified = _field("LastModified", self._now(stored.modified))
        facts = _field("Key", entry) + modified + _field("ETag", stored.etag)
        return f"<Contents>{facts}{_field('Size', len(stored.content))}</Contents>"

    def _now(self, seconds: float | None = None) -> str:
        if seconds is None:
            seconds = self.s3.clock()
        moment = datetime.fromtimestamp(seconds, tz=timezone.utc)
        return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _range_of(header: str, size_bytes: int) -> tuple[int, int]:
    """Return start and end of the bytes of a Range header, limited to the size of the object."""
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size_bytes - int(last)), size_bytes
    if int(first) >= size_bytes:
        raise _refusal(416, "InvalidRange")
    return int(first), min(size_bytes, int(last) + 1) if last else size_bytes


def _entry(key: str, prefix: str, delimiter: str) -> str:
    """Return the entry of a key in a listing: the key, or its common prefix."""
    end = key.find(delimiter, len(prefix)) if delimiter else -1
    return key if end < 0 else key[: end + len(delimiter)]


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
    """Serve during the block; the environment points clients to the server."""
    s3 = S3()
    with serving(s3, _Handler, port, host):
        others = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with patch.dict(os.environ, {**others, **s3.environment()}, clear=True):
            yield s3


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=9000)
    with running_s3(parser.parse_args().port) as s3:
        for name, value in s3.environment().items():
            print(f"export {name}={value}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
