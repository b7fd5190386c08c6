"""Pushes what a Trainer saves to the Hub, as its own settings say: from committed checkpoints, in the background."""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress

from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.scratch import files_made_by
from ft_ckpt.transfer.hub_place import HubPlace
from ft_ckpt.transfer.places import begin_push
from ft_ckpt.transfer.pushes import PendingPush
from ft_ckpt.transfer.reports import PushOptions, PushReport

_CARD = "README.md"
_FOLDER_OF_LAST = "last-checkpoint"  # the Trainer's own word


def push_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Begin to push a checkpoint as `hub_strategy` says; with the last push under way only if `hub_always_push`."""
    args, strategy = trainer.args, trainer.args.hub_strategy
    if not trainer.is_world_process_zero() or strategy == HubStrategy.END:
        return
    if not args.hub_always_push and _is_pushing(trainer):
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    message = _message_of(trainer)
    pushes = [_start_hub_push(trainer, checkpoint, "", message)]
    if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        folder = _FOLDER_OF_LAST if strategy == HubStrategy.CHECKPOINT else checkpoint.name
        pushes.append(_start_hub_push(trainer, checkpoint, folder, f"{message}, checkpoint", state=True))
    _note_pushes(trainer, pushes)


def push_saved(
    trainer: Trainer,
    message: str | None,
    told: Mapping[str, Any],
    *,
    blocking: bool,
    token: str | None,
    revision: str | None,
) -> "PushReport | Future[PushReport]":
    """Push what `save_model` has put into the output folder, with the card that the Trainer makes of what it is `told`.

    What is under way is waited for. Raises what `push` raises, or its future does.
    """
    folder = Path(trainer.args.output_dir)
    card = _trainer_card(trainer, folder, told)
    trainer._finish_current_push()
    push = _start_hub_push(trainer, folder, "", message, card=card, token=token, revision=revision)
    if blocking:
        return push.result()
    _note_pushes(trainer, [push])
    return push.future


def _trainer_card(trainer: Trainer, saved: Path, told: Mapping[str, Any]) -> str | None:
    """The text of the card; it is made in a folder of its own, as the one that was saved is part of a checkpoint."""
    tags = told.get("tags") or ()
    tags = [*([tags] if isinstance(tags, str) else tags), *(getattr(trainer.model, "model_tags", None) or ())]
    name = told.get("model_name") or (trainer.args.hub_model_id or saved.absolute().name).split("/")[-1]
    given = {**told, "model_name": name, **({"tags": list(dict.fromkeys(tags))} if tags else {})}
    before = LocalStore(saved).read(_CARD) if LocalStore(saved).stat(_CARD) else None

    def make_card(place: Path) -> None:
        if before is not None:
            LocalStore(place).write(_CARD, before)
        output_dir, trainer.args.output_dir = trainer.args.output_dir, str(place)
        try:
            trainer.create_model_card(**given)
        finally:
            trainer.args.output_dir = output_dir

    made = files_made_by(make_card).get(_CARD)
    return None if made is None else made.decode()


def _start_hub_push(
    trainer: Trainer,
    checkpoint: Path,
    folder: str,
    message: str | None,
    *,
    token: str | None = None,
    revision: str | None = None,
    **more: Any,
) -> PendingPush:
    args = trainer.args
    config = trainer.ft_ckpt.config
    place = HubPlace(trainer.hub_model_id, revision or args.hub_revision or "main", folder)
    options = PushOptions(token=token or args.hub_token, base_id=config.base_id, message=message, **more)
    return begin_push(checkpoint, place.url, options)


def _message_of(trainer: Trainer) -> str:
    """What the Trainer calls such a commit."""
    if trainer.args.save_strategy == SaveStrategy.STEPS:
        return f"Training in progress, step {trainer.state.global_step}"
    return f"Training in progress, epoch {int(trainer.state.epoch)}"


def _note_pushes(trainer: Trainer, pushes: list[PendingPush]) -> None:
    """Let the Trainer know what is under way: it waits for that at the end of training."""
    jobs = [push.future for push in pushes]
    if _is_pushing(trainer):
        trainer.push_in_progress.jobs.extend(jobs)
    else:
        trainer.push_in_progress = PushInProgress(jobs)


def _is_pushing(trainer: Trainer) -> bool:
    return trainer.push_in_progress is not None and not trainer.push_in_progress.is_done()
