"""Runs what follows the commit of a save: retention, upload, push, publish and callbacks.

The steps run in this order, in the thread that finished the save. The save is committed then, so
their errors do not fail it.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import ConfigError, listing
from ft_ckpt.jobs import BackgroundJob
from ft_ckpt.messages import short_repr, warn
from ft_ckpt.runs.folder import RunPlaces
from ft_ckpt.runs.saves.extension_parts import (
    RunPublisher,
    Uploads,
    UploadTerms,
    begin_push,
    end_pushes,
    open_publisher,
    open_uploads,
)
from ft_ckpt.saving.planning import SaveReport
from ft_ckpt.storage.places import Place

# a callback of the script (`on_saved`)
SaveHook = Callable[[SaveReport], object]
# what follows one save: gets the report, and returns it with the jobs that were started
FollowUp = Callable[[SaveReport], SaveReport]


@dataclass(frozen=True, eq=False)
class FollowUps:
    """What all saves of one saver use after their commit.

    Uploads, pushes and publishes run in threads of their own. `pushes` are those that were started.
    """

    hooks: tuple[SaveHook, ...] = ()
    uploads: Uploads | None = None
    publisher: RunPublisher | None = None
    pushes: list[BackgroundJob[Any]] = field(default_factory=list)

    def of_save(
        self,
        is_main: bool,
        *,
        prune: Callable[[Place], None] | None = None,
        upload_terms: UploadTerms | None = None,
        push_to: str | Place | None = None,
        base_id: str | None = None,
        publishes: bool = False,
        on_committed: Callable[[SaveReport], None] | None = None,
    ) -> FollowUp:
        """Return what follows one save, as a function of its report.

        Only rank 0 (`is_main`) uploads, pushes, publishes and calls hooks. A step whose argument is
        None or False is not done.
        """

        def follow_up(report: SaveReport) -> SaveReport:
            if on_committed is not None:
                on_committed(report)
            if prune is not None:
                deletion_lock: AbstractContextManager[Any] = nullcontext()
                if self.uploads is not None:
                    deletion_lock = self.uploads.deletion_lock
                with deletion_lock:
                    prune(report.place)

            if not is_main:
                return report
            jobs: dict[str, BackgroundJob[Any]] = {}
            uploads = self.uploads
            if uploads is not None and upload_terms is not None and uploads.covers(report.place):
                jobs["upload"] = uploads.begin_upload(report.place, upload_terms)
            if push_to is not None:
                jobs["push"] = begin_push(report.place, push_to, base_id)
                self.pushes.append(jobs["push"])

            if self.publisher is not None and publishes:
                jobs["publish"] = self.publisher.begin(report.place)
            report = replace(report, follow_ups=jobs)
            for hook in self.hooks:
                _call_hook(hook, report)
            return report

        return follow_up

    def end(self, *, wait: bool) -> None:
        """Wait for pushes and publishes, or only warn of those that have not ended yet."""
        end_pushes(self.pushes, wait=wait)
        if self.publisher is not None:
            self.publisher.end(wait_for=wait)


def open_follow_ups(
    on_saved: SaveHook | Iterable[SaveHook] | None, places: RunPlaces, config: SaverConfig
) -> FollowUps:
    """Open uploads and the publisher for a saver. Raises ConfigError for invalid settings."""
    uploads = None
    if places.directory is not None and places.upload_folder is not None:
        uploads = open_uploads(places.upload_folder, places.directory)
    publisher = None if config.publish is None else open_publisher(config.publish)
    return FollowUps(hooks_of(on_saved), uploads, publisher)


def _call_hook(hook: SaveHook, report: SaveReport) -> None:
    try:
        hook(report)
    except Exception as error:  # noqa: BLE001 - the script may raise any error
        name = getattr(hook, "__name__", type(hook).__name__)
        problem = f"{type(error).__name__}: {error}"
        warn(f"{report.path}: saved, but {name} of on_saved failed: {problem}")


def hooks_of(on_saved: SaveHook | Iterable[SaveHook] | None) -> tuple[SaveHook, ...]:
    """Return the functions in `on_saved`, which is one function, several or None.

    Raises ConfigError for anything else.
    """
    if on_saved is None:
        return ()
    if not callable(on_saved) and isinstance(on_saved, Iterable):
        hooks = tuple(on_saved)
    else:
        hooks = (on_saved,)
    wrong = [short_repr(hook) for hook in hooks if not callable(hook)]
    if wrong:
        raise ConfigError(
            f"on_saved={listing(wrong, ', ')}: expected a function of one SaveReport, or several"
        )
    return hooks
