"""Saving and resuming of transformers' `Trainer`, and of trainers built on it (TRL's).

   trainer = checkpointed(SFTTrainer)(model, args, train_dataset=data)  # a class
   trainer = checkpointed(SFTTrainer(model, args, train_dataset=data))  # or a trainer that exists
   trainer.train(resume_from_checkpoint=True)

Some programs make the trainer themselves and take only callbacks. Pass them a `FtCkptCallback`,
which calls `checkpointed`.

Files that a subclass adds in its own `save_model` or `_save` are committed with the checkpoint. If
it writes weights there in another layout, the training is refused before the first step. The
trainer or a callback may hold models besides the trained one. These are restored, or reports name
them. The Trainer still decides about the schedule (`save_strategy`), metrics, early stopping and
the best model.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from transformers import Trainer, TrainerCallback
from typing_extensions import Unpack

from ft_ckpt import CheckpointSaver
from ft_ckpt.config import SaveSettings, make_config
from ft_ckpt.errors import ConfigError
from ft_ckpt.integrations.checkpointed import Checkpointed, TrainerSettings, overriding
from ft_ckpt.integrations.trainer_layout import ends_chain
from ft_ckpt.messages import short_repr, warn
from ft_ckpt.retention import Keep
from ft_ckpt.runs.loop import in_words
from ft_ckpt.runs.saves import SaveHook, hooks_of
from ft_ckpt.values import as_names

__all__ = ["FtCkptCallback", "checkpointed"]

TrainerOrClass = TypeVar("TrainerOrClass")


class TrainerSaverSettings(SaveSettings, total=False):
    """The settings of `CheckpointSaver` for a Trainer, as type checkers see them."""

    background: bool


class TrainerArguments(TrainerSaverSettings, total=False):
    """The keywords of `checkpointed` as type checkers see them in `FtCkptCallback`."""

    keep: Keep | int | None
    allow: Iterable[str] | bool
    state: bool
    on_saved: SaveHook | Iterable[SaveHook] | None
    on_resumed: Callable[[CheckpointSaver[Any]], object] | None


# Methods that save. If a subclass overrides one, its method must call super().
_SAVING_METHODS = ("_save_checkpoint", "save_model")


def checkpointed(
    trainer: TrainerOrClass,
    *,
    keep: Keep | int | None = None,
    allow: Iterable[str] | bool = (),
    state: bool = False,
    on_saved: SaveHook | Iterable[SaveHook] | None = None,
    on_resumed: Callable[[CheckpointSaver[Any]], object] | None = None,
    **settings: Unpack[TrainerSaverSettings],
) -> TrainerOrClass:
    """Make a trainer, or a class of trainers, save and resume through ft_ckpt.

    For a class, which is `Trainer` or one built on it, a subclass is returned. The class of a
    trainer is replaced by such a subclass, and the trainer is returned.

    `keep` selects the checkpoints that stay. A number n means the newest n. None means the
    Trainer's `save_total_limit`, which counts the checkpoints of this run only. The Trainer's best
    checkpoint always stays. `allow` names items that a resume may lack. With `state=True`
    checkpoints have training state even if `save_only_model=True` is set. The Trainer requires that
    argument for models that `from_pretrained(distributed_config=...)` has sharded. `on_resumed` is
    called on every rank with the saver, before the first step of a resumed run or of a new one. It
    can invite writers, for example. `on_saved` and `settings` are those of `CheckpointSaver`.

    Raises ConfigError for invalid settings, for a trainer that saves through ft_ckpt already, and
    for anything else that is neither a trainer nor a class of trainers.
    """
    if "every" in settings:
        raise ConfigError(
            "every=: the Trainer decides when to save; set save_strategy and save_steps"
        )

    if not isinstance(state, bool):
        raise ConfigError(f"state={short_repr(state)}: expected True or False")
    if on_resumed is not None and not callable(on_resumed):
        raise ConfigError(
            f"on_resumed={short_repr(on_resumed)}: expected a function of the saver, or None"
        )

    trainer_settings = TrainerSettings(
        keep=make_config(None, {"keep": keep}).keep,
        allow=allow if isinstance(allow, bool) else as_names(allow, "allow"),
        config=make_config(None, settings),
        on_saved=hooks_of(on_saved),
        has_state=state,
        on_resumed=on_resumed,
    )
    if isinstance(trainer, type) and issubclass(trainer, Trainer):
        return cast("TrainerOrClass", _checkpointed_class(trainer, trainer_settings))
    if isinstance(trainer, Trainer):
        _take_over(trainer, trainer_settings)
        return trainer

    raise ConfigError(
        f"checkpointed(): {in_words(trainer)}, expected transformers' Trainer or a class built on "
        "it, as in checkpointed(SFTTrainer)(model, args, ...), or a trainer that exists"
    )


def _take_over(trainer: Trainer, settings: TrainerSettings) -> None:
    """Replace the class of a trainer by a subclass that saves and resumes through ft_ckpt.

    Raises ConfigError if its class does so already.
    """
    kind = type(trainer)
    if issubclass(kind, Checkpointed):
        raise ConfigError(
            f"{kind.__name__}: saves through ft_ckpt already; call checkpointed() "
            "once for a trainer"
        )
    trainer.__class__ = _checkpointed_class(kind, settings)
    trainer.ft_ckpt_begin()


def _checkpointed_class(kind: type[Any], settings: TrainerSettings) -> type[Any]:
    """Return a subclass of `kind` that saves and resumes through ft_ckpt.

    The methods are looked up in this order: `_Outermost`, `kind` and its bases, `Checkpointed`,
    `Trainer`.
    """
    for method in _SAVING_METHODS:
        for base in overriding(kind, method):
            if ends_chain(base, method):
                warn(
                    f"{base.__name__}.{method} does not call Trainer's own: ft_ckpt does not "
                    "save its files"
                )
    bases = (Checkpointed,) if kind is Trainer else (_Outermost, kind, Checkpointed)
    members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "ft_ckpt": settings}
    return type(kind.__name__, bases, members)


class _Outermost:
    """Gets the Trainer's calls before the user's trainer class.

    The methods of that class might not call those of `Checkpointed`, which come after them.
    """

    def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> Any:
        batches = self.ft_ckpt_batches(epoch_iterator)  # type: ignore[attr-defined]  # a method of Checkpointed
        return super().get_batch_samples(batches, *args)  # type: ignore[misc]  # of the trainer class

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        calls_before = self.ft_ckpt_calls  # type: ignore[attr-defined]  # an attribute of Checkpointed
        super()._save_checkpoint(model, trial)  # type: ignore[misc]  # of the trainer class
        if self.ft_ckpt_calls == calls_before:  # type: ignore[attr-defined]  # see above
            step = self.state.global_step  # type: ignore[attr-defined]  # see above
            warn(
                f"{type(self).__name__}._save_checkpoint: step {step} was saved without Trainer's "
                "own method: ft_ckpt has no checkpoint of it",
            )


class FtCkptCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Makes the trainer to which it is passed save and resume through ft_ckpt.

    It calls `checkpointed` with these settings. Use it with programs that make the trainer
    themselves and take only callbacks, and pass it on every rank. Raises ConfigError for invalid
    settings.
    """

    def __init__(self, **settings: Unpack[TrainerArguments]) -> None:
        self._settings: TrainerSettings = checkpointed(Trainer, **settings).ft_ckpt
        self._is_in_use = False

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _take_over(_calling_trainer(self), self._settings)
        self._is_in_use = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._is_in_use:
            raise ConfigError(
                "FtCkptCallback: added to a trainer that exists; call checkpointed(trainer) instead"
            )


def _calling_trainer(callback: TrainerCallback) -> Any:
    """Return the trainer that is being constructed with `callback`.

    transformers does not pass the trainer to the callback, so the frames of the callers are
    searched for it. Raises ConfigError if there is none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    raise ConfigError(
        "FtCkptCallback: no trainer is being made; call checkpointed(trainer) instead"
    )
