"""The state of a Lightning run without model, optimizers and schedulers."""

from collections.abc import Mapping
from typing import Any

from torch.optim.swa_utils import AveragedModel

from ft_ckpt.errors import SelectionError, listing

_SAVED_BY_SAVER = ("state_dict", "optimizer_states", "lr_schedulers")  # stored by ft_ckpt itself
# arguments of the module's constructor: any objects, not needed by a resume
_ARGUMENTS = "hyper_parameters"
# where averaging callbacks put weights and counts
_CURRENT, _AVERAGING = "current_model_state", "averaging_state"
_EPOCH, _BATCH = "epoch_progress", "epoch_loop.batch_progress"


class LightningState:
    """The rest of Lightning's own checkpoint, without model, optimizers and schedulers.

    The rest is loops, callbacks, data module, precision, and values added by hooks.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.is_over = False  # training has ended

    def state_dict(self) -> dict[str, Any]:
        """Return the current values.

        Raises SelectionError if a hook has put tensors into state_dict that are not live.
        """
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        weights = checkpoint["state_dict"]
        # the average is in their place; it is an item of the run
        if averaging_callbacks(self._trainer):
            weights = checkpoint.pop(_CURRENT, weights)
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
        connector, module = self._trainer._checkpoint_connector, self._trainer.lightning_module
        checkpoint = {**state, "state_dict": module.state_dict()}
        # both are restored: it is given what it has
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
    """Name the tensors in the state dict `weights` that are not the live ones of the module."""
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


def _as_if_not_over(fit_loop: Mapping[str, Any], epoch_is_whole: bool) -> dict[str, Any]:
    """Return the state of the loops for a run that may be continued with a higher limit.

    Lightning counts an epoch that a limit of steps cut short as completed, and a completed one as
    unfinished.
    """
    epoch, batch = fit_loop[_EPOCH], fit_loop[_BATCH]
    if epoch_is_whole:
        batch = {**batch, "current": dict.fromkeys(batch["current"], 0), "is_last_batch": False}
    else:
        epoch = {kind: _one_less(counts) for kind, counts in epoch.items()}
    return {**fit_loop, _EPOCH: epoch, _BATCH: batch}


def _one_less(counts: Mapping[str, int]) -> dict[str, int]:
    processed, completed = counts["processed"] - 1, counts["completed"] - 1
    return {**counts, "processed": processed, "completed": completed}
