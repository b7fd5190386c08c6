"""Checkpoints of transformers' `Trainer` and of the trainers built on it (TRL's), made and read by ft_ckpt.

    trainer = SFTTrainer(..., callbacks=[FtCkptCallback()])   # of one that is there: FtCkptCallback.attach(trainer)
    trainer.train(resume_from_checkpoint=True)

A Trainer has no place to put another way of saving in. The callback therefore slips a class between the trainer's own
and `Trainer`, which replaces what `Trainer` alone does. Files that a subclass adds in its own `save_model` or `_save`
are committed with the checkpoint; one that writes weights there itself is refused. Schedule (`save_strategy`), metrics,
early stopping and the best model remain the Trainer's business.
"""

import inspect
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from transformers import Trainer, TrainerCallback

from ft_ckpt.config import keep_of, make_config
from ft_ckpt.errors import ConfigError
from ft_ckpt.integrations.checkpointed import Checkpointed, TrainerSettings, overrides_method
from ft_ckpt.retention import Keep
from ft_ckpt.saving.follow_up import SaveHook, hooks_of
from ft_ckpt.storage.local_disk import local_path

__all__ = ["FtCkptCallback"]

_REPLACED = ("_save_checkpoint", "save_model")  # a subclass whose own do not call these is not saved by ft_ckpt


class FtCkptCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Makes the one trainer it is given to save and resume through ft_ckpt; give it on every rank.

    `keep` says which checkpoints stay (the best that the Trainer knows of always does); a number is of the newest;
    None: the Trainer's `save_total_limit` does, of this run's checkpoints. `allow` names items that a resume may do
    without. With `state=True` checkpoints hold the state of the run although `save_only_model=True` is set, which the
    Trainer demands for models that `from_pretrained(distributed_config=...)` has cut. `on_saved` and `settings` are
    those of `CheckpointSaver`.

    Raises ConfigError for settings that cannot work.
    """

    def __init__(
        self,
        *,
        keep: Keep | int | None = None,
        allow: Iterable[str] | bool = (),
        state: bool = False,
        on_saved: SaveHook | Iterable[SaveHook] | None = None,
        **settings: Any,
    ) -> None:
        if "every" in settings:
            raise ConfigError("every=: when to save is the Trainer's to say; set save_strategy and save_steps")
        self._settings = TrainerSettings(keep_of(keep), allow, make_config(None, settings), hooks_of(on_saved), state)
        self._trainer: Any = None

    @classmethod
    def attach(cls, trainer: Any, **settings: Any) -> "FtCkptCallback":
        """A new callback with `settings`, added to a `trainer` that is there already and not yet training."""
        callback = cls(**settings)
        trainer.add_callback(callback)
        callback._take_trainer(trainer)
        return callback

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the trainer that is being made."""
        self._take_trainer(_calling_trainer(self))

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

    def _take_trainer(self, trainer: Any) -> None:
        kind = type(trainer)
        if self._trainer is not None or issubclass(kind, Checkpointed):
            raise ConfigError("FtCkptCallback: one for one trainer; make another for another")
        local_path(trainer.args.output_dir)
        for method in filter(lambda name: not _calls_super(kind, name), _REPLACED):
            warnings.warn(
                f"{kind.__name__}.{method} does not call Trainer's own: what it saves is not ft_ckpt's", stacklevel=3
            )
        bases = (Checkpointed,) if kind is Trainer else (kind, Checkpointed)
        trainer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__})
        trainer.ft_ckpt = self._settings
        self._trainer = trainer


def _calling_trainer(callback: TrainerCallback) -> Any:
    """The trainer on the stack that is being made with `callback`: it tells its callbacks everything but itself."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    raise ConfigError("FtCkptCallback: no trainer is being made; use FtCkptCallback.attach(trainer)")


def _calls_super(kind: type, method: str) -> bool:
    """Whether the `method` of `kind` is Trainer's, or goes on to it by `super()` as far as its code shows."""
    code = getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)
    return not overrides_method(kind, method) or code is None or "super" in code.co_names
