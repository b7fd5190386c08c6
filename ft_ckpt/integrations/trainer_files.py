"""The output folder of a Trainer: chooses, loads, prunes and pushes checkpoints, those of ft_ckpt
and its own.
"""

import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress

from ft_ckpt.checkpoint import (
    CARD_NAME,
    MANIFEST_NAME,
    TOMBSTONE,
    damage_of,
    open_checkpoint,
    read_manifest,
    run_checkpoints,
)
from ft_ckpt.errors import (
    CorruptError,
    LoadError,
    ManifestError,
    NotACheckpointError,
    Problem,
    UnreadableError,
    listing,
)
from ft_ckpt.extensions.transfer import HubPlace, PendingPush, PushOptions, PushReport, begin_push
from ft_ckpt.messages import announce, warn
from ft_ckpt.ranks import Ranks
from ft_ckpt.retention import Keep
from ft_ckpt.runs import (
    ResumePoint,
    has_training_state,
    open_for_all,
    open_resume_point,
    prune_run,
    read_document,
    recover_all,
    restore_weights,
    run_sources,
    walk_models,
)
from ft_ckpt.storage import LocalStore, files_made_by, open_place

_NAME = re.compile(r"checkpoint-(\d+)")
_MODES = {
    True: "auto",
    "true": "auto",
    "auto": "auto",
    "latest": "auto",
    "must": "must",
    "false": None,
    "never": None,
}


@dataclass(frozen=True)
class ChosenCheckpoint:
    """The checkpoint that a Trainer resumes from, the same on every rank."""

    path: str | None = None  # None: a fresh start
    is_ours: bool = False  # whether it has a training state of ft_ckpt
    state: str | None = None  # text of the Trainer's own state file in a checkpoint of ft_ckpt
    items: tuple[str, ...] = ()  # names of the objects in its training state
    epoch: int = 0  # passes over the data that a checkpoint of ft_ckpt counts as done
    batch: int = 0  # batches done in the pass after them

    def path_for_trainer(self, folder: str) -> str | None:
        """The folder with the Trainer's own state file: the checkpoint, or `folder` if this rank
        does not see it.
        """
        if self.path is None or self.state is None or _trainer_state(Path(self.path)) == self.state:
            return self.path
        LocalStore(Path(folder)).write(TRAINER_STATE_NAME, self.state.encode())
        return folder


def wanted_of(resume_from_checkpoint: Any) -> Any:
    """The argument of `train` as "auto", "must", a path, or None for a fresh start."""
    if not resume_from_checkpoint:
        return None
    mode = (
        resume_from_checkpoint.lower()
        if isinstance(resume_from_checkpoint, str)
        else resume_from_checkpoint
    )
    return _MODES.get(mode, resume_from_checkpoint)


def chosen_by(ranks: Ranks, wanted: str, folder: Path, deep: bool) -> ChosenCheckpoint:
    """The checkpoint that rank 0 finds for `wanted`: a path, or for "auto" and "must" the newest
    whole checkpoint.

    Collective. Raises CorruptError, and NotACheckpointError if there is none for "must".
    """

    def find_on_leader() -> dict[str, Any]:
        path = _wanted_checkpoint(wanted, folder, deep) if ranks.is_main else None
        if path is None:
            return {}
        manifest = read_manifest(open_place(path)) if _has_file(path, MANIFEST_NAME) else None
        if manifest is None or not has_training_state(manifest):
            return {"path": str(path)}
        document = read_document(LocalStore(path), manifest)
        progress, items = document["progress"], sorted(document["items"])
        place = {"epoch": progress["epoch"], "batch": progress["batch"]}
        return {
            "path": str(path),
            "is_ours": True,
            "state": _trainer_state(path),
            "items": items,
            **place,
        }

    found, error = ranks.attempt(find_on_leader)
    chosen = ranks.agree("train(resume_from_checkpoint=...)", found, error).result
    return ChosenCheckpoint(**{**chosen, "items": tuple(chosen.get("items", ()))})


def _wanted_checkpoint(wanted: str, folder: Path, deep: bool) -> Path | None:
    """The checkpoint at the path `wanted`, or for a mode the newest whole one in `folder`; None for
    a fresh start.
    """
    if wanted not in ("auto", "must"):
        path = Path(wanted)
        # The Trainer checks a checkpoint without a manifest of ft_ckpt itself.
        if _has_file(path, MANIFEST_NAME) and (problems := _problems_of(path, deep)):
            advice = "resume_from_checkpoint=True takes the newest whole one"
            raise CorruptError(f"{path}: {listing(list(problems))}; {advice}")
        return path
    recover_all(folder)  # leftovers of killed saves
    newest = _newest_whole(folder, deep)
    if newest is None and wanted == "must":
        raise NotACheckpointError(
            f"{folder}: no whole checkpoint in it; resume_from_checkpoint=True begins afresh"
        )
    if newest is None:
        announce(f"a fresh start: no whole checkpoint in {folder}")
    return newest


