"""The base class that `checkpointed` puts between a trainer class and transformers' `Trainer`.

It replaces the Trainer's methods for saving and resuming. Names of `Trainer` that begin with an
underscore are overridden here, so a new release of transformers may require changes.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from ft_ckpt import CheckpointSaver
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import CheckpointError, ConfigError, SelectionError, listing
from ft_ckpt.integrations.trainer_files import (
    ChosenCheckpoint,
    chosen_by,
    has_saver_state,
    load_best_weights,
    logged_metrics,
    prune_older,
    requested_checkpoint,
    state_text,
)
from ft_ckpt.integrations.trainer_layout import AddedFiles, collect_files, defining_classes
from ft_ckpt.integrations.trainer_models import HeldState, held_state, unsaved_state
from ft_ckpt.integrations.trainer_push import push_checkpoint, push_saved
from ft_ckpt.messages import warn
from ft_ckpt.model.parts import is_adapter_run, parts_of
from ft_ckpt.model.tensors import without_own_layouts
from ft_ckpt.ranks import Ranks, by_itself, current_ranks, try_action
from ft_ckpt.ranks.wrappers import ModelTensors, is_distributed
from ft_ckpt.retention import Keep
from ft_ckpt.runs.data import GeneratorStates, capture_generators, restore_generators
from ft_ckpt.runs.saves import SaveHook
from ft_ckpt.storage.local import temporary_store
from ft_ckpt.storage.places import Place, local_path, open_place


@dataclass(frozen=True)
class TrainerSettings:
    """The arguments of `checkpointed`, which describes them.

    `has_state` is its argument `state`. `config` has the settings of the saver.
    """

    keep: Keep | None
    allow: Iterable[str] | bool
    config: SaverConfig
    on_saved: tuple[SaveHook, ...] = ()
    has_state: bool = False
    on_resumed: Callable[[CheckpointSaver[Any]], object] | None = None


class Checkpointed(Trainer):  # type: ignore[misc]  # transformers is not typed
    """`Trainer` with ft_ckpt's saving and resuming.

    Names begin with two underscores or with `ft_ckpt`, so that they do not clash with the names of
    subclasses.
    """

    ft_ckpt: TrainerSettings
    # How often `_save_checkpoint` of this class was called.
    ft_ckpt_calls = 0
    __saver: CheckpointSaver[Any] | None = None
    __loader: Any = None
    # The checkpoint to resume from.
    __chosen = ChosenCheckpoint()
    # What the trainer held besides the model and its optimizer when the training began.
    __held = HeldState()
    # Path of the module whose weights are saved as the model; None for the whole model.
    __attribute: str | None = None
    # How many batches of the first pass over the data are done already.
    __skipped_batches = 0
    # The random state after the resume. It is kept until the first batch is read.
    __random: GeneratorStates | None = None
    # The Trainer's iterator over the data, and the iterator of the saver that replaces it.
    __pass: tuple[Any, Iterator[Any]] | None = None
    # Whether batches of a step were read, and the step has not ended.
    __is_mid_step = False
    # Whether a save was requested in the middle of a step. It is made when the step has ended.
    __is_save_deferred = False
    # Whether the files that a subclass adds to a checkpoint are being collected.
    __is_collecting = False

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Verify the checkpoint to resume from, if any, and train."""
        request = requested_checkpoint(resume_from_checkpoint)
        directory = open_place(self.args.output_dir)
        deep = self.ft_ckpt.config.verify_resume
        # The resume verifies the files again when it opens them, because they might have been
        # replaced by then.
        self.__chosen = ChosenCheckpoint()
        if request:
            self.__chosen = chosen_by(self.__current_ranks(), request, directory, deep)
        with temporary_store() as scratch:
            return super().train(self.__chosen.path_for_trainer(scratch.url), *args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> Any:
        """Return the batches of a step, read from the saver's iterator over the data."""
        return super().get_batch_samples(self.ft_ckpt_batches(epoch_iterator), *args)

    def ft_ckpt_batches(self, epoch_iterator: Any) -> Any:
        """Return the saver's iterator over the data, which replaces the Trainer's.

        If `epoch_iterator` is the saver's already, it is returned.
        """
        if self.__saver is None:
            return epoch_iterator
        self.__is_mid_step = True
        if self.__pass is None or all(epoch_iterator is not iterator for iterator in self.__pass):
            self.__pass = epoch_iterator, self.__begin_pass()
        _, batches = self.__pass
        return batches

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ft_ckpt_begin()

    def ft_ckpt_begin(self) -> None:
        """Prepare a trainer whose `Trainer.__init__` has run.

        The output folder becomes an absolute path. Raises ConfigError for an output folder that is
        a URL.
        """
        self.args.output_dir = str(local_path(self.args.output_dir).absolute())
        self.add_callback(_StepWatch(self))

    def ft_ckpt_step_ended(self) -> bool:
        """Record the end of a step, and return whether a save was requested within it."""
        is_requested = self.__is_save_deferred
        self.__is_save_deferred = self.__is_mid_step = False
        return is_requested

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        epochs, skipped_batches = super()._init_training_state(
            max_steps, steps_per_epoch, *args, **kwargs
        )
        if self.__chosen.is_of_ft_ckpt:
            self.__agree_on_best()
        if self.__chosen.state is not None and steps_per_epoch == max_steps:
            # The data is a stream. Because the Trainer does not know the length of a pass, it
            # counts all steps as one pass.
            epochs = self.__chosen.epoch
            skipped_batches = 0
            if not self.args.ignore_data_skip:
                batches_per_step = self.args.gradient_accumulation_steps
                steps = math.ceil(self.__chosen.batch / batches_per_step)
                skipped_batches = steps * batches_per_step

        self.__skipped_batches = skipped_batches
        return epochs, skipped_batches

    def _prepare_for_training(
        self, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        path = None if self.__chosen.is_of_ft_ckpt else resume_from_checkpoint
        prepared = super()._prepare_for_training(max_steps, train_dataloader, path)
        if self.__saver is not None:
            self.__saver.close()
        self.__loader = prepared[1]
        self.__pass = self.__random = None
        self.__attribute = self.__check_layout()
        self.__saver = self.__make_saver(self.args.output_dir)
        self.__saver.register(
            model=self.model_wrapped, optimizer=self.optimizer, scheduler=self.lr_scheduler
        )
        absent = self.__register_held_state(self.__saver)
        if self.__chosen.is_of_ft_ckpt:
            progress = self.__saver.resume(self.__chosen.path, allow=self.ft_ckpt.allow)
            if progress.batch and not self.__skipped_batches and not self.args.ignore_data_skip:
                # The save was made at the end of a pass. Reading the rest, which is empty, ends
                # that pass.
                deque(self.__saver.remaining(self.__loader), 0)
            self.__random = capture_generators()
            self.__saver._run.note_absent(absent)

        self.__saver.register(**absent)
        if self.ft_ckpt.on_resumed is not None:
            self.ft_ckpt.on_resumed(self.__saver)
        return prepared

    def __check_layout(self) -> str | None:
        """Check before the training that its models can be saved.

        Returns the path of the module whose weights are saved as the model, or None for the whole
        model. Collective: call it on every rank. Raises SelectionError naming what cannot be saved.
        """
        written, error = try_action(
            lambda: self.__collect_files(Path(self.args.output_dir, "rehearsal"))
        )
        if not isinstance(error, CheckpointError):
            # A method of a subclass may fail only because it is called before the first step.
            error = None
        attribute = (written or AddedFiles()).attribute or self.ft_ckpt.config.attribute
        if error is None:
            _, error = try_action(lambda: self.__check_can_be_saved(attribute))
        self.__current_ranks().agree("the layout of the checkpoints", {}, error)
        return attribute

    def __check_can_be_saved(self, attribute: str | None) -> None:
        """Raise SelectionError if the weights cannot be saved as a model or adapter."""
        model = self.model_wrapped
        sources = ModelTensors(model).sources()
        try:
            parts = parts_of(
                model,
                sources,
                adapter_only=is_adapter_run(model, sources, attribute),
                attribute=attribute,
                dtype=self.ft_ckpt.config.dtype,
            )
            without_own_layouts(parts, is_run=False)
        except SelectionError as error:
            raise SelectionError(
                f"{error}; attribute= is a setting of checkpointed, and the Trainer saves all "
                "models without it"
            ) from error

    def __register_held_state(self, saver: CheckpointSaver[Any]) -> dict[str, Any]:
        """Register the state that the trainer holds besides its model, or watch it.

        A watched model is saved only if it changes during the training. Returns the objects that
        the checkpoint to resume from does not have. The caller registers them after the resume.
        """
        self.__held = held_state(self)
        saver.register(**self.__held.trained)
        names_in_checkpoint = self.__chosen.items
        absent: dict[str, Any] = {}
        for name, value in self.__held.objects.items():
            if self.__chosen.is_of_ft_ckpt and name not in names_in_checkpoint:
                absent[name] = value
            else:
                saver.register(**{name: value})

        for name, model in self.__held.models.items():
            if name in names_in_checkpoint:
                saver.register(**{name: model})
            else:
                saver._run.objects.watch(name, model)

        return absent

    def __warn_of_unsaved(self, saver: CheckpointSaver[Any]) -> None:
        """Warn once of state that changes in training but is not in the checkpoints.

        A resume names it in its report, too.
        """
        run = saver._run
        names = unsaved_state(self, self.__held, {*run.objects.watched, *run.objects.registered})
        new_names = [name for name in names if name not in run.unsaved]
        run.unsaved += new_names
        if new_names and self.is_world_process_zero():
            warn(
                f"{listing(new_names, ', ')}: changes during the training and is not in the "
                "checkpoints; a resumed run begins with it as the script makes it",
            )

    def __begin_pass(self) -> Iterator[Any]:
        """Return the saver's iterator over a new pass, or over the rest of a resumed pass."""
        assert self.__saver is not None
        batches = self.__saver.remaining(self.__loader)
        # The saver itself skips the batches that a checkpoint of ft_ckpt counts as done.
        skipped_batches = 0 if self.__chosen.is_of_ft_ckpt else self.__skipped_batches
        self.__skipped_batches = 0
        # Callbacks or an evaluation may have drawn random numbers since the resume.
        if self.__random is not None:
            restore_generators(self.__random)
            self.__random = None
        # The Trainer's own resume skips batches, and restores the random state after them.
        for _ in range(skipped_batches):
            next(batches, None)
        return batches

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        # Checkpoints of ft_ckpt are loaded later, in `_prepare_for_training`.
        if not self.__chosen.is_of_ft_ckpt:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if not self.__chosen.is_of_ft_ckpt:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        best = open_place(self.state.best_model_checkpoint)
        ranks = self.__current_ranks()
        has_state, error = try_action(lambda: ranks.is_main and has_saver_state(best))
        agreed = ranks.agree("the best model", {"has_state": has_state}, error)
        if not agreed.result["has_state"]:
            return super()._load_best_model()  # type: ignore[no-any-return]  # transformers is not typed
        load_best_weights(self.model_wrapped, best, self.ft_ckpt.config.verify_resume, ranks)
        return None

    def __agree_on_best(self) -> None:
        """Take the path of the best model from rank 0.

        Other ranks might not see the folder. Collective: call it on every rank.
        """
        sent = {"path": self.state.best_model_checkpoint}
        received = self.__current_ranks().agree("the place of the best model", sent)
        self.state.best_model_checkpoint = received.result["path"]

    def __current_ranks(self) -> Ranks:
        return current_ranks(self.ft_ckpt.config.enter_timeout_seconds)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # With a limit of 1 the Trainer would delete all folders here that are named like
        # checkpoints, even the newest one.
        limit = self.args.save_total_limit
        self.args.save_total_limit = None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.ft_ckpt_calls += 1
        if self.__is_mid_step:
            # A callback requested the save within a step. Until the step has ended, the data is
            # ahead of the weights, so the save is made then (see `_StepWatch`).
            self.__is_save_deferred = True
            self.control.should_training_stop = False
            return

        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder = Path(self._get_output_dir(trial=trial))
        target = folder / f"checkpoint-{self.state.global_step}"
        self.__commit_checkpoint(folder, target)
        if self.args.push_to_hub:
            push_checkpoint(self, target)
        if self.is_world_process_zero():
            run = open_place(folder)
            newest = Place(run.folder, target.name)
            best_path = self.state.best_model_checkpoint
            best = None if best_path is None else open_place(best_path)
            prune_older(run, newest, best, self.args.save_total_limit, self.ft_ckpt.keep)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights without training state."""
        if self.__is_collecting:
            super().save_model(output_dir, _internal_call=True)
            return

        target = Path(output_dir or self.args.output_dir)
        all_ranks_save = (
            self.is_fsdp_enabled
            or self.is_deepspeed_enabled
            or any(map(is_distributed, self.model_wrapped.parameters()))
        )
        if all_ranks_save:
            self.__save_weights(target)
        elif self.args.should_save:
            # As in Trainer, if each rank has the whole model, the main process saves it and the
            # others do not wait.
            with by_itself():
                self.__save_weights(target)

        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save to the output folder and push.

        Rank 0 returns the PushReport, or its future if `blocking` is False. Other ranks return
        None.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            repo_options = {} if private is None else {"private": private}
            self.init_hf_repo(token=token, **repo_options)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        return push_saved(
            self, commit_message, kwargs, blocking=blocking, token=token, revision=revision
        )

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.__is_collecting:
            super()._save(output_dir, state_dict)

    def __save_weights(self, target: Path) -> None:
        """Save the model, or its adapters, without training state."""
        saver = self.__saver
        if saver is None:  # train() was not called
            saver = self.__make_saver(None)
        written = self.__added_files(target)
        saver.save(
            self.model_wrapped,
            target,
            **self.__selection(written),
            step=self.state.global_step or None,
            metrics=logged_metrics(self.state),
            extra_files=written.files,
            background=False,
        )

    def __selection(self, written: AddedFiles) -> dict[str, Any]:
        """Return the arguments of `CheckpointSaver.save` that say which weights are saved.

        Adapters are saved without their base if the base can be loaded again from elsewhere.
        """
        sources = ModelTensors(self.model_wrapped).sources()
        attribute = written.attribute or self.ft_ckpt.config.attribute
        return {
            "adapter_only": is_adapter_run(self.model_wrapped, sources, attribute),
            "attribute": attribute,
        }

    def __added_files(self, target: Path) -> AddedFiles:
        """Return the files that a subclass adds to `target` in its own `save_model` or `_save`.

        Collective: call it on every rank. Raises SelectionError if the subclass writes weights in a
        layout of its own.
        """
        written, error = try_action(lambda: self.__collect_files(target))
        self.__current_ranks().agree("save_model()", {}, error)
        return written or AddedFiles()

    def __collect_files(self, target: Path) -> AddedFiles:
        methods = []
        for name in ("save_model", "_save"):
            methods += [f"{kind.__name__}.{name}" for kind in overriding(type(self), name)]
        if not methods:
            return AddedFiles()
        self.__is_collecting = True
        try:
            return collect_files(
                self.model,
                target,
                lambda folder: self.save_model(folder, _internal_call=True),
                methods[0],
            )
        finally:
            self.__is_collecting = False

    def __commit_checkpoint(self, folder: Path, target: Path) -> None:
        if self.__saver is None:
            raise ConfigError(
                f"{target}: a checkpoint of a run that has not begun; save within train()"
            )

        step = self.state.global_step
        best_step = self.state.best_global_step
        best_path = folder / f"checkpoint-{best_step}"
        if best_step and (best_step == step or open_place(best_path).exists):
            self.state.best_model_checkpoint = str(best_path)
        self.__agree_on_best()
        written = self.__added_files(target)
        self.__warn_of_unsaved(self.__saver)
        arguments: dict[str, Any] = {
            "metrics": logged_metrics(self.state),
            "extra_files": {**written.files, TRAINER_STATE_NAME: state_text(self)},
            # `_save_checkpoint` pushes the committed checkpoint next, and deletes older ones.
            "background": False,
        }
        if self.args.save_only_model and not self.ft_ckpt.has_state:
            selection = self.__selection(written)
            self.__saver.save(self.model_wrapped, target, **selection, step=step, **arguments)
        else:
            # The pass may have ended within a step, which leaves Accelerate in the middle of an
            # accumulation. The Trainer drops the gradients of such a step, so the flag is reset.
            self.accelerator.gradient_state._set_sync_gradients(True)
            self.__saver.step(step=step)
            self.__saver.save_state(path=target, **arguments)

    def __make_saver(self, directory: str | None) -> CheckpointSaver[Any]:
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        on_saved = self.ft_ckpt.on_saved
        config = replace(self.ft_ckpt.config, attribute=self.__attribute)
        return CheckpointSaver(
            self.accelerator, directory, tokenizer=tokenizer, config=config, on_saved=on_saved
        )


class _StepWatch(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Makes a save that was requested within a step when the step ends, and stops the training."""

    def __init__(self, trainer: Checkpointed) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.ft_ckpt_step_ended():
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.ft_ckpt_step_ended()  # an epoch may end within a step


def overriding(kind: type, method: str) -> list[type]:
    """Return the classes between `kind` and Trainer that define `method`, as super() calls them."""
    return defining_classes(kind, method, (Checkpointed, Trainer))
