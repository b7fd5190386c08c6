"""Lets Lightning read its training data through the saver, which counts the batches."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ft_ckpt.errors import ConfigError
from ft_ckpt.runs.data import DataPosition


class SaverLoader:
    """A data loader whose batches come from the saver.

    All other attributes are those of the wrapped loader.
    """

    def __init__(
        self, loader: Any, position: DataPosition, before_batch: Callable[[], None]
    ) -> None:
        """Wrap `loader`.

        `position` yields the batches and counts them. `before_batch` is called whenever the trainer
        requests a batch, before the batch is read.
        """
        # not by assignment, because `__setattr__` assigns to the loader
        self.__dict__.update(_loader=loader, _position=position, _before_batch=before_batch)

    def __iter__(self) -> Iterator[Any]:
        self.end_pass()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        batches = self._position.batches()
        while True:
            self._before_batch()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def end_pass(self) -> None:
        self._position.end_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return {}.

        The saver stores the position. The method exists because Lightning assumes that a loader
        with a state can be resumed.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the loader from a checkpoint of Lightning's own, if the run starts from one."""
        if state:
            self._loader.load_state_dict(state)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # it is missing while this object is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def refuse_unsized(loader: Any, limit: Any) -> None:
    """Raise ConfigError for a loader that has no length, if `limit` is not a number of batches.

    To find the end of such a loader, Lightning reads a batch ahead. The position of the saver would
    then be wrong.
    """
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        if not isinstance(limit, int):
            raise ConfigError(
                f"{type(getattr(loader, 'dataset', loader)).__name__}: has no length, so Lightning "
                "reads a batch ahead, and a save would not know the position; set the batches of "
                "an epoch: Trainer(limit_train_batches=N)"
            ) from None
