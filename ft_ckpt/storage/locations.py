"""Texts that name a place: local paths, URLs and their schemes; how they are shown in messages."""

import os
import re
from pathlib import Path

from ft_ckpt.errors import ConfigError
from ft_ckpt.messages import without_secrets

HUB_BUCKETS = "hf://buckets/"  # prefix of the URLs of storage buckets of the Hugging Face Hub
# two letters or more before the colon; Path leaves one slash
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_HUB_BUCKET_ADVICE = (
    "a bucket of the Hub takes and gives whole checkpoints, by push, pull and cp; to save a run "
    "there, or to list and read in place, use its S3 gateway: s3://NAME/folder for "
    "hf://buckets/NAMESPACE/NAME/folder, with AWS_ENDPOINT_URL=https://s3.hf.co/NAMESPACE, "
    "AWS_REGION=us-east-1 and keys made from a token"
)


def local_path(location: str | os.PathLike[str]) -> Path:
    """`location` as a path of this machine.

    Raises ConfigError for a URL ("s3://...", "hf://...", "file://..."), which would become a folder
    of that name.
    """
    text = os.fspath(location)
    if text.lower().startswith(HUB_BUCKETS):
        raise ConfigError(f"{text}: {_HUB_BUCKET_ADVICE}")
    match = _SCHEME.match(text)
    if match is not None:
        scheme = match[1]
        if scheme == "file":
            advice = "leave out the scheme"
        else:
            advice = "give a local folder, or, where buckets are supported, s3://, gs:// or az://"
        raise ConfigError(f"{text}: {scheme}://: not a local path; {advice}")
    return Path(location)


def refuse_secrets(url: str, other_way: str) -> None:
    """Raise ConfigError for a URL with user info or a signing parameter, which errors, logs and
    marks would show.
    """
    if without_secrets(url) != url:
        raise ConfigError(
            f"{url}: a URL with a key, password or token, which is refused; give it by {other_way}"
        )


def shown_location(location: str | os.PathLike[str]) -> str:
    """A path or URL for messages: relative to the working directory if it is below that."""
    path = Path(location)
    try:
        working_folder = Path.cwd()
    except OSError:  # it was deleted
        return str(location)
    if path.is_relative_to(working_folder):
        return str(path.relative_to(working_folder))
    return str(location)


def location_name(location: Path | str) -> str:
    """The last component of a `Place.location`."""
    return location.name if isinstance(location, Path) else location.rpartition("/")[2]
