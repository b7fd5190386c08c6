"""Parses the names and URLs of folders in model repositories of the Hugging Face Hub."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

from ft_ckpt.errors import ConfigError
from ft_ckpt.storage.places import refuse_secrets

MAIN = "main"
_URL = re.compile(r"hf://(?:models/)?([^/@]+/[^/@]+)(?:@(refs/[^/]+/[^/]+|[^/]+))?(?:/(.+?))?/?")
_NO_MODELS = ("buckets", "collections", "datasets", "kernels", "spaces")


@dataclass(frozen=True)
class HubPlace:
    """A folder of a model repository, in one of its revisions. `folder` is "" for the root."""

    repo_id: str
    revision: str = MAIN
    folder: str = ""

    @property
    def url(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        folder = f"/{self.folder}" if self.folder else ""
        return f"hf://{self.repo_id}{revision}{folder}"

    def path_of(self, name: str) -> str:
        """Return the path of the file `name` in the repository."""
        return f"{self.folder}/{name}" if self.folder else name

    def names_below(self, paths: Iterable[str]) -> list[str]:
        """Return those `paths` in the repository that are in this folder, relative to it."""
        prefix = f"{self.folder}/" if self.folder else ""
        return [path[len(prefix) :] for path in paths if path.startswith(prefix)]


def parse_place(text: str, revision: str | None = None) -> HubPlace:
    """Parse "user/name", "name" or "hf://user/name[@revision][/folder]".

    Raises ConfigError if it is not the name of a model repository, if it contains a token, or if
    its revision is not `revision`.
    """
    refuse_secrets(text, "HF_TOKEN, `hf auth login` or token=")
    repo_id = text
    url_revision = None
    folder = None
    match = _URL.fullmatch(text)
    if match is not None:
        repo_id = match[1]
        folder = match[3]
        if match[2] is not None:
            url_revision = unquote(match[2])

    if "://" in repo_id or repo_id.split("/")[0] in _NO_MODELS:
        raise ConfigError(
            f"{text}: no model repository; expected hf://user/name, with "
            "@revision or a folder if needed"
        )

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(
            f"{text}: no name of a model repository ({error}); expected user/name"
        ) from error

    if url_revision is not None and revision is not None and url_revision != revision:
        raise ConfigError(f"{text} and revision={revision!r}: two revisions; leave one out")
    return HubPlace(repo_id, url_revision or revision or MAIN, folder or "")
