"""Saves and resumes runs of Lightning's `Trainer`, of the packages lightning and pytorch_lightning.

   trainer = Trainer(callbacks=[LightningCheckpoint("runs/sft", every=500, keep=3)])
   trainer.fit(module, data)  # resumes from the newest complete checkpoint, if there is one

A save is made when the trainer requests the next batch. Only then is the last step complete, with
validation, schedulers and counters. Because Lightning has no hook at this point, the trainer gets a
data loader that calls this callback. After a resume the rest of an epoch is the same as in an
uninterrupted run. Lightning's `ModelCheckpoint` is not needed. Lightning does not add one either,
because this callback counts as one.
"""

import importlib
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from ft_ckpt import CheckpointSaver, Every
from ft_ckpt.config import SaveSettings, make_config
from ft_ckpt.errors import ConfigError, SelectionError, listing
from ft_ckpt.integrations.lightning_data import SaverLoader, refuse_unsized
from ft_ckpt.integrations.lightning_state import LightningState, averaging_callbacks
from ft_ckpt.model.tensors import has_adapters, library_of
from ft_ckpt.ranks.wrappers import is_distributed
from ft_ckpt.retention import Keep
from ft_ckpt.runs.data import GeneratorStates, capture_generators, restore_generators
from ft_ckpt.runs.resume import parse_mode
from ft_ckpt.runs.saves import SaveHook, hooks_of
from ft_ckpt.storage.places import Place, absolute_location
from ft_ckpt.values import as_names

