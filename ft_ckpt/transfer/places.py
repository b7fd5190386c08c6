"""Where checkpoints are sent and fetched from: a line for each kind of place, told by the scheme of its URL."""

import importlib
import os
from dataclasses import replace
from types import ModuleType
from typing import Any

from ft_ckpt.checkpoint.open_checkpoint import open_checkpoint
from ft_ckpt.errors import ConfigError
from ft_ckpt.storage.local_disk import local_path
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.open_store import SCHEMES, is_url
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.transfer.pushes import PendingPush, start_push
from ft_ckpt.transfer.reports import PullReport, PushOptions, PushReport

# For each scheme the module with `destination_url` and `send_checkpoint`, and the one with `fetch_checkpoint`; they
# are imported when one is asked for, as their clients take a while.
_BUCKETS = dict.fromkeys(SCHEMES, "ft_ckpt.transfer.bucket_places")
_SENDERS = {"hf": "ft_ckpt.transfer.hub_push", **_BUCKETS}
_FETCHERS = {"hf": "ft_ckpt.transfer.hub_pull", **_BUCKETS}
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
    """Push as `push` does, with its options in one."""
    sender = _module_for(destination, _SENDERS)
    sender.destination_url(destination, options)
    with open_checkpoint(_place_for(sender, checkpoint), compares=False) as held:
        report: PushReport = sender.send_checkpoint(held, destination, options)
        return report


def begin_push(checkpoint: Checkpoint, destination: str | Place, options: PushOptions) -> PendingPush:
    """Push as `push` does in the background, with its options in one."""
    sender = _module_for(destination, _SENDERS)
    url: str = sender.destination_url(destination, options)
    quiet = replace(options, quiet=True)
    return start_push(
        _place_for(sender, checkpoint), url, lambda held: sender.send_checkpoint(held, destination, quiet)
    )


def push_goal(destination: str, **options: Any) -> str | Place:
    """Where to push to, in a bucket with a client of these `options`. Raises ConfigError for what cannot be."""
    goal = open_place(destination, **options) if is_url(destination) else destination
    _module_for(goal, _SENDERS).destination_url(goal, PushOptions())
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
    fetcher, target = _module_for(source, _FETCHERS), None if folder is None else local_path(folder)
    report: PullReport = fetcher.fetch_checkpoint(source, target, token=token, overwrite=overwrite)
    return report


def _place_for(sender: ModuleType, checkpoint: Checkpoint) -> Place:
    """The checkpoint, where this sender can read it: the Hub's client takes nothing but files of this machine."""
    place = open_place(checkpoint)
    if isinstance(place.store, LocalStore) or sender.__name__ in _BUCKETS.values():
        return place
    return open_place(pull(place).path)


def _module_for(place: str | Place, modules: dict[str, str]) -> ModuleType:
    scheme, mark, _ = str(place).partition("://")
    scheme = scheme.lower() if mark else "hf"
    if scheme not in modules:
        known = ", ".join(f"{each}://" for each in modules)
        raise ConfigError(f"{place}: {scheme}:// is no place to send to or fetch from; expected {known}")
    return importlib.import_module(modules[scheme])
