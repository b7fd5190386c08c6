"""Publishes the checkpoints of a training process in the background, after each save."""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.errors import listing
from ft_ckpt.extensions.rl.options import ServerOptions
from ft_ckpt.extensions.rl.publish_reports import PublishReport
from ft_ckpt.extensions.rl.publishing import publish
from ft_ckpt.jobs import BackgroundJob, JobQueue
from ft_ckpt.messages import LOG, warn
from ft_ckpt.storage.places import Place, location_name


@dataclass(frozen=True, eq=False, kw_only=True)
class PendingPublish(BackgroundJob[PublishReport | None]):
    """A publish in the background.

    Its report is None if a newer checkpoint was waiting before it began.
    """

    urls: tuple[str, ...]
    """The servers."""


class Publisher:
    """Publishes in the background, one checkpoint at a time.

    Of several that wait, only the newest.
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
            warn(f"{listing(paths)}: not published yet", stacklevel=3)

    def _warn_not_published(self, path: Path | str, error: BaseException) -> None:
        option = " --delta" if self.options.delta else ""
        warn(
            f"{path}: not published: {error}; training goes on; run `ft-ckpt publish "
            f"{path} {' '.join(self.options.url)}{option}` to try again",
            stacklevel=3,
        )


def _unfinished(pushes: Sequence[PendingPublish]) -> list[PendingPublish]:
    return [pending for pending in pushes if not pending.done]
