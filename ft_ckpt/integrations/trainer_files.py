"""Chooses, loads and prunes the checkpoints in the output folder of a Trainer.

The folder may hold checkpoints of ft_ckpt and checkpoints that the Trainer itself wrote. In error
messages, a whole checkpoint is one that is complete and not damaged.
"""

import math
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.catalog import run_checkpoints
from ft_ckpt.checkpoint.checks import damage_of
from ft_ckpt.checkpoint.leases import TOMBSTONE
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, read_manifest
from ft_ckpt.errors import (
    CorruptError,
    LoadError,
    ManifestError,
    NotACheckpointError,
    Problem,
    UnreadableError,
    listing,
)
from ft_ckpt.messages import announce, warn
from ft_ckpt.ranks import Ranks
from ft_ckpt.retention import Keep
from ft_ckpt.runs.folder import has_training_state, prune_run, recover_all
from ft_ckpt.runs.items import run_sources, walk_models
from ft_ckpt.runs.resume import ResumePoint, open_for_all, open_resume_point, restore_weights
from ft_ckpt.runs.state import read_document
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, files_made_by

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
    """The checkpoint that a Trainer resumes from, the same on every rank.

    If it is not a checkpoint of ft_ckpt, all attributes but `path` keep their defaults.

    Attributes:
        path: The path of the checkpoint; None for a fresh start.
        is_of_ft_ckpt: Whether it has a training state of ft_ckpt.
        state: The text of the Trainer's own state file; None if it cannot be read.
        items: The names of the objects in the training state.
        epoch: The number of passes over the data that are done.
        batch: The number of batches that are done in the next pass.
    """

    path: str | None = None
    is_of_ft_ckpt: bool = False
    state: str | None = None
    items: tuple[str, ...] = ()
    epoch: int = 0
    batch: int = 0

    def path_for_trainer(self, folder: str) -> str | None:
        """Return a folder with the Trainer's own state file, which the Trainer reads on each rank.

        This is the checkpoint. If this rank does not see the checkpoint, the file is written to
        `folder`, and `folder` is returned.
        """
        if self.path is None or self.state is None:
            return self.path
        if _trainer_state(Place(LocalStore(Path(self.path)))) == self.state:
            return self.path
        LocalStore(Path(folder)).write(TRAINER_STATE_NAME, self.state.encode())
        return folder


def requested_checkpoint(resume_from_checkpoint: Any) -> Any:
    """Convert the argument of `train` to "auto", "must", a path, or None for a fresh start."""
    if not resume_from_checkpoint:
        return None
    mode = resume_from_checkpoint
    if isinstance(mode, str):
        mode = mode.lower()
    return _MODES.get(mode, resume_from_checkpoint)


def chosen_by(ranks: Ranks, request: str, folder: Place, deep: bool) -> ChosenCheckpoint:
    """Return the checkpoint that rank 0 chooses for `request`.

    Collective: call it on every rank. `request` is a path, or "auto" or "must" for the newest
    intact checkpoint. Raises CorruptError, and NotACheckpointError if there is none for "must".
    """

    def find_on_rank_0() -> dict[str, Any]:
        if not ranks.is_main:
            return {}
        place = _requested_checkpoint(request, folder, deep)
        if place is None:
            return {}
        manifest = read_manifest(place) if _has_file(place, MANIFEST_NAME) else None
        if manifest is None or not has_training_state(manifest):
            return {"path": str(place)}
        document = read_document(place.folder, manifest)
        progress = document["progress"]
        return {
            "path": str(place),
            "is_of_ft_ckpt": True,
            "state": _trainer_state(place),
            "items": sorted(document["items"]),
            "epoch": progress["epoch"],
            "batch": progress["batch"],
        }

    # The ranks agree: all get what rank 0 found, and its error is raised on all.
    found, error = ranks.attempt(find_on_rank_0)
    fields = dict(ranks.agree("train(resume_from_checkpoint=...)", found, error).result)
    fields["items"] = tuple(fields.get("items", ()))
    return ChosenCheckpoint(**fields)


def _requested_checkpoint(request: str, folder: Place, deep: bool) -> Place | None:
    """Return the checkpoint at the path `request`.

    For "auto" and "must", return the newest intact one in `folder`. If there is none for "auto",
    return None, which means a fresh start. Raises CorruptError for a damaged one, and
    NotACheckpointError if there is none for "must".
    """
    if request not in ("auto", "must"):
        # A URL becomes a local path here, which the Trainer then refuses.
        place = Place(LocalStore(Path(request)))
        # A checkpoint without a manifest of ft_ckpt is checked by the Trainer itself.
        problems: tuple[str, ...] = ()
        if _has_file(place, MANIFEST_NAME):
            problems = _problems_of(place, deep)
        if problems:
            advice = "resume_from_checkpoint=True takes the newest whole one"
            raise CorruptError(f"{place}: {listing(problems)}; {advice}")
        return place

    recover_all(folder)  # deletes or restores what killed saves have left
    newest = _newest_intact(folder, deep)
    if newest is None and request == "must":
        raise NotACheckpointError(
            f"{folder}: no whole checkpoint in it; resume_from_checkpoint=True begins afresh"
        )

    if newest is None:
        announce(f"a fresh start: no whole checkpoint in {folder}")
    return newest


