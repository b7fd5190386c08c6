"""Publishes the checkpoints of a run when they are committed: from the training process, or from one that watches."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint.catalog import CheckpointInfo, in_run_order
from ft_ckpt.checkpoint.follow import POLL_SECONDS, Follower, key_of
from ft_ckpt.checkpoint.open_checkpoint import open_checkpoint
from ft_ckpt.engines.options import ServerOptions
from ft_ckpt.engines.publish import PublishReport, publish
from ft_ckpt.engines.servers import connect
from ft_ckpt.errors import CheckpointError, ConfigError, TargetError, UnreadableError, listing
from ft_ckpt.messages import LOG, warn
from ft_ckpt.storage.place import Place, location_name, open_place
from ft_ckpt.transfer.push import PushQueue


@dataclass(frozen=True, eq=False)
class PendingPublish:
    """A publish in the background."""

    path: Path | str
    """The checkpoint: its path, or its URL."""
    urls: tuple[str, ...]
    """The servers."""
    future: "Future[PublishReport | None]"
    """Resolves to the report; to None if a newer checkpoint was waiting before it began."""

    @property
    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self.future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, at most `timeout` seconds; returns whether it has ended, with or without an error."""
        return bool(wait([self.future], timeout).done)

    def result(self, timeout: float | None = None) -> PublishReport | None:
        """Wait for it, at most `timeout` seconds, and return its report.

        Raises the error of the publish; TimeoutError after `timeout` seconds.
        """
        return self.future.result(timeout)


class Publisher:
    """Publishes in the background, one checkpoint at a time; of several that wait, only the newest."""

    def __init__(self, options: ServerOptions, after_resume: str = "resumed") -> None:
        self.options, self.after_resume = options, after_resume
        self.version: str | None = None  # of the last publish
        self._queue, self._pending = PushQueue(), list[PendingPublish]()

    def begin(self, place: Place) -> PendingPublish:
        """Publish the checkpoint at `place`, leased from now on. An error is a warning, and raised by the handle."""
        pending = PendingPublish(place.location, self.options.url, Future())
        stack = ExitStack()
        try:
            stack.enter_context(open_checkpoint(place, compares=False))
        except Exception as error:  # noqa: BLE001 - raised from the handle
            self._end_failed(pending, error)
            return pending
        self._pending = [*(each for each in self._pending if not each.done), pending]

        def publish_held() -> None:
            report = None
            try:
                with stack:
                    if self._pending[-1] is pending:
                        report = publish(place, self.options)
                        self.version = report.version
                        LOG.info("published %s as %s to %s", pending.path, report.version, ", ".join(self.options.url))
            except BaseException as error:  # noqa: BLE001 - raised from the handle
                self._end_failed(pending, error)
            else:
                pending.future.set_result(report)

        self._queue.begin(f"ft_ckpt-publish-{location_name(pending.path)}", publish_held)
        return pending

    def end(self, *, wait_for: bool) -> None:
        """Wait for all publishes if `wait_for`; warn of those not ended, which continue until the process ends."""
        left = [pending for pending in self._pending if not pending.done]
        if wait_for and left:
            LOG.info("waiting until %s is published to %s", location_name(left[-1].path), ", ".join(self.options.url))
            try:
                wait([pending.future for pending in left])
            finally:
                left = [pending for pending in left if not pending.done]
        if left:
            warn(f"{listing([str(each.path) for each in left])}: not published yet", stacklevel=3)

    def _end_failed(self, pending: PendingPublish, error: BaseException) -> None:
        pending.future.set_exception(error)
        warn(
            f"{pending.path}: not published: {error}; training goes on; run `ft-ckpt publish {pending.path} "
            f"{' '.join(pending.urls)}{' --delta' if self.options.delta else ''}` to try again",
            stacklevel=3,
        )


@dataclass(eq=False)
class _PublishingFollower(Follower):
    options: ServerOptions
    on_published: Callable[[PublishReport], object]
    published: int = 0
    newest: CheckpointInfo | None = None  # of those that were published

    def visit(self, waiting: Sequence[CheckpointInfo], infos: Sequence[CheckpointInfo]) -> None:
        """Publish the newest checkpoint, and settle it and all older ones."""
        if self.newest is not None:  # a sync brings the newest first
            ordered = in_run_order([*infos, self.newest])
            self.settled |= {key_of(each) for each in ordered[: ordered.index(self.newest)]}
        waiting = [each for each in waiting if key_of(each) not in self.settled]
        if not waiting:
            return
        info = waiting[-1]
        try:
            report = publish(info.place, self.options)
        except (TargetError, UnreadableError) as error:
            self.retry(info, error, counts=self.all_answer())
        except ConfigError as error:
            if not self.published:
                raise
            # a proxy may answer while the server restarts
            self.retry(info, error, counts=self.all_answer())
        except CheckpointError as error:
            self.skip(info, error)
        else:
            self.settled |= {key_of(each) for each in infos[: infos.index(info) + 1]}
            self.newest = info
            self.published += 1
            self.errors.clear()
            self.outages.clear()
            self.on_published(report)

    def all_answer(self) -> bool:
        try:
            for client in () if self.options.delta else self.options.clients():
                connect(client)
        except CheckpointError:
            return False
        return True


def follow_run(
    run: str | Path | Place,
    options: ServerOptions,
    *,
    idle_seconds: float | None = None,
    poll_seconds: float = POLL_SECONDS,
    on_published: Callable[[PublishReport], object] = lambda report: None,
    on_trouble: Callable[[str], object] = warn,
) -> int:
    """Publish each new newest checkpoint of `run`, a folder or URL that may not exist yet; returns how many.

    Only the newest is published, none twice, and none that is older than the last one. A server that does not answer is
    retried; a checkpoint that is damaged, or that running servers refuse twice, is skipped; `on_trouble` gets each of
    these messages once. Ends on SIGINT or SIGTERM, after the current publish, and after `idle_seconds` without a new
    checkpoint.

    Raises ConfigError for invalid options and, until one publish has succeeded, for unsupported servers. After
    `idle_seconds` it raises the newest error since the last publish, if there is one.
    """
    follower = _PublishingFollower(open_place(run).absolute, on_trouble, options, on_published)
    follower.follow(idle_seconds, poll_seconds)
    return follower.published
