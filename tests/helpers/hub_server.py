"""A Hub on loopback: the endpoints by which huggingface_hub commits to repositories and reads them.

Repositories, branches, commits and large files are kept in memory. Large files come by the LFS
protocol, in parts where they are larger than `part_bytes`; xet is not offered. `Fault`s make chosen
requests fail as real ones do.
"""

import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch
from urllib.parse import parse_qs, unquote, urlsplit

from http_server import Answer, FakeHandler, FakeServer, Request, serving
from huggingface_hub import constants
from huggingface_hub.utils._http import close_session

TOKEN = "hf_right"
LARGE_BYTES = 1 << 10  # files from this size on, except .md, and weights go by LFS


@dataclass(frozen=True)
class Blob:
    """One file of a commit."""

    content: bytes
    is_large: bool

    @property
    def oid(self) -> str:
        """Id of its content: SHA-256 for a large file, else git's blob id."""
        if self.is_large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repository:
    """One model repository."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)  # the commit of each
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)  # the files of each
    messages: list[str] = field(default_factory=list)  # of all commits

    def add_commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        """Commit `files` as the branch's new content; return the commit id."""
        parent = self.branches.get(branch, "")
        oid = hashlib.sha1(f"{parent}{message}{len(self.commits)}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str | None:
        """Return the commit id of a branch or of a commit id; None if unknown."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Hub(FakeServer):
    """The server's state, and its interface for tests."""

    def __init__(self, part_bytes: int = 1 << 20) -> None:
        super().__init__()
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.part_bytes = part_bytes
        self.ignored: set[str] = set()  # paths that a .gitignore excludes

    def files(self, repository: str, branch: str = "main") -> dict[str, bytes]:
        """Return the content of each file at the head of a branch, by path."""
        stored = self.repositories[repository]
        blobs = stored.commits[stored.branches[branch]]
        return {path: blob.content for path, blob in blobs.items()}

    def put(
        self,
        repository: str,
        files: dict[str, bytes],
        branch: str = "main",
        message: str = "by hand",
    ) -> None:
        """Commit `files` as another client would."""
        with self.lock:
            stored = self.repositories.setdefault(repository, Repository(private=False))
            old = stored.commits.get(stored.branches.get(branch, ""), {})
            new = {path: _blob_of(path, content) for path, content in files.items()}
            stored.add_commit(branch, {**old, **new}, message)


def _blob_of(path: str, content: bytes) -> Blob:
    return Blob(content, _is_large(path, len(content)))


def _is_large(path: str, size_bytes: int) -> bool:
    is_weights = path.endswith((".safetensors", ".h5", ".bin"))
    return is_weights or (size_bytes >= LARGE_BYTES and not path.endswith(".md"))


def absent(code: str) -> Answer:
    """Return the response for a missing object."""
    return Answer(404, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})


