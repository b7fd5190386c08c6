"""Checkpoints of transformers' `Trainer` and of the trainers built on it (TRL's), made and read by ft_ckpt.

    trainer = SFTTrainer(..., callbacks=[FtCkptCallback()])   # of one that is there: FtCkptCallback.attach(trainer)
    trainer.train(resume_from_checkpoint=True)

A Trainer has no place to put another way of saving in. The callback therefore slips a class between the trainer's own
and `Trainer`, which replaces what `Trainer` alone does. Files that a subclass adds in its own `save_model` or `_save`
are committed with the checkpoint; one that writes weights there itself is refused. Schedule (`save_strategy`), metrics,
early stopping and the best model remain the Trainer's business.
"""

import inspect
import logging
import math
import re
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS  # type: ignore[attr-defined]
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState

from ft_ckpt import CheckpointSaver, engines, resume, rng, starting, state_files
from ft_ckpt.adapters import has_adapters
from ft_ckpt.catalog import discover, read_manifest, verify
from ft_ckpt.config import keep_of, make_config
from ft_ckpt.disk import local_path
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    LoadError,
    ManifestError,
    NotACheckpointError,
    SelectionError,
    listing,
)
from ft_ckpt.holdings import is_dtensor
from ft_ckpt.items import known_sources
from ft_ckpt.manifest import MANIFEST_NAME
from ft_ckpt.marks import DROPPED
from ft_ckpt.opening import open_checkpoint
from ft_ckpt.ranks import attempt, by_itself, current
from ft_ckpt.retain import Keep
from ft_ckpt.sweep import clear, sweep

__all__ = ["FtCkptCallback"]

