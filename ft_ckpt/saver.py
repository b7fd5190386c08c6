"""`CheckpointSaver`: the interface of ft_ckpt to a training script."""

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
from ft_ckpt.model.sidecars import check_companions
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
_OPEN: WeakSet["CheckpointSaver[Any]"] = WeakSet()


SaveResult = TypeVar("SaveResult", default=SaveReport)  # what a saver's saves return
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

    `accelerator`: its prepared models are checked now, so that a run does not fail at its end
    because of a generation config that was invalid from the start. `directory`: where `save` with a
    step and without a path puts checkpoints, also after the script has changed its working
    directory. `settings`: the fields of `SaverConfig`, which may be passed as `config` instead.
    `on_saved`: one or several functions, called on rank 0 with the report of each committed save,
    in the thread that finished it; their errors become warnings. They must not call the saver.

    Raises ConfigError for invalid settings, CompanionError for a tokenizer or generation config
    that does not fit, SelectionError for optimizers and other objects of a run whose state cannot
    be saved, TargetError when `directory` cannot be written.
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
            # A template takes its tokens from the tokenizer, which may be given to save() only.
            check_companions(
                unwrap(model),
                tokenizer,
                self.config.chat_template_name if tokenizer else None,
            )
        self._run = TrainingRun(accelerator, self.config)
        self._epochs: int | None = None  # argument of `remaining`
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

        Returns when the checkpoint is durable. With `background` it returns at once if possible;
        the handle and the next call of the saver report the outcome, and both raise if the save
        failed. The keywords that are not listed here override the saver's settings.

        The whole model is saved (of torch's AveragedModel the inner one), or the submodule at
        `attribute`; several attributes get a folder each. `adapter_only` is required for a model
        with PEFT adapters: True saves the adapters alone, False the base and the adapters side by
        side, which only `ft_ckpt.load_model` puts together. `path` defaults to
        `directory`/checkpoint-`step`; a checkpoint with training state is never replaced. Within a
        run `step` and `metrics` default to those of its last step. `state_dict`: tensors to save
        instead of the live ones; it must agree with the model. `extra_files`: files of rank 0 by
        path in the checkpoint.

        `merged` True stores one plain model, with the active adapters merged into a copy of the
        base, layer by layer; names choose adapters, a mapping gives each a weight. A quantised base
        is refused: `ft_ckpt.merge` merges the adapter's files into the model that was quantised.
        `check`="logits", or a batch, compares the output of the saved folder in transformers with
        the live model before the commit. With `push_to_hub` ("user/name", or a URL) rank 0 then
        pushes the checkpoint there in the background, as `ft_ckpt.push` does; the report's `push`
        is the handle.

        Raises SelectionError when the model lacks the requested part or the request is ambiguous,
        IncompleteError when the files would differ from the model, TargetError or NoSpaceError when
        it cannot be written, RankError when another rank failed, RanksDisagreeError when ranks
        called differently or not at all; nothing is committed then.
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
        facts = self._run.facts_of_save(step, metrics_as_floats(metrics))
        model = model_inside(model)
        self._saves.wait_for_pending()
        if target is None and step is not None:  # into the directory of the run
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
                make_room=room_maker(config.keep, facts["step"], facts.get("run_id")),
                follow_up=follow_up,
                **facts,
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

        Call on every rank. `url` is that of the server, or several. Of a model with PEFT adapters
        the adapters are saved, unless `adapter_only` or `merged` says otherwise. A run never prunes
        what is saved here. `settings` are those of `ft_ckpt.publish`. Returns the report on rank 0,
        None on the others.

        Raises what `save` and `ft_ckpt.publish` raise, RankError on the other ranks.
        """
        options = server_options(url, settings)
        if adapter_only is None:
            adapter_only = not merged and has_adapters(model_inside(model))
        saved = self.save(
            model, path, adapter_only=adapter_only, merged=merged, step=step, background=False
        )
        place = (saved.result() if isinstance(saved, PendingSave) else saved).place
        ranks = self._current_ranks()

        def publish_on_rank_0() -> PublishReport | None:
            return publish(place, options) if ranks.is_main else None

        report = ranks.run("saver.publish()", publish_on_rank_0)
        if report is not None:
            self._run.published = report.version
        return report

    def register(self, **objects: Any) -> None:
        """Name objects of the run that Accelerate does not know. Call on every rank.

        These objects are saved and resumed with the run. `model` is the one whose weights are
        saved. Further modules (an average of the weights), optimizers, schedulers and all objects
        with `state_dict` and `load_state_dict` are saved with their state. Raises SelectionError
        for other objects.
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
        """Invite other processes to hand in parts of each checkpoint. Call on every rank.

        Call it after `resume`. Each name is that of a `Writer`; a group, such as rollout=4, invites
        "rollout-0" to "rollout-3". From now on a save of the run asks all of them for their state,
        and commits when all have handed in theirs for its step; a save in the background waits for
        them in the background. If writers or groups in `optional` are missing, it commits without
        them after `timeout_seconds`, or when their process has ended; the report's notes name them.
        Returns the token of the session; a `Writer` with this token joins no other session.

        Raises WriterError if the checkpoint that was resumed lacks the part of a writer, or has one
        of a writer that is not invited, unless `allow` names it; TargetError while another process
        has invited writers to the directory; ConfigError for invalid names, without a directory and
        with `staging`. Saves raise WriterError naming the writers that have ended, failed, or
        handed in nothing in time.
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
        """The progress of the run: steps as `step` counts them, data position as in `remaining`."""
        return self._run.progress

    def remaining(
        self, loader: Iterable[Batch], epochs: int | None = None, *, replay: bool | None = None
    ) -> Iterator[Batch]:
        """Yield the batches of `loader` that the run has not seen.

        The loop ends with the epoch, or with the last of `epochs`. After `resume` it continues
        exactly where the checkpoint was made; with `replay` also for random augmentation in loader
        workers, by reading seen batches again and dropping them. Epochs are counted per loader. On
        resume, loaders are matched by dataset, or else by the order of the calls. Checkpoints that
        are due at the end of an epoch are made there if the loader could not tell its last batch.
        After all `epochs` the last step is saved if there is a schedule and the step was not saved.
        """
        check_loop(loader, epochs)
        feed = self.place_in(loader, replay)
        self._epochs = epochs or self._epochs
        is_done = epochs is not None and feed.epoch >= epochs and self._run.resumed_from is not None
        if is_done and self._current_ranks().is_main:
            LOG.info("the run is finished: %d of %d epochs are done", feed.epoch, epochs)
        while epochs is None or feed.epoch < epochs:
            # Looked up again, because the run may have been rolled back.
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
        """Return the data position of `loader`.

        Integrations that iterate the loader use it; training loops use `remaining`.
        """
        return self._run.feeds.position_of(
            loader, self._current_ranks(), replay, self.config.on_difference
        )

    @as_in_training
    def step(
        self, metrics: Mapping[str, Any] | None = None, *, step: int | None = None
    ) -> SaveResult | None:
        """Report a finished batch, and save the run when it is due.

        Call on every rank, after every batch. A step is counted when an optimizer has stepped;
        batches of an accumulation are skipped, whether Accelerate or the script accumulates. The
        optimizers must be prepared by Accelerate or registered; without any, every call counts.
        `step` sets the count instead. `metrics`: real numbers, also as tensors or arrays of one
        element. After a save for a signal the process exits on all ranks, see `Every.signals`.

        Raises ConfigError for invalid metrics and steps, and what `save_state` raises; with
        on_failure="warn" a failed save gives a warning, and training continues. If there is a
        schedule, the first call raises SelectionError for state that the optimizers have made and
        that cannot be saved.
        """
        numbers, step = metrics_as_floats(metrics), optional_step(step)
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
        return cast("SaveResult | None", report)  # a saver's settings decide

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

        The checkpoint contains the weights, and the state of the objects that Accelerate prepared
        and of the registered ones; `objects` are registered first. If only PEFT adapters are
        trained, only these are saved, unless `adapter_only` says otherwise. Weights that the
        model's files have in another dtype, or not at all, are stored exactly with the state.
        `extra_files`, `background` and `overwrite` are as for `save`. Then checkpoints that `keep`
        does not select are deleted. Raises what `save` raises.
        """
        check_mappings(extra_files=extra_files)
        counted = self._run.agree_on_metrics(metrics_as_floats(metrics), self._current_ranks())
        config = self._config_with(background=background, overwrite=overwrite)
        self._run.register({**objects, **({} if model is None else {"model": model})})
        target = None if path is None else open_place(path, **config.client_options)
        return self._saves.save(
            None, config, target, counted, adapter_only, dict(extra_files or {})
        )

    def wait(self) -> SaveReport | None:
        """Wait for the save in the background and return its report. Call on every rank.

        Returns None without such a save. Raises the error of that save, once.
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
        """Restore the run from a checkpoint and return its progress; on every rank.

        `checkpoint`: "auto" (also "latest", True, None), the newest whole one of the run, in
        `directory` or staged, or a fresh start if there is none; "must", the newest, or an error;
        "never" (also False), a fresh start; or one by its name or path, or the path of a folder of
        Accelerate's `save_state`. The newest belongs to the newest run in the directory, however
        far other runs got. `objects` are registered first. `progress.report` lists the outcome of
        each item, none on a fresh start; items named in `allow` (True: any) may be absent or fail.
        Optimizer state and gradients that the checkpoint lacks are dropped. A run that is rolled
        back to one of its own older checkpoints continues as a new run, which may replace the later
        checkpoints.

        Raises LoadError when something was not restored, NotACheckpointError when there is none to
        resume from, CorruptError naming damaged files and the newest whole checkpoint, RankError
        when another rank failed. Nothing is overwritten before all files and items are compared.
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
        """End the use of the saver, on every rank; later saves are refused. Waits as `wait` does.

        With a schedule, the last step is saved first if it was not, unless an exception is
        propagating. The end of a `with` block calls this.
        """
        self._end_use(save=sys.exc_info()[0] is None)

    def _announce_start(self, mode: str | Place) -> None:
        """Log in one line where the run begins.

        A fresh start with `resume("never")` goes to the log only.
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
        """Replace the saver's settings by the arguments that are not None."""
        changes = {name: value for name, value in arguments.items() if value is not None}
        return replace(self.config, **changes)

    def _is_of_adapters(
        self, model: nn.Module, adapter_only: bool | None, attribute: Attribute
    ) -> bool:
        alone = saves_adapters_only(model, adapter_only, attribute)
        if alone and attribute == self.config.attribute:
            self._run.base.refuse_changed(model, self._current_ranks().rank)
        return alone

    def _end_use(self, *, save: bool) -> None:
        """Save the last step if asked, and release everything even on an error."""
        with ExitStack() as stack:
            stack.callback(self._saves.lease.end)  # runs last: uploads are of this run, too
            stack.callback(self._saves.end_follow_ups, wait=save)  # a background save starts it
            # after a save in the background, which waits for the writers
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
            # its error would hide the propagating one
            try_action(lambda: self._end_use(save=False))

    def _current_ranks(self) -> Ranks:
        return current_ranks(self.config.enter_timeout_seconds)


def _invited_writers(
    writers: Iterable[str], groups: Mapping[str, int], optional: Iterable[str]
) -> dict[str, bool]:
    """Return all invited writers, those of the groups included, and whether each is optional.

    Raises ConfigError for invalid names and counts, and for optional ones that are not invited.
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
    """Return the step that merges the adapters that `merged` chooses; None if it chooses none.

    Raises ConfigError for an invalid choice, and for arguments that a merge excludes.
    """
    choice = merge_choice(merged, excluded)
    if choice is None:
        return None
    from ft_ckpt.extensions.tools.merging import merged_part  # imports PEFT, which is slow

    return partial(merged_part, dtype=dtype, choice=choice)


def _logits_check(
    model: nn.Module, check: str | Mapping[str, Any] | None
) -> Callable[[Path], str] | None:
    """Return the step that compares the saved model's logits with the current ones of `model`.

    None without a `check`. Collective.
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
    """Warn at the end of a script that has never called `step`, nor closed its saver."""
    if hasattr(sys, "last_value"):  # it ends with an error, which says more
        return
    for saver in open_savers():
        saver._run.remind_of_step(is_main=is_first_process())  # the process group may be gone
