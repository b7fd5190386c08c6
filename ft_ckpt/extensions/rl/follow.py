"""Publishes the checkpoints of a run when they are committed, from a process that watches it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ft_ckpt.checkpoint.catalog import CheckpointInfo, in_run_order
from ft_ckpt.errors import CheckpointError, ConfigError, TargetError, UnreadableError
from ft_ckpt.extensions.rl.options import ServerOptions
from ft_ckpt.extensions.rl.publish_reports import PublishReport
from ft_ckpt.extensions.rl.publishing import publish
from ft_ckpt.extensions.rl.servers import connect
from ft_ckpt.messages import warn
from ft_ckpt.runs.folder import FOLLOW_SECONDS, CheckpointKey, key_of, looks, stop_on_signal
from ft_ckpt.storage.places import Place, open_place

_MAX_FAILURES = 2  # of one checkpoint, while all servers answer


class _Following:
    """Publishes the newest checkpoint of a run at each look.

    Never one that is older than the last one.
    """

    def __init__(
        self,
        options: ServerOptions,
        on_published: Callable[[PublishReport], object],
        on_trouble: Callable[[str], object],
    ) -> None:
        self.options = options
        self.on_published = on_published
        self.on_trouble = on_trouble
        self.published = 0
        self.error: CheckpointError | None = None  # the newest since the last publish
        self._newest: CheckpointInfo | None = None  # of those that were published
        # published, skipped or obsolete: not published again
        self._settled: set[CheckpointKey] = set()
        self._failures: dict[CheckpointKey, int] = {}
        self._skipped: set[str] = set()  # reported
        self._outages: set[str] = set()  # reported since the last publish

    def visit(self, infos: Sequence[CheckpointInfo]) -> None:
        """Publish the newest of `infos`, and settle it and all older ones."""
        if self._newest is not None:  # a sync brings the newest first
            ordered = in_run_order([*infos, self._newest])
            older = ordered[: ordered.index(self._newest)]
            self._settled.update(key_of(info) for info in older)
        waiting = [info for info in infos if key_of(info) not in self._settled]
        if not waiting:
            return
        info = waiting[-1]
        try:
            report = publish(info.place, self.options)
        except (TargetError, UnreadableError) as error:
            self._retry(info, error)
        except ConfigError as error:
            if not self.published:
                raise
            self._retry(info, error)  # a proxy may answer while the server restarts
        except CheckpointError as error:
            self._skip(info, error)
        else:
            published = infos[: infos.index(info) + 1]
            self._settled.update(key_of(older) for older in published)
            self._newest = info
            self.published += 1
            self.error = None
            self._outages.clear()
            self.on_published(report)

    def note(self, error: CheckpointError) -> None:
        """Report what the look at the run could not read."""
        if isinstance(error, UnreadableError):
            self._report_once(f"{error}; trying again", self._outages)
        else:
            self._report_once(f"{error}; skipped", self._skipped)

    def _retry(self, info: CheckpointInfo, error: CheckpointError) -> None:
        """Report an error that may pass.

        Skip the checkpoint at the second one while all servers answer.
        """
        key = key_of(info)
        self.error = error
        self._failures[key] = self._failures.get(key, 0) + self._all_answer()
        if self._failures[key] >= _MAX_FAILURES:
            self._skip(info, error)
        else:
            self._report_once(f"{error}; trying again", self._outages)

    def _skip(self, info: CheckpointInfo, error: CheckpointError) -> None:
        self._settled.add(key_of(info))
        self.error = error
        self._report_once(f"{info.path}: skipped: {error}", self._skipped)

    def _all_answer(self) -> bool:
        if self.options.delta:
            return True
        try:
            for client in self.options.clients():
                connect(client)
        except CheckpointError:
            return False
        return True

    def _report_once(self, text: str, reported: set[str]) -> None:
        if text not in reported:
            reported.add(text)
            self.on_trouble(text)


def follow_run(
    run: str | Path | Place,
    options: ServerOptions,
    *,
    idle_seconds: float | None = None,
    poll_seconds: float = FOLLOW_SECONDS,
    on_published: Callable[[PublishReport], object] = lambda report: None,
    on_trouble: Callable[[str], object] = warn,
) -> int:
    """Publish each new newest checkpoint of `run`, a folder or URL that may not exist yet.

    Returns how many. Only the newest is published, none twice, and none that is older than the last
    one. A server that does not answer is retried; a checkpoint that is damaged, or that running
    servers refuse twice, is skipped; `on_trouble` gets each of these messages once. Ends on SIGINT
    or SIGTERM, after the current publish, and after `idle_seconds` without a new checkpoint.

    Raises ConfigError for invalid options and, until one publish has succeeded, for unsupported
    servers. After `idle_seconds` it raises the newest error since the last publish, if there is
    one.
    """
    following = _Following(options, on_published, on_trouble)
    place = open_place(run).absolute
    with stop_on_signal() as stop:
        for infos in looks(place, idle_seconds, poll_seconds, stop, following.note):
            following.visit(infos)
        if following.error is not None and not stop.is_set():
            raise following.error
    return following.published