_LOG = logging.getLogger("ft_ckpt")
_NAME = re.compile(r"checkpoint-(\d+)")
_WEIGHTS = re.compile(r"((pytorch_)?model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_MODES = {True: "auto", "true": "auto", "auto": "auto", "latest": "auto", "must": "must", "false": None, "never": None}
_UNFINISHED = "*.ft_ckpt-*"  # what a save is writing, and what readers put beside a checkpoint
_REPLACED = ("_save_checkpoint", "save_model")  # a subclass whose own do not call these is not saved by ft_ckpt


class FtCkptCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Makes the one trainer it is given to save and resume through ft_ckpt; give it on every rank.

    `keep` says which checkpoints stay (the best that the Trainer knows of always does); a number is of the newest;
    None: the Trainer's `save_total_limit` does, of this run's checkpoints. `allow` names items that a resume may do
    without. `settings` are those of `CheckpointSaver`.

    Raises ConfigError for settings that cannot work.
    """

    def __init__(
        self,
        *,
        keep: Keep | int | None = None,
        allow: Iterable[str] | bool = (),
        verify_resume: bool = True,
        **settings: Any,
    ) -> None:
        if "every" in settings:
            raise ConfigError("every=: when to save is the Trainer's to say; set save_strategy and save_steps")
        self.keep, self.allow, self.verify = keep_of(keep), allow, verify_resume
        # Verified twice: to choose one that is whole, and when its files are held open, which may be others by then.
        self.config = make_config(None, {**settings, "verify_resume": verify_resume})
        self._trainer: Any = None

    @classmethod
    def attach(cls, trainer: Any, **settings: Any) -> "FtCkptCallback":
        """A new callback with `settings`, added to a `trainer` that is there already and not yet training."""
        callback = cls(**settings)
        trainer.add_callback(callback)
        callback._take(trainer)
        return callback

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the trainer that is being made."""
        self._take(_caller(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to be forgotten: without its trainer nothing would be saved in our way."""
        if self._trainer is None:
            raise ConfigError("FtCkptCallback: added to a trainer that was there; use FtCkptCallback.attach(trainer)")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is whole: what was asked for in the middle of it is done now."""
        if self._trainer.ft_ckpt_step_ended():
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A pass is over, perhaps in the middle of a step."""
        self._trainer.ft_ckpt_step_ended()

    def _take(self, trainer: Any) -> None:
        kind = type(trainer)
        if self._trainer is not None or issubclass(kind, _Checkpointed):
            raise ConfigError("FtCkptCallback: one for one trainer; make another for another")
        local_path(trainer.args.output_dir)
        # A push goes on beside training, over the folder that the next save writes into; the Trainer's own patterns
        # (checkpoint-*) do not know what is not yet in place.
        if _UNFINISHED not in DEFAULT_IGNORE_PATTERNS:
            DEFAULT_IGNORE_PATTERNS.append(_UNFINISHED)
        for method in filter(lambda name: not _calls_super(kind, name), _REPLACED):
            warnings.warn(
                f"{kind.__name__}.{method} does not call Trainer's own: what it saves is not ft_ckpt's", stacklevel=3
            )
        bases = (_Checkpointed,) if kind is Trainer else (kind, _Checkpointed)
        trainer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__})
        trainer.ft_ckpt = self
        self._trainer = trainer


class _Checkpointed(Trainer):  # type: ignore[misc]  # transformers is not typed
    """What `Trainer` does about checkpoints, done by ft_ckpt. Names of its own are mangled: subclasses have many."""

    ft_ckpt: FtCkptCallback
    __saver: CheckpointSaver | None = None
    __loader: Any = None
    __resumed = False  # whether from a checkpoint of ours
    __skip = 0  # batches of the first pass that were done, as the Trainer counts
    __random: rng.State | None = None  # of the moment of the save, until the first batch is read
    __pass: tuple[Any, Iterator[Any]] | None = None  # the Trainer's iterator over the data, and ours instead of it
    __mid_step = False
    __late = False  # a save was asked for in the middle of a step
    __asks = False  # a subclass is asked what it adds to a checkpoint

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        mode = resume_from_checkpoint.lower() if isinstance(resume_from_checkpoint, str) else resume_from_checkpoint
        wanted = _MODES.get(mode, resume_from_checkpoint) if resume_from_checkpoint else None
        chosen = self.__chosen(wanted) if wanted else None
        self.__resumed = chosen is not None and _is_resumable(Path(chosen))
        return super().train(chosen, *args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> Any:
        if self.__saver is None:
            return super().get_batch_samples(epoch_iterator, *args)
        if self.__pass is None or self.__pass[0] is not epoch_iterator:
            self.__pass = epoch_iterator, self.__begin_pass()
        self.__mid_step = True
        return super().get_batch_samples(self.__pass[1], *args)

    def ft_ckpt_step_ended(self) -> bool:
        """Note that no step is under way; whether a save is overdue."""
        late, self.__late, self.__mid_step = self.__late, False, False
        return late

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        epochs, self.__skip = super()._init_training_state(*args, **kwargs)
        return epochs, self.__skip

    def _prepare_for_training(self, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        path = None if self.__resumed else resume_from_checkpoint
        prepared = super()._prepare_for_training(max_steps, train_dataloader, path)
        if self.__saver is not None:
            self.__saver.close()
        self.__loader, self.__pass, self.__random = prepared[1], None, None
        config, directory = self.ft_ckpt.config, self.args.output_dir
        self.__saver = CheckpointSaver(self.accelerator, directory, tokenizer=self.__tokenizer(), config=config)
        self.__saver.register(model=self.model_wrapped, optimizer=self.optimizer, scheduler=self.lr_scheduler)
        if self.__resumed:
            self.__resume(self.__saver, resume_from_checkpoint)
        return prepared

    def __resume(self, saver: CheckpointSaver, path: Any) -> None:
        progress = saver.resume(path, allow=self.ft_ckpt.allow)
        if progress.batch and not self.__skip and not self.args.ignore_data_skip:
            deque(
                saver.remaining(self.__loader), 0
            )  # saved at the end of a pass, which ends now: nothing is left of it
        self.__random = rng.capture()

    def __begin_pass(self) -> Iterator[Any]:
        assert self.__saver is not None  # noqa: S101 - the only caller has looked
        batches, skip = self.__saver.remaining(self.__loader), 0 if self.__resumed else self.__skip
        self.__skip = 0
        if self.__random is not None:  # what came since the resume (callbacks, an evaluation) may have drawn some
            rng.restore(self.__random)
            self.__random = None
        for _ in range(skip):  # resumed the Trainer's way: it puts the random state back after the first batches
            next(batches, None)
        return batches

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        if not self.__resumed:  # ours are read when the model is wrapped and the optimizer made
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if not self.__resumed:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        path = Path(self.state.best_model_checkpoint)
        if not _is_resumable(path):
            return super()._load_best_model()  # type: ignore[no-any-return]  # transformers is not typed
        outcome, error = attempt(lambda: _load_weights(self.model_wrapped, path, self.ft_ckpt.verify))
        current(self.ft_ckpt.config.enter_timeout_seconds).agree("load_best_model_at_end", outcome, error)
        return None

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # With a limit of 1 the Trainer would delete here whatever is called like a checkpoint, the newest one too.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.__mid_step:  # asked for by a callback: the data is ahead of the weights until the step is done
            self.__late, self.control.should_training_stop = True, False
            return
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder = Path(self._get_output_dir(trial=trial))
        target = folder / f"checkpoint-{self.state.global_step}"
        self.__commit(folder, target)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
        if self.is_world_process_zero():
            self.__sweep(folder, target)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.__asks:
            super().save_model(output_dir, _internal_call=True)
            return
        # As in Trainer: of a model that each rank holds whole, the main process saves, and nobody waits for it.
        together = self.is_fsdp_enabled or self.is_deepspeed_enabled or _is_sharded(self.model_wrapped)
        if together or self.args.should_save:
            with nullcontext() if together else by_itself():
                self.__save_weights(Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.__asks:
            super()._save(output_dir, state_dict)

    def __save_weights(self, target: Path) -> None:
        """The model, or its adapters, as what may be loaded: without the training state."""
        tokenizer, config = self.__tokenizer(), self.ft_ckpt.config
        saver = self.__saver or CheckpointSaver(self.accelerator, tokenizer=tokenizer, config=config)
        saver.save(
            self.model_wrapped,
            target,
            adapter_only=has_adapters(engines.unwrap(self.model_wrapped)),
            step=self.state.global_step or None,
            metrics=_metrics(self.state),
            extra_files=self.__added(),
            background=False,
        )

    def __added(self) -> dict[str, bytes]:
        """What a subclass writes beside the weights, from its own `save_model` or `_save`, on all ranks; by path."""
        method = next((name for name in ("save_model", "_save") if _overrides(type(self), name)), None)
        if method is None:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            self.__asks = True
            try:
                _, error = attempt(lambda: self.save_model(folder, _internal_call=True))
            finally:
                self.__asks = False
            found = _files(Path(folder))
        weights = [path for path in found if _WEIGHTS.fullmatch(path)]
        if weights:
            name = f"{type(self).__name__}.{method}"
            error = SelectionError(
                f"{listing(weights, ', ')}: written by {name} itself, in a layout of its own that ft_ckpt does not "
                "know; train without FtCkptCallback, or let it call super() for the weights"
            )
        current(self.ft_ckpt.config.enter_timeout_seconds).agree("save_model()", {}, error)
        return found

    def __commit(self, folder: Path, target: Path) -> None:
        if self.__saver is None:
            raise ConfigError(f"{target}: a checkpoint of a run that has not begun; save within train()")
        step, best = self.state.global_step, self.state.best_global_step
        best_path = folder / f"checkpoint-{best}"
        if best and (best == step or best_path.exists()):
            self.state.best_model_checkpoint = str(best_path)
        given: dict[str, Any] = {
            "metrics": _metrics(self.state),
            "extra_files": {**self.__added(), TRAINER_STATE_NAME: self.__state_text()},
            "background": False,  # the Trainer deletes older checkpoints once this returns
        }
        if self.args.save_only_model:
            adapters = has_adapters(engines.unwrap(self.model_wrapped))
            self.__saver.save(self.model_wrapped, target, adapter_only=adapters, step=step, **given)
        else:
            # A pass may have been broken off in the middle of a step, whose gradients the Trainer keeps nowhere either.
            self.accelerator.gradient_state._set_sync_gradients(True)
            self.__saver.step(step=step)
            self.__saver.save_state(path=target, **given)

    def __state_text(self) -> str:
        """What the Trainer writes about itself, and its callbacks as they are now."""
        told = [*self.callback_handler.callbacks, self.control]
        exported = [each for each in told if isinstance(each, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, TRAINER_STATE_NAME)
            self.state.save_to_json(str(path))
            return path.read_text(encoding="utf-8")

    def __sweep(self, folder: Path, newest: Path) -> None:
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        run_id = read_manifest(newest).run_id
        keep = self.ft_ckpt.keep
        if keep is None and limit is not None and limit > 0:
            ours = [info for info in discover(folder) if run_id in (None, info.manifest.run_id)]
            last = [info.path for info in ours if info.path != folder][-limit:]
            is_beside = best is not None and Path(best) not in last  # the best counts among the limit
            keep = Keep(last=max(limit - is_beside, 1))
        if keep is not None:
            report = sweep(folder, keep, run_id=run_id, protect=[newest] if best is None else [newest, best])
            for problem in report.problems:
                warnings.warn(f"{folder}: an old checkpoint was not deleted: {problem}", stacklevel=3)

    def __tokenizer(self) -> Any:
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def __chosen(self, wanted: str) -> str | None:
        """The checkpoint to resume from, the same on every rank; None for a fresh start.

        `wanted` is a path; "auto" is the newest that is whole, if any; "must" the newest, or an error.
        """
        ranks, folder = current(self.ft_ckpt.config.enter_timeout_seconds), Path(self.args.output_dir)
        path: Path | None = None
        error: BaseException | None = None
        with ranks.working():
            if ranks.leads:
                path, error = attempt(lambda: _sought(wanted, folder, self.ft_ckpt.verify))
        found = None if path is None else str(path)
        answer: str | None = ranks.agree("train(resume_from_checkpoint=...)", {"path": found}, error)[0]["path"]
        return answer


_BASE = (Trainer, _Checkpointed)


def _caller(callback: TrainerCallback) -> Any:
    """The trainer on the stack that is being made with `callback`: it tells its callbacks everything but itself."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    raise ConfigError("FtCkptCallback: no trainer is being made; use FtCkptCallback.attach(trainer)")


def _overrides(kind: type, method: str) -> bool:
    """Whether a class between `Trainer` and `kind` has a `method` of its own."""
    return any(method in vars(each) for each in kind.__mro__ if issubclass(each, Trainer) and each not in _BASE)


def _calls_super(kind: type, method: str) -> bool:
    """Whether the `method` of `kind` is Trainer's, or goes on to it by `super()` as far as its code shows."""
    code = getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)
    return not _overrides(kind, method) or code is None or "super" in code.co_names


def _files(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` but the pickle of the Trainer's arguments: path to content."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != TRAINING_ARGS_NAME}


def _is_sharded(model: nn.Module) -> bool:
    return any(is_dtensor(tensor) for tensor in model.parameters())


def _sought(wanted: str, folder: Path, deep: bool) -> Path | None:
    """The checkpoint that `wanted` means, of those in `folder` if it is no path; None for a fresh start."""
    if wanted not in ("auto", "must"):
        return _whole(wanted, deep)
    clear(folder)  # of what saves have left that were killed
    path = _newest(folder, deep)
    if path is None and wanted == "must":
        raise NotACheckpointError(f"{folder}: no whole checkpoint in it; resume_from_checkpoint=True begins afresh")
    if path is None:
        _LOG.info("a fresh start: no whole checkpoint in %s", folder)
    return path


def _newest(folder: Path, deep: bool) -> Path | None:
    """The checkpoint in `folder` with the highest step that is whole, ours or the Trainer's; None without one."""
    below = folder.iterdir() if folder.is_dir() else ()
    named = [(int(match[1]), path) for path in below if (match := _NAME.fullmatch(path.name))]
    for _, path in sorted(named, reverse=True):
        problems = _problems(path, deep)
        if not problems:
            return path
        warnings.warn(f"{path}: not whole, trying an older one: {listing(list(problems))}", stacklevel=2)
    return None


def _whole(wanted: Any, deep: bool) -> Path:
    """The checkpoint that was asked for by its path; one that is not ours is the Trainer's to judge."""
    path = Path(wanted)
    problems = _problems(path, deep) if (path / MANIFEST_NAME).exists() else ()
    if problems:
        raise CorruptError(f"{path}: {listing(list(problems))}; resume_from_checkpoint=True takes the newest whole one")
    return path


def _problems(path: Path, deep: bool) -> tuple[str, ...]:
    try:
        if (path / MANIFEST_NAME).exists():
            return verify(path, deep=deep).problems
        if (path / DROPPED).exists():
            return ("it is being deleted",)
        TrainerState.load_from_json(str(path / TRAINER_STATE_NAME))  # the last thing that the Trainer writes
    except (ManifestError, OSError, ValueError, TypeError) as error:
        return (str(error),)
    return ()


def _is_resumable(path: Path) -> bool:
    """Whether the checkpoint has a training state of ours."""
    return (path / MANIFEST_NAME).exists() and starting.is_resumable(read_manifest(path))


def _load_weights(model: nn.Module, path: Path, deep: bool) -> None:
    with open_checkpoint(path) as held, state_files.opened(held) as stored:
        if problems := held.problems(deep):
            raise CorruptError(f"{path}: {listing(list(problems))}; the best model was not loaded")
        document = state_files.read_document(held.folder)
        outcome = resume.restore_weights(known_sources(model, []), document, stored)
    if outcome.status != "restored":
        raise LoadError(f"{path}: the best model was not loaded: {outcome.detail}")


def _metrics(state: Any) -> dict[str, float]:
    """What was logged at this step, as far as it is numbers."""
    rows = [row for row in state.log_history if row.get("step") == state.global_step]
    found = {name: value for row in rows for name, value in row.items() if name not in ("step", "epoch")}
    return {name: float(v) for name, v in found.items() if isinstance(v, (int, float)) and math.isfinite(v)}
