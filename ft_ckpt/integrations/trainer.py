"""Saving and resuming of transformers' `Trainer`, and of trainers built on it (TRL's), through ft_ckpt.

    trainer = checkpointed(SFTTrainer)(model, args, train_dataset=data)       # as a class
    trainer = SFTTrainer(..., callbacks=[FtCkptCallback()])                   # as a callback
    trainer.train(resume_from_checkpoint=True)

Files that a subclass adds in its own `save_model` or `_save` are committed with the checkpoint; weights that it writes
there in another layout are refused before the first step. Models that the trainer or a callback holds beside the
trained one are restored, or named. Schedule (`save_strategy`), metrics, early stopping and the best model remain the
Trainer's.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback
from typing_extensions import Self, Unpack

from ft_ckpt import CheckpointSaver
from ft_ckpt.config import SaveSettings, make_config, names_of
from ft_ckpt.errors import ConfigError
from ft_ckpt.integrations.checkpointed import Checkpointed, TrainerSettings, overriding
from ft_ckpt.integrations.trainer_layout import ends_chain
from ft_ckpt.messages import short, warn
from ft_ckpt.retention import Keep
from ft_ckpt.saving.follow_up import SaveHook, hooks_of
from ft_ckpt.training.arguments import in_words

__all__ = ["FtCkptCallback", "checkpointed"]

TrainerClass = TypeVar("TrainerClass")


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


_REPLACED = ("_save_checkpoint", "save_model")  # overrides of these in subclasses must call super()


def checkpointed(
    trainer_class: type[TrainerClass],
    *,
    keep: Keep | int | None = None,
    allow: Iterable[str] | bool = (),
    state: bool = False,
    on_saved: SaveHook | Iterable[SaveHook] | None = None,
    on_resumed: Callable[[CheckpointSaver[Any]], object] | None = None,
    **settings: Unpack[TrainerSaverSettings],
) -> type[TrainerClass]:
    """A subclass of `trainer_class`, `Trainer` or a class built on it, that saves and resumes through ft_ckpt.

    `keep` selects the checkpoints that stay (the Trainer's best one always does); a number means the newest n; None:
    the Trainer's `save_total_limit`, for this run's checkpoints. `allow` names items that a resume may lack. With
    `state=True` checkpoints have training state although `save_only_model=True` is set, which the Trainer requires for
    models that `from_pretrained(distributed_config=...)` has sharded. `on_resumed` is called on every rank with the
    saver before the first step, after a resume or at a fresh start, for example to invite writers. `on_saved` and
    `settings` are those of `CheckpointSaver`.

    Raises ConfigError for invalid settings, and for anything but a class of trainers.
    """
    if not isinstance(trainer_class, type) or not issubclass(trainer_class, Trainer):
        raise ConfigError(
            f"checkpointed(): {in_words(trainer_class)}, expected transformers' Trainer or a class built on it, as in "
            "checkpointed(SFTTrainer)(model, args, ...)"
        )
    if "every" in settings:
        raise ConfigError("every=: the Trainer decides when to save; set save_strategy and save_steps")
    if not isinstance(state, bool):
        raise ConfigError(f"state={short(state)}: expected True or False")
    if on_resumed is not None and not callable(on_resumed):
        raise ConfigError(f"on_resumed={short(on_resumed)}: expected a function of the saver, or None")
    config, rules = make_config(None, settings), make_config(None, {"keep": keep}).keep
    allow = allow if isinstance(allow, bool) else names_of(allow, "allow")
    return _with_our_saving(trainer_class, TrainerSettings(rules, allow, config, hooks_of(on_saved), state, on_resumed))


def _with_our_saving(kind: type[Any], settings: TrainerSettings) -> type[Any]:
    for method in _REPLACED:
        for base in overriding(kind, method):
            if ends_chain(base, method):
                text = f"{base.__name__}.{method} does not call Trainer's own: ft_ckpt does not save its files"
                warn(text, stacklevel=4)
    # One base before the class, which sees whether its methods get to the other, between the class and Trainer.
    bases = (Checkpointed,) if kind is Trainer else (_Outermost, kind, Checkpointed)
    members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "ft_ckpt": settings}
    return type(kind.__name__, bases, members)


class _Outermost:
    """Sees the calls of the Trainer before a trainer class, whose methods may not reach those of `Checkpointed`."""

    def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> Any:
        batches = self.ft_ckpt_batches(epoch_iterator)  # type: ignore[attr-defined]  # of Checkpointed
        return super().get_batch_samples(batches, *args)  # type: ignore[misc]  # of the trainer class

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        before = self.ft_ckpt_calls  # type: ignore[attr-defined]  # of Checkpointed, which is among the bases
        super()._save_checkpoint(model, trial)  # type: ignore[misc]  # of the trainer class
        if self.ft_ckpt_calls == before:  # type: ignore[attr-defined]  # see above
            step = self.state.global_step  # type: ignore[attr-defined]  # see above
            warn(
                f"{type(self).__name__}._save_checkpoint: step {step} was saved without Trainer's own method: ft_ckpt "
                "has no checkpoint of it",
                stacklevel=2,
            )


class FtCkptCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Makes one trainer save and resume through ft_ckpt; pass it on every rank.

    The same as `checkpointed`, with the same arguments, for a trainer that another program constructs. Raises
    ConfigError for invalid settings.
    """

    def __init__(self, **settings: Unpack[TrainerArguments]) -> None:
        self._settings: TrainerSettings = checkpointed(Trainer, **settings).ft_ckpt
        self._trainer: Any = None

    @classmethod
    def attach(cls, trainer: Any, **settings: Unpack[TrainerArguments]) -> Self:
        """A new callback with `settings`, added to an existing `trainer` that is not yet training."""
        callback = cls(**settings)
        trainer.add_callback(callback)
        callback._take_trainer(trainer)
        return callback

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._take_trainer(_calling_trainer(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            raise ConfigError("FtCkptCallback: added to an existing trainer; use FtCkptCallback.attach(trainer)")

    # A Trainer has no hook to replace its saving, and does not pass itself to callbacks. So the trainer is found among
    # the callers of the constructor, and gets the class that `checkpointed` returns.

    def _take_trainer(self, trainer: Any) -> None:
        kind = type(trainer)
        if self._trainer is not None or issubclass(kind, Checkpointed):
            raise ConfigError("FtCkptCallback: one callback per trainer; make a callback for each trainer")
        trainer.__class__ = _with_our_saving(kind, self._settings)
        trainer.ft_ckpt_begin()
        self._trainer = trainer


def _calling_trainer(callback: TrainerCallback) -> Any:
    """The trainer that is being constructed with `callback`, from the frames of the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    raise ConfigError("FtCkptCallback: no trainer is being constructed; use FtCkptCallback.attach(trainer)")
