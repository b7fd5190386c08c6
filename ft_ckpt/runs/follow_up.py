"""The steps after a commit: retention, upload, push, publish, callbacks.

They run in this order in the thread that finished the save. Their errors do not fail the save,
which is committed.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import ConfigError, listing
from ft_ckpt.extensions.rl import Publisher, ServerOptions
from ft_ckpt.extensions.transfer import (
    PendingPush,
    PushOptions,
    RunUploads,
    UploadTerms,
    begin_push,
)
from ft_ckpt.jobs import BackgroundJob, yield_to_training
from ft_ckpt.messages import short, warn
from ft_ckpt.runs.run_places import RunPlaces
from ft_ckpt.saving import SaveReport
from ft_ckpt.storage import Place

SaveHook = Callable[[SaveReport], object]  # a function of the script
AfterSave = Callable[[SaveReport], SaveReport]


@dataclass(frozen=True, eq=False)
class FollowUp:
    """The steps of one saver after its saves; uploads, pushes and publishes run in their own
    threads.
    """

    hooks: tuple[SaveHook, ...] = ()
    uploads: RunUploads | None = None
    pushes: list[PendingPush] = field(default_factory=list)
    publisher: Publisher | None = None

    def plan(
        self,
        is_main: bool,
        *,
        prune: Callable[[Place], None] | None = None,
        terms: UploadTerms | None = None,
        push_to: str | Place | None = None,
        base_id: str | None = None,
        publishes: bool = False,
        committed: Callable[[SaveReport], None] | None = None,
    ) -> AfterSave:
        """The follow-up of one save; only rank 0 (`is_main`) uploads, pushes, publishes and calls
        hooks.
        """

        def follow(report: SaveReport) -> SaveReport:
            jobs: dict[str, BackgroundJob[Any]] = {}
            if committed is not None:
                committed(report)
            if prune is not None:
                with nullcontext() if self.uploads is None else self.uploads.sweeping:
                    prune(report.place)
            if (
                is_main
                and terms is not None
                and self.uploads is not None
                and self.uploads.takes(report.place)
            ):
                jobs["upload"] = self.uploads.begin_upload(report.place, terms)
            if is_main and push_to is not None:
                push = begin_push(report.place, push_to, PushOptions(base_id=base_id))
                self.pushes.append(push)
                jobs["push"] = push
            if is_main and publishes and self.publisher is not None:
                jobs["publish"] = self.publisher.begin(report.place)
            report = replace(report, follow_ups=jobs)
            for hook in self.hooks if is_main else ():
                _call_hook(hook, report)
            return report

        return follow


def make_follow_up(
    on_saved: SaveHook | Iterable[SaveHook] | None, places: RunPlaces, config: SaverConfig
) -> FollowUp:
    """The follow-up of a saver; its uploads run at low priority."""
    uploads = None
    if places.directory is not None and places.staging is not None:
        uploads = RunUploads(places.staging, places.directory, yield_to_training)
    publisher, goal = None, config.publish
    if goal is not None:
        settings: dict[str, Any] = dict(goal) if isinstance(goal, Mapping) else {"url": goal}
        after_resume = settings.pop("after_resume", "resumed")
        publisher = Publisher(ServerOptions(**settings), after_resume)
    return FollowUp(hooks_of(on_saved), uploads, publisher=publisher)


def _call_hook(hook: SaveHook, report: SaveReport) -> None:
    try:
        hook(report)
    except Exception as error:  # noqa: BLE001 - the script's own, of any kind
        name = getattr(hook, "__name__", type(hook).__name__)
        problem = f"{type(error).__name__}: {error}"
        warn(f"{report.path}: saved, but {name} of on_saved failed: {problem}", stacklevel=2)


def hooks_of(given: SaveHook | Iterable[SaveHook] | None) -> tuple[SaveHook, ...]:
    """The functions in `given`: one, several or none. Raises ConfigError for anything else."""
    if given is None:
        return ()
    hooks = (
        (given,) if callable(given) else tuple(given) if isinstance(given, Iterable) else (given,)
    )
    wrong = [short(hook) for hook in hooks if not callable(hook)]
    if wrong:
        raise ConfigError(
            f"on_saved={listing(wrong, ', ')}: expected a function of one SaveReport, or several"
        )
    return hooks
