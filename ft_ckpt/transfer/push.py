"""Push and pull: the kinds of places by URL scheme, and the queue of pushes."""

import atexit
import concurrent.futures.thread  # noqa: F401 - what is registered below must come after what this registers
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.errors import ConfigError, listing
from ft_ckpt.messages import LOG, warn
from ft_ckpt.storage.local_disk import local_path
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import SCHEMES, Place, is_url, location_name, open_place
from ft_ckpt.transfer.outgoing import PullReport, PushOptions, PushReport


@dataclass(frozen=True, eq=False)
class PendingPush:
    """A push in the background."""

    path: Path | str
    """The checkpoint that is pushed: its path, or its URL."""
    url: str
    """Where to."""
    future: "Future[PushReport]"
    """Resolves to the report."""

    @property
    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self.future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, at most `timeout` seconds; returns whether it has ended, with or without an error."""
        return bool(wait([self.future], timeout).done)

    def result(self, timeout: float | None = None) -> PushReport:
        """Wait for it, at most `timeout` seconds, and give its report.

        Raises what the push raised; TimeoutError when time is up.
        """
        return self.future.result(timeout)


class PushQueue:
    """A queue of jobs, one at a time, each in a daemon thread. The process waits for them at exit.

    Not a ThreadPoolExecutor: Python joins its threads at exit even after an interrupt of that wait.
    """

    def __init__(self, at_exit: Callable[[], object] | None = None) -> None:
        self.lock = threading.Lock()
        self.last: threading.Thread | None = None
        self.at_exit = at_exit or self.join
        _QUEUES.add(self)

    def begin(self, name: str, job: Callable[[], object]) -> None:
        """Run `job`, which must not raise, in a thread of that name after all earlier jobs."""
        with self.lock:
            before = self.last

            def run() -> None:
                if before is not None:
                    before.join()
                job()

            self.last = threading.Thread(target=run, name=name, daemon=True)
            self.last.start()

    def join(self, seconds: float | None = None) -> bool:
        """Wait for all jobs, at most `seconds`; returns whether all have ended. A forked child has none."""
        last = self.last
        if last is None:
            return True
        last.join(seconds)
        return not last.is_alive()


_QUEUES: WeakSet[PushQueue] = WeakSet()
_QUEUE = PushQueue()


def start_push(place: Place, url: str, send: Callable[[OpenCheckpoint], PushReport]) -> PendingPush:
    """Send the checkpoint at `place` in the background, leased from now on. All errors are raised from the handle."""
    push = PendingPush(place.location, url, Future())
    stack = ExitStack()
    try:
        held = stack.enter_context(open_checkpoint(place, compares=False))
    except Exception as error:  # noqa: BLE001 - raised from the handle
        _end_failed(push, error)
        return push

    def send_held() -> None:
        try:
            with stack:
                report = send(held)
        except BaseException as error:  # noqa: BLE001 - raised from the handle
            _end_failed(push, error)
        else:
            push.future.set_result(report)

    _QUEUE.begin(f"ft_ckpt-push-{location_name(push.path)}", send_held)
    return push


def wait_for_pushes(pushes: Sequence[PendingPush]) -> None:
    """Wait until all have ended; an interrupt warns of those that have not."""
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
    if left := [f"{push.path} to {push.url}" for push in pushes if not push.done]:
        warn(f"{listing(left)}: not pushed yet; `ft-ckpt push` does it again", stacklevel=3)


def _end_failed(push: PendingPush, error: BaseException) -> None:
    warn(
        f"{push.path}: not pushed: {error}; the checkpoint is not touched, `ft-ckpt push {push.path} {push.url}` does "
        "it again",
        stacklevel=4,
    )
    push.future.set_exception(error)


def _end_queues() -> None:
    for queue in list(_QUEUES):
        queue.at_exit()


# Uploads use thread pools, which accept no work after their own exit hook. Hooks run in reverse order of registration,
# so this one runs before it.
getattr(threading, "_register_atexit", atexit.register)(_end_queues)


# For each scheme the module with `destination_url`, `send_checkpoint` and `fetch_checkpoint`. They are imported on use,
# because their clients are slow to import.
_HUB = "ft_ckpt.transfer.hub"
_MODULES = {"hf": _HUB, **dict.fromkeys(SCHEMES, "ft_ckpt.transfer.buckets")}
Checkpoint = str | os.PathLike[str] | Place


def push(
    checkpoint: Checkpoint,
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
    """Push the committed `checkpoint` to a model repository on the Hub, as one commit; it is leased meanwhile.

    `destination` is "user/name", or "hf://user/name[@revision][/folder]". A repository or branch that is not there is
    made, `private` if that is True. All digests are compared first. Sent are weights, configs, tokenizer and a manifest
    of just these: no training state unless `state` is True, and no path of this machine; `base_id` is the name of the
    base model that takes the place of one. The text of a card that is there stays, its metadata are brought up to date.
    Weights of older checkpoints that readers would mix up with these are deleted by the same commit. What is there
    already is not sent again: then no commit is made.

    A `destination` in a bucket ("s3://...", or a `Place` there) gets a copy, as `copy` makes it, also without the
    state; there is no `revision`, `private`, `token`, `base_id` or `message` then. What is in a bucket itself is pulled
    into the cache before it is pushed to the Hub.

    With `background` the answer is a handle at once; pushes go one after the other, and a failed one is warned of.

    Raises ConfigError for a destination that cannot be, NotACheckpointError when nothing is committed at `checkpoint`,
    CorruptError when its files differ from its manifest, TargetError when the Hub refuses or is not reached; then the
    repository is as it was.
    """
    options = PushOptions(revision, private, token, state, base_id, message)
    return (begin_push if background else push_now)(checkpoint, destination, options)


def push_now(checkpoint: Checkpoint, destination: str | Place, options: PushOptions) -> PushReport:
    """As `push`, with its options in one object."""
    sender = _module_for(destination)
    sender.destination_url(destination, options)
    with open_checkpoint(_place_for(sender, checkpoint), compares=False) as held:
        report: PushReport = sender.send_checkpoint(held, destination, options)
        return report


def begin_push(checkpoint: Checkpoint, destination: str | Place, options: PushOptions) -> PendingPush:
    """As `push` in the background, with its options in one object."""
    sender = _module_for(destination)
    url: str = sender.destination_url(destination, options)
    quiet = replace(options, quiet=True)
    return start_push(
        _place_for(sender, checkpoint), url, lambda held: sender.send_checkpoint(held, destination, quiet)
    )


def push_goal(destination: str, **options: Any) -> str | Place:
    """Where to push to, in a bucket with a client of these `options`. Raises ConfigError for what cannot be."""
    goal = open_place(destination, **options) if is_url(destination) else destination
    _module_for(goal).destination_url(goal, PushOptions())
    return goal


def pull(
    source: str | Place,
    folder: str | os.PathLike[str] | None = None,
    *,
    token: str | None = None,
    overwrite: bool = False,
) -> PullReport:
    """Fetch the checkpoint at `source` into `folder`, or, from a bucket, into the cache; its path is in the report.

    `source` is "hf://user/name[@revision][/folder]", of which all comes from one commit, or the URL or `Place` of a
    checkpoint in a bucket. With a manifest every file is compared with it, and the checkpoint is committed as a save
    would be, or not at all. What has none is fetched from the Hub as it is. `folder` must be new or empty; `overwrite`
    lets a checkpoint take the place of another.

    Without `folder` a checkpoint in a bucket comes into the cache: ~/.cache/ft_ckpt, or the folder that FT_CKPT_CACHE
    names. What is there is compared and not fetched again, nor are files of 1 MiB or more that another checkpoint there
    has; of several processes that pull it one fetches. Nothing in it should be changed. Checkpoints that were not
    pulled for the longest time are deleted for new ones once it has 200 GB, or what FT_CKPT_CACHE_SIZE says; none that
    was pulled within the hour, is pinned or in use.

    Raises ConfigError for a source that cannot be, MissingError when there is no such repository, revision or folder,
    NotACheckpointError when nothing is committed there in a bucket, UnreadableError when the Hub is not reached,
    CorruptError or ManifestError when files and manifest differ, NameTakenError when `folder` is taken, TargetError or
    NoSpaceError when it cannot be written.
    """
    fetcher, target = _module_for(source), None if folder is None else local_path(folder)
    report: PullReport = fetcher.fetch_checkpoint(source, target, token=token, overwrite=overwrite)
    return report


def _place_for(sender: ModuleType, checkpoint: Checkpoint) -> Place:
    """The checkpoint where the sender can read it: the Hub's client reads local files only, so a bucket's is pulled."""
    place = open_place(checkpoint)
    if isinstance(place.store, LocalStore) or sender.__name__ != _HUB:
        return place
    return open_place(pull(place).path)


def _module_for(place: str | Place) -> ModuleType:
    scheme, mark, _ = str(place).partition("://")
    scheme = scheme.lower() if mark else "hf"
    if scheme not in _MODULES:
        known = ", ".join(f"{each}://" for each in _MODULES)
        raise ConfigError(f"{place}: {scheme}:// is no place to send to or fetch from; expected {known}")
    return importlib.import_module(_MODULES[scheme])
