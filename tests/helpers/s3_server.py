"""An S3 server on loopback, as strict as the real ones, with a clock and faults that a test sets.

How to use it: the fixture `s3` (tests/conftest.py) is a running `S3` whose address and keys are in
the environment, so `s3://bucket/runs/sft` is on it, here and in every process that is started from
here:

    def test_something(s3):
        save(..., "s3://bucket/runs/sft")
        # names of all objects; `s3.content(name)` is the bytes of one
        assert "runs/sft/checkpoint-1/ft_ckpt.json" in s3.names()
        s3.faults.append(Fault("PUT .*ft_ckpt.json", status=503, times=2))  # see http_server.py
        s3.advance(86_400)  # its clock
        s3.ignores_conditions = True  # a store that overwrites all the same
        assert len(s3.seen("GET")) == 3  # in the log of requests, `s3.requests`

`running_s3()` is the same without pytest; for processes that are not started from here, `python
tests/helpers/s3_server.py --port 9000` serves until it is ended. A process that was forked must not
have used obstore before the fork (its threads are not forked; it says so): fork first, or start
anew. Signatures are not checked, but keys have to be KEY. The client retries by itself, for minutes
if every request fails: `store_options={"retry_config": {"max_retries": 1}}`, or `FAST` as options,
limits that.
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
_LEAST_PART_BYTES = 5 << 20
_MOST_DELETED, _MOST_LISTED = 1000, 1000


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
        self.listed_at_once = _MOST_LISTED
        self.clock: Callable[[], float] = time.time

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
        names = {
            "ENDPOINT_URL": self.url,
            "ALLOW_HTTP": "true",
            "ACCESS_KEY_ID": KEY,
            "SECRET_ACCESS_KEY": "SKTEST",
        }
        return {f"AWS_{name}": value for name, value in {**names, "REGION": "us-east-1"}.items()}

    def refusal(self, fault: Fault) -> Answer:
        """The error response of a fault."""
        return _refusal(fault.status, fault.code, fault.headers)


def _refusal(status: int, code: str, headers: dict[str, str] | None = None) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>"
    return Answer(status, body.encode(), {"Content-Type": "application/xml", **(headers or {})})


def _document(name: str, *inside: str) -> Answer:
    body = f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{"".join(inside)}</{name}>'
    return Answer(
        200,
        f'<?xml version="1.0" encoding="UTF-8"?>{body}'.encode(),
        {"Content-Type": "application/xml"},
    )


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

    def _action(self, asked: Request) -> Any:
        for method, needs, action in _ROUTES:
            if method == asked.method and (
                not needs or needs in asked.query or needs in asked.headers
            ):
                return action
        raise _refusal(405, "MethodNotAllowed")

    # Request handlers

    def get(self, bucket: str, key: str, asked: Request, _: bytes) -> Answer:
        found, headers = self._found(bucket, key), asked.headers
        if not self.s3.ignores_conditions and headers.get("if-match", found.etag) not in (
            found.etag,
            "*",
        ):
            raise _refusal(412, "PreconditionFailed")
        described = {"ETag": found.etag, "Last-Modified": formatdate(found.modified, usegmt=True)}
        described |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if asked.method == "HEAD":
            return Answer(200, b"", {**described, "Content-Length": str(len(found.content))})
        if "range" not in headers:
            return Answer(200, found.content, described)
        size = len(found.content)
        start, stop = _range_of(headers["range"], size)
        described["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return Answer(206, found.content[start:stop], described)

    def put(self, bucket: str, key: str, asked: Request, body: bytes) -> Answer:
        self._check_conditions(bucket, key, asked)
        return Answer(200, b"", {"ETag": self.s3.put(key, body, bucket)})

    def copy(self, bucket: str, key: str, asked: Request, _body: bytes) -> Answer:
        source, _, name = unquote(asked.headers["x-amz-copy-source"]).lstrip("/").partition("/")
        if source not in self.s3.buckets:
            raise _refusal(404, "NoSuchBucket")
        etag = self.s3.put(key, self._found(source, name).content, bucket)
        return _document(
            "CopyObjectResult", _field("ETag", etag), _field("LastModified", self._now())
        )

    def delete(self, bucket: str, key: str, _asked: Request, _: bytes) -> Answer:
        self.s3.buckets[bucket].pop(key, None)
        return Answer(204, b"")

    def delete_many(self, bucket: str, _key: str, asked: Request, body: bytes) -> Answer:
        if "content-md5" not in asked.headers and not any(
            name.startswith("x-amz-checksum") for name in asked.headers
        ):
            raise _refusal(400, "InvalidRequest")  # as the real one does
        keys = [
            each.text or ""
            for each in ElementTree.fromstring(body).iter()
            if each.tag.endswith("Key")
        ]
        if len(keys) > _MOST_DELETED:
            raise _refusal(400, "MalformedXML")
        for doomed in keys:
            self.s3.buckets[bucket].pop(doomed, None)
        return _document(
            "DeleteResult", *(f"<Deleted>{_field('Key', doomed)}</Deleted>" for doomed in keys)
        )

    def list(self, bucket: str, _key: str, asked: Request, _: bytes) -> Answer:
        prefix, delimiter = asked.query.get("prefix", ""), asked.query.get("delimiter", "")
        after = asked.query.get("continuation-token", asked.query.get("start-after", ""))
        limit = min(int(asked.query.get("max-keys", _MOST_LISTED)), self.s3.listed_at_once)
        entries = sorted(
            {
                _entry(key, prefix, delimiter)
                for key in self.s3.buckets[bucket]
                if key.startswith(prefix)
            }
        )
        left = [entry for entry in entries if entry > after]
        shown = left[:limit]
        more = [_field("NextContinuationToken", shown[-1])] if len(left) > limit else []
        facts = [_field("Name", bucket), _field("Prefix", prefix), _field("KeyCount", len(shown))]
        facts += [_field("MaxKeys", limit), _field("IsTruncated", str(bool(more)).lower()), *more]
        return _document(
            "ListBucketResult", *facts, *(self._listed(bucket, entry, delimiter) for entry in shown)
        )

    def begin(self, bucket: str, key: str, _asked: Request, _: bytes) -> Answer:
        upload = uuid.uuid4().hex
        self.s3.uploads[upload] = bucket, key, {}
        names = _field("Bucket", bucket), _field("Key", key), _field("UploadId", upload)
        return _document("InitiateMultipartUploadResult", *names)

    def put_part(self, bucket: str, key: str, asked: Request, body: bytes) -> Answer:
        number = int(asked.query["partNumber"])
        if not 1 <= number <= 10_000:
            raise _refusal(400, "InvalidArgument")
        self._upload(bucket, key, asked)[number] = body
        return Answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def complete(self, bucket: str, key: str, asked: Request, body: bytes) -> Answer:
        parts = self._upload(bucket, key, asked)
        numbers = [
            int(each.text or 0)
            for each in ElementTree.fromstring(body).iter()
            if each.tag.endswith("Number")
        ]
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

    def abort(self, bucket: str, key: str, asked: Request, _: bytes) -> Answer:
        self._upload(bucket, key, asked)
        del self.s3.uploads[asked.query["uploadId"]]
        return Answer(204, b"")

    def list_uploads(self, bucket: str, _key: str, asked: Request, _: bytes) -> Answer:
        found = [
            (name, key) for name, (place, key, _) in self.s3.uploads.items() if place == bucket
        ]
        found = [each for each in found if each[1].startswith(asked.query.get("prefix", ""))]
        entries = [
            f"<Upload>{_field('Key', key)}{_field('UploadId', name)}</Upload>"
            for name, key in found
        ]
        return _document("ListMultipartUploadsResult", *entries, "<IsTruncated>false</IsTruncated>")

    def _upload(self, bucket: str, key: str, asked: Request) -> dict[int, bytes]:
        place, name, parts = self.s3.uploads.get(asked.query["uploadId"], ("", "", {}))
        if (place, name) != (bucket, key):
            raise _refusal(404, "NoSuchUpload")
        return parts

    def _found(self, bucket: str, key: str) -> _Object:
        found = self.s3.buckets[bucket].get(key)
        if found is None:
            raise _refusal(404, "NoSuchKey")
        return found

    def _check_conditions(self, bucket: str, key: str, asked: Request) -> None:
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
        facts = (
            _field("Key", entry)
            + _field("LastModified", self._now(found.modified))
            + _field("ETag", found.etag)
        )
        return f"<Contents>{facts}{_field('Size', len(found.content))}</Contents>"

    def _now(self, moment: float | None = None) -> str:
        given = datetime.fromtimestamp(
            self.s3.clock() if moment is None else moment, tz=timezone.utc
        )
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
    with serving(s3, _Handler, port, host):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with patch.dict(os.environ, {**kept, **s3.environment()}, clear=True):
            yield s3


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=9000)
    with running_s3(parser.parse_args().port) as s3:
        print(
            *(f"export {name}={value}" for name, value in s3.environment().items()),
            sep="\n",
            flush=True,
        )
        threading.Event().wait()


if __name__ == "__main__":
    main()