def _newest_intact(folder: Place, deep: bool) -> Place | None:
    """Return the intact checkpoint in `folder` with the highest step, of ft_ckpt or the Trainer.

    Returns None if there is no checkpoint. Raises CorruptError if there are checkpoints of ft_ckpt,
    but none is intact.
    """
    names_by_step = []
    for entry in folder.folder.list_folder().folders:
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            names_by_step.append((int(match[1]), entry.name))

    committed: list[str] = []
    for _, name in sorted(names_by_step, reverse=True):
        place = Place(folder.folder, name)
        # An UnreadableError ends the search, because this checkpoint may be intact.
        problems = _problems_of(place, deep)
        if not problems:
            return place
        warn(f"{place}: not whole, trying an older one: {listing(problems)}")
        if _has_file(place, MANIFEST_NAME):
            committed.append(name)

    if committed:
        raise CorruptError(
            f"{folder}: {listing(committed, ', ')}: damaged (see the warnings), and there is no "
            "other checkpoint; move them away to begin afresh"
        )

    return None


def _problems_of(place: Place, deep: bool) -> tuple[str, ...]:
    """Return why a checkpoint is not intact; nothing if it is.

    Raises UnreadableError if it cannot be read now.
    """
    try:
        if _has_file(place, MANIFEST_NAME):
            return damage_of(place, deep=deep)
        if _has_file(place, TOMBSTONE):
            return ("it is being deleted",)
        # The Trainer writes this file last, so a checkpoint that has it is complete.
        TrainerState.load_from_json(place.folder.where(TRAINER_STATE_NAME))
    except UnreadableError:
        raise
    except (ManifestError, OSError, ValueError, TypeError) as error:
        return (str(error),)
    return ()


def has_saver_state(place: Place) -> bool:
    """Check whether a checkpoint has a training state of ft_ckpt."""
    return _has_file(place, MANIFEST_NAME) and has_training_state(read_manifest(place))


def load_best_weights(model: nn.Module, best: Place, deep: bool, ranks: Ranks) -> None:
    """Load the weights of rank 0's checkpoint `best` into `model`.

    Collective: call it on every rank. Ranks that do not see the checkpoint get a copy. `deep`
    compares the digests of all its files. Raises CorruptError naming damaged files, LoadError when
    the weights do not fit.
    """
    with ExitStack() as stack:
        # `run` waits for all ranks, so all have loaded before the stack deletes the copies.
        ranks.run("load_best_model_at_end", partial(_load_best, model, best, deep, ranks, stack))


def _load_best(model: nn.Module, best: Place, deep: bool, ranks: Ranks, stack: ExitStack) -> None:
    def open_best() -> ResumePoint:
        checkpoint = stack.enter_context(open_checkpoint(best))
        _refuse_damaged_best(best, checkpoint.find_problems(deep=False))
        return open_resume_point(checkpoint, stack)

    point, problems = open_for_all(open_best, "opening the best model", deep, ranks, stack)
    _refuse_damaged_best(best, problems)
    assert point is not None, "it is open if it has no problems"
    sources = run_sources(walk_models(model, []), [])
    outcome = restore_weights(sources, point)
    if outcome.status != "restored":
        raise LoadError(f"{best}: the best model was not loaded: {outcome.detail}")


def _refuse_damaged_best(best: Place, problems: Sequence[Problem]) -> None:
    if problems:
        raise CorruptError(f"{best}: {listing(problems)}; the best model was not loaded")


def _has_file(place: Place, name: str) -> bool:
    return place.folder.stat(name) is not None


def _trainer_state(place: Place) -> str | None:
    """Read the Trainer's own state file in a checkpoint; return None if it cannot be read."""
    with suppress(OSError, ValueError):
        return place.folder.read(TRAINER_STATE_NAME).decode()
    return None


def prune_older(
    folder: Place, newest: Place, best: Place | None, limit: int | None, keep: Keep | None
) -> None:
    """Delete checkpoints that `keep` does not select, of the run that saved `newest`.

    Without `keep`, the newest `limit` checkpoints stay. `best` is the Trainer's best checkpoint; it
    always stays and counts as one of them. Warns of checkpoints that could not be deleted.
    """
    run_id = read_manifest(newest).run_id
    if keep is None and limit is not None and limit > 0:
        infos = run_checkpoints(folder)
        paths = [info.path for info in infos if run_id in (None, info.manifest.run_id)]
        if best is not None and best.location not in paths[-limit:]:
            limit -= 1  # the best one stays besides the newest
        keep = Keep(last=max(limit, 1))

    if keep is not None:
        protected = [newest]
        if best is not None:
            protected.append(best)
        report = prune_run(folder, keep, run_id=run_id, protect=protected)
        for problem in report.problems:
            warn(f"{folder}: an old checkpoint was not deleted: {problem}")


def state_text(trainer: Trainer) -> str:
    """Return the text of the Trainer's own state file, with its callbacks' current state."""
    stateful = [*trainer.callback_handler.callbacks, trainer.control]
    exported = [part for part in stateful if isinstance(part, ExportableState)]
    trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
    files = files_made_by(
        lambda folder: trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
    )
    return files[TRAINER_STATE_NAME].decode()


def logged_metrics(state: Any) -> dict[str, float]:
    """Return the finite numbers that the Trainer has logged at the current step."""
    logged: dict[str, Any] = {}
    for row in state.log_history:
        if row.get("step") == state.global_step:
            logged.update(row)
    metrics = {}
    for name, value in logged.items():
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
        if is_number and name not in ("step", "epoch"):
            metrics[name] = float(value)
    return metrics