__all__ = ["LightningCheckpoint"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _checkpoint_classes() -> tuple[type, ...]:
    """Return the base classes by which a trainer recognizes checkpoint callbacks.

    These are the classes of the packages that are imported. If none is imported, they are those of
    the packages that are installed.
    """
    names = [name for name in _PACKAGES if name in sys.modules]
    if not names:
        names = [name for name in _PACKAGES if find_spec(name.partition(".")[0]) is not None]
    modules = [importlib.import_module(f"{name}.callbacks") for name in names or _PACKAGES]
    return tuple(module.Checkpoint for module in modules)


_Base: Any = type("_Base", _checkpoint_classes(), {})


class LightningSettings(SaveSettings, total=False):
    """The settings of `CheckpointSaver` for a Lightning run, as type checkers see them."""

    background: bool
    keep: Keep | int | None


class LightningCheckpoint(_Base):  # type: ignore[misc]  # its base classes are computed at import time
    """Saves a Lightning run to `directory` and resumes it.

    Use one per trainer, on a single device or under DDP. A checkpoint has the weights of the
    submodule `attribute` of the LightningModule. With "" it has those of the whole module. With
    None it has those of the only Hugging Face or PEFT model in the module, or of the whole module
    if there is no such model. Everything else is part of the training state.

    `every` counts Lightning's `global_step`, and metrics are the trainer's `callback_metrics`.
    `resume` and `allow` are arguments of `CheckpointSaver.resume`, and `replay` is an argument of
    `CheckpointSaver.remaining`. `tokenizer`, `on_saved` and `settings` are those of
    `CheckpointSaver`.

    Raises ConfigError for invalid settings, and when training starts with a strategy that is not
    supported.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: Every | int = Every(epochs=1),  # noqa: B008 - a constant
        tokenizer: Any = None,
        resume: str | Path | Place | bool | None = "auto",
        allow: Iterable[str] | bool = (),
        replay: bool | None = None,
        on_saved: SaveHook | Iterable[SaveHook] | None = None,
        **settings: Unpack[LightningSettings],
    ) -> None:
        super().__init__()
        self._config = make_config(None, {**settings, "every": every})
        self._directory = absolute_location(directory)
        self._tokenizer = tokenizer
        self._replay = replay
        parse_mode(resume)  # raises ConfigError now, and not when the training starts
        self._resume: str | Path | Place | bool | None = resume
        self._allow = allow if isinstance(allow, bool) else as_names(allow, "allow")
        self._on_saved = hooks_of(on_saved)

        # Without a separator it is a mode, or the name of a folder in `directory`.
        if isinstance(resume, (str, Path)) and os.sep in str(resume):
            self._resume = absolute_location(resume)
        self._saver: CheckpointSaver[Any] | None = None
        self._loaders: list[SaverLoader] = []
        self._state: LightningState | None = None

        # The last step that was reported to the saver.
        self._step = 0

        # The random state after the resume. It is kept until the first batch is read.
        self._random: GeneratorStates | None = None

        # The trainer's limit_val_batches. It is set to 0 in the trainer until the first batch is
        # read after a resume.
        self._val_limit: Any = None

        # The saver's signal handlers, by the number of the signal.
        self._handlers: Mapping[int, Any] = {}

    @property
    def best_model_path(self) -> str:
        """Raises ConfigError, because Lightning cannot load folders of ft_ckpt."""
        raise ConfigError(
            f"ckpt_path='best': {self._directory} has folders of ft_ckpt, which Lightning does not "
            "read; pass the module, with the weights of ft_ckpt.best(directory, metric) if not "
            "with those it has"
        )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Resume, after the strategy has set up model and optimizers."""
        if trainer.fast_dev_run:
            return
        _refuse_strategy(trainer)
        _refuse_callbacks(trainer)
        if trainer.ckpt_path is not None and self._resume not in ("never", False):
            raise ConfigError(
                f"ckpt_path={trainer.ckpt_path!r}: both Lightning and ft_ckpt would restore the "
                "run; leave it out, or begin from it with LightningCheckpoint(resume='never')"
            )

        attribute = self._config.attribute
        if attribute is None:
            attribute = _saved_attribute(pl_module)
        config = replace(self._config, attribute=attribute or None)
        handlers_before = _handlers_of(config.every)
        self._saver = CheckpointSaver(
            None, self._directory, tokenizer=self._tokenizer, config=config, on_saved=self._on_saved
        )

        # Lightning will set its own signal handlers, which would end the run before it is saved.
        # Therefore the saver's handlers are removed here, and set again in `on_train_start`.
        handlers = _handlers_of(config.every)
        changed = [number for number in handlers if handlers[number] != handlers_before[number]]
        self._handlers = {number: handlers[number] for number in changed}
        _set_handlers({number: handlers_before[number] for number in changed})
        self._state = LightningState(trainer)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        averaging = averaging_callbacks(trainer)
        averages = [callback._average_model for callback in averaging]
        objects_by_kind = {
            "optimizer": trainer.optimizers,
            "scheduler": schedulers,
            "average": averages,
        }
        objects = {}  # by name: "optimizer", "optimizer_1", "optimizer_2", ...
        for kind, members in objects_by_kind.items():
            for number, member in enumerate(members):
                name = f"{kind}_{number}" if number else kind
                objects[name] = member

        self._saver.register(model=trainer.strategy.model, **objects, lightning=self._state)
        self._replace_loaders(trainer)
        for callback in averaging:
            self._save_before_averaging(callback)
        if self._saver.resume(self._resume, allow=self._allow).resumed_from is not None:
            self._random = capture_generators()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the saver's signal handlers again.

        After a resume, the trainer would first repeat the validation that the run made before the
        save. This validation is skipped.
        """
        if self._saver is None:
            return
        _set_handlers(self._handlers)
        self._step = trainer.global_step
        if self._random is not None:
            self._val_limit = trainer.limit_val_batches
            trainer.limit_val_batches = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step.

        An averaging callback may have called this method already (see `_save_before_averaging`).
        """
        if self._saver is None or self._state is None or self._state.is_over:
            return
        self._state.is_over = True
        if trainer.is_last_batch:
            for loader in self._loaders:
                loader.end_pass()
        self._report_step(trainer)
        self._saver.close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Release the trainer, even if no batch was left to train."""
        if self._saver is not None:
            self._saver.close()
        self._forget(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release the trainer without saving."""
        if self._saver is not None:
            self._saver.__exit__(type(exception), exception, exception.__traceback__)
        self._forget(trainer)

    def _replace_loaders(self, trainer: Any) -> None:
        """Let the trainer read its training data through the saver.

        To do so, replace the method of the strategy that wraps data loaders.
        """
        strategy = trainer.strategy
        process_by_strategy = strategy.process_dataloader
        saver = self._saver

        def process_dataloader(loader: Any) -> Any:
            processed = process_by_strategy(loader)
            if not trainer.training or saver is None:
                return processed
            refuse_unsized(processed, trainer.limit_train_batches)
            position = saver.place_in(processed, self._replay)
            saver_loader = SaverLoader(processed, position, lambda: self._before_batch(trainer))
            self._loaders.append(saver_loader)
            return saver_loader

        strategy.process_dataloader = process_dataloader

    def _save_before_averaging(self, averaging: Any) -> None:
        """Make sure that the last step is saved before a callback averages the model.

        At the end of training, the callback replaces the weights of the model by their average.
        """
        put_average = averaging.on_train_end

        def on_train_end(trainer: Any, pl_module: Any) -> None:
            self.on_train_end(trainer, pl_module)
            put_average(trainer, pl_module)

        averaging.on_train_end = on_train_end

    def _before_batch(self, trainer: Any) -> None:
        """Report the last step to the saver.

        Before the first batch after a resume there is no step to report. The random state and the
        limit of the validation are restored then.
        """
        if self._random is None:
            self._report_step(trainer)
            return
        trainer.limit_val_batches = self._val_limit
        trainer.fit_loop.on_iteration_done()  # as in an uninterrupted run
        # Callbacks may have drawn random numbers since the resume.
        restore_generators(self._random)
        self._random = None

    def _report_step(self, trainer: Any) -> None:
        """Report a step to the saver, which may save; do nothing if it was reported before."""
        if self._saver is not None and trainer.global_step != self._step:
            self._step = trainer.global_step
            self._saver.step(trainer.callback_metrics, step=self._step)

    def _forget(self, trainer: Any) -> None:
        """Restore the methods and the limit of the trainer, and drop the saver."""
        if self._saver is not None:
            del trainer.strategy.process_dataloader
            for callback in averaging_callbacks(trainer):
                del callback.on_train_end
        if self._random is not None and self._val_limit is not None:
            trainer.limit_val_batches = self._val_limit
        self._saver = self._state = self._random = self._val_limit = None
        self._loaders = []


def _refuse_strategy(trainer: Any) -> None:
    """Raise ConfigError for a strategy that shards the model, or wraps it in anything but DDP."""
    model = trainer.strategy.model
    is_plain = model is trainer.lightning_module
    is_supported = is_plain or isinstance(model, DistributedDataParallel)
    if not is_supported or any(map(is_distributed, model.parameters())):
        raise ConfigError(
            f"{type(trainer.strategy).__name__}: expected a single device or DDP; "
            "shard a model in a loop of your own, with CheckpointSaver, which "
            "supports FSDP, ZeRO and tensor parallelism"
        )


def _refuse_callbacks(trainer: Any) -> None:
    """Raise ConfigError for a callback that replaces the schedulers during training.

    A resumed run would have the schedulers of the beginning.
    """
    for callback in trainer.callbacks:
        if any(kind.__name__ == "StochasticWeightAveraging" for kind in type(callback).__mro__):
            raise ConfigError(
                f"{type(callback).__name__}: replaces the scheduler during training, so that a run "
                "could not be resumed exactly; average by WeightAveraging, with the schedule in "
                "configure_optimizers"
            )


def _saved_attribute(module: Any) -> str:
    """Return the path of the only Hugging Face or PEFT model in a LightningModule.

    Returns "" if there is no such model.
    """
    models: list[str] = []
    for path, inner in module.named_modules():
        is_model = library_of(inner) is not None or has_adapters(inner)
        is_inside = any(path.startswith(f"{model}.") for model in models)
        if is_model and not is_inside:
            models.append(path)
    if len(models) > 1:
        raise SelectionError(
            f"{listing(models, ', ')}: {len(models)} models in {type(module).__name__}; say whose "
            "weights the checkpoint holds: attribute='...', or attribute='' for the whole module"
        )
    return models[0] if models else ""


def _handlers_of(every: Every | None) -> dict[int, Any]:
    names = () if every is None else every.signals
    numbers = [signal.Signals[name] for name in names]
    return {number: signal.getsignal(number) for number in numbers}


def _set_handlers(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
