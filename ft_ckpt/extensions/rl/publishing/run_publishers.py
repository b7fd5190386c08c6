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

    The report is None if a newer checkpoint was waiting before the publish began.
    """

    urls: tuple[str, ...]
    """The servers."""


class Publisher:
    """Publishes in the background, one checkpoint at a time.

    Of several checkpoints that wait, only the newest is published.
    """

    def __init__(self, options: ServerOptions, after_resume: str = "resumed") -> None:
        self.options, self.after_resume = options, after_resume
        self.version: str | None = None  # of the last publish
        self._queue = JobQueue()
        self._pending: list[PendingPublish] = []
        self._started = 0  # publishes

    def begin(self, place: Place) -> PendingPublish:
        """Publish the checkpoint at `place`, leased from now on.

        An error is a warning, and raised by the handle.
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
        self._started += 1
        number = self._started

        def publish_leased() -> PublishReport | None:
            try:
                with stack:
                    if number < self._started:  # a newer one waits
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

        Warn of those not ended, which continue until the process ends.
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


def _unfinished(pushes: Sequence[PendingPublish]) -> list[PendingPublish]:
    return [pending for pending in pushes if not pending.done]


_MAX_FAILURES = 2  # tries of one checkpoint, while all servers answer


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
        """Publish the newest of `infos`; the older ones are not published any more."""
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
    run: Place,
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
    with stop_on_signal() as stop:
        for infos in poll_checkpoints(
            run.absolute, idle_seconds, poll_seconds, stop, following.note
        ):
            following.visit(infos)
        if following.error is not None and not stop.is_set():
            raise following.error
    return following.published
