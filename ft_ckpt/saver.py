"""Defines `CheckpointSaver`, through which a training script saves and resumes."""

import atexit
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, cast, overload
from weakref import WeakSet

from torch import Tensor, nn
from typing_extensions import Self, TypeVar, Unpack

from ft_ckpt.checkpoint.manifest import age_of
from ft_ckpt.config import SaverConfig, SaverSettings, make_config
from ft_ckpt.errors import ConfigError, is_number, listing
from ft_ckpt.extensions.rl.engines import ServerOptions, ServerSettings, server_options
from ft_ckpt.extensions.rl.publishing import PublishReport, publish
from ft_ckpt.extensions.rl.writers import check_writer_names
from ft_ckpt.extensions.transfer.sending import push_goal
from ft_ckpt.messages import LOG, announce
from ft_ckpt.model.parts import Attribute, check_model, model_inside, saves_adapters_only
from ft_ckpt.model.sidecars import check_sidecars
from ft_ckpt.model.tensors import Merged, Part, View, has_adapters, merge_choice
from ft_ckpt.ranks import Ranks, current_ranks, try_action
from ft_ckpt.ranks.moving import is_first_process
from ft_ckpt.ranks.wrappers import unwrap
from ft_ckpt.runs.data import DataPosition
from ft_ckpt.runs.folder import open_run_places, room_maker
from ft_ckpt.runs.loop import (
    Progress,
    TrainingRun,
    check_accelerator,
    check_loop,
    check_mappings,
    check_schedule,
    check_tokenizer_argument,
    start_recorder,
)
from ft_ckpt.runs.resume import ResumeRequest, parse_mode, resume_run
from ft_ckpt.runs.saves import RunSaves, SaveHook, open_follow_ups
from ft_ckpt.saving import SaveRunner, as_in_training, library_versions
from ft_ckpt.saving.planning import PendingSave, SaveReport, SaveRequest, request_of
from ft_ckpt.storage.places import Place, location_name, open_place, shown_location
from ft_ckpt.values import as_names, metrics_as_floats, optional_step

if TYPE_CHECKING:
    import torch

__all__ = ["CheckpointSaver", "Progress", "SaveReport"]
# the savers of this process that are not closed
_OPEN: WeakSet["CheckpointSaver[Any]"] = WeakSet()

# what the saves of a saver return: a report, or a handle of a save in the background
SaveResult = TypeVar("SaveResult", default=SaveReport)
Batch = TypeVar("Batch")


class SaveArguments(TypedDict, total=False):
    """The keywords of `CheckpointSaver.save` for type checkers, without `background`."""

    adapter_only: bool | None
    attribute: Attribute
    dtype: "str | torch.dtype | None"
    chat_template_name: str | None
    tokenizer: Any
    format: str | None
    compression: str | None
    max_shard_size: int | str | None
    state_dict: Mapping[str, Tensor] | None
    step: int | None
    metrics: Mapping[str, Any] | None
    extra_files: Mapping[str, str | bytes] | None
    overwrite: bool | None
    merged: Merged
    check: str | Mapping[str, Any] | None
    push_to_hub: str | None