class HubHandler(FakeHandler):
    """Answers the requests to a Hub by its `routes`: method, pattern of the path, action."""

    routes: "list[tuple[str, str, Any]]"

    @property
    def hub(self) -> Hub:
        """The server's state."""
        return cast("Hub", self.fake)

    def check(self, request: Request) -> None:
        """Refuse any other token, and commits and new repositories without one."""
        token, path = request.headers.get("authorization"), request.path
        if request.method == "POST" and path.startswith("/api/") and token is None:
            raise Answer(401, {"error": "Invalid username or password."})
        if not path.startswith("/lfs/") and token not in (None, f"Bearer {TOKEN}"):
            message = "Invalid credentials in Authorization header"
            raise Answer(401, {"error": message}, {"X-Error-Message": message})

    def answer(self, request: Request) -> Answer:
        """Execute a request by the first route that matches."""
        path = urlsplit(self.path).path  # quoted: a name may have a slash
        for method, pattern, action in self.routes:
            match = re.fullmatch(pattern, path)
            if match is not None and request.method in method.split():
                arguments = [*map(unquote, match.groups()), request.content]
                with self.hub.lock:
                    return action(self, *arguments) or Answer(200)
        return Answer(404, {"error": f"no such place: {path}"})

    # Request handlers

    def whoami(self, _: bytes) -> Answer:
        return Answer(200, {"type": "user", "name": "user", "auth": {}})

    def create(self, body: bytes) -> Answer:
        settings = json.loads(body)
        name = f"{settings.get('organization') or 'user'}/{settings['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            return Answer(409, {"error": "You already created this model repo", "url": url})
        is_private = settings.get("visibility") == "private" or bool(settings.get("private"))
        repository = self.hub.repositories[name] = Repository(is_private)
        files = {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)}
        repository.add_commit("main", files, "initial commit")
        return Answer(200, {"url": url, "name": name})

    def validate(self, _: bytes) -> Answer:
        return Answer(200, {"errors": [], "warnings": []})

    def info(self, name: str, revision: str, _: bytes) -> Answer:
        repository = self._repository(name)
        oid, files = self._files(repository, revision or "main")
        siblings = [{"rfilename": path} for path in files]
        names = {"id": name, "modelId": name, "sha": oid}
        facts = {"private": repository.private, "tags": [], "siblings": siblings}
        return Answer(200, {**names, **facts})

    def branch(self, name: str, branch: str, _: bytes) -> Answer:
        repository = self._repository(name)
        if branch in repository.branches:
            return Answer(409, {"error": "Reference already exists"})
        repository.branches[branch] = repository.branches["main"]
        return Answer(200)

    def preupload(self, name: str, revision: str, body: bytes) -> Answer:
        _, stored = self._files(self._repository(name), revision)
        files = []
        for file in json.loads(body)["files"]:
            path, blob = file["path"], stored.get(file["path"])
            mode = "lfs" if _is_large(path, file["size"]) else "regular"
            facts = {"shouldIgnore": path in self.hub.ignored, "oid": blob.oid if blob else None}
            files.append({"path": path, "uploadMode": mode, **facts})
        return Answer(200, {"files": files})

    def batch(self, _name: str, body: bytes) -> Answer:
        objects = [self._object(**facts) for facts in json.loads(body)["objects"]]
        return Answer(200, {"transfer": "basic", "objects": objects})

    def _object(self, oid: str, size: int) -> dict[str, Any]:
        if oid in self.hub.large:
            return {"oid": oid, "size": size}
        action: dict[str, Any] = {"href": f"{self.hub.url}/lfs/whole/{oid}"}
        if size > self.hub.part_bytes:
            header = {"chunk_size": str(self.hub.part_bytes)}
            for number in range(1, -(-size // self.hub.part_bytes) + 1):
                header[f"{number:05d}"] = f"{self.hub.url}/lfs/part/{oid}/{number}"
            action = {"href": f"{self.hub.url}/lfs/complete/{oid}", "header": header}
        verify = {"href": f"{self.hub.url}/lfs/verify"}
        return {"oid": oid, "size": size, "actions": {"upload": action, "verify": verify}}

    def put_whole(self, oid: str, body: bytes) -> None:
        self._keep_large(oid, body)

    def put_part(self, oid: str, number: str, body: bytes) -> Answer:
        self.hub.parts[oid, int(number)] = body
        return Answer(200, None, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def complete(self, oid: str, body: bytes) -> None:
        numbers = [part["partNumber"] for part in json.loads(body)["parts"]]
        content = b"".join([self.hub.parts.pop((oid, number)) for number in numbers])
        self._keep_large(oid, content)

    def verify(self, body: bytes) -> Answer:
        return Answer(200 if json.loads(body)["oid"] in self.hub.large else 404)

    def _keep_large(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            raise Answer(400, {"error": "the content is not what was announced"})
        self.hub.large[oid] = content

    def commit(self, name: str, revision: str, body: bytes) -> Answer:
        repository = self._repository(name)
        oid, stored = self._files(repository, revision)
        lines = [json.loads(line) for line in body.splitlines()]
        header, files = lines[0]["value"], dict(stored)
        if header.get("parentCommit") not in (None, oid):
            message = "A commit has happened since. Please refresh and try again."
            return Answer(412, {"error": message}, {"X-Error-Message": message})
        for line in lines[1:]:
            self._change(files, line["key"], line["value"])
        commit = repository.add_commit(revision, files, header["summary"])
        url = f"{self.hub.url}/{name}/commit/{commit}"
        return Answer(200, {"commitUrl": url, "commitOid": commit, "success": True})

    def _change(self, files: dict[str, Blob], key: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = Blob(base64.b64decode(value["content"]), False)
        elif key == "lfsFile":
            if value["oid"] not in self.hub.large:
                raise Answer(400, {"error": f"{path}: its content was not uploaded"})
            files[path] = Blob(self.hub.large[value["oid"]], True)
        elif path not in files:
            error = {"error": "A file with this name doesn't exist"}
            raise Answer(404, error, {"X-Error-Code": "EntryNotFound"})
        else:
            del files[path]

    def paths_info(self, name: str, revision: str, body: bytes) -> Answer:
        _, files = self._files(self._repository(name), revision)
        paths = [path for path in parse_qs(str(body, "utf-8"))["paths"] if path in files]
        return Answer(200, [_entry(path, files[path]) for path in paths])

    def tree(self, name: str, revision: str, _: bytes) -> Answer:
        files = self._files(self._repository(name), revision)[1]
        return Answer(200, [_entry(path, blob) for path, blob in files.items()])

    def content(self, name: str, revision: str, path: str, _: bytes) -> Answer:
        oid, files = self._files(self._repository(name), revision)
        if path not in files:
            raise absent("EntryNotFound")
        blob = files[path]
        headers = {
            "X-Repo-Commit": oid,
            "ETag": f'"{blob.oid}"',
            "Content-Type": "application/octet-stream",
        }
        return Answer(200, blob.content, headers)

    def _repository(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        has_token = self.headers.get("Authorization") is not None
        if repository is None or (repository.private and not has_token):
            raise absent("RepoNotFound")
        return repository

    def _files(self, repository: Repository, revision: str) -> tuple[str, dict[str, Blob]]:
        oid = repository.resolve(revision)
        if oid is None:
            raise absent("RevisionNotFound")
        return oid, repository.commits[oid]


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    lfs = {"oid": blob.oid, "size": len(blob.content), "pointerSize": 130}
    large = {"lfs": lfs} if blob.is_large else {}
    return {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid[:40], **large}


_REPO = r"/api/models/([^/]+/[^/]+)"
ROUTES: list[tuple[str, str, Any]] = [
    ("GET", "/api/whoami-v2", HubHandler.whoami),
    ("POST", "/api/repos/create", HubHandler.create),
    ("POST", "/api/validate-yaml", HubHandler.validate),
    ("GET", rf"{_REPO}()", HubHandler.info),
    ("GET", rf"{_REPO}/revision/([^/]+)", HubHandler.info),
    ("POST", rf"{_REPO}/branch/([^/]+)", HubHandler.branch),
    ("POST", rf"{_REPO}/preupload/([^/]+)", HubHandler.preupload),
    ("POST", rf"{_REPO}/commit/([^/]+)", HubHandler.commit),
    ("POST", rf"{_REPO}/paths-info/([^/]+)", HubHandler.paths_info),
    ("GET", rf"{_REPO}/tree/([^/]+)", HubHandler.tree),
    ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", HubHandler.batch),
    ("PUT", "/lfs/whole/([^/]+)", HubHandler.put_whole),
    ("PUT", "/lfs/part/([^/]+)/([^/]+)", HubHandler.put_part),
    ("POST", "/lfs/complete/([^/]+)", HubHandler.complete),
    ("POST", "/lfs/verify", HubHandler.verify),
    ("GET HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", HubHandler.content),
]


HubHandler.routes = ROUTES


@contextmanager
def serving_hub(part_bytes: int = 1 << 20) -> Iterator[Hub]:
    """Serve a Hub during the block; other processes reach its `url` by HF_ENDPOINT."""
    hub = Hub(part_bytes)
    with serving(hub, HubHandler):
        yield hub


@contextmanager
def using_hub(hub: Hub) -> Iterator[Hub]:
    """Make this process use `hub` as the Hub.

    It patches huggingface_hub, which has read its settings when it was imported.
    """
    settings: dict[str, Any] = {
        "ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    close_session()
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(constants, **settings))
        stack.enter_context(patch.dict("os.environ", {"HF_TOKEN": TOKEN}))
        if "transformers.utils.hub" in sys.modules:  # it keeps a client of its own
            stack.enter_context(patch("transformers.utils.hub._hf_api", None, create=True))
        yield hub
    close_session()


def main() -> None:
    """Serve until the input ends.

    The one line of output is JSON: the environment of client programs.
    """
    with serving_hub() as hub:
        settings = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        print(json.dumps(settings), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