def _newest_whole(folder: Path, deep: bool) -> Path | None:
    """The whole checkpoint in `folder` with the highest step, of ft_ckpt or the Trainer; None
    without one.

    Raises CorruptError if there are checkpoints of ft_ckpt, but none is whole.
    """
    committed: list[str] = []
    below = LocalStore(folder).list_folder().folders
    named = [
        (int(match[1]), folder / each.name)
        for each in below
        if (match := _NAME.fullmatch(each.name))
    ]
    for _, path in sorted(named, reverse=True):
        problems = _problems_of(path, deep)  # raises UnreadableError, so that no older one is taken
        if not problems:
            return path
        warn(f"{path}: not whole, trying an older one: {listing(list(problems))}", stacklevel=2)
        committed += [path.name] if _has_file(path, MANIFEST_NAME) else []
    if committed:
        raise CorruptError(
            f"{folder}: {listing(committed, ', ')}: damaged (see the warnings), and there is no "
            "other checkpoint; move them away to begin afresh"
        )
    return None


def _problems_of(path: Path, deep: bool) -> tuple[str, ...]:
    try:
        if _has_file(path, MANIFEST_NAME):
            return damage_of(open_place(path), deep=deep)
        if _has_file(path, TOMBSTONE):
            return ("it is being deleted",)
        # the Trainer writes this file last
        TrainerState.load_from_json(str(path / TRAINER_STATE_NAME))
    except UnreadableError:
        raise
    except (ManifestError, OSError, ValueError, TypeError) as error:
        return (str(error),)
    return ()


def has_our_state(path: Path) -> bool:
    return _has_file(path, MANIFEST_NAME) and has_training_state(read_manifest(open_place(path)))


def load_best_weights(model: nn.Module, path: Path, deep: bool, ranks: Ranks) -> None:
    """Load the weights of rank 0's checkpoint at `path` into `model`; ranks that do not see it get
    a copy.

    Collective. `deep` compares the digests of all its files. Raises CorruptError naming damaged
    files, LoadError when the weights do not fit.
    """
    with ExitStack() as stack:
        # all ranks have loaded before the stack deletes the copies on other nodes
        ranks.run("load_best_model_at_end", partial(_load_best, model, path, deep, ranks, stack))


def _load_best(model: nn.Module, path: Path, deep: bool, ranks: Ranks, stack: ExitStack) -> None:
    def open_best() -> ResumePoint:
        held = stack.enter_context(open_checkpoint(open_place(path)))
        _refuse_damaged_best(path, held.find_problems(deep=False))
        return open_resume_point(held, stack)

    point, problems = open_for_all(open_best, "opening the best model", deep, ranks, stack)
    _refuse_damaged_best(path, problems)
    assert point is not None, "it is open if it has no problems"
    outcome = restore_weights(run_sources(walk_models(model, []), []), point)
    if outcome.status != "restored":
        raise LoadError(f"{path}: the best model was not loaded: {outcome.detail}")


def _refuse_damaged_best(path: Path, problems: Sequence[Problem]) -> None:
    if problems:
        raise CorruptError(f"{path}: {listing(problems)}; the best model was not loaded")


def _has_file(path: Path, name: str) -> bool:
    return LocalStore(path).stat(name) is not None


def _trainer_state(path: Path) -> str | None:
    """The text of the Trainer's own state file in a checkpoint; None if it cannot be read."""
    with suppress(OSError, ValueError):
        return LocalStore(path).read(TRAINER_STATE_NAME).decode()
    return None


def prune_older(
    folder: Path, newest: Path, best: str | None, limit: int | None, keep: Keep | None
) -> None:
    """Delete checkpoints of the run of `newest` that `keep` does not select; without `keep`, all
    above `limit`.

    `best` is the Trainer's best checkpoint, which stays. Warns of checkpoints that could not be
    deleted.
    """
    run_id = read_manifest(open_place(newest)).run_id
    if keep is None and limit is not None and limit > 0:
        ours = [
            info
            for info in run_checkpoints(open_place(folder))
            if run_id in (None, info.manifest.run_id)
        ]
        last = [info.path for info in ours][-limit:]
        is_beside = best is not None and Path(best) not in last  # the best counts among the limit
        keep = Keep(last=max(limit - is_beside, 1))
    if keep is not None:
        report = prune_run(
            folder, keep, run_id=run_id, protect=[newest] if best is None else [newest, best]
        )
        for problem in report.problems:
            warn(f"{folder}: an old checkpoint was not deleted: {problem}", stacklevel=3)


