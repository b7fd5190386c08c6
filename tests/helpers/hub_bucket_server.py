"""A Hub on loopback with storage buckets: the endpoints that huggingface_hub uses for them.

hf_xet chunks and hashes the content as for the real Hub, but the responses point it to a content
store on this disk (local://). The content of a batch is read back from there and compared with its
hash.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch
from urllib.parse import parse_qs, quote, urlsplit

import hf_xet
from http_server import Answer, serving
from hub_server import ROUTES, TOKEN, Hub, HubHandler, absent, using_hub
from huggingface_hub.utils import _xet

from ft_ckpt import copy

EMPTY = "0" * 64  # the hash of no bytes


@dataclass
class StoredFile:
    """A file of a bucket."""

    hash: str
    time: float = field(default_factory=time.time)


@dataclass
class Bucket:
    """One bucket: its files by path."""

    private: bool
    files: dict[str, StoredFile] = field(default_factory=dict)


class BucketHub(Hub):
    """The server's state, and its interface for tests."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.buckets: dict[str, Bucket] = {}
        self.contents: dict[str, bytes] = {EMPTY: b""}
        self.places: list[Path] = []
        self.operations: list[tuple[str, str]] = []  # of all batches, as (type, path)
        self.page = 5  # entries of a listing per page

    def bytes_of(self, bucket: str) -> dict[str, bytes]:
        """Return the content of each file of a bucket, by path."""
        files = self.buckets[bucket].files
        return {path: self.contents[files[path].hash] for path in sorted(files)}

    def put_file(self, bucket: str, path: str, content: bytes) -> None:
        """Upload a file as another client would."""
        place = self.new_place()
        with hf_xet.XetSession().new_upload_commit(**_client_of(place)) as commit:
            upload = commit.start_upload_bytes(content, sha256=hf_xet.SKIP_SHA256)
        name = upload.result().xet_info.hash
        self.contents[name] = content
        self.buckets[bucket].files[path] = StoredFile(name)

    def new_place(self) -> Path:
        """Make a folder that one client uploads to: hf_xet locks it against other processes."""
        self.places.append(Path(tempfile.mkdtemp(dir=self.folder)))
        return self.places[-1]

    def place_of_all(self) -> Path:
        """Make a folder with all contents, for a client that downloads."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        with hf_xet.XetSession().new_upload_commit(**_client_of(place)) as commit:
            for content in self.contents.values():
                commit.start_upload_bytes(content, sha256=hf_xet.SKIP_SHA256)
        copied = Path(tempfile.mkdtemp(dir=self.folder))
        return shutil.copytree(place, copied, dirs_exist_ok=True)

    def content(self, name: str) -> bytes | None:
        """Return the uploaded bytes with that hash; None if they were not uploaded."""
        for place in reversed(self.places):
            if name in self.contents:
                break
            with tempfile.TemporaryDirectory() as copied:
                shutil.copytree(place, copied, dirs_exist_ok=True)
                group = hf_xet.XetSession().new_download_stream_group(**_client_of(copied))
                content = b"".join(map(bytes, group.download_stream(hf_xet.XetFileInfo(name))))
                file = Path(copied, "file")
                file.write_bytes(content)
                if hf_xet.hash_files([str(file)])[0].hash == name:
                    self.contents[name] = content
        return self.contents.get(name)


def _client_of(place: str | Path) -> dict[str, Any]:
    return {
        "endpoint": f"local://{place}",
        "token": "xet",
        "token_expiry_unix_secs": int(time.time()) + 3600,
    }


class _BucketHandler(HubHandler):
    @property
    def hub(self) -> BucketHub:
        """The server's state."""
        return cast("BucketHub", self.fake)

    def create_bucket(self, name: str, body: bytes) -> Answer:
        url = {"url": f"{self.hub.url}/buckets/{name}"}
        if name in self.hub.buckets:
            return Answer(409, url)
        if name.startswith("others/"):
            message = "You don't have the rights to create a bucket under this namespace"
            return Answer(403, {"error": message})
        settings = json.loads(body)
        is_private = settings.get("visibility") == "private" or bool(settings.get("private"))
        self.hub.buckets[name] = Bucket(is_private)
        return Answer(200, url)

    def bucket_info(self, name: str, _: bytes) -> Answer:
        bucket = self._bucket(name)
        facts = {"id": name, "private": bucket.private, "createdAt": _stamp(0), "size": 0}
        return Answer(200, {**facts, "totalFiles": len(bucket.files)})

    def bucket_tree(self, name: str, prefix: str, _: bytes) -> Answer:
        bucket, url = self._bucket(name), urlsplit(self.path)
        query = parse_qs(url.query)
        recursive = query.get("recursive", ["false"])[0]
        entries: dict[str, dict[str, Any]] = {}
        for path in sorted(bucket.files):
            if path.startswith(prefix):
                entry = self._file(path, bucket.files[path])
                if recursive.lower() != "true":
                    entry = _top(entry, prefix)
                entries[entry["path"]] = entry
        listing = list(entries.values())
        start = int(query.get("cursor", ["0"])[0])
        stop = start + self.hub.page
        headers = {}
        if listing[stop:]:
            next_page = f"{self.hub.url}{url.path}?recursive={recursive}&cursor={stop}"
            headers["Link"] = f'<{next_page}>; rel="next"'
        return Answer(200, listing[start:stop], headers)

    def bucket_paths(self, name: str, body: bytes) -> Answer:
        files = self._bucket(name).files
        paths = [path for path in json.loads(body)["paths"] if path in files]
        return Answer(200, [self._file(path, files[path]) for path in paths])

    def bucket_batch(self, name: str, body: bytes) -> Answer:
        """Apply each operation independently; the response names those that failed."""
        bucket = self._bucket(name)
        processed, failed = 0, []
        for line in body.splitlines():
            operation = json.loads(line)
            error = self._operation(bucket, operation)
            if error:
                failed.append({"path": operation["path"], "error": error})
            else:
                processed += 1
        result = {"success": not failed, "processed": processed, "failed": failed}
        return Answer(200 if processed else 422, result)

    def _operation(self, bucket: Bucket, line: dict[str, Any]) -> str:
        """Apply one operation; return why it failed, or ""."""
        path = line["path"]
        self.hub.operations.append((line["type"], path))
        if line["type"] == "deleteFile":
            return "" if bucket.files.pop(path, None) is not None else "no such file"
        name = line["xetHash"]
        if line["type"] == "copyFile":
            source = None
            if line["sourceRepoType"] == "bucket":
                source = self.hub.buckets.get(line["sourceRepoId"])
            if source is None or name not in {file.hash for file in source.files.values()}:
                return "the source has no such content"
        elif self.hub.content(name) is None:
            return "its content was not uploaded"
        bucket.files[path] = StoredFile(name)
        return ""

    def xet_token(self, name: str, kind: str, _: bytes) -> Answer:
        self._bucket(name)
        if kind == "write" and self.headers.get("Authorization") is None:
            return Answer(401, {"error": "Invalid username or password."})
        place = self.hub.new_place() if kind == "write" else self.hub.place_of_all()
        expiry = int(time.time()) + 3600
        return Answer(200, {"accessToken": "xet", "exp": expiry, "casUrl": f"local://{place}"})

    def bucket_file(self, name: str, path: str, _: bytes) -> Answer:
        file = self._bucket(name).files.get(path)
        if file is None:
            raise absent("EntryNotFound")
        headers = {
            # another host
            "Location": self.hub.url.replace("127.0.0.1", "localhost") + f"/cdn/{file.hash}",
            "X-Xet-Hash": file.hash,
            "X-Linked-Size": str(len(self.hub.contents[file.hash])),
            "X-Xet-Refresh-Route": f"{self.hub.url}/api/buckets/{quote(name)}/xet-read-token",
        }
        return Answer(302, None, headers)

    def cdn(self, name: str, _: bytes) -> Answer:
        if self.headers.get("Authorization") is not None:
            return Answer(400, {"error": "the token has left the Hub"})
        content, byte_range = self.hub.contents[name], self.headers.get("Range")
        if byte_range is None:
            return Answer(200, content)
        start, stop = map(int, byte_range.removeprefix("bytes=").split("-"))
        return Answer(206, content[start : stop + 1])

    def _bucket(self, name: str) -> Bucket:
        bucket = self.hub.buckets.get(name)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if bucket is None or (bucket.private and not has_token):
            raise absent("RepoNotFound")
        return bucket

    def _file(self, path: str, file: StoredFile) -> dict[str, Any]:
        facts = {
            "type": "file",
            "path": path,
            "size": len(self.hub.contents[file.hash]),
            "xetHash": file.hash,
        }
        return {**facts, "mtime": _stamp(file.time), "uploadedAt": _stamp(file.time)}


