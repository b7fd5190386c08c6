"""Pushes the checkpoints of a Trainer, and the model that it has saved, to the Hub."""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress

from ft_ckpt.checkpoint.manifest import CARD_NAME
from ft_ckpt.extensions.transfer.copies import PushReport
from ft_ckpt.extensions.transfer.endpoints import PushOptions
from ft_ckpt.extensions.transfer.hub import HubPlace
from ft_ckpt.extensions.transfer.sending import PendingPush, begin_push
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import files_made_by, open_place

# the Trainer's own name for the folder of the newest checkpoint
_LAST_FOLDER = "last-checkpoint"


def push_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Start to push a checkpoint, as `hub_strategy` says.

    Nothing is pushed while an earlier push is running, unless `hub_always_push` is set. Only rank 0
    pushes.
    """
    args = trainer.args
    strategy = args.hub_strategy
    if not trainer.is_world_process_zero() or strategy == HubStrategy.END:
        return
    if not args.hub_always_push and _is_pushing(trainer):
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    by_step = args.save_strategy == SaveStrategy.STEPS
    progress = f"epoch {int(trainer.state.epoch)}"
    if by_step:
        progress = f"step {trainer.state.global_step}"
    message = f"Training in progress, {progress}"  # the Trainer's own message
    pushes = [_start_hub_push(trainer, checkpoint, "", message)]
    if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        folder = _LAST_FOLDER if strategy == HubStrategy.CHECKPOINT else checkpoint.name
        pushes.append(
            _start_hub_push(trainer, checkpoint, folder, f"{message}, checkpoint", state=True)
        )

    _register_pushes(trainer, pushes)


def push_saved(
    trainer: Trainer,
    message: str | None,
    card_options: Mapping[str, Any],
    *,
    blocking: bool,
    token: str | None,
    revision: str | None,
) -> "PushReport | Future[PushReport]":
    """Push the files that `save_model` wrote to the output folder.

    The Trainer makes the model card with `card_options`. An earlier push is waited for first. With
    `blocking`, the report is returned and errors of `push` are raised. Without it, the future is
    returned and has the report or the error.
    """
    folder = Path(trainer.args.output_dir)
    card = _trainer_card(trainer, folder, card_options)
    trainer._finish_current_push()
    push = _start_hub_push(trainer, folder, "", message, card=card, token=token, revision=revision)
    if blocking:
        return push.result()
    _register_pushes(trainer, [push])
    return push.future


def _trainer_card(trainer: Trainer, saved: Path, options: Mapping[str, Any]) -> str | None:
    """Return the text of the model card that the Trainer makes; None if it makes none.

    The card is made in a scratch folder, because the saved card is part of a checkpoint.
    """
    tags = options.get("tags") or ()
    tags = [tags] if isinstance(tags, str) else list(tags)
    tags += getattr(trainer.model, "model_tags", None) or ()
    repo_name = (trainer.args.hub_model_id or saved.absolute().name).split("/")[-1]
    arguments = {**options, "model_name": options.get("model_name") or repo_name}
    if tags:
        arguments["tags"] = list(dict.fromkeys(tags))
    store = LocalStore(saved)
    saved_card = store.read(CARD_NAME) if store.stat(CARD_NAME) else None

    def make_card(scratch: Path) -> None:
        if saved_card is not None:
            LocalStore(scratch).write(CARD_NAME, saved_card)
        output_dir = trainer.args.output_dir
        trainer.args.output_dir = str(scratch)
        try:
            trainer.create_model_card(**arguments)
        finally:
            trainer.args.output_dir = output_dir

    card = files_made_by(make_card).get(CARD_NAME)
    return None if card is None else card.decode()


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
    target = HubPlace(trainer.hub_model_id, revision or args.hub_revision or "main", folder)
    options = PushOptions(
        token=token or args.hub_token,
        base_id=trainer.ft_ckpt.config.base_id,
        message=message,
        **more,
    )
    return begin_push(open_place(checkpoint), target.url, options)


def _register_pushes(trainer: Trainer, pushes: list[PendingPush]) -> None:
    """Register running pushes with the Trainer, which waits for them at the end of training."""
    jobs = [push.future for push in pushes]
    if _is_pushing(trainer):
        trainer.push_in_progress.jobs.extend(jobs)
    else:
        trainer.push_in_progress = PushInProgress(jobs)


def _is_pushing(trainer: Trainer) -> bool:
    return trainer.push_in_progress is not None and not trainer.push_in_progress.is_done()
