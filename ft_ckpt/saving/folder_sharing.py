"""Decides how ranks share the files of a folder: how many of them may write into one file.

The decision is a `Mode`. It depends on the file system of the folder, on the clients of that file
system, and on whether all ranks see the folder. A client is one kernel with its cache: on a network
file system, each machine is one. If the kind of the file system does not decide, the ranks try to
write into one file at the same time (`range_trial`).
"""

import socket
import uuid
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ft_ckpt.errors import CorruptError
from ft_ckpt.messages import LOG
from ft_ckpt.processes import machine_id
from ft_ckpt.ranks import Ranks, Values, rank_numbers, try_action
from ft_ckpt.saving.planning import Mode
from ft_ckpt.saving.range_trial import try_ranges
from ft_ckpt.storage import Mount, Store, mount_of
from ft_ckpt.storage.local import LocalStore, folder_of

_PROBE = ".ft_ckpt-probe"


@dataclass(frozen=True)
class FolderSharing:
    """How the ranks may share files in one folder.

    All fields except `views` are equal on all ranks.

    Attributes:
        mode: The mode of saves that are large enough for all ranks to write.
        reason: Why this mode was chosen.
        clients: Number of clients of the file system among the ranks; 0 for a bucket.
        blind: The ranks that do not see what rank 0 writes.
        range_problem: What the trial of byte ranges has found wrong; "" if nothing, None if there
            was no trial.
        views: How each rank sees the folder (see `_view_of`); () except on rank 0.
    """

    mode: Mode
    reason: str
    clients: int = 1
    blind: tuple[int, ...] = ()
    range_problem: str | None = None
    views: Values = ()


class SharedFolders:
    """Caches how the ranks share the files of folders.

    The cache is cleared after a failed save.
    """

    def __init__(self) -> None:
        self._sharing: dict[str, FolderSharing] = {}  # by URL

    def sharing_of(
        self, folder: Store, ranks: Ranks, trial_folder: Store | None = None
    ) -> FolderSharing:
        """Return how the ranks share files in `folder`.

        If it is not known yet, small files are written into `trial_folder`, which is inside
        `folder`; by default they are written into `folder` itself. Collective: call it on every
        rank.
        """
        if ranks.size == 1:
            return FolderSharing(_expected_mode(folder), "one rank")
        if folder.url not in self._sharing:
            sharing = try_sharing(trial_folder or folder, ranks)
            self._sharing[folder.url] = sharing
            if ranks.is_main:
                LOG.info("%s: %s: %s", folder.url, sharing.mode.value, sharing.reason)
        return self._sharing[folder.url]

    def last_mode(self, folder: Store) -> Mode:
        """Return the mode that `sharing_of` has found for `folder`.

        If it is not known yet, return the mode that most folders of its kind have.
        """
        sharing = self._sharing.get(folder.url)
        return _expected_mode(folder) if sharing is None else sharing.mode

    def forget(self) -> None:
        """Clear the cache."""
        self._sharing.clear()


def _expected_mode(folder: Store) -> Mode:
    return Mode.SPREAD if folder.local_folder is None else Mode.SHARED


def try_sharing(store: Store, ranks: Ranks) -> FolderSharing:
    """Find out how several ranks may share files in the folder or bucket `store`.

    Rank 0 writes a small file, and every rank tells how it sees this file and its file system.
    Collective: call it on every rank. Raises the error of rank 0 on all ranks if rank 0 cannot
    write there.
    """
    token = uuid.uuid4().hex
    name = f"{_PROBE}-{token}"

    def write_probe() -> None:
        if ranks.is_main:
            store.write(name, token.encode())

    _, error = try_action(write_probe)

    # The folder may have another name on another rank, so all ranks take the name of rank 0.
    probe = ranks.agree(
        "the files of save()", {"folder": store.url, "name": name, "token": token}, error
    ).result
    probed = store if store.local_folder is None else LocalStore(Path(probe["folder"]))
    view, error = try_action(partial(_view_of, probed, probe["name"], probe["token"]))
    try:
        agreed = ranks.agree("the look at the files of save()", view, error, decide=_decide)
    finally:
        if ranks.is_main:
            store.delete([name])

    decision = agreed.result
    clients = decision["clients"]
    blind = tuple(decision["blind"])
    if decision["mode"] is not None:
        mode = Mode[decision["mode"]]
        return FolderSharing(mode, decision["reason"], clients, blind, views=agreed.values)

    # The store is a folder here, because a bucket needs no trial.
    problem = try_ranges(folder_of(probed), ranks)
    mode, reason = Mode.SHARED, "what ranks wrote into one file at the same time was all there"
    if problem:
        mode, reason = Mode.SPREAD, problem
    return FolderSharing(mode, reason, clients, blind, problem, agreed.values)


def _view_of(store: Store, name: str, token: str) -> dict[str, Any]:
    """Describe, as JSON, how this rank sees the folder.

    `sees` says whether the rank reads the file that rank 0 has written, `host` is its machine.
    `client` and `mount` identify the file system; they are absent for a bucket, and for a rank that
    does not see the file.
    """
    try:
        sees = store.read(name) == token.encode()
    except CorruptError:  # there is no such file, or it cannot be read
        sees = False
    view: dict[str, Any] = {"sees": sees, "host": socket.gethostname()}
    folder = store.local_folder
    if folder is None or not sees:
        return view
    mount = mount_of(folder)
    # A kernel has one cache for all mounts of a device. So machine and device identify a client.
    client = f"{machine_id() or view['host']} {folder.stat().st_dev}"
    return {**view, "client": client, "mount": None if mount is None else asdict(mount)}


def _decide(views: Values) -> dict[str, Any]:
    """Choose the mode and its reason on rank 0, from the views of all ranks.

    The mode is None if a trial has to decide.
    """
    blind = [rank for rank, view in enumerate(views) if not view["sees"]]
    clients = {view["client"] for view in views if "client" in view}
    mounts = []
    for view in views:
        if view.get("mount") is not None:
            mounts.append(Mount(**view["mount"]))

    mode: Mode | None = None
    reason = ""
    if blind:
        mode, reason = Mode.MAIN, f"rank(s) {rank_numbers(blind)} do not see what rank 0 writes"
    elif not clients:
        mode, reason = Mode.SPREAD, "an object of a bucket has one writer"
    elif len(mounts) == len(views) and all(mount.is_local for mount in mounts):
        mode, reason = Mode.SHARED, f"one kernel merges what ranks write to {mounts[0].kind}"
    elif len(clients) > 1:
        mode, reason = _decide_by_kind(mounts)

    return {
        "mode": None if mode is None else mode.name,
        "reason": reason,
        "clients": len(clients),
        "blind": blind,
    }


def _decide_by_kind(mounts: list[Mount]) -> tuple[Mode | None, str]:
    """Choose the mode for several clients of one file system, and its reason.

    The mode is None if the kind of the file system does not decide.
    """
    for mount in mounts:
        if mount.is_bucket:
            return Mode.MAIN, f"{mount.kind} uploads whole files, at a time of its own"
        if mount.is_close_to_open:
            return Mode.SPREAD, f"{mount.kind} does not promise byte ranges to several clients"
        if mount.locks_chunks:
            return Mode.SPREAD, f"{mount.source} lets one client at a time write into a file"
    return None, ""
