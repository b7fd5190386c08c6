"""Publishes the checkpoints of a run when they are committed.

`Publisher` does so in the training process, `follow_run` in a process that watches the run.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.catalog import CheckpointInfo, in_run_order
from ft_ckpt.errors import CheckpointError, ConfigError, TargetError, UnreadableError, listing
from ft_ckpt.extensions.rl.engines import ServerOptions, connect
from ft_ckpt.extensions.rl.publishing.reports import PublishReport
from ft_ckpt.extensions.rl.publishing.steps import publish
from ft_ckpt.jobs import BackgroundJob, JobQueue
from ft_ckpt.messages import LOG, warn
from ft_ckpt.runs.folder import (
    FOLLOW_SECONDS,
    CheckpointKey,
    key_of,
    poll_checkpoints,
    stop_on_signal,
)
from ft_ckpt.storage.places import Place, location_name


@dataclass(frozen=True, eq=False, kw_only=True)
class PendingPublish(BackgroundJob[PublishReport | None]):
    """A publish in the background.

    The report is None if the publish was skipped, because a newer checkpoint was waiting.
    """

    urls: tuple[str, ...]
    """The addresses of the servers."""


class Publisher:
    """Publishes in the background, one checkpoint at a time.

    Of several checkpoints that wait, only the newest is published.
    """

    def __init__(self, options: ServerOptions, after_resume: str = "resumed") -> None:
        self.options, self.after_resume = options, after_resume
        self.version: str | None = None  # the version of the last publish
        self._queue = JobQueue()
        self._pending: list[PendingPublish] = []
        self._started_count = 0

    def begin(self, place: Place) -> PendingPublish:
        """Publish the checkpoint at `place` in the background. It is leased before this returns.

        An error is reported as a warning, and the returned handle raises it.
        """
        path = place.location
        stack = ExitStack()
        try:
            stack.enter_context(open_checkpoint(place))
        except Exception as error:  # noqa: BLE001 - raised from the handle
            self._warn_not_published(path, error)
            failed: Future[PublishReport | None] = Future()
            failed.set_exception(error)
            return PendingPublish(path=path, future=failed, urls=self.options.url)

        self._started_count += 1
        number = self._started_count

        def publish_leased() -> PublishReport | None:
            try:
                with stack:
                    if number < self._started_count:  # a newer checkpoint is waiting
                        return None
                    report = publish(place, self.options)
            except BaseException as error:
                self._warn_not_published(path, error)
                raise
            self.version = report.version
            urls = ", ".join(self.options.url)
            LOG.info("published %s as %s to %s", path, report.version, urls)
            return report

        future = self._queue.start(f"ft_ckpt-publish-{location_name(path)}", publish_leased)
        pending = PendingPublish(path=path, future=future, urls=self.options.url)
        self._pending = [*_unfinished(self._pending), pending]
        return pending

    def end(self, *, wait_for: bool) -> None:
        """Wait for all publishes if `wait_for`.

        Warns of publishes that have not ended. They continue until the process ends.
        """
        unfinished = _unfinished(self._pending)
        if wait_for and unfinished:
            newest = location_name(unfinished[-1].path)
            LOG.info("waiting until %s is published to %s", newest, ", ".join(self.options.url))
            try:
                wait([pending.future for pending in unfinished])
            finally:
                unfinished = _unfinished(unfinished)
        if unfinished:
            paths = [str(pending.path) for pending in unfinished]
            warn(f"{listing(paths)}: not published yet")

    def _warn_not_published(self, path: Path | str, error: BaseException) -> None:
        option = " --delta" if self.options.delta else ""
        warn(
            f"{path}: not published: {error}; training goes on; run `ft-ckpt publish "
            f"{path} {' '.join(self.options.url)}{option}` to try again",
        )


def _unfinished(publishes: Sequence[PendingPublish]) -> list[PendingPublish]:
    return [pending for pending in publishes if not pending.done]


_MAX_FAILURES = 2  # how often a checkpoint is tried while all servers answer


class _Following:
    """Publishes the newest checkpoint at each poll of a run, but none older than the last one."""

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

        # The newest error since the last publish.
        self.error: CheckpointError | None = None
        self._last_published: CheckpointInfo | None = None

        # Checkpoints that were published, skipped or overtaken by newer ones.
        self._done: set[CheckpointKey] = set()
        self._failures: dict[CheckpointKey, int] = {}

        # Messages that were reported: about skipped checkpoints, and about servers that do not
        # answer. The latter are reported once more after the next publish.
        self._reported_skips: set[str] = set()
        self._reported_outages: set[str] = set()

    def visit(self, infos: Sequence[CheckpointInfo]) -> None:
        """Publish the newest of `infos`. Older ones are never published after it."""
        if self._last_published is not None:
            # Older checkpoints may appear later, because a sync copies the newest one first.
            ordered = in_run_order([*infos, self._last_published])
            older = ordered[: ordered.index(self._last_published)]
            self._done.update(key_of(info) for info in older)

        waiting = [info for info in infos if key_of(info) not in self._done]
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
            published_or_older = infos[: infos.index(info) + 1]
            self._done.update(key_of(other) for other in published_or_older)
            self._last_published = info
            self.published += 1
            self.error = None
            self._reported_outages.clear()
            self.on_published(report)

    def report_unreadable(self, error: CheckpointError) -> None:
        """Report what a poll of the run could not read."""
        if isinstance(error, UnreadableError):
            self._report_once(f"{error}; trying again", self._reported_outages)
        else:
            self._report_once(f"{error}; skipped", self._reported_skips)

    def _retry(self, info: CheckpointInfo, error: CheckpointError) -> None:
        """Report an error after which the next try may succeed.

        The checkpoint is skipped at its second error that occurs while all servers answer.
        """
        key = key_of(info)
        self.error = error
        if self._all_answer():
            self._failures[key] = self._failures.get(key, 0) + 1
        if self._failures.get(key, 0) >= _MAX_FAILURES:
            self._skip(info, error)
        else:
            self._report_once(f"{error}; trying again", self._reported_outages)

    def _skip(self, info: CheckpointInfo, error: CheckpointError) -> None:
        self._done.add(key_of(info))
        self.error = error
        self._report_once(f"{info.path}: skipped: {error}", self._reported_skips)

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
    run: Place,
    options: ServerOptions,
    *,
    idle_seconds: float | None = None,
    poll_seconds: float = FOLLOW_SECONDS,
    on_published: Callable[[PublishReport], object] = lambda report: None,
    on_trouble: Callable[[str], object] = warn,
) -> int:
    """Watch `run`, and publish its newest checkpoint whenever there is a new one.

    `run` is a folder or URL that need not exist yet. Returns the number of publishes. No checkpoint
    is published twice, and none that is older than the last one. A server that does not answer is
    tried again. A checkpoint that is damaged, or that running servers refuse twice, is skipped.
    `on_trouble` gets each such message once. Ends on SIGINT or SIGTERM, after the current publish,
    and after `idle_seconds` without a new checkpoint.

    Raises ConfigError for invalid options and, until one publish has succeeded, for unsupported
    servers. After `idle_seconds` it raises the newest error since the last publish, if there is
    one.
    """
    following = _Following(options, on_published, on_trouble)
    with stop_on_signal() as stop:
        for infos in poll_checkpoints(
            run.absolute, idle_seconds, poll_seconds, stop, following.report_unreadable
        ):
            following.visit(infos)
        if following.error is not None and not stop.is_set():
            raise following.error
    return following.published
