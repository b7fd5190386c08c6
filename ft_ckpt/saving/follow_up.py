"""What follows a committed save: older checkpoints go, its upload and a push begin, the script's functions are called.

All of it is done where the save was finished, in its thread for one in the background, and in this order. Nothing of it
fails a save: the checkpoint is there.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from ft_ckpt.checkpoint.run_places import RunPlaces
from ft_ckpt.config import SaverConfig
from ft_ckpt.messages import warn
from ft_ckpt.saving.execute import SaveReport
from ft_ckpt.saving.priority import yield_to_training
from ft_ckpt.storage.place import Place
from ft_ckpt.transfer.places import begin_push
from ft_ckpt.transfer.pushes import PendingPush, wait_for_pushes, warn_of_unpushed
from ft_ckpt.transfer.reports import PushOptions
from ft_ckpt.transfer.uploads import RunUploads, UploadTerms

SaveHook = Callable[[SaveReport], object]  # a script's own function
AfterSave = Callable[[SaveReport], SaveReport]


@dataclass(frozen=True, eq=False)
class FollowUp:
    """What one saver does after its saves; its uploads and pushes go on by themselves."""

    hooks: tuple[SaveHook, ...] = ()
    uploads: RunUploads | None = None
    pushes: list[PendingPush] = field(default_factory=list)

    def plan(
        self,
        leads: bool,
        *,
        prune: Callable[[Place], None] | None = None,
        terms: UploadTerms | None = None,
        push_to: str | Place | None = None,
        base_id: str | None = None,
    ) -> AfterSave:
        """What to do after one save; on a rank that does not lead nothing is sent and no function called."""

        def follow(report: SaveReport) -> SaveReport:
            if prune is not None:
                with nullcontext() if self.uploads is None else self.uploads.sweeping:
                    prune(report.place)
            if leads and terms is not None and self.uploads is not None and self.uploads.takes(report.place):
                report = replace(report, upload=self.uploads.begin_upload(report.place, terms))
            if leads and push_to is not None:
                push = begin_push(report.place, push_to, PushOptions(base_id=base_id))
                self.pushes.append(push)
                report = replace(report, push=push)
            for hook in self.hooks if leads else ():
                _call_hook(hook, report)
            return report

        return follow

    def end_pushes(self, *, wait: bool) -> None:
        """Wait for all pushes, or name those that have not ended, which go on until the process ends."""
        (wait_for_pushes if wait else warn_of_unpushed)(self.pushes)


def make_follow_up(on_saved: SaveHook | Iterable[SaveHook] | None, places: RunPlaces, config: SaverConfig) -> FollowUp:
    """What a saver in these places does after its saves; its uploads give way to training."""
    uploads = None
    if places.directory is not None and places.staging is not None:
        give_way = partial(yield_to_training, low_io=config.io_priority == "low")
        uploads = RunUploads(places.staging, places.directory, give_way)
    return FollowUp(hooks_of(on_saved), uploads)


def _call_hook(hook: SaveHook, report: SaveReport) -> None:
    try:
        hook(report)
    except Exception as error:  # noqa: BLE001 - the script's own, of any kind
        name = getattr(hook, "__name__", type(hook).__name__)
        told = f"{type(error).__name__}: {error}"
        warn(f"{report.path}: saved, but {name} of on_saved failed: {told}", stacklevel=2)


def hooks_of(given: SaveHook | Iterable[SaveHook] | None) -> tuple[SaveHook, ...]:
    """One function, several or none."""
    if given is None:
        return ()
    return (given,) if callable(given) else tuple(given)
