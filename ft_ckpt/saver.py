"""`CheckpointSaver`: the one object a training script talks to."""

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn

from ft_ckpt import commit, engines, rehearsal, resume
from ft_ckpt.config import SaverConfig, make_config
from ft_ckpt.disk import local_path
from ft_ckpt.errors import CheckpointError, ConfigError, LoadError
from ft_ckpt.opening import OpenCheckpoint, open_checkpoint
from ft_ckpt.parts import Attribute, is_adapter_run
from ft_ckpt.pending import Pending, PendingSave
from ft_ckpt.preparing import check_companions, request_of
from ft_ckpt.ranks import Ranks, attempt, current
from ft_ckpt.records import versions
from ft_ckpt.running import Progress, Run
from ft_ckpt.saving import SaveReport
from ft_ckpt.signals import exit_code
from ft_ckpt.sweep import clear, tidy

__all__ = ["CheckpointSaver", "Progress", "SaveReport"]
T = TypeVar("T")
_LOG = logging.getLogger("ft_ckpt")
_OPEN: WeakSet["CheckpointSaver"] = WeakSet()


class CheckpointSaver:
    """Saves models that Accelerate, or nothing, has wrapped, as folders that every Hugging Face tool loads.

    `accelerator` is looked through for prepared models, whose generation configs are checked here and now, so that a
    run does not end on an error that was there at its start. `directory` is where checkpoints go when `save` is given
    a step and no path. `settings` are the fields of `SaverConfig`, which may be passed as `config` instead.

    Raises ConfigError for settings that cannot work, CompanionError for a tokenizer or generation config that does
    not fit, SelectionError for optimizers and other objects of a run whose state cannot be kept, TargetError when
    `directory` cannot be written.
    """

    def __init__(
        self,
        accelerator: Any = None,
        directory: str | Path | None = None,
        *,
        tokenizer: Any = None,
        config: SaverConfig | None = None,
        **settings: Any,
    ) -> None:
        self.config = make_config(config, settings)
        self._rehearsal = rehearsal.begun()
        directory = directory if self._rehearsal is None else self._rehearsal.directory
        self.accelerator = accelerator
        self.directory = None if directory is None else local_path(directory)
        self.tokenizer = tokenizer
        self._closed = False
        if self.directory is not None:
            commit.check_target(self.directory, 0)
        for model in getattr(accelerator, "_models", None) or ():
            # A template takes its tokens from the tokenizer, which may only come with the call of save().
            check_companions(engines.unwrap(model), tokenizer, self.config.chat_template_name if tokenizer else None)
        self._run = Run(accelerator, self.config)
        self._epochs: int | None = None  # that `remaining` was asked for
        self._pending = Pending(self._run)
        if self.config.every is not None:
            self._run.check()
        _OPEN.add(self)

    def save(
        self,
        model: nn.Module,
        path: str | Path | None = None,
        *,
        adapter_only: bool = False,
        attribute: Attribute = None,
        dtype: str | None = None,
        chat_template_name: str | None = None,
        tokenizer: Any = None,
        format: str | None = None,  # noqa: A002 - the name its users know from other savers
        compression: str | None = None,
        max_shard_size: int | str | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        extra_files: Mapping[str, str | bytes] | None = None,
        background: bool | None = None,
    ) -> SaveReport | PendingSave:
        """Save `model`, or what is asked of it, to the folder `path`; call on every rank. Returns when it is durable.

        With `background` it returns at once if it can, and the checkpoint, of this moment, is written meanwhile; the
        next save waits for it. What becomes of it is told by the handle, and by the next call of the saver, which
        raises if it failed.

        The whole model by default; its PEFT adapters with `adapter_only`; the submodule at `attribute`, or several, a
        folder each. `path` defaults to `directory`/checkpoint-`step`. `state_dict` is taken instead of the live
        tensors, if it agrees with the model. `extra_files` of rank 0, by path in the checkpoint, are committed with it.
        The other keywords override the saver's settings for this call.

        Raises SelectionError when the model lacks what was asked for, IncompleteError when the result would differ
        from the live model, TargetError or NoSpaceError when it cannot be written, RankError when another rank
        failed, RanksDisagreeError when ranks called differently or not at all. Nothing is committed then, and what
        was committed before is whole.
        """
        given: dict[str, Any] = {"dtype": dtype, "chat_template_name": chat_template_name, "format": format}
        given |= {"compression": compression, "max_shard_size": max_shard_size, "background": background}
        config = replace(self.config, **{name: value for name, value in given.items() if value is not None})
        self._pending.settle()
        return self._pending.save(
            config,
            lambda: request_of(
                config,
                model,
                self._target(path, step),
                adapter_only=adapter_only,
                attribute=attribute,
                tokenizer=self.tokenizer if tokenizer is None else tokenizer,
                state_dict=state_dict,
                state_dict_given=state_dict is not None,
                step=step,
                metrics=dict(metrics or {}),
                extra_files=dict(extra_files or {}),
            ),
        )

    def register(self, **objects: Any) -> None:
        """Name objects of the run that Accelerate does not know, to be saved and resumed with it; on every rank.

        `model` is the one whose weights are saved; further modules (an average of the weights), optimizers, schedulers
        and whatever has `state_dict` and `load_state_dict` keep their state. Raises SelectionError for anything else.
        """
        self._run.register(objects)

    @property
    def progress(self) -> Progress:
        """How far the run is: steps as `step` counts them, place in the data as `remaining` gives it."""
        return self._run.progress

    def remaining(self, loader: Any, epochs: int | None = None, *, replay: bool | None = None) -> Iterator[Any]:
        """The batches of `loader` that the run has not seen: the rest of a pass, or with `epochs` of that many passes.

        After `resume` it goes on exactly where the checkpoint was made; with `replay` also for random augmentation in
        loader workers, as batches seen are read again and dropped. Checkpoints that `every` wants at the end of a pass
        are made there if the loader could not tell which batch is the last.
        """
        ranks, self._epochs = self._ranks(), epochs or self._epochs
        while epochs is None or self._run.progress.epoch < epochs:
            batches = self._run.remaining(loader, ranks, replay)
            yield from batches if self._rehearsal is None else self._rehearsal.watched(batches)
            if self.config.every is not None and self.config.every.epochs:
                self._save_if_due({}, pass_ended=True)
            if epochs is None:
                return

    def step(
        self, metrics: Mapping[str, float] | None = None, *, step: int | None = None
    ) -> SaveReport | PendingSave | None:
        """Say that a batch is done; saves the run when `every` wants it. On every rank, after every batch.

        Counts a step when the optimizer has stepped: batches within gradient accumulation are passed over. `step`
        sets the count instead. After a save for a signal the process exits on all ranks, see `Every.signals`.

        Raises what `save_state` raises; with on_failure="warn" a save that fails is warned of, and training goes on.
        """
        if not self._run.is_between_steps:
            return None
        self._run.stepped(step)
        given = dict(metrics or {})
        report = self._save_if_due(given)
        if self._rehearsal is not None:
            save, leads = lambda path: self.save_state(path=path, metrics=given), self._ranks().leads
            self._rehearsal.stepped(self._run.step, given, report is not None, leads, save)
        return report

    def save_state(
        self,
        model: nn.Module | None = None,
        path: str | Path | None = None,
        *,
        adapter_only: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        extra_files: Mapping[str, str | bytes] | None = None,
        background: bool | None = None,
        **objects: Any,
    ) -> SaveReport | PendingSave:
        """Save a checkpoint that the run can be resumed from: weights, and the state of everything else; on every rank.

        Without arguments it is of what Accelerate prepared, and of what was registered; `objects` are registered
        first. Of a model with PEFT adapters that are all that is trained, only these are saved, unless `adapter_only`
        says otherwise. Weights that the checkpoint holds in another dtype, or not at all, are kept exactly beside it.
        `extra_files` and `background` as for `save`.
        Then what `keep` does not ask for is deleted. Raises what `save` raises.
        """
        counted = self._run.agreed(metrics or {}, self._ranks())
        config = self.config if background is None else replace(self.config, background=background)
        return self._save_state(None, config, model, path, adapter_only, counted, objects, dict(extra_files or {}))

    def wait(self) -> SaveReport | None:
        """Wait for the save in the background, if there is one, and give its report; on every rank.

        Raises what that save would have raised. Once is enough: it is over then.
        """
        return self._pending.settle()

    def resume(self, checkpoint: str | Path = "auto", *, allow: Iterable[str] | bool = (), **objects: Any) -> Progress:
        """Put the run back to where a checkpoint was made, and say how far it is; on every rank.

        `checkpoint`: "auto", the newest in `directory` that is whole, or a fresh start if there is none; "must", the
        newest, or an error; "never", a fresh start; or one by its name or path. `objects` are registered first.
        `progress.report` lists what became of each item; those named in `allow` (True: any) may be absent or fail.

        Raises LoadError when something was not restored, NotACheckpointError when there is none to resume from,
        CorruptError naming damaged files and the newest whole checkpoint, RankError when another rank failed.
        """
        self._pending.settle()
        self.register(**objects)
        with ExitStack() as stack:
            held = self._opened(str(checkpoint), stack)
            if held is not None:
                self._run.report = self._run.reinstate(held, self._ranks(), allow, versions())
        if self._ranks().leads:
            _LOG.info(*_told(self._run.progress, self.directory))
        return self._run.progress

    def close(self) -> None:
        """End of use: waits as `wait` does; later saves are refused. Also called when a `with` block ends."""
        self._closed = True
        _OPEN.discard(self)
        self._run.close()
        self._pending.close()

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _, error = attempt(self.close)
        if error is not None and kind is None:
            raise error  # not over the error that is on its way

    def _opened(self, mode: str, stack: ExitStack) -> OpenCheckpoint | None:
        """The checkpoint that rank 0 chooses, open on every rank as long as the stack; collective."""
        ranks = self._ranks()
        held: OpenCheckpoint | None
        held, error = ranks.attempt(lambda: self._chosen(mode, stack) if ranks.leads else None)
        told = {"mode": mode, "path": None, "identity": None}
        if held is not None:
            told |= {"path": str(held.path), "identity": held.identity}
        found = ranks.agree("resume()", told, error, same=("mode",))[0]
        if found["path"] is None or ranks.size == 1:
            return held
        here: OpenCheckpoint | None
        here, error = ranks.attempt(lambda: held or stack.enter_context(open_checkpoint(found["path"])))
        answers = ranks.agree("opening the checkpoint of resume()", {"identity": here and here.identity}, error)
        if any(answer["identity"] != found["identity"] for answer in answers):
            raise LoadError(f"{found['path']}: replaced by another save while the ranks opened it; resume again")
        return here

    def _chosen(self, mode: str, stack: ExitStack) -> OpenCheckpoint | None:
        if self.directory is not None:
            clear(self.directory)  # of what saves have left that were killed
        return stack.enter_context(resume.chosen(self.directory, mode, self.config.verify_resume))

    def _save_if_due(self, metrics: dict[str, float], pass_ended: bool = False) -> SaveReport | PendingSave | None:
        if self._pending.has_ended(self._ranks()):
            self._tried(self._pending.settle)
        metrics = self._run.agreed(metrics, self._ranks())
        reason = self._run.due(metrics, self._ranks(), pass_ended)
        if reason is None:
            return None
        ends = reason == "deadline" or reason.startswith("SIG") or self._rehearsal is not None
        config = replace(self.config, background=self.config.background and not ends)
        report = self._tried(lambda: self._save_state(reason, config, None, None, None, metrics, {}))
        if reason.startswith("SIG"):
            self.close()
            raise SystemExit(exit_code(reason, self.config.every.exit_code if self.config.every else None))
        return report

    def _tried(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except CheckpointError as error:
            if self.config.on_failure == "raise":
                raise
            warnings.warn(f"step {self._run.step}: no checkpoint was made, training goes on: {error}", stacklevel=4)
            return None

    def _save_state(
        self,
        reason: str | None,
        config: SaverConfig,
        model: nn.Module | None,
        path: str | Path | None,
        adapter_only: bool | None,
        metrics: dict[str, float],
        objects: dict[str, Any],
        extra_files: dict[str, str | bytes] | None = None,
    ) -> SaveReport | PendingSave:
        self._pending.settle()
        begun = time.monotonic()
        now, history = self._run, self._run.history
        self.register(**objects, **({} if model is None else {"model": model}))
        now.note_saved(reason, metrics)
        try:
            captured = now.capture(self._ranks(), versions(), self._pending.kept)
            adapters = captured.once("adapters", lambda: is_adapter_run(now.model))
            report = self._pending.save(
                config,
                lambda: request_of(
                    config,
                    now.model,
                    self._target(path, now.step),
                    adapter_only=adapters if adapter_only is None else adapter_only,
                    tokenizer=self.tokenizer,
                    step=now.step,
                    metrics=metrics,
                    captured=captured,
                    run_id=now.run_id,
                    protect=self._protected(),
                    extra_files=extra_files or {},
                ),
                self._prunes(),
            )
        except BaseException:
            now.history = history
            now.note_saved(reason, {})  # the next try comes an interval later
            raise
        if isinstance(report, PendingSave):
            self._pending.before = history  # what it cost, and whether it is there at all, is known later
            return report
        now.history = history
        now.note_saved(reason, metrics, time.monotonic() - begun)
        return report

    def _prunes(self) -> Callable[[Path], None]:
        """What deletes old checkpoints once a new one is there."""
        directory = self.directory if self._ranks().leads else None
        return partial(tidy, directory, self.config.keep, self._run.run_id, self._protected())

    def _protected(self) -> tuple[Path, ...]:
        return () if self._run.resumed_from is None else (self._run.resumed_from,)

    def _ranks(self) -> Ranks:
        return current(self.config.enter_timeout_seconds)

    def _target(self, path: str | Path | None, step: int | None) -> Path:
        if self._closed:
            raise CheckpointError("this saver is closed; make a new one to save again")
        if path is not None:
            return local_path(path).absolute()
        if self.directory is None or step is None:
            raise ConfigError("save() without a path needs the saver's directory and a step; give it a path, or both")
        return (self.directory / self.config.name_template.format(step=step)).absolute()


def _told(progress: Progress, directory: Path | None) -> tuple[Any, ...]:
    """What the log says of a resume: a format and its arguments."""
    if progress.resumed_from is None:
        return "a fresh start: nothing was resumed from %s", directory
    place = progress.resumed_from.name, progress.step, progress.epoch, progress.batch
    return "resumed from %s (step %d, epoch %d, batch %d)", *place


def open_savers() -> list[CheckpointSaver]:
    """The savers of this process that are neither closed nor gone."""
    return list(_OPEN)
