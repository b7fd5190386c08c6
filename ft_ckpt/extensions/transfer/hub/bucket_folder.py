"""Lists, sends and downloads the files of a folder in a storage bucket of the Hub."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import BucketFile, HfApi
from huggingface_hub.errors import EntryNotFoundError
from typing_extensions import Self

from ft_ckpt.checkpoint.manifest import MANIFEST_LIMIT_BYTES
from ft_ckpt.errors import ConfigError, ManifestError, TargetError
from ft_ckpt.extensions.transfer.hub.client import make_api
from ft_ckpt.storage import checked_name
from ft_ckpt.storage.places import HUB_BUCKETS, files_made_by, refuse_secrets

# The id of a bucket: NAMESPACE/NAME.
_BUCKET_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class BucketFolder:
    """A folder in a bucket. `path` is "" for the bucket itself."""

    api: HfApi
    bucket_id: str
    path: str

    @classmethod
    def at(cls, url: str, token: str | None = None) -> Self:
        """Return the folder at hf://buckets/NAMESPACE/NAME[/folder].

        Raises ConfigError for other URLs, and for those with a token in them.
        """
        refuse_secrets(url, "HF_TOKEN, `hf auth login` or token=")
        components = [name for name in url[len(HUB_BUCKETS) :].split("/") if name]
        bucket_id = "/".join(components[:2])
        if not _BUCKET_ID.fullmatch(bucket_id):
            expected = f"{HUB_BUCKETS}NAMESPACE/NAME, then a folder"
            raise ConfigError(f"{url}: no bucket of the Hub; expected {expected}")
        path = "/".join(components[2:])
        return cls(make_api(token), bucket_id, checked_name(path) if path else "")

    def within(self, name: str) -> Self:
        """Return the folder `name` in this one."""
        return replace(self, path=checked_name(self.path_of(name)))

    @property
    def url(self) -> str:
        return f"{HUB_BUCKETS}{self._bucket_path}"

    @property
    def name(self) -> str:
        """The last component of its URL."""
        return self._bucket_path.rpartition("/")[2]

    @property
    def _bucket_path(self) -> str:
        return f"{self.bucket_id}/{self.path}" if self.path else self.bucket_id

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def make_bucket(self, private: bool | None) -> None:
        """Create the bucket if it is missing, as a private one unless `private` is False.

        Raises TargetError if `private` is True and the bucket is public.
        """
        self.api.create_bucket(self.bucket_id, private=private is not False, exist_ok=True)
        if private and not self.api.bucket_info(self.bucket_id).private:
            raise TargetError(f"{self.url}: public, expected private=True; make it private first")

    def files(self) -> dict[str, BucketFile]:
        """List the files in this folder and its subfolders, by their paths in it."""
        prefix = self.path_of("")
        files: dict[str, BucketFile] = {}
        with suppress(EntryNotFoundError):
            tree = self.api.list_bucket_tree(self.bucket_id, self.path or None, recursive=True)
            for entry in tree:
                if isinstance(entry, BucketFile) and entry.path.startswith(prefix):
                    files[entry.path.removeprefix(prefix)] = entry
        return files

    def send(self, files: Mapping[str, Path | bytes], delete: Iterable[str] = ()) -> None:
        """Add `files` by path in this folder, and delete others, in one batch."""
        self.api.batch_bucket_files(
            self.bucket_id,
            add=[(content, self.path_of(name)) for name, content in files.items()],
            delete=[self.path_of(name) for name in delete],
        )

    def download(self, files: list[tuple[BucketFile, Path]]) -> None:
        """Download listed files to paths on this machine."""
        self.api.download_bucket_files(self.bucket_id, list[Any](files))

    def read_text(self, file: BucketFile) -> str:
        """Read a small text file. Raises ManifestError if it is larger than a manifest may be."""
        if file.size > MANIFEST_LIMIT_BYTES:
            raise ManifestError(
                f"{HUB_BUCKETS}{self.bucket_id}/{file.path}: {file.size:,} bytes, expected at most "
                f"{MANIFEST_LIMIT_BYTES:,}; it was not written by ft_ckpt, use another checkpoint"
            )
        contents = files_made_by(lambda folder: self.download([(file, folder / "text")]))
        return contents["text"].decode("utf-8", "replace")
