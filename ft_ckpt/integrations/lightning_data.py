"""The training data of a Lightning run, read through the saver."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ft_ckpt.errors import ConfigError
from ft_ckpt.runs.data import DataPosition


class FedLoader:
    """Proxy of a training data loader that yields the batches of `place`.

    Further attributes are those of the loader.
    """

    def __init__(self, loader: Any, place: DataPosition, before_batch: Callable[[], None]) -> None:
        """Wrap `loader`.

        `before_batch` is called whenever the trainer requests a batch, before it is read.
        """
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
        self._place.end_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return {}: Lightning assumes that a loader with state can be resumed."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the loader from a checkpoint of Lightning's own, if the run starts from one."""
        if state:
            self._loader.load_state_dict(state)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # absent while this object is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def refuse_unsized(loader: Any, limit: Any) -> None:
    """Raise ConfigError for a loader without length or limit.

    Lightning then reads a batch ahead to find its end.
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