class CheckpointSaver(Generic[SaveResult]):
    """Saves and resumes a training run, and saves models as Hugging Face tools load them.

    `accelerator`: its prepared models are checked now. So a run does not fail at its end because of
    a generation config that was invalid from the start. `directory`: the folder or URL for
    checkpoints that are saved without a path. A relative path stays valid if the script changes its
    working directory. `settings`: the fields of `SaverConfig`, which may be passed as `config`
    instead. `on_saved`: one or several functions that rank 0 calls with the report of each
    committed save, in the thread that finished it. Their errors become warnings. They must not call
    the saver.

    Raises ConfigError for invalid settings, CompanionError for a tokenizer or generation config
    that does not fit, SelectionError for optimizers and other objects of a run whose state cannot
    be saved, and TargetError if `directory` cannot be written.
    """

    @overload
    def __init__(
        self: "CheckpointSaver[SaveReport]",
        accelerator: Any = None,
        directory: str | Path | Place | None = None,
        *,
        tokenizer: Any = None,
        on_saved: SaveHook | Iterable[SaveHook] | None = None,
        background: Literal[False] = False,
        **settings: Unpack[SaverSettings],
    ) -> None: ...

    @overload
    def __init__(
        self: "CheckpointSaver[PendingSave]",
        accelerator: Any = None,
        directory: str | Path | Place | None = None,
        *,
        tokenizer: Any = None,
        on_saved: SaveHook | Iterable[SaveHook] | None = None,
        background: Literal[True],
        **settings: Unpack[SaverSettings],
    ) -> None: ...

    @overload
    def __init__(
        self: "CheckpointSaver[SaveReport | PendingSave]",
        accelerator: Any = None,
        directory: str | Path | Place | None = None,
        *,
        tokenizer: Any = None,
        on_saved: SaveHook | Iterable[SaveHook] | None = None,
        background: bool,
        **settings: Unpack[SaverSettings],
    ) -> None: ...

    @overload
    def __init__(
        self: "CheckpointSaver[SaveReport | PendingSave]",
        accelerator: Any = None,
        directory: str | Path | Place | None = None,
        *,
        tokenizer: Any = None,
        config: SaverConfig | None,
        on_saved: SaveHook | Iterable[SaveHook] | None = None,
    ) -> None: ...

    def __init__(
        self,
        accelerator: Any = None,
        directory: str | Path | Place | None = None,
        *,
        tokenizer: Any = None,
        config: SaverConfig | None = None,
        on_saved: SaveHook | Iterable[SaveHook] | None = None,
        **settings: Any,
    ) -> None:
        self.config = make_config(config, settings)
        self._rehearsal = start_recorder()
        if self._rehearsal is not None:
            directory = self._rehearsal.directory
            self.config = replace(self.config, staging=None, publish=None)

        check_accelerator(accelerator)
        check_tokenizer_argument(tokenizer)
        check_schedule(self.config, directory)
        self.accelerator = accelerator
        self.tokenizer = tokenizer
        place = None
        if directory is not None:
            place = open_place(directory, **self.config.client_options)
        self._places = open_run_places(place, self.config, lambda: self._current_ranks().is_main)
        for model in getattr(accelerator, "_models", None) or ():
            # A chat template needs the tokens of the tokenizer, which `save` may get later.
            template_name = self.config.chat_template_name if tokenizer else None
            check_sidecars(unwrap(model), tokenizer, template_name)

        self._run = TrainingRun(accelerator, self.config)

        # the argument of `remaining`
        self._epochs: int | None = None
        self._pending = SaveRunner(self._run.objects.steppers, background=self.config.background)
        follow_ups = open_follow_ups(on_saved, self._places, self.config)
        is_rehearsal = self._rehearsal is not None
        self._saves = RunSaves(
            self._run, self._pending, self._places, tokenizer, is_rehearsal, follow_ups
        )
        self._run.check_objects()
        self._run.note_base()
        _OPEN.add(self)

    @overload
    def save(
        self,
        model: nn.Module,
        path: str | Path | Place | None = None,
        *,
        background: None = None,
        **arguments: Unpack[SaveArguments],
    ) -> SaveResult: ...

    @overload
    def save(
        self,
        model: nn.Module,
        path: str | Path | Place | None = None,
        *,
        background: Literal[True],
        **arguments: Unpack[SaveArguments],
    ) -> PendingSave: ...

    @overload
    def save(
        self,
        model: nn.Module,
        path: str | Path | Place | None = None,
        *,
        background: Literal[False],
        **arguments: Unpack[SaveArguments],
    ) -> SaveReport: ...

    @overload
    def save(
        self,
        model: nn.Module,
        path: str | Path | Place | None = None,
        *,
        background: bool,
        **arguments: Unpack[SaveArguments],
    ) -> SaveReport | PendingSave: ...

    @as_in_training
    def save(
        self,
        model: nn.Module,
        path: str | Path | Place | None = None,
        *,
        adapter_only: bool | None = None,
        attribute: Attribute = None,
        dtype: "str | torch.dtype | None" = None,
        chat_template_name: str | None = None,
        tokenizer: Any = None,
        format: str | None = None,  # noqa: A002 - its name in other savers
        compression: str | None = None,
        max_shard_size: int | str | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, str | bytes] | None = None,
        background: bool | None = None,
        overwrite: bool | None = None,
        merged: Merged = False,
        check: str | Mapping[str, Any] | None = None,
        push_to_hub: str | None = None,
    ) -> Any:
        """Save `model`, or a part of it, to the folder `path`. Call on every rank.

        Returns the report when the checkpoint is durable. With `background` it returns a handle at
        once if possible. The handle and the next call of the saver report the outcome, and both
        raise an error if the save has failed. The keywords that are not explained here override the
        settings of the saver.

        The whole model is saved (of torch's AveragedModel the inner one), or the submodule at
        `attribute`. Several attributes get a folder each. `adapter_only` is required for a model
        with PEFT adapters: True saves the adapters alone. False saves the base and the adapters
        side by side, which only `ft_ckpt.load_model` puts together. `path` is by default
        `directory`/checkpoint-`step`. A checkpoint with training state is never replaced. Within a
        run `step` and `metrics` are by default those of its last step. `state_dict` has tensors to
        save instead of the live ones, and must agree with the model. `extra_files` has files of
        rank 0 by their path in the checkpoint.

        `merged` True stores one plain model: the active adapters are merged into a copy of the
        base, layer by layer. Names choose adapters, and a mapping gives each a weight. A quantised
        base is refused: `ft_ckpt.merge` merges the adapter's files into the model that was
        quantised. `check`="logits", or a batch, compares the output of the saved folder in
        transformers with that of the live model before the commit. With `push_to_hub` ("user/name",
        or a URL) rank 0 then pushes the checkpoint there in the background, as `ft_ckpt.push` does.
        The report's `push` is the handle.

        Nothing is committed if an error is raised: SelectionError if the model lacks the requested
        part or the request is ambiguous, IncompleteError if the files would differ from the model,
        TargetError or NoSpaceError if it cannot be written, RankError if another rank has failed,
        RanksDisagreeError if ranks called it with different arguments or not at all.
        """
        config = self._config_with(
            dtype=dtype,
            chat_template_name=chat_template_name,
            format=format,
            compression=compression,
            max_shard_size=max_shard_size,
            background=background,
            overwrite=overwrite,
        )
        target = None if path is None else open_place(path, **config.client_options)
        push_to = None if push_to_hub is None else push_goal(push_to_hub, **config.client_options)
        check_tokenizer_argument(tokenizer)
        check_mappings(state_dict=state_dict, extra_files=extra_files)
        step = optional_step(step)
        run_fields = self._run.fields_of_save(step, metrics_as_floats(metrics))
        model = model_inside(model)
        self._saves.wait_for_pending()
        is_in_directory = target is None and step is not None
        if is_in_directory:
            self._saves.take_lease()
        excluded = {"adapter_only": adapter_only, "attribute": attribute, "state_dict": state_dict}
        attribute = self.config.attribute if attribute is None else attribute
        follow_up = self._saves.follow_up_of_save(push_to=push_to, base_id=config.base_id)

        def make_request() -> SaveRequest:
            check_model(model)
            notes: list[str] = []
            if state_dict is None:
                notes = self._run.objects.notes_on_weights(model)
            return request_of(
                config,
                model,
                self._saves.target_folder(target, step, has_state=False),
                merge=_merge_step(merged, excluded, config.dtype),
                check=_logits_check(model, check),
                adapter_only=not merged and self._is_of_adapters(model, adapter_only, attribute),
                attribute=attribute,
                tokenizer=self.tokenizer if tokenizer is None else tokenizer,
                state_dict=state_dict,
                extra_files=dict(extra_files or {}),
                notes=tuple(notes),
                make_room=room_maker(config.keep, run_fields["step"], run_fields.get("run_id")),
                follow_up=follow_up,
                **run_fields,
            )

        return self._pending.save(make_request, config)

    def publish(
        self,
        model: nn.Module,
        url: str | Sequence[str] | ServerOptions,
        path: str | Path | Place | None = None,
        *,
        adapter_only: bool | None = None,
        merged: Merged = False,
        step: int | None = None,
        **settings: Unpack[ServerSettings],
    ) -> PublishReport | None:
        """Save `model` as `save` does, and publish it from rank 0 to one server or several.

        Call on every rank. `url` is the URL of a server, or several URLs. If the model has PEFT
        adapters, the adapters alone are saved, unless `adapter_only` or `merged` says otherwise. A
        run never deletes what is saved here. `settings` are those of `ft_ckpt.publish`. Returns the
        report on rank 0, None on the others.

        Raises what `save` and `ft_ckpt.publish` raise, and RankError on the other ranks.
        """
        options = server_options(url, settings)
        if adapter_only is None:
            adapter_only = not merged and has_adapters(model_inside(model))
        saved = self.save(
            model, path, adapter_only=adapter_only, merged=merged, step=step, background=False
        )
        save_report = saved.result() if isinstance(saved, PendingSave) else saved
        ranks = self._current_ranks()

        def publish_on_leader() -> PublishReport | None:
            return publish(save_report.place, options) if ranks.is_main else None

        report = ranks.run("saver.publish()", publish_on_leader)
        if report is not None:
            self._run.published = report.version
        return report

    def register(self, **objects: Any) -> None:
        """Add objects to the run that Accelerate does not know. Call on every rank.

        The objects are saved and resumed with the run, under the names of the arguments. `model` is
        the model whose weights are saved. Other modules (such as an average of the weights),
        optimizers, schedulers and all objects with `state_dict` and `load_state_dict` are saved
        with the training state. Raises SelectionError for any other object.
        """
        self._run.register(objects)

    def invite(
        self,
        *writers: str,
        optional: Iterable[str] = (),
        allow: Iterable[str] = (),
        timeout_seconds: float = 300.0,
        **groups: int,
    ) -> str:
        """Invite other processes to hand in files for each checkpoint. Call on every rank.

        Call it after `resume`. Each name is that of a `Writer`. A group, such as rollout=4, invites
        "rollout-0" to "rollout-3". From now on a save of the run asks all of them for their files,
        and commits when all have handed in those of its step. A save in the background waits for
        them in the background. If writers or groups in `optional` are missing, it commits without
        them after `timeout_seconds`, or when their process has ended. The report's notes name them.
        Returns the token of the session. A `Writer` with this token joins no other session.

        Raises WriterError if the checkpoint that was resumed lacks the files of a writer, or has
        files of a writer that is not invited, unless `allow` names it. Raises TargetError while
        another process has invited writers to the directory. Raises ConfigError for invalid names,
        without a directory, and with `staging`. Saves raise WriterError naming the writers that
        have ended, have failed, or have handed in nothing in time.
        """
        if not is_number(timeout_seconds, 0):
            raise ConfigError(
                f"timeout_seconds={timeout_seconds!r:.80}: expected seconds from 0 on"
            )
        optional = as_names(optional, "invite(optional=...)")
        allow = as_names(allow, "invite(allow=...)")
        is_optional = _invited_writers(writers, groups, optional)
        return self._saves.invite(is_optional, allow, timeout_seconds)

    @property
    def directory(self) -> Path | str | None:
        """The folder for checkpoints that are saved without a path, or its URL in a bucket."""
        return None if self._places.directory is None else self._places.directory.location

    @property
    def progress(self) -> Progress:
        """The progress of the run: the steps that `step` counts, the position of `remaining`."""
        return self._run.progress

    def remaining(
        self, loader: Iterable[Batch], epochs: int | None = None, *, replay: bool | None = None
    ) -> Iterator[Batch]:
        """Yield the batches of `loader` that the run has not seen.

        The loop ends with the epoch, or with the last of `epochs`. After `resume` it continues
        exactly where the checkpoint was made. With `replay` this holds for random augmentation in
        loader workers too: the seen batches are read again and dropped. Epochs are counted for each
        loader. After a resume, a loader is recognized by its dataset, or else by the order of the
        calls.

        If a checkpoint is due at the end of an epoch and the loader could not tell its last batch,
        it is saved at the end of the loop. After all `epochs` the last step is saved, if there is a
        schedule and the step was not saved yet.
        """
        check_loop(loader, epochs)
        feed = self.place_in(loader, replay)
        if epochs:
            self._epochs = epochs
        is_done = epochs is not None and feed.epoch >= epochs and self._run.resumed_from is not None
        if is_done and self._current_ranks().is_main:
            LOG.info("the run is finished: %d of %d epochs are done", feed.epoch, epochs)
        while epochs is None or feed.epoch < epochs:
            # Looked up again, because the script may have called `resume` in the loop.
            feed = self.place_in(loader, replay)
            batches = self._saves.read_until_signal(feed.batches())
            batches = self._run.watch_loop(batches, self._current_ranks())
            if self._rehearsal is not None:
                batches = self._rehearsal.watch_batches(batches)
            yield from batches
            if self.config.every is not None and self.config.every.epochs:
                self._saves.save_if_due({})
            if epochs is None:
                return

        self._saves.save_last()

    def place_in(self, loader: Any, replay: bool | None = None) -> DataPosition:
        """Return the position of the run in the data of `loader`.

        It is for integrations that iterate the loader themselves. Training loops use `remaining`.
        """
        return self._run.feeds.position_of(
            loader, self._current_ranks(), replay, self.config.on_difference
        )

    @as_in_training
    def step(
        self, metrics: Mapping[str, Any] | None = None, *, step: int | None = None
    ) -> SaveResult | None:
        """Report a finished batch, and save the run if a save is due.

        Call on every rank, after every batch. A step is counted when an optimizer has stepped. The
        other batches of an accumulation do not count, whether Accelerate or the script accumulates.
        The optimizers must be prepared by Accelerate or registered. Without any, every call counts.
        `step` sets the count instead. `metrics` are real numbers, also as tensors or arrays of one
        element. After a save on a signal the process exits on all ranks, see `Every.signals`.

        Returns the report of a save, or None. Raises ConfigError for invalid metrics and steps, and
        what `save_state` raises. With on_failure="warn" a failed save gives a warning, and training
        continues. If there is a schedule, the first step raises SelectionError for state that the
        optimizers have made and that cannot be saved.
        """
        numbers = metrics_as_floats(metrics)
        step = optional_step(step)
        if not self._run.is_batch_done():
            return None
        if not self._run.has_begun:
            self._run.check_first_step(self._current_ranks())
        self._run.note_step(step, numbers)
        report = self._saves.save_if_due(numbers)
        if self._rehearsal is not None:
            self._rehearsal.record_step(
                self._run.step,
                numbers,
                report is not None,
                self._current_ranks().is_main,
                lambda path: self.save_state(path=path, metrics=numbers),
            )

        # The settings of the saver decide which type it is.
        return cast("SaveResult | None", report)

    @overload
    def save_state(
        self,
        model: nn.Module | None = None,
        path: str | Path | Place | None = None,
        *,
        adapter_only: bool | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, str | bytes] | None = None,
        background: None = None,
        overwrite: bool | None = None,
        **objects: Any,
    ) -> SaveResult: ...

    @overload
    def save_state(
        self,
        model: nn.Module | None = None,
        path: str | Path | Place | None = None,
        *,
        adapter_only: bool | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, str | bytes] | None = None,
        background: Literal[True],
        overwrite: bool | None = None,
        **objects: Any,
    ) -> PendingSave: ...

    @overload
    def save_state(
        self,
        model: nn.Module | None = None,
        path: str | Path | Place | None = None,
        *,
        adapter_only: bool | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, str | bytes] | None = None,
        background: Literal[False],
        overwrite: bool | None = None,
        **objects: Any,
    ) -> SaveReport: ...

    @overload
    def save_state(
        self,
        model: nn.Module | None = None,
        path: str | Path | Place | None = None,
        *,
        adapter_only: bool | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, str | bytes] | None = None,
        background: bool,
        overwrite: bool | None = None,
        **objects: Any,
    ) -> SaveReport | PendingSave: ...

    @as_in_training
    def save_state(
        self,
        model: nn.Module | None = None,
        path: str | Path | Place | None = None,
        *,
        adapter_only: bool | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, str | bytes] | None = None,
        background: bool | None = None,
        overwrite: bool | None = None,
        **objects: Any,
    ) -> Any:
        """Save a checkpoint that the run can be resumed from. Call on every rank.

        The checkpoint has the weights, and the state of the objects that Accelerate has prepared or
        the script has registered. `objects` are registered first. If only PEFT adapters are
        trained, only these are saved, unless `adapter_only` says otherwise. Weights that the
        model's files have in another dtype, or not at all, are stored exactly with the state.
        `extra_files`, `background` and `overwrite` are as for `save`. After the commit, checkpoints
        that `keep` does not select are deleted. Raises what `save` raises.
        """
        check_mappings(extra_files=extra_files)
        numbers = self._run.agree_on_metrics(metrics_as_floats(metrics), self._current_ranks())
        config = self._config_with(background=background, overwrite=overwrite)
        if model is not None:
            objects = {**objects, "model": model}
        self._run.register(objects)
        target = None if path is None else open_place(path, **config.client_options)
        return self._saves.save(
            None, config, target, numbers, adapter_only, dict(extra_files or {})
        )

    def wait(self) -> SaveReport | None:
        """Wait for the save in the background, and return its report. Call on every rank.

        Returns None if there is no such save. Raises the error of the save, once.
        """
        return self._pending.wait_for_save()

    @as_in_training
    def resume(
        self,
        checkpoint: str | Path | Place | bool | None = "auto",
        *,
        allow: Iterable[str] | bool = (),
        **objects: Any,
    ) -> Progress:
        """Restore the run from a checkpoint, and return its progress. Call on every rank.

        `checkpoint` is one of these:

        - "auto" (also "latest", True, None): the newest intact checkpoint of the run, in
          `directory` or in the staging folder. If there is no checkpoint, it is a fresh start.
        - "must": the newest checkpoint, or an error.
        - "never" (also False): a fresh start.
        - the name or the path of a checkpoint, or the path of a folder of Accelerate's
          `save_state`.

        The newest checkpoint is that of the newest run in the directory, even if another run got
        further. `objects` are registered first. `progress.report` lists the outcome of each item,
        and none on a fresh start. Items that `allow` names may be absent or fail; True allows any
        item. Optimizer state and gradients that the checkpoint lacks are dropped. A run that goes
        back to one of its own older checkpoints continues as a new run, which may replace the later
        checkpoints.

        Raises LoadError if something was not restored, NotACheckpointError if there is no
        checkpoint to resume from, CorruptError naming damaged files and the newest intact
        checkpoint, and RankError if another rank has failed. Nothing is overwritten before all
        files and items are compared.
        """
        self._saves.wait_for_pending()
        self._saves.take_lease()
        self.register(**objects)
        mode = parse_mode(checkpoint)
        request = ResumeRequest(
            mode, self._places, self.config.client_options, self.config.verify_resume
        )
        resume_run(self._run, request, self._current_ranks(), allow, library_versions())
        self._saves.upload_leftovers()
        self._saves.publish_resumed()
        self._saves.reopen_session()
        if self._current_ranks().is_main:
            self._announce_start(mode)
        return self._run.progress

    def close(self) -> None:
        """Close the saver. Call on every rank. Later saves are refused.

        With a schedule, the last step is saved first if it was not saved yet, unless an exception
        is propagating. Then this waits for a save in the background, and for uploads, pushes and
        publishes. The end of a `with` block calls this.
        """
        self._end_use(save=sys.exc_info()[0] is None)

    def _announce_start(self, mode: str | Place) -> None:
        """Tell the user in one line where the run begins.

        A fresh start by `resume("never")` goes to the log only.
        """
        progress = self._run.progress
        if progress.resumed_from is None:
            searched = "no directory" if self.directory is None else shown_location(self.directory)
            text = f"a fresh start: nothing was resumed from {searched}"
            if mode == "never":
                LOG.info("%s", text)
            else:
                announce(text)
            return
        age = age_of(self._run.resumed_moment)
        saved = f", saved {age} ago" if age else ""
        counts = f"step {progress.step}, epoch {progress.epoch}, batch {progress.batch}"
        announce(f"resumed {location_name(progress.resumed_from)} at {counts}{saved}")

    def _config_with(self, **arguments: Any) -> SaverConfig:
        """Return the settings of the saver, with those arguments replaced that are not None."""
        changes = {name: value for name, value in arguments.items() if value is not None}
        return replace(self.config, **changes)

    def _is_of_adapters(
        self, model: nn.Module, adapter_only: bool | None, attribute: Attribute
    ) -> bool:
        """Check whether the adapters alone are saved.

        If so, raises an error if their base has changed since the run began.
        """
        adapters_only = saves_adapters_only(model, adapter_only, attribute)
        if adapters_only and attribute == self.config.attribute:
            self._run.base.refuse_changed(model, self._current_ranks().rank)
        return adapters_only

    def _end_use(self, *, save: bool) -> None:
        """Save the last step if `save`, and release everything, also after an error."""
        # The stack calls the callbacks in reverse order: the last one first.
        with ExitStack() as stack:
            # The lease ends last, because uploads belong to the run too.
            stack.callback(self._saves.lease.end)
            # After the save in the background, which starts the uploads.
            stack.callback(self._saves.end_follow_ups, wait=save)
            # After the save in the background, which waits for the writers.
            stack.callback(self._saves.writers.end)
            stack.callback(self._pending.close)
            stack.callback(self._run.close)
            stack.callback(_OPEN.discard, self)
            stack.callback(self._saves.close)
            if save and not self._saves.is_closed:
                self._run.remind_of_step(is_main=self._current_ranks().is_main)
                self._saves.save_last()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._end_use(save=True)
        else:
            # The error of the block is propagating. An error from here would hide it.
            try_action(lambda: self._end_use(save=False))

    def _current_ranks(self) -> Ranks:
        return current_ranks(self.config.enter_timeout_seconds)