def _top(entry: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entry of a file in a listing of one level: the file, or the folder that has it."""
    path: str = entry["path"]
    parent = f"{prefix}/" if prefix and path.startswith(f"{prefix}/") else ""
    step, _, rest = path[len(parent) :].partition("/")
    if not rest:
        return entry
    return {"type": "directory", "path": parent + step, "uploadedAt": entry["uploadedAt"]}


def _stamp(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_BUCKET = "/api/buckets/([^/]+/[^/]+)"
_BucketHandler.routes = [
    *ROUTES,
    ("POST", _BUCKET, _BucketHandler.create_bucket),
    ("GET", _BUCKET, _BucketHandler.bucket_info),
    ("GET", rf"{_BUCKET}/tree/?(.*)", _BucketHandler.bucket_tree),
    ("POST", rf"{_BUCKET}/paths-info", _BucketHandler.bucket_paths),
    ("POST", rf"{_BUCKET}/batch", _BucketHandler.bucket_batch),
    ("GET", rf"{_BUCKET}/xet-(read|write)-token", _BucketHandler.xet_token),
    ("GET HEAD", "/buckets/([^/]+/[^/]+)/resolve/(.+)", _BucketHandler.bucket_file),
    ("GET HEAD", "/cdn/(.+)", _BucketHandler.cdn),
]


@contextmanager
def using_buckets(hub: Hub) -> Iterator[None]:
    """Make this process use `hub` as `using_hub` does; hf_xet does not retry for minutes."""
    quick = {"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1", "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms"}
    session = patch.object(_xet, "_GLOBAL_XET_HOLDER", _xet.XetSessionHolder())
    with patch.dict("os.environ", quick), session, using_hub(hub):
        yield


def copy_as_client(url: str, source: str, goal: str, overwrite: bool) -> None:
    """Copy from or to the Hub at `url`: the action of another process."""
    hub = BucketHub(Path())
    hub.url = url
    with using_buckets(hub):
        copy(source, goal, overwrite=overwrite)


@contextmanager
def serving_buckets(folder: Path) -> Iterator[BucketHub]:
    """Serve a Hub with buckets during the block; contents are kept in `folder`."""
    folder.mkdir(exist_ok=True)
    hub = BucketHub(folder)
    with serving(hub, _BucketHandler):
        yield hub
