"""What a Lightning run has beside weights, optimizers and schedulers: the state of its loops, and its training data."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.training.data_position import DataPosition

_OURS = ("state_dict", "optimizer_states", "lr_schedulers")  # kept under names of tensors, not as Lightning has them
_ARGUMENTS = "hyper_parameters"  # of the module's constructor, any objects: nothing that a resume needs
_EPOCH, _BATCH = "epoch_progress", "epoch_loop.batch_progress"


class LightningState:
    """All that Lightning's own checkpoint has beside tensors of the model: loops, callbacks, data module, precision,
    and what hooks add to it.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.is_over = False  # whether training has come to its end

    def state_dict(self) -> dict[str, Any]:
        """The values of this moment. Raises SelectionError for hooks that store other weights than the live ones."""
        made = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._refuse_others(made["state_dict"])
        kept = {name: value for name, value in made.items() if name not in _OURS and _ARGUMENTS not in name}
        if self.is_over:
            kept["loops"]["fit_loop"] = _as_if_not_over(kept["loops"]["fit_loop"], self._trainer.is_last_batch)
        return {**kept, "metrics": dict(self._trainer.callback_metrics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give everything back, by Lightning's own functions."""
        connector, module = self._trainer._checkpoint_connector, self._trainer.lightning_module
        connector._loaded_checkpoint = {**state, "state_dict": module.state_dict()}
        try:
            module.on_load_checkpoint(connector._loaded_checkpoint)
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
            connector.restore_loops()
        finally:
            connector._loaded_checkpoint = {}
        self._trainer._logger_connector._callback_metrics.update(state["metrics"])

    def _refuse_others(self, stored: Mapping[str, Any]) -> None:
        live = self._trainer.lightning_module.state_dict(keep_vars=True)
        others = [n for n, one in stored.items() if n not in live or one.data_ptr() != live[n].data_ptr()]
        if others:
            raise SelectionError(
                f"{listing(others, ', ')}: put into the checkpoint's state_dict by an on_save_checkpoint of the module "
                "or a callback; the live weights are what ft_ckpt saves. Leave state_dict alone there, or use another "
                "callback"
            )


class FedLoader:
    """A training data loader whose place is the saver's to know; everything else is the loader's own."""

    def __init__(self, loader: Any, place: DataPosition, before_batch: Callable[[], None]) -> None:
        """`before_batch` is called whenever the trainer asks for a batch, before it is read."""
        self.__dict__.update(_loader=loader, _place=place, _before_batch=before_batch)

    def __iter__(self) -> Iterator[Any]:
        self.end_pass()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        batches = self._place.batches()
        while True:
            self._before_batch()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def end_pass(self) -> None:
        """Leave the pass that was begun."""
        self._place.end_pass()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning takes a loader that has state for one that can be resumed."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What a checkpoint of Lightning's own says of the loader, if it is begun from."""
        if state:
            self._loader.load_state_dict(state)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet: this object is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def _as_if_not_over(fit_loop: Mapping[str, Any], epoch_is_whole: bool) -> dict[str, Any]:
    """The state of the loops for a run that may go on for longer than it was to.

    Lightning counts an epoch that a limit of steps has cut short as done; and one that is whole as if it could go on.
    """
    epoch, batch = fit_loop[_EPOCH], fit_loop[_BATCH]
    if epoch_is_whole:
        batch = {**batch, "current": dict.fromkeys(batch["current"], 0), "is_last_batch": False}
    else:
        epoch = {kind: {**n, **{w: n[w] - 1 for w in ("processed", "completed")}} for kind, n in epoch.items()}
    return {**fit_loop, _EPOCH: epoch, _BATCH: batch}
