"""Storage buckets of the Hugging Face Hub as stores, through huggingface_hub: its batches, listings and downloads.

The version of an object is its Xet hash. A bucket has no conditional writes, so two savers could not exclude each
other: only whole checkpoints, see `transfer.hub_buckets`, and marks are written there.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from huggingface_hub import BucketFile, BucketFolder, HfApi, constants
from huggingface_hub.errors import BucketNotFoundError, EntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # in its __init__, not in its __all__
    build_hf_headers,
    hf_raise_for_status,
    http_backoff,
)

from ft_ckpt.errors import ConfigError
from ft_ckpt.messages import clean_causes
from ft_ckpt.storage.hub_client import HUB_ERRORS, hub_errors, hub_status, make_api, progress_bars
from ft_ckpt.storage.store import (
    HUB_BUCKETS,
    Folder,
    FolderListing,
    Store,
    Stored,
    changed_object,
    checked_name,
    missing_object,
    read_object,
    refuse_beyond,
    refuse_other_length,
)

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)  # of a bucket, with its namespace
_BUCKET_FILE: Any = BucketFile  # its methods are not typed
_MISSING = (BucketNotFoundError, RepositoryNotFoundError)
_FIRST_BYTES = 256 << 10  # read with the first range of a file: latency equals the transfer of about 1 MB


@contextmanager
def bucket_errors(where: str, *, writing: bool = False) -> Iterator[None]:
    """Convert errors of the Hub to ConfigError for a missing bucket, TargetError when `writing`, or UnreadableError."""
    with hub_errors(where, writing=writing, failed="not written"):
        try:
            yield
        except _MISSING as error:
            clean_causes(error)
            raise ConfigError(
                f"{where}: no such bucket, or none that this token may see; correct its name, or log in with "
                "`hf auth login`"
            ) from error


@dataclass(frozen=True)
class HubBucket:
    """The files of the bucket `bucket_id` below `prefix` ("" or a path with a slash at its end)."""

    bucket_id: str
    prefix: str = ""
    token: str | None = field(default=None, repr=False)

    @classmethod
    def from_url(cls, url: str, token: str | None = None) -> "HubBucket":
        """The store at hf://buckets/NAMESPACE/NAME[/folder]. Raises ConfigError."""
        if not hasattr(HfApi, "copy_files"):
            raise ConfigError(f"{url}: buckets of the Hub need huggingface_hub 1.10 or later; update it")
        steps = [step for step in url[len(HUB_BUCKETS) :].split("/") if step]
        bucket_id, folder = "/".join(steps[:2]), "/".join(steps[2:])
        if not _NAME.fullmatch(bucket_id):
            raise ConfigError(f"{url}: no bucket of the Hub; expected {HUB_BUCKETS}NAMESPACE/NAME, then a folder")
        return cls(bucket_id, f"{checked_name(folder)}/" if folder else "", token)

    @property
    def api(self) -> HfApi:
        return make_api(self.token)

    @property
    def url(self) -> str:
        return f"{HUB_BUCKETS}{self.bucket_id}/{self.prefix}".rstrip("/")

    @property
    def identity(self) -> str:
        return self.url

    @property
    def parent(self) -> "HubBucket | None":
        if not self.prefix:
            return None
        above = self.prefix.rstrip("/").rpartition("/")[0]
        return HubBucket(self.bucket_id, f"{above}/" if above else "", self.token)

    def within(self, folder: str) -> "HubBucket":
        return HubBucket(self.bucket_id, f"{self.prefix}{checked_name(folder)}/", self.token)

    def where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def path(self, name: str) -> str:
        """The path of a file in the bucket. Raises ConfigError for an invalid name."""
        return self.prefix + checked_name(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return read_object(self, name, start, stop)

    def open(self, name: str) -> "HubObject":
        found = self.stat(name)
        if found is None:
            raise missing_object(self.where(name))
        return HubObject(self, name, found.size_bytes, found.version)

    def list(self, prefix: str = "") -> list[Stored]:
        begin = self.prefix + (f"{checked_name(prefix)}/" if prefix else "")
        with bucket_errors(self.where(prefix)):
            found = [self._stored(each) for each in self._tree(begin, recursive=True) if isinstance(each, BucketFile)]
        return sorted(found, key=lambda each: each.name)

    def known_hashes(self, most: int) -> set[str]:
        """The Xet hashes of the files among the first `most` entries below this folder."""
        with bucket_errors(self.url):
            some = islice(self._tree(self.prefix, recursive=True), most)
            return {each.xet_hash for each in some if isinstance(each, BucketFile)}

    def list_folder(self, prefix: str = "") -> FolderListing:
        begin, folders, objects = self.prefix + (f"{checked_name(prefix)}/" if prefix else ""), set[str](), []
        with bucket_errors(self.where(prefix)):
            for each in self._tree(begin, recursive=False):
                step, _, deeper = each.path[len(begin) :].partition("/")
                if deeper or isinstance(each, BucketFolder):
                    folders.add(step)
                else:
                    objects.append(self._stored(each))
        named = tuple(Folder(name, self.where(f"{prefix}/{name}" if prefix else name)) for name in sorted(folders))
        return FolderListing(bool(named or objects), named, tuple(sorted(objects, key=lambda each: each.name)))

    def stat(self, name: str) -> Stored | None:
        with bucket_errors(self.where(name)):
            found = [*self.api.get_bucket_paths_info(self.bucket_id, [self.path(name)])]
        return self._stored(found[0]) if found else None

    def write(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object. Raises ConfigError with `create_only`."""
        if create_only:
            self._refuse(name)
        with bucket_errors(self.where(name), writing=True), progress_bars(shown=False):
            self.send({name: data})

    def create(self, name: str, size_bytes: int) -> NoReturn:
        """Always raises ConfigError."""
        self._refuse(name)

    def copy(self, name: str, other: str, source: Store | None = None) -> bool:
        """False: files are copied by their hash, see `send`."""
        if (self if source is None else source).stat(name) is None:
            raise missing_object(self.where(name))
        return False

    def delete(self, names: Iterable[str]) -> None:
        doomed = list(dict.fromkeys(names))
        paths = {self.path(name): name for name in doomed}
        with bucket_errors(self.url, writing=True):
            try:
                self.send({}, delete=doomed)
            except HUB_ERRORS as error:  # some of them may not exist
                if hub_status(error) not in (200, 404, 422):
                    raise
                left = [paths[each.path] for each in self.api.get_bucket_paths_info(self.bucket_id, paths)]
                self.send({}, delete=left)

    def free_bytes(self) -> int | None:
        return None

    def send(
        self,
        add: Mapping[str, Path | bytes],
        copy: Mapping[str, tuple[str, str]] | None = None,
        delete: Sequence[str] = (),
    ) -> None:
        """Add files from paths or bytes by name, `copy` others from (bucket, Xet hash), and `delete` others.

        More than a thousand are sent in several batches; each may be applied in part when this raises.
        """
        self.api.batch_bucket_files(
            self.bucket_id,
            add=[(source, self.path(name)) for name, source in add.items()],
            copy=[("bucket", bucket, content, self.path(name)) for name, (bucket, content) in (copy or {}).items()],
            delete=[self.path(name) for name in delete],
        )

    def download(self, files: Mapping[Stored, Path], *, shown: bool = False) -> None:
        """Download listed objects, by their hash, to new files; with bars if `shown`. Raises UnreadableError."""
        wanted: list[tuple[str | BucketFile, str | Path]] = []
        for each, path in files.items():
            facts = {"type": "file", "path": self.path(each.name), "size": each.size_bytes, "xetHash": each.version}
            wanted.append((_BUCKET_FILE(**facts), path))
        with bucket_errors(self.url), progress_bars(shown=shown):
            self.api.download_bucket_files(self.bucket_id, wanted)

    def _tree(self, begin: str, *, recursive: bool) -> Iterator[Any]:
        """The entries below the folder `begin`; the Hub lists every path with this prefix."""
        try:
            found = self.api.list_bucket_tree(self.bucket_id, begin.rstrip("/") or None, recursive=recursive)
            yield from (each for each in found if each.path.startswith(begin) and each.path != begin)
        except EntryNotFoundError:
            return

    def _stored(self, found: BucketFile) -> Stored:
        time: datetime | None = found.uploaded_at or found.mtime
        modified = 0.0 if time is None else time.timestamp()
        return Stored(found.path[len(self.prefix) :], found.size, modified, found.xet_hash, found.xet_hash)

    def _refuse(self, name: str) -> NoReturn:
        self.path(name)
        raise ConfigError(
            f"{self.url}: nothing is saved into a bucket of the Hub directly, because it has no conditional writes; "
            "save to a disk and `ft-ckpt sync` (or cp, push) it there, or use its S3 gateway (s3://)"
        )


@dataclass
class HubObject:
    """An open file of a bucket, read in ranges."""

    store: HubBucket
    name: str
    size_bytes: int
    version: str
    _first: bytes | None = field(default=None, repr=False)
    can_map = False

    @property
    def where(self) -> str:
        return self.store.where(self.name)

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        stop = start + len(memory)
        refuse_beyond(self, self.where, stop)
        if stop > _FIRST_BYTES:
            memory[:] = self._range(start, stop)
            return
        if self._first is None:
            self._first = self._range(0, min(_FIRST_BYTES, self.size_bytes))
        memory[:] = self._first[start:stop]

    def map(self) -> None:
        return

    def check(self) -> None:
        found = self.store.stat(self.name)
        if found is None or found.version != self.version:
            raise changed_object(self.where)

    def close(self) -> None:
        """Nothing to release."""

    def _range(self, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        api = self.store.api
        path = quote(self.store.path(self.name), safe="")
        headers = {"Range": f"bytes={start}-{stop - 1}", **build_hf_headers(token=api.token)}
        with bucket_errors(self.where):
            answer = http_backoff(
                "GET",
                f"{api.endpoint}/buckets/{self.store.bucket_id}/resolve/{path}",
                headers=headers,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            )
            hf_raise_for_status(answer)
        content: bytes = answer.content
        if answer.status_code == 200:  # ranges are ignored
            content = content[start:stop]
        refuse_other_length(self.where, start, len(content), stop - start)
        return content
