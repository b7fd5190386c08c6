"""Push and pull, and the queue of pushes."""

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
    """The URL of its destination."""


_queue = JobQueue()  # pushes run one after the other


def start_push(place: Place, url: str, send: Callable[[OpenCheckpoint], PushReport]) -> PendingPush:
    """Send the checkpoint at `place` in the background, leased from now on.

    All errors are raised from the handle.
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
    """Wait until all pushes have ended; warns of the others on an interrupt."""
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
    manifest of these files, and the training state if `state` is True. Local paths are replaced by
    `base_id`, the name of the base model, or removed. An existing model card keeps its text; its
    metadata are updated. The same commit deletes files of older checkpoints that the old manifest
    lists or that readers would confuse with these. Existing files are not sent again; if nothing
    changes, there is no commit.

    To a bucket ("s3://...", or a `Place` there) the checkpoint is copied as by `copy`, also without
    the state; `revision`, `private`, `token`, `base_id` and `message` raise ConfigError. A
    checkpoint in a bucket is pulled into the cache before it is pushed to the Hub. A storage bucket
    of the Hub, "hf://buckets/user/name[/folder]", takes `token` and `private`; a missing one is
    created, as a private one unless `private` is False. Its manifest is sent last.

    With `background` a handle is returned at once; pushes run one after the other, and a failure is
    a warning.

    Raises ConfigError for an invalid destination, NotACheckpointError when nothing is committed at
    `checkpoint`, CorruptError when its files differ from its manifest, TargetError when the Hub
    refuses or cannot be reached, or when a .gitignore in the repository has dropped files from the
    commit.
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
        with _open_for(
            endpoint, checkpoint
        ) as opened:  # in the thread, because it may be pulled first
            return endpoint.push(opened, quiet)

    return start_push(checkpoint, endpoint.url, send)


def push_goal(destination: str, **options: Any) -> str | Place:
    """Return the destination of a push; in a bucket, with a client of these `options`.

    Raises ConfigError if the destination is invalid.
    """
    if not isinstance(destination, str):
        raise ConfigError(
            f"push: {short_repr(destination)}, expected a Hub repository as 'user/name', "
            "or a URL, as text"
        )
    goal = open_place(destination, **options) if is_url(destination) else destination
    endpoint_of(goal).destination(goal, PushOptions())
    return goal


def pull(
    source: PlaceLike,
    folder: str | os.PathLike[str] | None = None,
    *,
    token: str | None = None,
    overwrite: bool = False,
) -> PullReport:
    """Fetch the checkpoint at `source` into `folder`, or, from a bucket, into the cache.

    `source` is "hf://user/name[@revision][/folder]", read from a single commit, or the URL or
    `Place` of a checkpoint in a bucket ("s3://...", "hf://buckets/user/name/..."), or the absolute
    path or `Place` of a checkpoint in a folder. With a manifest, every file is compared with it,
    and the checkpoint is committed like a save, or not at all. Files on the Hub without a manifest
    are fetched as they are. `folder` must be new or empty; with `overwrite`, a checkpoint may
    replace another one. The report has the path.

    A delta, see `publish`, is rebuilt to the checkpoint that it stands for, byte for byte. Its base
    is read in the parent of `folder` if it is there, else rebuilt from the chain.

    Without `folder`, a checkpoint in a bucket, but not one of the Hub, is fetched into the cache:
    FT_CKPT_CACHE, or ft_ckpt in HF_HOME. An entry of the cache is compared and not fetched again,
    nor are files of 1 MiB or more that another entry has; of several processes one fetches. Do not
    change files in the cache. The least recently pulled checkpoints are deleted when the cache
    exceeds 200 GB, or FT_CKPT_CACHE_SIZE, unless they are pinned, in use, or were pulled within the
    hour.

    Raises ConfigError for an invalid source, MissingError when there is no such repository,
    revision or folder, NotACheckpointError when the bucket has no committed checkpoint there,
    UnreadableError when the Hub is not reached, CorruptError or ManifestError when files and
    manifest differ, or entries of a chain are missing, NameTakenError when `folder` is taken,
    TargetError or NoSpaceError when it cannot be written.
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
    """Open the checkpoint where the endpoint can read it.

    The Hub's client reads local files only, so a checkpoint in a bucket is pulled first. So is a
    delta, because the Hub gets all weights.
    """
    if endpoint.reads_local_files and (not place.is_local or is_delta(place)):
        place = Place(LocalStore(pull(place).path))
    with open_checkpoint(place) as opened:
        yield opened