def state_text(trainer: Trainer) -> str:
    """The text of the Trainer's own state file, with the current state of its callbacks."""
    stateful = [*trainer.callback_handler.callbacks, trainer.control]
    exported = [each for each in stateful if isinstance(each, ExportableState)]
    trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
    made = files_made_by(
        lambda folder: trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
    )
    return made[TRAINER_STATE_NAME].decode()


def metrics_of(state: Any) -> dict[str, float]:
    """The finite numbers that the Trainer has logged at the current step."""
    rows = [row for row in state.log_history if row.get("step") == state.global_step]
    found = {
        name: value for row in rows for name, value in row.items() if name not in ("step", "epoch")
    }
    return {
        name: float(v)
        for name, v in found.items()
        if isinstance(v, (int, float)) and math.isfinite(v)
    }


_FOLDER_OF_LAST = "last-checkpoint"  # as the Trainer names it


def push_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Start to push a checkpoint by `hub_strategy`; while the last push is running, only if
    `hub_always_push`.
    """
    args, strategy = trainer.args, trainer.args.hub_strategy
    if not trainer.is_world_process_zero() or strategy == HubStrategy.END:
        return
    if not args.hub_always_push and _is_pushing(trainer):
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    by_step = args.save_strategy == SaveStrategy.STEPS
    place = f"step {trainer.state.global_step}" if by_step else f"epoch {int(trainer.state.epoch)}"
    message = f"Training in progress, {place}"  # the Trainer's own message
    pushes = [_start_hub_push(trainer, checkpoint, "", message)]
    if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        folder = _FOLDER_OF_LAST if strategy == HubStrategy.CHECKPOINT else checkpoint.name
        pushes.append(
            _start_hub_push(trainer, checkpoint, folder, f"{message}, checkpoint", state=True)
        )
    _note_pushes(trainer, pushes)


def push_saved(
    trainer: Trainer,
    message: str | None,
    card_options: Mapping[str, Any],
    *,
    blocking: bool,
    token: str | None,
    revision: str | None,
) -> "PushReport | Future[PushReport]":
    """Push the files that `save_model` wrote to the output folder, with the Trainer's card for
    `card_options`.

    Waits for the running push first. Raises the errors of `push`; without `blocking` its future
    does.
    """
    folder = Path(trainer.args.output_dir)
    card = _trainer_card(trainer, folder, card_options)
    trainer._finish_current_push()
    push = _start_hub_push(trainer, folder, "", message, card=card, token=token, revision=revision)
    if blocking:
        return push.result()
    _note_pushes(trainer, [push])
    return push.future


def _trainer_card(trainer: Trainer, saved: Path, options: Mapping[str, Any]) -> str | None:
    """The text of the Trainer's card.

    It is made in a scratch folder: the saved card is part of a checkpoint.
    """
    tags = options.get("tags") or ()
    tags = [
        *([tags] if isinstance(tags, str) else tags),
        *(getattr(trainer.model, "model_tags", None) or ()),
    ]
    name = (
        options.get("model_name")
        or (trainer.args.hub_model_id or saved.absolute().name).split("/")[-1]
    )
    given = {**options, "model_name": name, **({"tags": list(dict.fromkeys(tags))} if tags else {})}
    before = LocalStore(saved).read(CARD_NAME) if LocalStore(saved).stat(CARD_NAME) else None

    def make_card(place: Path) -> None:
        if before is not None:
            LocalStore(place).write(CARD_NAME, before)
        output_dir, trainer.args.output_dir = trainer.args.output_dir, str(place)
        try:
            trainer.create_model_card(**given)
        finally:
            trainer.args.output_dir = output_dir

    made = files_made_by(make_card).get(CARD_NAME)
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
    args, config = trainer.args, trainer.ft_ckpt.config
    place = HubPlace(trainer.hub_model_id, revision or args.hub_revision or "main", folder)
    options = PushOptions(
        token=token or args.hub_token, base_id=config.base_id, message=message, **more
    )
    return begin_push(checkpoint, place.url, options)


def _note_pushes(trainer: Trainer, pushes: list[PendingPush]) -> None:
    """Register running pushes with the Trainer, which waits for them at the end of training."""
    jobs = [push.future for push in pushes]
    if _is_pushing(trainer):
        trainer.push_in_progress.jobs.extend(jobs)
    else:
        trainer.push_in_progress = PushInProgress(jobs)


def _is_pushing(trainer: Trainer) -> bool:
    return trainer.push_in_progress is not None and not trainer.push_in_progress.is_done()
