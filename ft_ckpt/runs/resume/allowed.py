"""The items that a resume may leave unrestored, as the user allows by `resume(allow=...)`."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ft_ckpt.errors import ConfigError, LoadError, listing
from ft_ckpt.messages import did_you_mean
from ft_ckpt.runs.state import Restored, RestoreReport
from ft_ckpt.values import as_names

HALF_RESTORED = "parts of the run are overwritten: make its objects again before another resume()"
# items that are not objects of a run
_NOT_OBJECTS = ("adapter settings", "base", "data", "gradients", "rng")


class AllowedItems:
    """The items that may stay unrestored."""

    def __init__(self, allow: Iterable[str] | bool) -> None:
        """Read the argument `allow`: names of items, True for any item, or False for none.

        Raises ConfigError for anything else.
        """
        self._allows_any = allow is True
        try:
            names = as_names(() if isinstance(allow, bool) else allow, "resume(allow=...)")
        except ConfigError as error:
            raise ConfigError(f"{error}, or True for any") from None
        self._names = frozenset(names)

    def refuse_unknown(self, names: Collection[str], outcomes: Iterable[Restored]) -> None:
        """Raise ConfigError if an allowed name is not that of an item.

        The items are those in `names` and in `outcomes`. "weights" cannot be allowed.
        """
        items = {*_NOT_OBJECTS, *names, *(outcome.name for outcome in outcomes)} - {"weights"}
        unknown = sorted(self._names - items)
        if unknown:
            question = did_you_mean(unknown, items)
            text = (
                f"resume(allow=...): {listing([repr(name) for name in unknown], ', ')}: no such "
                f"item; there are {listing(sorted(items), ', ', 20)}"
            )
            raise ConfigError(f"{text}; {question}" if question else text)

    def refuse_unrestored(
        self, path: Path | str, outcomes: Sequence[Restored], effect: str
    ) -> None:
        """Raise LoadError naming each item that was not restored and is not allowed to stay so.

        `path` is the checkpoint. `effect` says in the error what the failed resume has changed.
        """
        if self._allows_any:
            return
        required = tuple(outcome for outcome in outcomes if outcome.name not in self._names)
        problems = RestoreReport(items=required).problems
        if problems:
            raise LoadError(
                f"{path}: {listing(problems)}. Pass the same objects as the saved run, or "
                f"resume(allow=[names]) to go on without; {effect}"
            )
