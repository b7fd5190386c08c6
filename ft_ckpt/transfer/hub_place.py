"""Places on the Hub: how their URLs are read, how it is asked, and its errors as ours."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # in its __init__, not in its __all__
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)

from ft_ckpt._version import __version__
from ft_ckpt.errors import CheckpointError, ConfigError, MissingError, TargetError, UnreadableError
from ft_ckpt.messages import clean_causes
from ft_ckpt.storage.open_store import refuse_secrets

MAIN = "main"
HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]  # the client's own, which is another package's in each version
HUB_ERRORS: tuple[Any, ...] = (HTTP_ERROR, OSError, ValueError, RuntimeError)
_URL = re.compile(r"hf://(?:models/)?([^/@]+/[^/@]+)(?:@(refs/[^/]+/[^/]+|[^/]+))?(?:/(.+?))?/?")
_OTHERS = ("buckets", "collections", "datasets", "kernels", "spaces")


@dataclass(frozen=True)
class HubPlace:
    """A folder of a model repository, in one of its revisions."""

    repo_id: str
    revision: str = MAIN
    folder: str = ""

    @property
    def url(self) -> str:
        """The place as it is written."""
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"hf://{self.repo_id}{revision}{self.folder and '/'}{self.folder}"

    def path_of(self, name: str) -> str:
        """The path in the repository of what is called `name` here."""
        return f"{self.folder}/{name}" if self.folder else name

    def names_below(self, paths: list[str]) -> list[str]:
        """Of `paths` in the repository those in this folder, relative to it."""
        start = f"{self.folder}/" if self.folder else ""
        return [path[len(start) :] for path in paths if path.startswith(start)]


def parse_place(text: str, revision: str | None = None) -> HubPlace:
    """The place that "user/name", "name" or "hf://user/name[@revision][/folder]" means.

    Raises ConfigError for what is no name of a model repository, for a token in it, and for two different revisions.
    """
    refuse_secrets(text, "HF_TOKEN, `hf auth login` or token=")
    match = _URL.fullmatch(text)
    repo_id, told, folder = (match[1], match[2], match[3]) if match else (text, None, None)
    told = None if told is None else unquote(told)
    if "://" in repo_id or repo_id.split("/")[0] in _OTHERS:
        raise ConfigError(f"{text}: no model repository; expected hf://user/name, with @revision or a folder if needed")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{text}: no name of a model repository ({error}); expected user/name") from error
    if told is not None and revision is not None and told != revision:
        raise ConfigError(f"{text} and revision={revision!r}: two revisions; leave one out")
    return HubPlace(repo_id, told or revision or MAIN, folder or "")


def make_api(token: str | None = None, endpoint: str | None = None) -> HfApi:
    """The client of the Hub, or of what HF_ENDPOINT or `endpoint` names instead."""
    return HfApi(endpoint=endpoint, token=token, library_name="ft_ckpt", library_version=__version__)


@contextmanager
def hub_errors(where: str, *, writing: bool) -> Iterator[None]:
    """Errors of the Hub come out as TargetError while writing, else as MissingError or UnreadableError."""
    try:
        yield
    except CheckpointError:
        raise
    except HUB_ERRORS as error:
        clean_causes(error)
        raise _as_ours(where, error, writing) from error


@contextmanager
def progress_bars(*, shown: bool) -> Iterator[None]:
    """Leave the client's progress bars as they are, or keep them away while the block runs."""
    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def hub_status(error: BaseException | None) -> int | None:
    """The status that the Hub answered with, where that is at the bottom of an error."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return int(status)
        error = error.__cause__ or error.__context__
    return None


def _as_ours(where: str, error: BaseException, writing: bool) -> CheckpointError:
    told = f"{where}: {'not pushed' if writing else 'not read'} ({_hub_reason(error)}); {_advice(error)}"
    if isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError)) and not writing:
        return MissingError(told)
    return TargetError(told) if writing else UnreadableError(told)


def _hub_reason(error: BaseException) -> str:
    """What the client says, in one line of bounded length, and what it had from below."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    cause = error.__cause__
    below = "" if cause is None or hub_status(error) is None else f"; {' '.join(str(cause).split())}"
    return f"{words}{below}"[:400].rstrip(".")


def _advice(error: BaseException) -> str:
    status = hub_status(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it"
    if status in (401, 403, 404):
        return "look at the name, log in with `hf auth login` or give a token that may do this"
    return "try again"
