"""Saves and restores the state of a Lightning run without model, optimizers and schedulers.

Lightning makes a checkpoint of its own in memory, from which this module takes the rest: the state
of loops, callbacks, data module and precision, and values added by hooks.
"""

from collections.abc import Mapping
from typing import Any

from torch.optim.swa_utils import AveragedModel

from ft_ckpt.errors import SelectionError, listing

# Keys of Lightning's checkpoint that the saver stores as items of the run.
_SAVED_BY_SAVER = ("state_dict", "optimizer_states", "lr_schedulers")
# Part of the keys with the arguments of the module's constructor. They may be any objects, and a
# resume does not need them.
_ARGUMENTS = "hyper_parameters"
# Keys under which averaging callbacks put the weights that are not averaged, and their counts.
_LIVE_WEIGHTS = "current_model_state"
_AVERAGING = "averaging_state"
# Keys in the state of the loops.
_EPOCH_PROGRESS = "epoch_progress"
_BATCH_PROGRESS = "epoch_loop.batch_progress"


class LightningState:
    """An item of the run with the rest of Lightning's own checkpoint.

    Attributes:
        is_over: Whether the training has ended.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.is_over = False

    def state_dict(self) -> dict[str, Any]:
        """Return the current values.

        Raises SelectionError if a hook has put tensors into the state dict of the model that are
        not the model's own.
        """
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        weights = checkpoint["state_dict"]

        # An averaging callback has put the average there, which is an item of the run by itself.
        if averaging_callbacks(self._trainer):
            weights = checkpoint.pop(_LIVE_WEIGHTS, weights)
            checkpoint.pop(_AVERAGING, None)

        added = _added_tensors(self._trainer.lightning_module, weights)
        if added:
            raise SelectionError(
                f"{listing(added, ', ')}: put into the checkpoint's state_dict by an "
                "on_save_checkpoint of the module or a callback; the live weights are what ft_ckpt "
                "saves. Leave state_dict alone there, or use another callback"
            )

        for name in list(checkpoint):
            if name in _SAVED_BY_SAVER or _ARGUMENTS in name:
                del checkpoint[name]

        if self.is_over:
            loops = checkpoint["loops"]
            loops["fit_loop"] = _as_if_not_over(loops["fit_loop"], self._trainer.is_last_batch)

        return {**checkpoint, "metrics": dict(self._trainer.callback_metrics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values by Lightning's own functions."""
        connector = self._trainer._checkpoint_connector
        module = self._trainer.lightning_module
        checkpoint = {**state, "state_dict": module.state_dict()}

        # The saver has restored the weights and the average. The callback expects both in the
        # checkpoint, so it is given its current values.
        for callback in averaging_callbacks(self._trainer):
            callback.on_save_checkpoint(self._trainer, module, checkpoint)
        connector._loaded_checkpoint = checkpoint
        try:
            module.on_load_checkpoint(connector._loaded_checkpoint)
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
            connector.restore_loops()
        finally:
            connector._loaded_checkpoint = {}

        self._trainer._logger_connector._callback_metrics.update(state["metrics"])


def _added_tensors(module: Any, weights: Mapping[str, Any]) -> list[str]:
    """Return the names in the state dict `weights` whose tensors are not those of the module."""
    live = module.state_dict(keep_vars=True)
    # Only parameters and buffers are compared: get_extra_state returns a new object of any type
    # at each call.
    compared = dict(module.named_parameters(remove_duplicate=False))
    compared.update(module.named_buffers(remove_duplicate=False))
    added = []
    for name, value in weights.items():
        is_copy = name in compared and value.data_ptr() != live[name].data_ptr()
        if name not in live or is_copy:
            added.append(name)
    return added


def averaging_callbacks(trainer: Any) -> list[Any]:
    """Return the callbacks that average the weights, such as Lightning's WeightAveraging."""
    return [callback for callback in trainer.callbacks if _is_averaging(callback)]


def _is_averaging(callback: Any) -> bool:
    return isinstance(getattr(callback, "_average_model", None), AveragedModel)


def _as_if_not_over(fit_loop: Mapping[str, Any], is_epoch_complete: bool) -> dict[str, Any]:
    """Return the state of the loops from which a run can continue with a higher limit.

    At the end of training, Lightning counts the last epoch wrongly for this. If a limit of steps
    has cut it short, it counts as completed. If it is complete, its batches count as unfinished.
    """
    epoch = fit_loop[_EPOCH_PROGRESS]
    batch = fit_loop[_BATCH_PROGRESS]
    if is_epoch_complete:
        batch = {**batch, "current": dict.fromkeys(batch["current"], 0), "is_last_batch": False}
    else:
        epoch = {kind: _one_less(counts) for kind, counts in epoch.items()}
    return {**fit_loop, _EPOCH_PROGRESS: epoch, _BATCH_PROGRESS: batch}


def _one_less(counts: Mapping[str, int]) -> dict[str, int]:
    return {
        **counts,
        "processed": counts["processed"] - 1,
        "completed": counts["completed"] - 1,
    }
