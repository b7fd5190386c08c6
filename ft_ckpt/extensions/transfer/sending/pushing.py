"""Pushes and pulls checkpoints, and runs pushes in the background one after the other."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, overload

from typing_extensions import Unpack

from ft_ckpt.checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.checkpoint.manifest import is_delta
from ft_ckpt.errors import ConfigError, listing
from ft_ckpt.extensions.transfer.copies import PullReport, PushReport
from ft_ckpt.extensions.transfer.endpoints import (
    Endpoint,
    PlaceLike,
    PushOptions,
    copy_endpoint_of,
    endpoint_of,
)
from ft_ckpt.jobs import BackgroundJob, JobQueue
from ft_ckpt.messages import LOG, short_repr, warn
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, is_url, local_path, location_name, open_place


@dataclass(frozen=True, eq=False, kw_only=True)
class PendingPush(BackgroundJob[PushReport]):
    """A push in the background, or an upload of a staged checkpoint."""

    url: str
    """The URL of the destination."""


# All pushes in the background run one after the other.
_queue = JobQueue()


def start_push(place: Place, url: str, send: Callable[[OpenCheckpoint], PushReport]) -> PendingPush:
    """Send the checkpoint at `place` in the background. It is leased before this returns.

    All errors are raised by the returned handle, and reported as warnings.
    """
    path = place.location
    stack = ExitStack()
    try:
        checkpoint = stack.enter_context(open_checkpoint(place))
    except Exception as error:  # noqa: BLE001 - raised from the handle
        _warn_not_pushed(path, url, error)
        failed: Future[PushReport] = Future()
        failed.set_exception(error)
        return PendingPush(path=path, future=failed, url=url)

    def send_leased() -> PushReport:
        try:
            with stack:
                return send(checkpoint)
        except BaseException as error:
            _warn_not_pushed(path, url, error)
            raise

    future = _queue.start(f"ft_ckpt-push-{location_name(path)}", send_leased)
    return PendingPush(path=path, future=future, url=url)


def wait_for_pushes(pushes: Sequence[PendingPush]) -> None:
    """Wait until all pushes have ended. On an interrupt, warns of those that have not."""
    waiting = [push for push in pushes if not push.done]
    for push in waiting:
        LOG.info("waiting until %s is pushed to %s", location_name(push.path), push.url)
    try:
        wait([push.future for push in waiting])
    except BaseException:
        warn_of_unpushed(waiting)
        raise


def warn_of_unpushed(pushes: Sequence[PendingPush]) -> None:
    """Warn of pushes that have not ended."""
    unfinished = [f"{push.path} to {push.url}" for push in pushes if not push.done]
    if unfinished:
        warn(f"{listing(unfinished)}: not pushed yet; run `ft-ckpt push` to try again")


def _warn_not_pushed(path: Path | str, url: str, error: BaseException) -> None:
    warn(
        f"{path}: not pushed: {error}; the checkpoint is not touched; run `ft-ckpt push "
        f"{path} {url}` to try again",
    )


class PushArguments(TypedDict, total=False):
    """The keywords of `push` as type checkers see them, but for `background`."""

    revision: str | None
    private: bool | None
    token: str | None
    state: bool
    base_id: str | None
    message: str | None


@overload
def push(
    checkpoint: PlaceLike,
    destination: str | Place,
    *,
    background: Literal[False] = False,
    **arguments: Unpack[PushArguments],
) -> PushReport: ...


@overload
def push(
    checkpoint: PlaceLike,
    destination: str | Place,
    *,
    background: Literal[True],
    **arguments: Unpack[PushArguments],
) -> PendingPush: ...


@overload
def push(
    checkpoint: PlaceLike,
    destination: str | Place,
    *,
    background: bool,
    **arguments: Unpack[PushArguments],
) -> PushReport | PendingPush: ...


def push(
    checkpoint: PlaceLike,
    destination: str | Place,
    *,
    revision: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    state: bool = False,
    base_id: str | None = None,
    message: str | None = None,
    background: bool = False,
) -> PushReport | PendingPush:
    """Push the committed `checkpoint` to a model repository on the Hub, as one commit.

    `destination` is "user/name", or "hf://user/name[@revision][/folder]". A missing repository or
    branch is created, as a private one if `private` is True. The checkpoint is leased during the
    push, and all digests are compared first. The commit has weights, configs, tokenizer and a
    manifest of these files, and the training state if `state` is True. Local paths in configs are
    replaced by `base_id`, the name of the base model, or removed. An existing model card keeps its
    text, and its metadata are updated. The same commit deletes files of older checkpoints that the
    old manifest lists or that readers would confuse with the new files. Existing files are not sent
    again. If nothing changes, there is no commit.

    To a bucket ("s3://...", or a `Place` there) the checkpoint is copied as by `copy`, without the
    training state unless `state` is True. `revision`, `private`, `token`, `base_id` and `message`
    then raise ConfigError. A checkpoint in a bucket is pulled into the cache before it is pushed to
    the Hub. A storage bucket of the Hub, "hf://buckets/user/name[/folder]", takes `token` and
    `private`. A missing one is created, as a private one unless `private` is False. Its manifest is
    sent last.

    With `background` a handle is returned at once. Pushes run one after the other, and a failure is
    reported as a warning.

    Raises ConfigError for an invalid destination, NotACheckpointError if nothing is committed at
    `checkpoint`, and CorruptError if its files differ from its manifest. Raises TargetError if the
    Hub refuses or cannot be reached, or if a .gitignore in the repository has dropped files from
    the commit.
    """
    place = open_place(checkpoint)
    options = PushOptions(revision, private, token, state, base_id, message)
    if background:
        return begin_push(place, destination, options)
    return push_now(place, destination, options)


def push_now(checkpoint: Place, destination: str | Place, options: PushOptions) -> PushReport:
    """Push as `push` does, with the options in one object."""
    endpoint = endpoint_of(destination).destination(destination, options)
    with _open_for(endpoint, checkpoint) as opened:
        return endpoint.push(opened, options)


def begin_push(checkpoint: Place, destination: str | Place, options: PushOptions) -> PendingPush:
    """Push in the background as `push` does, with the options in one object."""
    endpoint = endpoint_of(destination).destination(destination, options)
    quiet = replace(options, quiet=True)

    def send(_leased: OpenCheckpoint) -> PushReport:
        # The checkpoint is opened in the thread, because it may have to be pulled first.
        with _open_for(endpoint, checkpoint) as opened:
            return endpoint.push(opened, quiet)

    return start_push(checkpoint, endpoint.url, send)


def push_goal(destination: str, **options: Any) -> str | Place:
    """Return the checked destination of a push.

    A destination in a bucket gets a client with these `options`. Raises ConfigError if the
    destination is invalid.
    """
    if not isinstance(destination, str):
        raise ConfigError(
            f"push: {short_repr(destination)}, expected a Hub repository as 'user/name', "
            "or a URL, as text"
        )
    target = open_place(destination, **options) if is_url(destination) else destination
    endpoint_of(target).destination(target, PushOptions())
    return target


def pull(
    source: PlaceLike,
    folder: str | os.PathLike[str] | None = None,
    *,
    token: str | None = None,
    overwrite: bool = False,
) -> PullReport:
    """Fetch the checkpoint at `source` into `folder`, or from a bucket into the cache.

    `source` is one of these:

    - "hf://user/name[@revision][/folder]", of which a single commit is read,
    - the URL or `Place` of a checkpoint in a bucket ("s3://...", "hf://buckets/user/name/..."),
    - the absolute path or `Place` of a checkpoint in a folder.

    If there is a manifest, every file is compared with it. The checkpoint is then committed like a
    save, or not at all. Files on the Hub without a manifest are fetched as they are. `folder` must
    be new or empty. With `overwrite`, a checkpoint may replace another one. The report has the
    path.

    A delta (see `publish`) is rebuilt to the checkpoint that it stands for, byte for byte. Its base
    is read in the parent of `folder` if it is there, and rebuilt from the chain otherwise.

    Without `folder`, a checkpoint in a bucket is fetched into the cache, which is FT_CKPT_CACHE, or
    ft_ckpt in HF_HOME. A bucket of the Hub needs a `folder`. A checkpoint that the cache has is
    compared and not fetched again. Nor are files of 1 MiB or more that another checkpoint in the
    cache has. If several processes pull one checkpoint, one of them fetches it. Do not change files
    in the cache. The least recently pulled checkpoints are deleted when the cache exceeds 200 GB,
    or FT_CKPT_CACHE_SIZE, unless they are pinned, in use, or were pulled within the hour.

    Raises ConfigError for an invalid source, and MissingError if there is no such repository,
    revision or folder. Raises NotACheckpointError if the bucket has no committed checkpoint there,
    and UnreadableError if the Hub is not reached. Raises CorruptError or ManifestError if files and
    manifest differ, or if entries of a chain are missing. Raises NameTakenError if `folder` is
    taken, and TargetError or NoSpaceError if it cannot be written.
    """
    target = None if folder is None else local_path(folder)
    if not isinstance(source, (str, os.PathLike, Place)):
        raise ConfigError(
            f"pull: {short_repr(source)}, expected hf://user/name, the URL of a checkpoint, or its "
            "path"
        )
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    is_path = isinstance(source, str) and Path(source).is_absolute()
    kind = copy_endpoint_of(source) if is_path else endpoint_of(source)
    return kind.source(source, token).pull(target, overwrite=overwrite)


@contextmanager
def _open_for(endpoint: Endpoint, place: Place) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint at a place where the endpoint can read it.

    The Hub's client reads only local files, so a checkpoint in a bucket is pulled first. A delta is
    pulled as well, because the Hub gets all weights.
    """
    if endpoint.reads_local_files and (not place.is_local or is_delta(place)):
        place = Place(LocalStore(pull(place).path))
    with open_checkpoint(place) as opened:
        yield opened