def _invited_writers(
    writers: Iterable[str], groups: Mapping[str, int], optional: Iterable[str]
) -> dict[str, bool]:
    """Return the names of all invited writers, each with whether it is optional.

    A group of 2 called "rollout" gives "rollout-0" and "rollout-1". Raises ConfigError for invalid
    names and counts, and for a name in `optional` that is not invited.
    """
    names = [*writers]
    optional_names = {*optional}
    wrong = []
    for group, count in groups.items():
        if not is_number(count, 1, whole=True):
            wrong.append(f"{group}={count!r:.80}")
            continue
        members = [f"{group}-{number}" for number in range(count)]
        names += members
        if group in optional_names:
            optional_names.update(members)

    if wrong:
        raise ConfigError(
            f"{listing(wrong, ', ')}: expected the number of writers of the group, from 1 on"
        )

    check_writer_names(names)
    unknown = sorted({*optional} - {*names, *groups})
    if unknown:
        raise ConfigError(f"optional={unknown}: not invited; expected some of {', '.join(names)}")
    return {name: name in optional_names for name in names}


def _merge_step(
    merged: Merged, excluded: Mapping[str, Any], dtype: str
) -> Callable[[View], Part] | None:
    """Return the function that merges the adapters that `merged` chooses; None if it chooses none.

    Raises ConfigError for an invalid choice, and for arguments (`excluded`) that a merge cannot
    have.
    """
    choice = merge_choice(merged, excluded)
    if choice is None:
        return None
    from ft_ckpt.extensions.tools.merging import merged_part  # imports PEFT, which is slow

    return partial(merged_part, dtype=dtype, choice=choice)


def _logits_check(
    model: nn.Module, check: str | Mapping[str, Any] | None
) -> Callable[[Path], str] | None:
    """Return the function that compares the logits of the saved model with those of `model`.

    Collective: call it on every rank, because it computes the logits of `model` now. Returns None
    without a `check`.
    """
    if check is None:
        return None
    from ft_ckpt.extensions.tools.merging import live_logits

    return live_logits(model, check).compare


def open_savers() -> list["CheckpointSaver[Any]"]:
    """Return the savers of this process that are neither closed nor garbage-collected."""
    return list(_OPEN)


@atexit.register
def _remind_open_savers() -> None:
    """Warn at the end of a script that has never called `step` and has not closed its saver."""
    if hasattr(sys, "last_value"):  # the script ends with an error, which says more
        return
    # `is_first_process` because the process group may be gone by now.
    for saver in open_savers():
        saver._run.remind_of_step(is_main=is_first_process())
